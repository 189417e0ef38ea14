"""The documents: their Python is Python, and runs where a page is to be run; their commands are ones that the command
line takes, with settings that it knows; their links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch

from draftsmith.launch.commands import COMMANDS, configure
from draftsmith.modules import drafters

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}


@pytest.fixture(autouse=True)
def one_thread():
    """Beside other tests more only stand in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_what_is_called_python_is(page):
    for block in blocks(page):
        ast.parse(block)


def test_the_page_on_python_runs_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.setattr(drafters, "__path__", list(drafters.__path__))
    page, names = ROOT / "docs" / "python.md", {"__name__": "page"}
    assert len(blocks(page)) >= 8
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def commands(text: str) -> list[list[str]]:
    """The command lines of a page's sh blocks: words without comments, redirections, pipes and what `launch` starts."""
    found = []
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL):
        lines = re.sub(r"(^|\s)#[^\n]*", r"\1", block).replace("\\\n", " ")
        lexer = shlex.shlex(lines, posix=True, punctuation_chars="|;&<>\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
        words: list[str] = []
        for word in [*lexer, "\n"]:
            if word and set(word) <= set("|;&<>\n"):
                found += [words] * bool(words)
                words = []
            else:
                words.append(word)
    return [words[next((i for i, word in enumerate(words) if "=" not in word), 0) :] for words in found]


# What stands for a value of the reader's.
STANDING = {"T": "0.7", "N": "3", "SEED": "0"}


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_ones_that_the_command_line_takes(name, capsys):
    for words in commands(NAMES[name].read_text()):
        if words[0] != "draftsmith" or "..." in words:
            continue
        words = [STANDING.get(word, word) for word in words[1:]]
        command = next((own for size in (2, 1) if (own := " ".join(words[:size])) in COMMANDS), None)
        if command is None:
            assert words[:1] == ["--version"] or any(own.startswith(" ".join(words)) for own in COMMANDS), words
            continue
        args = words[len(command.split()) :]
        if any(word.endswith(".yaml") for word in args):  # that a command before it writes
            args += ["--print-config"]
            args = [word for word, before in zip(args, ["", *args], strict=False) if "--config" not in (word, before)]
        configure(command, args)


def anchors(page: Path) -> set[str]:
    """Of its headings, as forges make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = NAMES[name]
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link
