"""Console output: tables that never cut a name, the JSON document, notes and progress on stderr."""

import io
import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from draftsmith.data import console
from draftsmith.data.console import (
    LOG_EVERY_S,
    Column,
    Table,
    add_result,
    console_output,
    draw_table,
    json_values,
    log_note,
    print_facts,
    print_table,
    print_text,
    progress_bar,
    results,
    table_from_cells,
)

LONG = "specdec++:h=0.7:min=2:max=20:calibrated=on"
TABLE = Table(
    "methods",
    "Greedy",
    [
        Column("method", "method"),
        Column("tau", "tau", ".2f"),
        Column("ci", "95 % CI", below=True),
        Column("words", "what was found in the end"),
    ],
    [
        {"method": LONG, "tau": 4.125, "ci": "3.90-4.40", "words": "more than the best fixed number of tokens"},
        {"method": "ar", "tau": 1.0, "words": Text("nothing", "red")},
    ],
    "A note of several words that is longer than a narrow terminal.",
)


def shown(width: int, table: Table = TABLE) -> list[str]:
    screen = Console(width=width, file=io.StringIO())
    draw_table(screen, table)
    return screen.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [120, 80, 50])
def test_no_width_crops_a_cell(width):
    lines = shown(width)
    cells = [str(cell) for row in TABLE.rows for cell in row.values() if not isinstance(cell, float)]
    texts = [*cells, "4.12", "1.00", "method", "tau, 95 % CI", "what was found in the end", TABLE.title, TABLE.note]
    # However texts are folded, every letter is there once.
    printed, expected = (Counter("".join(parts).replace(" ", "").replace("─", "")) for parts in (lines, texts))
    assert printed == expected
    assert all(len(line) <= width for line in lines) and any("4.12 3.90-4.40" in line for line in lines)
    assert any(LONG in line for line in lines) == (width == 120)


def test_a_pipe_has_the_whole_width(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    row = ("a " * 100).strip(), "b" * 100
    print_table(table_from_cells("wide", ("words", "word"), [row]))
    print_facts({"name": row[0], "none": None}, "title")
    out = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert f" {row[0]}  {row[1]}" in out and f"  name  {row[0]}" in out and "  none  -" in out


def test_the_document_is_all_there_is_on_stdout(capsys):
    with console_output(as_json=True) as to_json:
        print("a library's own words")
        log_note("a note")
        print_text(Text("the answer", "bold"))
        print_table(TABLE)
        assert add_result(tau=float("nan"), path=sys) is True
        print_facts({"rows": 3}, key="counts")
    found = json.loads(to_json(exit_code=0))
    captured = capsys.readouterr()
    assert captured.out == "" and "a library's own words\na note\n" in captured.err
    assert found["text"] == ["the answer"] and found["exit_code"] == 0 and found["counts"] == {"rows": 3}
    assert found["tau"] is None
    (table,) = found["tables"]
    assert table["rows"][0]["tau"] == 4.125 and table["rows"][1]["words"] == "nothing" and table["title"] == "Greedy"
    assert add_result(tau=1.0) is False
    with results() as document:  # what a command leaves in finished.json
        print_table(TABLE)
    assert json.dumps(json_values(document))


def test_quiet_leaves_out_notes_and_progress(capsys):
    with console_output(quiet=True):
        log_note("a note")
        with progress_bar("measuring", 2, "prompts") as advance:
            advance(2)
        print_text("the answer")
    captured = capsys.readouterr()
    assert captured.out == "the answer\n" and captured.err == ""
    log_note("[again]")
    assert capsys.readouterr().err == "[again]\n"


def test_progress_in_a_log_is_a_line_now_and_then(capsys, monkeypatch):
    now = iter([0.0, 1.0, LOG_EVERY_S, LOG_EVERY_S + 1, 2 * LOG_EVERY_S])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with progress_bar("rollouts", 100, "prompts", 10) as advance:
        for _ in range(4):
            advance(15)
    assert capsys.readouterr().err.splitlines() == [
        "rollouts: 40/100 prompts, 1 prompts/s, about 60 s left",
        "rollouts: 70/100 prompts, 1 prompts/s, about 30 s left",
    ]
