"""Output options of every command: --json, --quiet and --verbose."""

import json
import logging
import warnings

import pytest

from draftsmith.data.console import log_note, print_table, print_text, table_from_cells
from draftsmith.launch import commands
from draftsmith.launch.cli import main


@pytest.fixture
def loud(monkeypatch, tmp_path):
    """A command that prints in every way."""

    def run(config):
        print("a library prints")
        warnings.warn("a library warns", stacklevel=1)
        logging.getLogger("a.library").warning("a library logs")
        logging.getLogger("a.library").info("a library logs more")
        log_note("a note")
        print_text("the answer")
        print_table(table_from_cells("numbers", ("name", "value"), [("tau", 2.5)]))
        return tmp_path

    monkeypatch.setattr(commands.Command, "run", property(lambda self: run))
    return tmp_path


@pytest.mark.parametrize("word", ["--json", "--json=true", "--json=True", "--json=on"])
def test_the_document_of_a_command(loud, capsys, word):
    assert main(["doctor", word]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "exit_code": 0,
        "output": str(loud),
        "command": "doctor",
        "tables": [{"name": "numbers", "rows": [{"name": "tau", "value": 2.5}]}],
        "text": ["the answer"],
    }
    assert "a library prints" in captured.err and "a note" in captured.err


def test_one_process_of_a_run_prints_the_document(loud, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", "--json"]) == 0 and capsys.readouterr().out == ""


def test_an_output_option_is_off_or_refused(loud, capsys):
    assert main(["doctor", "--json=false"]) == 0 and "the answer" in capsys.readouterr().out
    assert main(["doctor", "--json=maybe"]) == 2
    assert "--json: found 'maybe', expected true or false" in capsys.readouterr().err


def test_quiet_and_verbose(loud, capsys, caplog):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert main(["doctor", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert "the answer" in captured.out and captured.err == "" and not warned and not caplog.records
    with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match="a library warns"):
        assert main(["doctor", "--verbose"]) == 0
    assert [record.message for record in caplog.records] == ["a library logs", "a library logs more"]
    assert "a note" in capsys.readouterr().err
    assert main(["doctor", "--quiet", "--verbose"]) == 2
    assert "found --quiet and --verbose, expected one of them" in capsys.readouterr().err


def test_an_error_leaves_stdout_empty(capsys):
    assert main(["data", "inspect", "/no/such/place", "--json", "--quiet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("draftsmith: error: /no/such/place: ")
