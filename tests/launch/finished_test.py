"""A finished command, repeated: it says so and writes nothing, and only if its output is what it wrote."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import draftsmith
from draftsmith.data.console import log_done, print_table, print_text, table_from_cells
from draftsmith.data.settings import volatile
from draftsmith.launch.cli import main
from draftsmith.launch.commands import COMMANDS, Command
from draftsmith.launch.finished import content_of


@dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """A command that writes.

    Attributes:
        head: a path.
        size: an option.
        threads: an option that changes nothing.
        again: anew.
        output: where to.
    """

    head: tuple[str, ...] = ()
    size: int = 1
    threads: int = volatile(1)
    again: bool = False
    output: Path = field(kw_only=True)


@pytest.fixture
def writer(monkeypatch, tmp_path) -> Any:
    """`writer` and `eval bench`, which continues an output itself: `calls` counts how often they ran."""
    module: Any = ModuleType("draftsmith.writer")
    module.WriterConfig, module.calls, module.code = WriterConfig, 0, 0

    def run(config: WriterConfig) -> int:
        module.calls += 1
        config.output.mkdir(exist_ok=True)
        (config.output / "a.json").write_text(f"{config.size}")
        (config.output / "results.json").write_text("{}")
        (config.output / "deep").mkdir(exist_ok=True)
        (config.output / "deep" / "b").write_text("b")
        print_text("a line")
        print_table(table_from_cells("numbers", ("name", "value"), [("tau", Fraction(5, 2))]))
        return int(module.code)

    module.run = run
    monkeypatch.setitem(sys.modules, "draftsmith.writer", module)
    for name in ("writer", "eval bench"):
        monkeypatch.setitem(COMMANDS, name, Command("writer:WriterConfig", "writer", "Writer"))
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "model.safetensors").write_text("weights")
    return module


def words(tmp_path: Path, *more: str) -> list[str]:
    return ["--head", str(tmp_path / "head"), "--output", str(tmp_path / "out"), *more]


def test_a_finished_command_says_so_in_one_line_and_prints_the_same_document(writer, tmp_path, capsys):
    assert main(["writer", *words(tmp_path, "--json")]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["writer", *words(tmp_path, "--json", "--threads", "4")]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == first and first["tables"] and first["text"] == ["a line"]
    assert main(["writer", *words(tmp_path)]) == 0 and writer.calls == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"already done: writer in {tmp_path}/out (--again measures anew)\n"
    assert draftsmith.run("writer", head=(str(tmp_path / "head"),), output=tmp_path / "out") == 0 and writer.calls == 1
    assert main(["writer", *words(tmp_path, "--again")]) == 0 and writer.calls == 2
    # The same head somewhere else, with a card and measurements that `eval bench --card` has written.
    (tmp_path / "head").rename(tmp_path / "moved")
    for place in (tmp_path / "moved", tmp_path / "out"):
        (place / "README.md").write_text("card")
    assert main(["writer", "--head", str(tmp_path / "moved"), "--output", str(tmp_path / "out")]) == 0
    assert writer.calls == 2


def test_a_failure_that_a_command_returned_is_returned_again(writer, tmp_path):
    writer.code = 1
    assert [main(["writer", *words(tmp_path)]) for _ in range(2)] == [1, 1] and writer.calls == 1


@pytest.mark.parametrize("command", ["writer", "eval bench"])
def test_other_options_and_other_content_are_refused_or_left_to_a_command_that_compares_them(
    writer, tmp_path, capsys, command
):
    assert main([*command.split(), *words(tmp_path)]) == 0
    continues = command == "eval bench"
    assert main([*command.split(), *words(tmp_path, "--size", "2")]) == (0 if continues else 2)
    if not continues:
        said = capsys.readouterr().err.splitlines()[-1]
        assert "made with another options.size: 1, now 2" in said
    (tmp_path / "head" / "model.safetensors").write_text("WEIGHTS")
    assert main([*command.split(), *words(tmp_path)]) == (0 if continues else 2)
    assert writer.calls == (3 if continues else 1)
    if not continues:
        assert "content.head" in capsys.readouterr().err


def test_the_record_of_a_command_that_finds_itself_finished_is_kept(writer, tmp_path, capsys, monkeypatch):
    """As a training does whose data are listed in another order."""
    assert main(["eval", "bench", *words(tmp_path, "--json")]) == 0
    first, record = capsys.readouterr().out, (tmp_path / "out" / "finished.json").read_bytes()
    monkeypatch.setattr(writer, "run", lambda config: log_done("eval bench", config.output) or 0)
    assert main(["eval", "bench", *words(tmp_path, "--size", "2")]) == 0
    assert (tmp_path / "out" / "finished.json").read_bytes() == record
    capsys.readouterr()
    assert main(["eval", "bench", *words(tmp_path, "--json")]) == 0 and capsys.readouterr().out == first


def test_a_changed_file_of_a_training_is_refused(writer, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(COMMANDS, "train writer", Command("writer:WriterConfig", "writer", "Writer"))
    assert main(["train", "writer", *words(tmp_path)]) == 0
    (tmp_path / "out" / "deep" / "b").write_text("c")
    assert main(["train", "writer", *words(tmp_path)]) == 2 and writer.calls == 1
    assert "deep/b, changed since it was written" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["other", "gone", "unfinished", "half"])
def test_an_output_that_is_not_what_was_written_is_not_finished(writer, tmp_path, change):
    assert main(["writer", *words(tmp_path)]) == 0
    out, record = tmp_path / "out", tmp_path / "out" / "finished.json"
    if change == "other":
        (out / "deep" / "b").write_text("c")
    elif change == "gone":
        (out / "a.json").unlink()
    elif change == "unfinished":
        record.unlink()
    else:
        record.write_text(record.read_text()[:100])
    assert main(["writer", *words(tmp_path)]) == 0 and writer.calls == 2
    assert main(["writer", *words(tmp_path)]) == 0 and writer.calls == 2


@pytest.mark.parametrize("command", ["writer", "eval bench"])
def test_results_that_were_edited_are_refused(writer, tmp_path, capsys, command):
    assert main([*command.split(), *words(tmp_path)]) == 0
    (tmp_path / "out" / "results.json").write_text("{} ")
    assert main([*command.split(), *words(tmp_path)]) == 2 and writer.calls == 1
    assert f"{tmp_path}/out/results.json, changed since it was written" in capsys.readouterr().err


def test_a_change_in_a_file_of_data_is_noticed_and_made_good(tmp_path, capsys):
    prompts = ["data", "prompts", "--source", "embedded:prompts", "--limit", "6", "--rows-per-shard", "3"]
    prompts += ["--target", "embedded:target", "--output", str(tmp_path / "prompts")]
    assert main(prompts) == 0
    shard = tmp_path / "prompts" / "shard-00001.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-9] + b"x" + content[-8:])
    assert main(prompts) == 0
    assert "shard-00001 was changed since it was written, and is made again" in capsys.readouterr().err
    assert shard.read_bytes() == content
    assert main(prompts) == 0 and "already done: data prompts" in capsys.readouterr().err
    # What a stage believes is no longer what was written.
    manifest = tmp_path / "prompts" / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    for _ in range(2):
        assert main(prompts) == 2 and "manifest.json, changed since it was written" in capsys.readouterr().err


def test_a_file_inside_a_word_counts_by_its_content(tmp_path):
    tree = tmp_path / "tree.yaml"
    tree.write_text("- [0]")
    words = f"eagle3-static:tree={tree}", f"{tree}:focal"
    before = [content_of(word, tmp_path / "out") for word in words]
    assert None not in before and content_of("eagle3:k=3", tmp_path / "out") is None
    tree.write_text("- [1]")
    assert not {*before} & {content_of(word, tmp_path / "out") for word in words}


def test_a_report_is_made_again_only_if_its_runs_went_on(tmp_path, capsys):
    run, page = tmp_path / "run", tmp_path / "run" / "report.html"
    run.mkdir()
    results: dict[str, Any] = {"meta": {"kind": "certify"}, "tables": [
        {"name": "x", "columns": [{"key": "a", "title": "A"}], "rows": [{"a": "first"}]}]}  # fmt: skip
    (run / "results.json").write_text(json.dumps(results))
    assert main(["eval", "report", str(run)]) == 0 and main(["eval", "report", str(run)]) == 0
    assert f"already done: eval report in {page}" in capsys.readouterr().err
    results["tables"][0]["rows"] = [{"a": "second"}]
    (run / "results.json").write_text(json.dumps(results))
    assert main(["eval", "report", str(run)]) == 0 and "second" in page.read_text()
