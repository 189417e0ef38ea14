"""EAGLE-1 heads in the directory that SafeAILab/EAGLE, vLLM and SGLang share.

Tensors are named as ours: fc, layers.{i}.self_attn.{q,k,v,o}_proj, layers.{i}.mlp.{gate,up,down}_proj and the norms,
without a prefix, embedding and lm_head. The systems differ in the biases that they create (`systems.py`).
"""

from __future__ import annotations

import dataclasses

import torch

from draftsmith.modules.drafters.eagle import EagleConfig
from draftsmith.modules.formats.base import NotReadHere, TargetFacts, same_values
from draftsmith.modules.formats.llama import Fields, layer_window, llama_fields
from draftsmith.modules.formats.llama_format import HeadFiles, LlamaFormat, check_layer
from draftsmith.modules.llama_config import LlamaConfig

FIRST_NORM, LAST_NORM = "layers.0.input_layernorm.weight", "norm.weight"


class Eagle1Format(LlamaFormat[EagleConfig]):
    """Directory of an EAGLE-1 head.

    strict: the system raises for tensors that it does not know.
    """

    kind = "eagle"
    vocabularies = ("vocab_size", "draft_vocab_size", "hot_vocab_size")
    strict = False

    def check_common(self, config: EagleConfig) -> None:
        fc_bias = (config.fc_bias, "no bias: vLLM drops it silently, and no two systems keep it alike")
        check_layer(config.llama, {"fc_bias": fc_bias})

    def unserved(self, target: TargetFacts) -> str:
        # It reads the last state only, which every model gives, and its own states, which cannot hold the factor.
        scaled = f"leaves out the factor {target.scale:.4g} on the target's logits, whose lm_head the head borrows"
        return scaled if target.scale != 1 else ""

    def fields(self, config: EagleConfig, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        """Return what vLLM and SafeAILab both read."""
        qkv_bias = {"qkv_bias": True} if config.llama.qkv_bias else {}
        return {**llama_fields(config.llama, dtype), "architectures": ["LlamaForCausalLM"], "bias": False, **qkv_bias}

    def read_config(self, files: HeadFiles, llama: LlamaConfig) -> EagleConfig:
        if window := layer_window(files.raw, llama.num_layers):
            raise NotReadHere("config.json, sliding_window", window, "layers without a window")
        if LAST_NORM in files.tensors:
            raise NotReadHere(LAST_NORM, "a norm of its states, as NeMo Automodel trains", "none, as EAGLE-1 has")
        # A published file may have tensors that no EAGLE-1 head computes with.
        for name in [name for name in files.tensors if name.startswith("lm_head") or name == FIRST_NORM]:
            tensor, theirs = files.tensors.pop(name), None if files.target is None else files.target.lm_head
            if name == FIRST_NORM:
                files.notes.append(f"{name} is left out: EAGLE-1 has no norm before the attention of layer 0")
            else:
                files.notes.append(f"{name} is left out: the target's lm_head is used")
            differs = name != FIRST_NORM and theirs is not None and not same_values(tensor, theirs)
            text = "raises: it has no such parameter" if self.strict else "takes the target's, which differs"
            files.add_problems({name: (self.strict or differs, text)})
        biases = files.take_biases()
        layers = dataclasses.replace(
            llama,
            max_position=files.longest_text(llama),
            qkv_bias=biases.qkv,
            o_bias=biases.o,
            mlp_bias=biases.mlp,
        )
        return EagleConfig(layers, biases.fc)
