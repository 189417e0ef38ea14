"""Exported heads in SafeAILab's own module, float32.

PyPI's last release is 1.2.1 of 2024: rotary base 10000 always, no `qkv_bias`, weights only as a pickle with the
target's embedding in it. What it can hold is compared; what it can not is asserted, so that a newer release shows.
Run by `make test-engines`.
"""

from __future__ import annotations

import json

import pytest
import torch
from eagle.model.cnets import Model
from eagle.model.configs import EConfig
from exported import Exported, assert_close, assert_loaded, cases, read
from safetensors.torch import load_file

HELD = ("llama", "two-layers")
NOT_HELD = {"theta": (), "qwen2": ("q_proj.bias", "k_proj.bias", "v_proj.bias")}


def load(exported: Exported) -> tuple[Model, list[str]]:
    """As `EaModel.__init__` and `from_pretrained` build it, and the names on disk that it has no place for.

    Its repository's later code reads safetensors and passes strict=False, which is what this does.
    """
    config_file = exported.directory / "config.json"
    config = EConfig.from_pretrained(str(config_file))
    model = Model(config, bias=json.loads(config_file.read_text()).get("bias", True))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    tensors = load_file(exported.directory / "model.safetensors")
    names = model.load_state_dict({"embed_tokens.weight": exported.ours["embed_tokens"], **tensors}, strict=False)
    assert not names.missing_keys
    return model.eval(), names.unexpected_keys


@torch.inference_mode()
def run(model: Model, exported: Exported) -> torch.Tensor:
    ours = exported.ours
    return model(ours["features"][None], ours["ids"][None, 1:])[0]


def test_every_case_is_known():
    assert sorted([*HELD, *NOT_HELD]) == cases("eagle")


@pytest.mark.parametrize("case", HELD)
def test_its_forward_gives_our_logits(case: str):
    exported = read(case, "eagle")
    model, unknown = load(exported)
    loaded = dict(model.named_parameters())
    del loaded["embed_tokens.weight"]
    assert not unknown
    assert_loaded(loaded, exported.state)
    hidden = run(model, exported)
    logits = hidden @ exported.ours["lm_head"].T
    assert_close(f"SafeAILab {case}", exported.ours, hidden=hidden, logits=logits)


@pytest.mark.parametrize("case", NOT_HELD)
def test_what_this_release_can_not_hold(case: str):
    exported = read(case, "eagle")
    model, unknown = load(exported)
    assert sorted(unknown) == sorted(f"layers.0.self_attn.{name}" for name in NOT_HELD[case])
    assert (run(model, exported) - exported.ours["hidden"]).abs().max() > 1e-2


def test_a_config_without_bias_gives_the_fusion_layer_one():
    exported = read("llama", "eagle")
    raw = json.loads((exported.directory / "config.json").read_text())
    assert raw["bias"] is False
    config = EConfig.from_pretrained(str(exported.directory / "config.json"))
    assert Model(config).fc.bias is not None
