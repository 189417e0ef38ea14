"""A terminal gets no control character that a model, a server or a file chose, on a real pseudo-terminal."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import shutil
import sys
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.text import Text
from servers import Server

from draftsmith.data import console
from draftsmith.data.console import console_output, log_note, print_facts, print_table, print_text, table_from_cells
from draftsmith.data.store.manifest import Manifest
from draftsmith.eval import decode
from draftsmith.launch.cli import main

# Title, clipboard, clear screen by an escape and by one byte, backspace.
EVIL = "a\x1b]0;owned\x07b\x1b]52;c;YQ==\x1b\\c\x1b[2Jd\x9b2Je\bf"
COLORS = re.compile(r"\x1b\[[0-9;]*m")
CONTROLS = re.compile(r"[^\x20-\x7e\xa0-\uffff\n\t]")


@contextmanager
def terminal(monkeypatch) -> Iterator[Callable[[], str]]:
    """Make stdout and stderr a pseudo-terminal; yields a function that ends it and returns what it got."""
    master, slave = pty.openpty()
    tty.setraw(slave)  # else it would write \n as \r\n
    received: list[bytes] = []

    def read() -> None:
        while content := os.read(master, 4096):
            received.append(content)
            if content.endswith(b"\x04"):
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    screen = os.fdopen(slave, "w", encoding="utf-8", errors="backslashreplace")
    assert screen.isatty()
    monkeypatch.setenv("TERM", "xterm-256color")

    def ended() -> str:
        screen.write("\x04")
        screen.flush()
        reader.join()
        return COLORS.sub("", b"".join(received).decode().removesuffix("\x04"))

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", screen)
        patched.setattr(sys, "stderr", screen)
        yield ended
    screen.close()
    os.close(master)


def test_a_streamed_answer_shows_what_a_terminal_would_obey(models, monkeypatch, capsys):
    """Piece by piece, as tokens may split an escape sequence; a pipe and --json get the text as it is."""
    pieces = [*EVIL, "\n", "\tend"]
    stream = SimpleNamespace(
        push=lambda tokens, _: [(pieces.pop(0), True) for _ in tokens if pieces],
        finish=lambda: [(piece, False) for piece in pieces],
    )
    words = ["decode", "Hi", "--target", models["target"], "--max-new-tokens", "4", "--ignore-eos"]
    monkeypatch.setattr(decode, "TokenStream", lambda tokenizer: stream)
    with terminal(monkeypatch) as ended:
        assert main(words) == 0
        shown = ended()
    assert CONTROLS.findall(shown) == []
    # The tab as blanks.
    assert r"a\x1b]0;owned\x07b\x1b]52;c;YQ==\x1b\c\x1b[2Jd\x9b2Je\x08f" + "\n        end\n" in shown
    pieces = [*EVIL, "\r\n", "\tend"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{EVIL}\r\n\tend\n"
    pieces = [*EVIL]
    assert main([*words, "--json"]) == 0
    document = capsys.readouterr().out
    assert json.loads(document)["answer"] == EVIL and CONTROLS.findall(document) == []


def test_tables_notes_and_bars_of_anything(monkeypatch):
    with terminal(monkeypatch) as ended, console_output():
        log_note(EVIL)
        logger = logging.getLogger("a_library")
        logger.addHandler(handler := logging.StreamHandler())
        logger.warning("%s", EVIL)
        logger.removeHandler(handler)
        print_text(Text(EVIL, "bold"))
        print_facts({EVIL: EVIL, "b": Text(EVIL)}, EVIL)
        print_table(table_from_cells("t", ("one", EVIL), [(EVIL, Text(EVIL)), ("x", 1)]))
        with console.progress_bar(EVIL, 2, EVIL) as advance:
            advance(1)
        shown = ended()
    # The bar hides the cursor and redraws its line; nothing else is left. A folded cell may break the words that are
    # counted.
    shown = re.sub(r"\x1b\[(\?25[lh]|2K|1A)|\r", "", shown)
    assert CONTROLS.findall(shown) == [] and shown.count("[2J") >= 7


def model_type(models: dict[str, str], folder: Path) -> list[str]:
    target = Path(shutil.copytree(models["target"], folder / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"model_type": EVIL, "architectures": [EVIL]}))
    return ["decode", "Hi", "--target", str(target)]


def artifact(models: dict[str, str], folder: Path) -> list[str]:
    identity = {"tokenizer": EVIL, "target": {"config": EVIL}}
    Manifest(EVIL, {"target": models["target"]}, identity=identity, command=f"draftsmith {EVIL}").write(folder)
    return ["data", "responses", "--output", "x", "--data", str(folder), "--target", models["target"]]


def yaml_key(models: dict[str, str], folder: Path) -> list[str]:
    (folder / "x.yaml").write_text('"a\\e]0;owned\\ab\\Nc": 1\n')
    return ["train", "eagle", "--config", str(folder / "x.yaml")]


def reply(models: dict[str, str], folder: Path) -> list[str]:
    return ["eval", "served", "--server", "{server}", "--target", models["target"], "--data", models["data"],
            "--engine", "vllm", "--output", str(folder / "out"), "--concurrency", "1"]  # fmt: skip


@pytest.mark.parametrize("make", [model_type, artifact, yaml_key, reply])
def test_an_error_shows_what_a_terminal_would_obey(make, models, tmp_path, monkeypatch):
    with Server(lambda request: (404, {}, EVIL)) as server:
        words = [word.format(server=server.url) for word in make(models, tmp_path)]
        for more in ([], ["--debug"]):
            with terminal(monkeypatch) as ended:
                assert main([*words, *more]) == 2
                shown = ended()
            assert "draftsmith: error: " in shown and CONTROLS.findall(shown) == []
            assert "\\x1b" in shown or "\\\\x1b" in shown
