"""EAGLE-1 heads in the directory that SafeAILab/EAGLE, vLLM and SGLang share.

Tensors are named as ours: fc, layers.{i}.self_attn.{q,k,v,o}_proj, layers.{i}.mlp.{gate,up,down}_proj and the norms,
without a prefix, embedding and lm_head. The systems differ in the biases that they create (`systems.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.formats.base import (
    ImportedHead,
    Package,
    Problem,
    TargetFacts,
    as_stored,
    check_tensors,
    same_values,
)
from draftsmith.modules.formats.llama import LlamaFormat, check_layer, check_options, longest_text
from draftsmith.modules.layers import llama_sizes

FIRST_NORM = "layers.0.input_layernorm.weight"


class Eagle1Format(LlamaFormat):
    """Directory of an EAGLE-1 head."""

    def check_common(self, config: EagleConfig) -> None:
        fc_bias = (config.fc_bias, "no bias: vLLM drops it silently, and no two systems keep it alike")
        check_layer(config.llama, {"fc_bias": fc_bias})

    def disk_tensors(self, config: EagleConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(state)

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        raw, notes = package.config, list[str]()
        llama = llama_sizes(raw)
        check_options(raw, llama, target, ("vocab_size", "draft_vocab_size", "hot_vocab_size"), notes)
        problems = self.problems(raw, package.tensors, target)
        tensors = self.own_tensors(package, target, str, notes, problems)
        # A published file may have tensors that no EAGLE-1 head computes with.
        for name in [name for name in tensors if name.startswith("lm_head") or name == FIRST_NORM]:
            tensor, theirs = tensors.pop(name), None if target is None else target.lm_head
            if name == FIRST_NORM:
                notes.append(f"{name} is left out: EAGLE-1 has no norm before the attention of layer 0")
            else:
                notes.append(f"{name} is left out: the target's lm_head is used")
            if self.row.strict:
                problems.append(Problem(name, f"{self.system} raises: it has no such parameter"))
            elif name != FIRST_NORM and theirs is not None and not same_values(tensor, theirs):
                problems.append(Problem(name, f"{self.system} takes the target's, which differs"))
        biases: dict[str, Any] = self.take_biases(tensors, raw, notes, problems)
        fc_bias = biases.pop("fc_bias")
        llama = dataclasses.replace(llama, max_position=longest_text(llama, target, notes), **biases)
        config = EagleConfig(llama, fc_bias)
        with torch.device("meta"):
            check_tensors(EagleHead(config), tensors)
        return ImportedHead(config, as_stored(tensors), tuple(notes), (*problems, *self.unheld(config)))
