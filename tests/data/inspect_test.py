"""`data inspect` shows the mask of every kind of artifact."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console
from worlds import tiny_tokenizer

from draftsmith.data.inspect import InspectConfig, masked_text, run
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.launch.cli import main
from draftsmith.modules.types import InputError


def test_the_mask_is_colored_and_bracketed_where_color_does_not_show():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("<|user|>Hi<|end|><|assistant|>Hö<|end|>")["input_ids"]
    mask = [position >= ids.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1 for position in range(len(ids))]
    text = masked_text(ids, mask, tokenizer, bracketed=True)
    assert text.plain == "<|user|>Hi<|end|><|assistant|>⟦Hö<|end|>⟧"
    console = Console(force_terminal=True, color_system="standard", width=200, no_color=False)
    with console.capture() as captured:
        console.print(masked_text(ids, mask, tokenizer, bracketed=False))
    assert "\x1b[2m<|user|>Hi<|end|><|assistant|>\x1b[0m\x1b[1;32mHö<|end|>\x1b[0m" in captured.get()


@pytest.mark.parametrize("stage", ["prompts", "responses", "acceptance", "features"])
def test_every_kind_is_shown(chain, capsys, stage):
    run(InspectConfig(chain.directory(stage), row=1, rows=2))
    shown = capsys.readouterr().out
    assert f"{stage} in" in shown and "hashes of what is read" in shown and "row 2, id row-2" in shown
    assert {
        "prompts": "user: ",
        "responses": "counted by the loss",
        "acceptance": "counted by the loss",
        "features": "all finite",
    }[stage] in shown


def test_a_supervised_row_shows_its_mask(chain, capsys, tmp_path):
    make_prompts(PromptsConfig(str(chain.source), str(chain.target), tmp_path / "out", supervised=True))
    run(InspectConfig(tmp_path / "out"))
    assert "<|assistant|>⟦Rename a to b:<|end|>⟧" in capsys.readouterr().out


def test_only_the_files_that_are_shown_are_hashed(chain, tmp_path):
    """One byte is changed in the last file of states: a row of the first file does not look there."""
    copy = Path(shutil.copytree(chain.directory("features"), tmp_path / "features"))
    first, *_, last = sorted(copy.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1] + bytes([last.read_bytes()[-1] ^ 1]))
    run(InspectConfig(copy, row=0))
    with pytest.raises(InputError, match=f"{last.name}: found sha256"):
        run(InspectConfig(copy, row=10))
    # Sizes are compared for all.
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{first.name}: found .* bytes, not"):
        run(InspectConfig(copy, rows=0))


ESCAPES = "a\x1b[2J\x1b]0;title\x07\x9b31m\rb"


@pytest.mark.parametrize("options", [{}, {"supervised": True}])
def test_escape_sequences_of_the_data_are_printed_as_text(pair, tmp_path, capsys, options):
    rows = [{"id": "id\x1b[1m", "task": "t\x1b", "prompt": ESCAPES, "answer": ESCAPES}]
    (tmp_path / "x.jsonl").write_text(json.dumps(rows[0]))
    run(
        InspectConfig(make_prompts(PromptsConfig(str(tmp_path / "x.jsonl"), str(pair[0]), tmp_path / "out", **options)))
    )
    shown = capsys.readouterr().out
    assert not set(shown) & (set(map(chr, [*range(32), *range(127, 160)])) - {"\n"})
    assert r"a\x1b[2J\x1b]0;title\x07\x9b31m\rb" in shown and r"id\x1b[1m" in shown


def test_letters_that_stdout_has_not_are_printed_as_codes(pair, tmp_path, monkeypatch):
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "Grüße", "answer": "日本"}))
    out = tmp_path / "out"
    make_prompts(PromptsConfig(str(tmp_path / "x.jsonl"), str(pair[0]), out, supervised=True))
    for more in ([], ["--json"]):
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii"))
        assert main(["data", "inspect", str(out), *more]) == 0
        shown = printed.getvalue().replace(b"\\\\", b"\\")
        assert rb"Gr\xfc\xdfe" in shown and rb"\u65e5\u672c" in shown


def test_a_row_that_is_not_there_and_another_tokenizer(chain, tmp_path, pair):
    with pytest.raises(InputError, match="row: found 11, expected less than 11"):
        run(InspectConfig(chain.directory("prompts"), row=11))
    copy = Path(shutil.copytree(chain.directory("prompts"), tmp_path / "prompts"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["config"]["target"] = "embedded:target"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="target: found embedded:target with tokenizer"):
        run(InspectConfig(copy))
