"""Rows of transformers models that are answered together: each as if it were alone, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from architectures import build

from draftsmith.data.engines.own import OwnEngine, generate_all
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets import hf
from draftsmith.modules.types import SamplingParams

COUNTS = (3, 17, 1, 9, 5, 12, 2, 30)  # tokens of prompts, of which three are answered at a time


# Windows in every other layer, experts and sinks, compressed keys, partial rotary and scaled outputs.
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "deepseek_v3", "glm", "granite", "mixtral", "phi3"])
@pytest.mark.parametrize("mask_elements", [hf.MASK_ELEMENTS, 2 * 17**2])  # prompts are read together, or some alone
def test_rows_are_answered_as_each_alone(tmp_path, monkeypatch, name, mask_elements):
    monkeypatch.setattr(hf, "MASK_ELEMENTS", mask_elements)
    build(name, tmp_path)
    lm = load_lm(str(tmp_path), loader="hf")
    prompts = [torch.randint(2, lm.info.vocab_size, (count,)).tolist() for count in COUNTS]
    assert isinstance(lm.session(3, 60), hf.HFRows)
    greedy = SamplingParams()
    alone = [generate_all(lm, [prompt], greedy, 6 + 3 * len(prompt) % 11, 1)[0] for prompt in prompts]
    longest = max(map(len, alone))
    together = generate_all(lm, prompts, greedy, longest, 3)
    for own, answer in zip(alone, together, strict=True):
        assert answer[: len(own)] == own


def test_padding_does_not_overflow_in_float16(tmp_path):
    """Gemma 2 computes scores in the model's type. A score below -16 added to float16's least number is infinite."""
    model = build("gemma2", tmp_path)
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj.weight.data *= 30
        layer.self_attn.k_proj.weight.data *= 30
    model.save_pretrained(tmp_path)
    lm = load_lm(str(tmp_path), loader="hf", dtype="float16")
    prompts = [torch.randint(2, lm.info.vocab_size, (count,)).tolist() for count in COUNTS]
    assert lm.session(len(prompts), 60).prefill(range(len(prompts)), prompts).isfinite().all()


def test_an_engine_says_that_it_answers_alone(tmp_path, capsys):
    build("phi3", tmp_path)
    lm = load_lm(str(tmp_path), loader="hf")
    settings = AnswerSettings(Checkpoint(str(tmp_path)), SamplingParams(), 9, False, 0)
    capsys.readouterr()
    OwnEngine(settings, lm, 8)
    assert not capsys.readouterr().err
    lm.no_trees = "Phi3, which does not"
    OwnEngine(settings, lm, 8)
    assert capsys.readouterr().err == "answers one prompt at a time, whatever --batch-size says: Phi3, which does not\n"
