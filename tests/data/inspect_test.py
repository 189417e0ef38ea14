"""`data inspect` shows the mask and says how many rows round-trip, for every kind of artefact."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console
from tiny_models import tiny_tokenizer

from draftsmith.data.inspect import InspectConfig, masked_text, round_trips, run
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.modules.types import InputError


def test_the_mask_is_coloured_and_bracketed_where_colour_does_not_show():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("<|user|>Hi<|end|><|assistant|>Hö<|end|>")["input_ids"]
    mask = [position >= ids.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1 for position in range(len(ids))]
    text = masked_text(ids, mask, tokenizer, bracketed=True)
    assert text.plain == "<|user|>Hi<|end|><|assistant|>⟦Hö<|end|>⟧"
    console = Console(force_terminal=True, color_system="standard", width=200, no_color=False)
    with console.capture() as capture:
        console.print(masked_text(ids, mask, tokenizer, bracketed=False))
    assert "\x1b[2m<|user|>Hi<|end|><|assistant|>\x1b[0m\x1b[1;32mHö<|end|>\x1b[0m" in capture.get()


@pytest.mark.parametrize("stage", ["prompts", "responses", "acceptance", "features"])
def test_every_kind_is_shown(chain, capsys, stage):
    run(InspectConfig(chain.directory(stage), row=1, rows=2))
    shown = capsys.readouterr().out
    assert f"{stage} in" in shown and "every hash right" in shown and "row 2, id row-2" in shown
    assert {"prompts": "user: ", "responses": "11 rows, ", "acceptance": "draft Y", "features": "all finite"}[
        stage
    ] in shown


def test_a_supervised_row_shows_its_mask(chain, capsys, tmp_path):
    make_prompts(PromptsConfig(str(chain.source), str(chain.target), tmp_path / "out", supervised=True))
    run(InspectConfig(tmp_path / "out"))
    assert "<|assistant|>⟦Rename a to b:<|end|>⟧" in capsys.readouterr().out


def test_what_round_trips():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("function", add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    mask = [False, *[True] * (len(ids) + 1)]
    row = {"input_ids": [1, *ids, end], "loss_mask": mask, "retokenised": False}
    assert round_trips(row, tokenizer)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "function"]
    assert letters != ids
    assert not round_trips({**row, "input_ids": [1, *letters, end]}, tokenizer)  # the same text in other tokens
    row |= {"retokenised": True, "text": "function", "server_tokens": len(ids) + 1}
    assert round_trips(row, tokenizer) and round_trips({**row, "server_tokens": None}, tokenizer)
    assert not round_trips({**row, "server_tokens": len(ids) + 2}, tokenizer)
    assert not round_trips({**row, "text": "functio"}, tokenizer)


def test_a_row_that_is_not_there_and_another_tokenizer(chain, tmp_path, pair):
    with pytest.raises(InputError, match="row: found 11, expected less than 11"):
        run(InspectConfig(chain.directory("prompts"), row=11))
    config = InspectConfig(chain.directory("prompts"))
    with pytest.raises(InputError, match="model: found"):
        run(dataclasses.replace(config, tokenizer=str(tmp_path / "nothing")))
