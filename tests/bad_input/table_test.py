"""Bad input of every command: one line that says what is wrong, exit code 2, and nothing that counts as complete.

The rows are in the files beside this one, by area (`ROWS`); a new area is a new file.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from bad_input.row import Ground, Row

from draftsmith.launch.cli import main
from draftsmith.launch.commands import COMMANDS

HERE = Path(__file__).parent
AREAS = sorted(file.stem for file in HERE.glob("*.py") if file.stem not in ("row", "table_test"))
TABLE: dict[str, Row] = {
    f"{area}: {row.id}": row for area in AREAS for row in importlib.import_module(f"bad_input.{area}").ROWS
}
# What a finished command leaves: none of it may lie where a command failed.
COMPLETE = ("manifest.json", "results.json", "training.json", "report.html", "finished.json")


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Ground:
    return Ground(tmp_path_factory.mktemp("ground"))


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_one_line_and_exit_code_2(name, ground, tmp_path, capsys, monkeypatch):
    row = TABLE[name]
    monkeypatch.chdir(tmp_path)
    made = row.make(ground, tmp_path) if row.make else {}
    out = tmp_path / "out"

    class Names(dict):
        def __missing__(self, key: str) -> str:
            return ground[key]

    names = Names(out=str(out), tmp=str(tmp_path), **{key: str(value) for key, value in made.items()})
    words = [word.format_map(names) for word in row.words.split()]
    capsys.readouterr()
    code = main(words)
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("draftsmith: error: ")]
    assert code == 2, f"exit code {code}: {said}"
    assert "Traceback" not in said
    assert len(errors) == 1, said
    assert [part for part in row.says if part not in errors[0]] == [], errors[0]
    assert [file for file in COMPLETE if (out / file).exists()] == []


def test_every_command_has_rows():
    covered = {name for row in TABLE.values() for name in COMMANDS if row.words.startswith(name)}
    assert sorted(COMMANDS.keys() - covered) == []
