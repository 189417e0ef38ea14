"""Chat turns cut from code: right answers by hand, splits by content."""

from __future__ import annotations

import random

from draftsmith.benchmarks.embedded.corpus import (
    Function,
    ImportBlock,
    content_key,
    parse_function,
    read_corpus,
)
from draftsmith.benchmarks.embedded.tasks import FUNCTION_TASKS, sort_imports

SOURCE = '''def area(width: int, height: int=1) -> int:
    """Area of a rectangle."""
    if width < 0:
        return 0
    return width * height'''


def function(source: str = SOURCE) -> Function:
    return Function(content_key(parse_function(source)), "area", source, "stdlib", "PSF-2.0")


def ask(task: str, source: str = SOURCE) -> tuple[str, str]:
    made = FUNCTION_TASKS[task](function(source), random.Random(0))
    assert made is not None
    return made


def test_rename_changes_every_use_of_one_argument_and_nothing_else():
    prompt, answer = ask("rename")
    old, new = prompt.split(":\n\n")[0].removeprefix("Rename ").split(" to ")
    assert old in ("width", "height")
    code = prompt.split("\n\n", 1)[1]
    # The words are whole identifiers here, so replacing text is an independent way to the same answer.
    assert answer == code.replace(old, new)


def test_type_hints_are_listed_and_undone():
    prompt, hinted = ask("add_type_hints")
    assert prompt.startswith("Add the type hints: width: int, height: int, -> int\n\n")
    bare = prompt.split("\n\n", 1)[1]
    assert bare.startswith("def area(width, height=1):")
    assert hinted.startswith("def area(width: int, height: int=1) -> int:")
    assert ask("remove_type_hints") == (f"Remove the type hints:\n\n{hinted}", bare)


def test_wrap_in_try_indents_the_body():
    prompt, answer = ask("wrap_in_try")
    code = prompt.split("\n\n", 1)[1]
    exception = prompt.split("on ")[1].split()[0]
    head, *body = code.split("\n")
    expected = [head, "    try:", *(f"    {line}" for line in body), f"    except {exception}:", "        return None"]
    assert answer == "\n".join(expected)


def test_sort_imports_sorts_lines():
    block = ImportBlock("0" * 16, ("import sys", "import os", "from abc import ABC"), "stdlib", "PSF-2.0")
    made = sort_imports(block, random.Random(1))
    assert made is not None and made[1] == "from abc import ABC\nimport os\nimport sys"


def test_a_function_is_in_one_split_whatever_its_docstring_hints_and_name():
    bare = "def other(width, height=1):\n    if width < 0:\n        return 0\n    return width * height"
    assert content_key(parse_function(SOURCE)) == content_key(parse_function(bare))
    assert content_key(parse_function(SOURCE)) != content_key(parse_function(bare.replace("0", "1")))


def test_corpus_is_deduplicated_licensed_and_stable():
    corpus = read_corpus(["rich", "jinja2"])
    keys = [item.key for item in corpus.functions]
    assert len(keys) == len(set(keys)) > 200
    assert {item.licence for item in corpus.functions} == {"MIT", "BSD-3-Clause"}
    assert read_corpus(["rich", "jinja2"]) == corpus
