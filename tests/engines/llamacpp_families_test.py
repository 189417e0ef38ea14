"""`draftsmith check --engine llamacpp` for targets of other families than Llama: hybrids, sliding windows, mixtures of
experts, a softcap. Their GGUF files are of llama.cpp's own converter. Run by `make test-engines`, by our own python."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from llamacpp_targets import TARGETS, convert, write_target
from worlds import in_rows, quick_block_head, quick_eagle3_head

from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.check import engine
from draftsmith.eval.check.check import run as check
from draftsmith.eval.settings import CheckConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.llama_config import RopeScaling
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm

torch.set_num_threads(1)
SERVER = Path(os.environ["DRAFTSMITH_LLAMA_SERVER"])
QUESTIONS = (
    "What does this function do?",
    "Rename a to b: def add(a, second):",
    "def add(first): return first",
    "What?",
)
GPT_OSS = RopeScaling("yarn", 4.0, original_max_position=32, beta_fast=4.0, beta_slow=0.5, truncate=False)
PART = dataclasses.replace(GPT_OSS, truncate=True, partial_rotary_factor=0.5, attention_factor=1.2)
Made = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Family, kind of head, its rotation -> an exported head that has seen the answers, and options of its check."""
    root = tmp_path_factory.mktemp("families")
    prompts = root / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    @cache
    def target(family: str) -> tuple[Any, list[list[int]], dict[str, Any]]:
        directory = write_target(family, root / family)
        file = convert(SERVER.parents[1] / "converter", directory, root / f"{family}.gguf")
        lm: Any = load_lm(str(directory))
        lm.config = Checkpoint(directory).shape
        asked = [prompt.prompt_ids for prompt in read_prompts(str(prompts), str(directory))]
        answers = in_rows(lm, asked, 64)
        texts = [[*prompt, *answer.tokens] for prompt, answer in zip(asked, answers, strict=True)]
        return lm, texts, {"target": str(directory), "target_gguf": file}

    @cache
    def head(family: str, kind: str, rope: RopeScaling | None = None) -> tuple[Path, dict[str, Any]]:
        lm, texts, options = target(family)
        if rope is not None:
            lm.config = dataclasses.replace(lm.config, rope_scaling=rope)
        if kind == "eagle3":
            net = quick_eagle3_head(lm, texts, 100, 0, 3, aux_layers=(2, 4, 6), norm_before_fc=True)
        else:
            net = quick_block_head(lm, texts, 60, kind, block=5, anchors=128, layers=(2, 4, 6))
        name = f"{family}-{kind}-{'own' if rope is None else rope.truncate}"
        saved = save_head(root / name, net, {"target": lm.info.identity}, "")
        config = ExportConfig(format="llamacpp", head=saved, output=root / f"{name}-gguf", **options)
        assert export(config) == 0
        served = {"head": saved, "engine": "llamacpp", "engine_path": SERVER, "data": str(prompts)}
        return config.output, {**options, **served, "max_new_tokens": 48, "num_drafted": 3}

    return head


def checked(made: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = check(CheckConfig(directory=made[0], **made[1]))
    shown = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{shown}")
    return code, " ".join(shown.split())


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
@pytest.mark.parametrize("family", TARGETS)
def test_a_target_answers_and_its_head_drafts_as_here(made: Made, capsys, family: str, kind: str):
    code, shown = checked(made(family, kind), capsys)
    assert code == 0 and f"equal: text, drafts and accepted tokens of all {len(QUESTIONS)} prompts" in shown
    # Of targets whose prompts end in parts, the draft's row before the last part reads another token's state.
    moved = kind == "eagle3" and family != "minimax_m2"
    assert ("llama.cpp reads these prompts in parts" in shown) == moved


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4"])
def test_the_row_that_llamacpp_misreads_shows_in_the_drafts(made: Made, capsys, monkeypatch, family: str):
    monkeypatch.setattr(engine, "moved_states", lambda length, checkpoints: [])
    code, shown = checked(made(family, "eagle3"), capsys)
    assert code == 1 and "DIFFERS" not in shown  # the text is right all the same


@pytest.mark.parametrize("rope", [GPT_OSS, PART], ids=["gpt-oss", "part"])
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_heads_own_rotation_is_served(made: Made, capsys, kind: str, rope: RopeScaling):
    assert checked(made("minimax_m2", kind, rope), capsys)[0] == 0
