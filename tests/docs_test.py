"""The documents: their Python is Python, and runs where a page is to be run; their commands are ones that the command
line takes, with settings that it knows; and their links lead somewhere. `make site` checks that pages build."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

import draftsmith
from draftsmith.launch.arguments import parse
from draftsmith.launch.cli import take_output_options
from draftsmith.launch.commands import COMMANDS, configure

ROOT = Path(__file__).resolve().parents[1]
RECORDS = sorted((ROOT / "benchmarks").rglob("README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *RECORDS]
NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_what_is_called_python_is(page):
    for block in blocks(page):
        ast.parse(block)


def test_the_page_on_python_runs_in_order(tmp_path, monkeypatch, drafters_registry):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    page, names = ROOT / "docs" / "python.md", {"__name__": "page"}
    assert len(blocks(page)) >= 8
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def commands(text: str) -> list[list[str]]:
    """The command lines of a page's sh blocks: words without comments, redirections, pipes and what `launch` starts."""
    found = []
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL):
        lines = re.sub(r"(^|\s)#[^\n]*", r"\1", block)
        assert not any("\\\n" in quoted for quoted in re.findall(r"'[^']*'", lines)), "a backslash is itself in quotes"
        lines = lines.replace("\\\n", " ")
        lexer = shlex.shlex(lines, posix=True, punctuation_chars="|;&<>\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
        words: list[str] = []
        file = False  # is the next word, of a redirection
        for word in [*lexer, "\n"]:
            if word and set(word) <= set("<>"):
                file = True
            elif word and set(word) <= set("|;&\n"):
                found += [words] * bool(words)
                words = []
            elif file:
                file = False
            else:
                words.append(word)
    return [words[next((i for i, word in enumerate(words) if "=" not in word), 0) :] for words in found]


# Programs of a reader's machine, which need not be on this one.
OTHERS = ("vllm", "llama-server", "python", "pip", "git", "jq", "cd", "export", ".")
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
        args = take_output_options(words[len(command.split()) :], set())
        if any(word.endswith(".yaml") for word in args):  # that a command before it writes
            args += ["--print-config"]
            args = [word for word, before in zip(args, ["", *args], strict=False) if "--config" not in (word, before)]
        configure(command, args)


def settings_of(script: Path) -> type:
    """Whose fields are the options of a script of this project: what it gives to `main_of`."""
    calls = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call)]
    given = next(node.args[0] for node in calls if isinstance(node.func, ast.Name) and node.func.id == "main_of")
    assert isinstance(given, ast.Name)
    parts = script.relative_to(ROOT).with_suffix("").parts
    return getattr(importlib.import_module(".".join(("draftsmith", *parts))), given.id)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_run_by_another_program_is_there(name, capsys):
    """Scripts and their options, targets of make and their variables, the JSON that a server is given."""
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(NAMES[name].read_text()):
        if words[0] == "make":
            for word in words[1:]:
                variable, assigned, _ = word.partition("=")
                script = ROOT / "examples" / f"{words[1]}.sh"
                if assigned and script.is_file():
                    assert re.search(rf"^: .\${{{variable}:[=?]", script.read_text(), re.M), words
                else:
                    sought = rf"^{variable} [?:]?=" if assigned else rf"^([\w-]+ )*{word}( [\w-]+)*:"
                    assert re.search(sought, makefile, re.M), words
        elif words[0] == "sh":
            assert (ROOT / words[1]).is_file(), words
        elif words[0] == "python" and words[1] != "-m":
            script = ROOT / words[1]
            assert script.is_file(), words
            if "main_of" in script.read_text():
                parse(words[1], settings_of(script), words[2:])
        elif "--speculative-config" in words and "..." not in " ".join(words):
            assert json.loads(words[words.index("--speculative-config") + 1]), words
        else:
            assert words[0] in ("draftsmith", *OTHERS), words


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_of_a_kind_that_is_tested(name):
    """Blocks without a kind are what a command printed."""
    text = NAMES[name].read_text()
    for kind, block in re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        assert kind in ("", "sh", "python", "json", "{eval-rst}"), kind
        # Commands and Python are marked as such, and tested as such.
        assert kind or not re.match(r" *(draftsmith|python|make|pip|vllm|git|import|from) ", block), block
        if kind == "json":
            json.loads(block)


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


def test_every_public_name_is_in_the_reference_once():
    named = re.findall(r"^\.\. auto\w+:: draftsmith\.(\w+)$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(draftsmith.PUBLIC)
