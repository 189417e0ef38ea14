"""Exported heads in SafeAILab's own module, float32.

PyPI's last release is 1.2.1 of 2024: rotary base 10000 always, no `qkv_bias`, weights only as a pickle with the
target's embedding in it. What it can hold is compared; what it cannot is asserted, so that a newer release shows.
Run by `make test-engines`.
"""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from defects import EAGLE
from eagle.model import cnets
from eagle.model.cnets import Model
from eagle.model.configs import EConfig
from exported import (
    Exported,
    asked,
    assert_as_checked,
    assert_close,
    assert_loaded,
    broken,
    cases,
    emptied,
    read,
    restore_unfilled,
)
from safetensors.torch import load_file
from torch import Tensor

HELD = ("llama", "two-layers")
# Reported, and ignored by this code: its lm_head, its vocabulary and its head_dim are the target's or derived.
HARMLESS = {"lm_head", "larger-head_dim", "q-norm"}


def load(exported: Exported) -> tuple[Model, dict[str, Tensor], list[str]]:
    """Build the model as `EaModel.__init__` and `from_pretrained` do; also its parameters before, and unknown names.

    Its repository's later code reads safetensors and passes strict=False, which is what this does. The target's
    embedding replaces the model's own, whatever its shape, as with the `load_emb` of both.
    """
    config_file = exported.directory / "config.json"
    config = EConfig.from_pretrained(str(config_file))
    model = Model(config, bias=json.loads(config_file.read_text()).get("bias", True))
    started = emptied(model)
    model.embed_tokens.weight.data = exported.ours["embed_tokens"].clone()
    names = model.load_state_dict(load_file(exported.directory / "model.safetensors"), strict=False)
    return model.eval(), started, names.unexpected_keys


@torch.inference_mode()
def run(model: Model, exported: Exported) -> Tensor:
    """Return hidden states [T, H]."""
    return model(exported.ours["features"][None], exported.ours["ids"][None, 1:])[0]


@pytest.mark.parametrize("case", HELD)
def test_its_forward_gives_our_logits(case: str):
    exported = read("eagle", case, "eagle")
    model, _, unknown = load(exported)
    assert not unknown
    loaded = dict(model.named_parameters())
    del loaded["embed_tokens.weight"]
    assert_loaded(loaded, exported.state)
    hidden = run(model, exported)
    logits = hidden @ exported.ours["lm_head"].T
    assert_close(f"SafeAILab {case}", exported.ours, hidden=hidden, **{"logits.0": logits})


def test_what_this_release_cannot_hold():
    assert sorted([*HELD, "qwen2"]) == cases("eagle", "eagle")
    exported = read("eagle", "qwen2", "eagle")
    model, _, unknown = load(exported)
    assert sorted(unknown) == [f"layers.0.self_attn.{name}_proj.bias" for name in "kqv"]
    assert (run(model, exported) - exported.ours["hidden"]).abs().max() > 1e-2


@pytest.mark.parametrize("defect", [name for name in asked("eagle", "eagle") if EAGLE[name].case in HELD])
@torch.inference_mode()
def test_a_defect_changes_the_draft_exactly_if_the_check_reports_it(defect: str):
    exported = broken("eagle", defect, "eagle")

    def compute() -> Tensor:
        model, started, _ = load(exported)
        restore_unfilled(model, started)
        return run(model, exported) @ exported.ours["lm_head"].T

    assert_as_checked(exported, compute, harmless=defect in HARMLESS)


def test_this_release_has_no_eagle3():
    """Else compare those heads as `vllm_test.py` does. The repository's own code has it."""
    assert not hasattr(cnets, "LlamaDecoderLayeremb") and "draft_vocab_size" not in inspect.getsource(cnets)
