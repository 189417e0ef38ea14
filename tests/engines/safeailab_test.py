"""Exported heads in SafeAILab's own module, float32.

PyPI's last release is 1.2.1 of 2024: rotary base 10000 always, no `qkv_bias`, weights only as a pickle with the
target's embedding in it. What it can hold is compared; what it cannot is asserted, so that a newer release shows.
Run by `make test-engines`.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass

import pytest
import torch
from defects import DEFECTS
from eagle.model import cnets
from eagle.model.cnets import Model
from eagle.model.configs import EConfig
from exported import (
    Exported,
    assert_close,
    assert_drafts_as_predicted,
    assert_loaded,
    broken,
    cases,
    emptied,
    read,
    settle,
)
from safetensors.torch import load_file
from torch import Tensor

HELD = ("llama", "two-layers")
NOT_HELD = {"theta": (), "qwen2": ("q_proj.bias", "k_proj.bias", "v_proj.bias")}


# Our reader goes by the repository, which knows `qkv_bias`.
# Fields that it ignores and the head does not need.
LOST = {"larger-head_dim", "smaller-head_dim", "draft_vocab_size"}
ASKED = [name for name, defect in DEFECTS.items() if defect.case in HELD and not defect.config.get("qkv_bias")]


@dataclass(frozen=True)
class Loaded:
    """model: NaN where no tensor filled it. started: its parameters before. unknown: names without a place."""

    model: Model
    started: dict[str, Tensor]
    unknown: list[str]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Without the embedding."""
        named = dict(self.model.named_parameters())
        del named["embed_tokens.weight"]
        return named


def load(exported: Exported) -> Loaded:
    """As `EaModel.__init__` and `from_pretrained` build it.

    Its repository's later code reads safetensors and passes strict=False, which is what this does. The target's
    embedding replaces the model's own, whatever its shape, as with the `load_emb` of both.
    """
    config_file = exported.directory / "config.json"
    config = EConfig.from_pretrained(str(config_file))
    model = Model(config, bias=json.loads(config_file.read_text()).get("bias", True))
    started = emptied(model)
    model.embed_tokens.weight.data = exported.ours["embed_tokens"].clone()
    names = model.load_state_dict(load_file(exported.directory / "model.safetensors"), strict=False)
    return Loaded(model.eval(), started, names.unexpected_keys)


@torch.inference_mode()
def run(model: Model, exported: Exported) -> torch.Tensor:
    ours = exported.ours
    return model(ours["features"][None], ours["ids"][None, 1:])[0]


def test_every_case_is_known():
    assert sorted([*HELD, *NOT_HELD]) == cases("eagle")


@pytest.mark.parametrize("case", HELD)
def test_its_forward_gives_our_logits(case: str):
    exported = read(case, "eagle")
    loaded = load(exported)
    assert not loaded.unknown
    assert_loaded(loaded.parameters, exported.state)
    hidden = run(loaded.model, exported)
    logits = hidden @ exported.ours["lm_head"].T
    assert_close(f"SafeAILab {case}", exported.ours, hidden=hidden, logits=logits)


@pytest.mark.parametrize("case", NOT_HELD)
def test_what_this_release_cannot_hold(case: str):
    exported = read(case, "eagle")
    loaded = load(exported)
    assert sorted(loaded.unknown) == sorted(f"layers.0.self_attn.{name}" for name in NOT_HELD[case])
    assert (run(loaded.model, exported) - exported.ours["hidden"]).abs().max() > 1e-2


@pytest.mark.parametrize("defect", ASKED)
@torch.inference_mode()
def test_a_defect_does_what_our_reader_predicts(defect: str):
    exported, predicted = broken(defect, "eagle")
    if predicted.raises:
        with pytest.raises(RuntimeError, match="size mismatch for"):
            load(exported)
        return
    loaded = load(exported)
    weights = dict(predicted.weights)
    embedding = weights.pop("embed_tokens.weight", exported.ours["embed_tokens"])
    assert torch.equal(loaded.model.embed_tokens.weight, embedding)
    assert set(loaded.unknown) == set(predicted.dropped)
    settle(loaded.parameters, loaded.started, weights)
    logits = run(loaded.model, exported) @ exported.ours["lm_head"].T
    assert_drafts_as_predicted(predicted, logits, exported, lost=defect in LOST)


def test_this_release_has_no_eagle3():
    """Else compare those heads as `eagle3_vllm_test.py` does. The repository's own code has it."""
    assert not hasattr(cnets, "LlamaDecoderLayeremb") and "draft_vocab_size" not in inspect.getsource(cnets)


def test_a_config_without_bias_gives_the_fusion_layer_one():
    exported = read("llama", "eagle")
    raw = json.loads((exported.directory / "config.json").read_text())
    assert raw["bias"] is False
    config = EConfig.from_pretrained(str(exported.directory / "config.json"))
    assert Model(config).fc.bias is not None
