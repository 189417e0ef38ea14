"""EAGLE-1 heads in the directory that SafeAILab/EAGLE, vLLM and SGLang share.

Tensors are named as ours: fc, layers.{i}.self_attn.{q,k,v,o}_proj, layers.{i}.mlp.{gate,up,down}_proj and the norms,
without a prefix, embedding and lm_head. The systems differ in the biases that they create (`systems.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from draftsmith.modules.drafters.eagle import EagleConfig
from draftsmith.modules.formats.base import same_values
from draftsmith.modules.formats.llama import HeadFiles, LlamaFormat, check_layer
from draftsmith.modules.layers import LlamaConfig

FIRST_NORM = "layers.0.input_layernorm.weight"
TAKES = "takes the target's, which differs"


class Eagle1Format(LlamaFormat):
    """Directory of an EAGLE-1 head."""

    vocabularies = ("vocab_size", "draft_vocab_size", "hot_vocab_size")

    def check_common(self, config: EagleConfig) -> None:
        fc_bias = (config.fc_bias, "no bias: vLLM drops it silently, and no two systems keep it alike")
        check_layer(config.llama, {"fc_bias": fc_bias})

    def read_config(self, files: HeadFiles, llama: LlamaConfig) -> EagleConfig:
        # A published file may have tensors that no EAGLE-1 head computes with.
        for name in [name for name in files.tensors if name.startswith("lm_head") or name == FIRST_NORM]:
            tensor, theirs = files.tensors.pop(name), None if files.target is None else files.target.lm_head
            if name == FIRST_NORM:
                files.notes.append(f"{name} is left out: EAGLE-1 has no norm before the attention of layer 0")
            else:
                files.notes.append(f"{name} is left out: the target's lm_head is used")
            differs = name != FIRST_NORM and theirs is not None and not same_values(tensor, theirs)
            files.add_problems(
                {name: (self.row.strict or differs, "raises: it has no such parameter" if self.row.strict else TAKES)}
            )
        biases: dict[str, Any] = files.take_biases()
        fc_bias = biases.pop("fc_bias")
        return EagleConfig(dataclasses.replace(llama, max_position=files.longest_text(llama), **biases), fc_bias)
