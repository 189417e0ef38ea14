"""Classes that load a config.json: multimodal models without their towers, families of other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import CHATML, chat_tokenizer
from tiny_configs import random_model, sample, tiny_config

from draftsmith.modules.pretrained.checkpoint import Checkpoint, load_tokenizer
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.plan import meta_target


def saved(directory: Path, family: str, **fields: Any) -> Any:
    """A random model, whose config.json gets these fields."""
    model = random_model(tiny_config(family))
    model.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return model


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "mistral3", "llama4", "gemma3"])
def test_text_never_reaches_the_layers_that_are_dropped(tmp_path, model_type):
    whole = saved(tmp_path, model_type)
    lm, ids = load_lm(str(tmp_path)), sample(40, 1)
    torch.testing.assert_close(lm.logits(torch.tensor(ids), 40), logits(whole, ids))
    size, full = (sum(weight.numel() for weight in model.parameters()) for model in (lm.model, whole))
    assert size < 0.85 * full
    assert size == sum(weight.numel() for weight in meta_target(Checkpoint(tmp_path), False).parameters())


def test_a_model_that_needs_an_image_is_refused_in_one_line(tmp_path):
    saved(tmp_path, "blip-2")
    with pytest.raises(InputError, match=r"fails when it reads a text .*expected logits and hidden states of a text"):
        load_lm(str(tmp_path))


@pytest.mark.parametrize("change", ["type", "no class"])
def test_a_family_of_another_name_is_that_of_its_class_and_its_code_does_not_run(tmp_path, monkeypatch, change):
    """Kimi-K2: moonshotai/Kimi-K2-Instruct, config.json."""
    own = {name: f"modeling_deepseek.{kind}" for name, kind in (("AutoConfig", "A"), ("AutoModelForCausalLM", "B"))}
    named = ["DeepseekV3ForCausalLM" if change == "type" else "KimiForCausalLM"]
    whole, ids = saved(tmp_path, "deepseek_v3", model_type="kimi_k2", auto_map=own, architectures=named), sample(40, 1)
    (tmp_path / "modeling_deepseek.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.setattr("builtins.input", lambda text="": pytest.fail(text))
    if change == "type":
        torch.testing.assert_close(load_lm(str(tmp_path)).logits(torch.tensor(ids), 40), logits(whole, ids))
    else:
        with pytest.raises(InputError, match=r"runs its own code.*--trust-remote-code"):
            load_lm(str(tmp_path))


def test_the_chat_template_of_a_processor_is_the_tokenizers(tmp_path):
    saved(tmp_path, "llava")
    chat_tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert load_tokenizer(str(tmp_path)).chat_template == CHATML


def test_a_number_in_place_of_a_switch_is_refused(tmp_path):
    random_model(tiny_config("llama4_text")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    # As the first published files have it.
    file.write_text(json.dumps({**raw, "attn_temperature_tuning": 4}))
    with pytest.raises(InputError, match=r"attn_temperature_tuning.*expected valid settings. Correct config.json"):
        load_lm(str(tmp_path))
