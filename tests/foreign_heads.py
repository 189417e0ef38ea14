"""Tiny random heads, their target's facts, and broken copies of their exports."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import ImportedHead, Package, TargetFacts
from draftsmith.modules.llama_config import LlamaConfig, RopeScaling
from draftsmith.modules.pretrained.heads import build_head, stored_tensors

V, H, CONTEXT = 20, 12, 64
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 16)
LLAMA = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=10, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=4,
    max_position=CONTEXT, rms_eps=1e-5, rope_theta=5000.0, rope_scaling=RopeScaling(original_max_position=CONTEXT),
)  # fmt: skip
LINEAR = RopeScaling("linear", 4.0, original_max_position=CONTEXT)
# As gpt-oss: the ramp ends between pairs. A part of each head, as Qwen3.5, with another scale, as DeepSeek.
YARN = RopeScaling("yarn", 8.0, original_max_position=8, beta_fast=2.0, beta_slow=0.5, truncate=False)
PART = RopeScaling("yarn", 4.0, original_max_position=16, partial_rotary_factor=0.5, attention_factor=1.25)


def llama(**changes: Any) -> LlamaConfig:
    return dataclasses.replace(LLAMA, **changes)


FAMILIES = {
    "llama": LLAMA,
    "qwen2": llama(qkv_bias=True, rope_theta=1e6),
    "llama3 rope": llama(rope_scaling=LLAMA3),
    "wide heads": llama(head_dim=8),
    "linear rope": llama(rope_scaling=LINEAR, rope_theta=10000.0),
    "linear rope, other base": llama(rope_scaling=LINEAR),
    "two layers": llama(num_layers=2),
}


def random_head(config: LlamaConfig, seed: int = 0, fc_bias: bool = False) -> EagleHead:
    """Return a head whose parameters are all random: a tensor in a wrong place changes the output."""
    torch.manual_seed(seed)
    head = EagleHead(EagleConfig(config, fc_bias)).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.4)
    return head


def state_of(head: EagleHead) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in head.named_parameters()}


def facts(**raw: Any) -> TargetFacts:
    """Return the facts of a Llama target with the sizes of `LLAMA`."""
    torch.manual_seed(9)
    fields = {
        "model_type": "llama", "vocab_size": V, "hidden_size": H, "num_hidden_layers": 6,
        "max_position_embeddings": CONTEXT, "rope_theta": 5000.0,
    }  # fmt: skip
    return TargetFacts(fields | raw, torch.randn(V, H), torch.randn(V, H))


def changed(package: Package, config: Mapping[str, Any] = {}, tensors: Mapping[str, Tensor | None] = {}) -> Package:
    """Return a copy with other fields and tensors; a field of `...` and a tensor of None are removed."""
    fields = {**package.config, **config}
    state = {**package.tensors, **tensors}
    return Package(
        {key: value for key, value in fields.items() if value is not ...},
        {name: tensor for name, tensor in state.items() if tensor is not None},
    )


D2T = torch.tensor([0, 2, 3, 7, 8, 12, 13, 19])
LAYERS = 12
DEFAULT = (2, 6, 9)  # of 12 layers


def random_eagle3(llama_config: LlamaConfig = LLAMA, reduced: bool = True, **settings: Any) -> Eagle3Head:
    """Return an EAGLE-3 head whose parameters are all random."""
    torch.manual_seed(4)
    config = Eagle3Config(llama_config, settings.pop("aux_layers", DEFAULT), len(D2T) if reduced else V, **settings)
    head = Eagle3Head(config).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(std=0.4)
    if reduced:
        head.use_draft_vocabulary(D2T)
    return head


EAGLE1 = {name: formats()[name, "eagle"] for name in ("eagle", "vllm", "sglang")}
EAGLE3 = {name: formats()[name, "eagle3"] for name in ("eagle", "vllm", "sglang", "speculators")}
TARGET = facts(num_hidden_layers=LAYERS)
IDS = "eagle_aux_hidden_state_layer_ids"


def written(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Package:
    """Export the random EAGLE-3 head for one of these systems, or llama.cpp."""
    head = random_eagle3(**settings)
    return formats()[name, "eagle3"].write(head.config, stored_tensors(head), dtype, TARGET)


def where(imported: ImportedHead) -> list[str]:
    return [problem.where for problem in imported.problems]


def assert_same(imported: ImportedHead, head: Any) -> None:
    """Check that a head was read as its own system computes it, to the bit."""
    assert imported.config == head.config and imported.problems == ()
    again = stored_tensors(build_head(head.kind, imported.config, imported.state))
    assert again.keys() == stored_tensors(head).keys()
    for key, tensor in stored_tensors(head).items():
        assert again[key].dtype == tensor.dtype and torch.equal(again[key], tensor), key


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))
