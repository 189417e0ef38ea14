"""The list of mutants fits the source that it mutates; that each dies is shown by `make mutants`."""

from __future__ import annotations

from pathlib import Path

from mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[1]


def test_every_mutant_changes_one_place_that_is_still_there():
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    found = {mutant.name: texts[mutant.file].count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}
    for mutant in MUTANTS:
        compile(texts[mutant.file].replace(mutant.old, mutant.new), mutant.file, "exec")
        assert mutant.old != mutant.new


def test_every_mutant_has_a_name_of_its_own_and_tests_that_exist():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 80
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(names)
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, _, function = test.partition("::")
            assert (ROOT / path).is_file(), (mutant.name, test)
            assert function.partition("[")[0] in (ROOT / path).read_text(), (mutant.name, test)


def test_known_survivors_have_a_sentence():
    for mutant in MUTANTS:
        assert not mutant.reason or len(mutant.reason.split()) >= 8, mutant.name
