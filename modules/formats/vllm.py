"""EAGLE-1 and EAGLE-3 heads in vLLM 0.33.0 (models/llama_eagle.py, models/llama_eagle3.py, models/utils.py).

An unknown tensor stops it, unless it is a bias or a rotary buffer; a missing one stays uninitialised.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from draftsmith.modules.formats.base import Problem, Served, TargetFacts
from draftsmith.modules.formats.eagle1 import Eagle1Format
from draftsmith.modules.formats.eagle3 import CLASS, Eagle3Format, Flags, layer_ids
from draftsmith.modules.formats.llama import Biases, LlamaFormat


class VLLM(LlamaFormat):
    """A method of vLLM's speculative config, which has the name of the head's kind."""

    name, system = "vllm", "vLLM"

    def serve(self, served: Served) -> str:
        return command(served, self.kind)


class VLLMEagle(VLLM, Eagle1Format):
    """EAGLE-1 head, also of a head_dim or rope that SafeAILab's code does not hold."""

    strict = True
    classes = ("LlamaForCausalLM", "EagleLlamaForCausalLM")
    # models/llama.py, LlamaDecoderLayer. fc never has one.
    bias_fields = {"qkv": ("attention_bias", "bias"), "o": ("attention_bias", "bias"), "mlp": ("mlp_bias",)}

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        # `qkv_bias`, if present, decides for q, k and v.
        biases = super().biases(raw)
        return biases._replace(qkv=bool(raw["qkv_bias"])) if "qkv_bias" in raw else biases

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        # The head's layers count on from the target's, its `layer_types` do not (models/llama.py, LlamaAttention).
        typed, layers = len(raw.get("layer_types") or []), int(raw.get("num_hidden_layers") or 1)
        short = typed and target is not None and (target.num_layers or 0) + layers > typed
        text = "raises: effective_layer_idx is out of bounds. Remove the field"
        return super().problems(raw, target) + self.listed({"layer_types": (short, text)})


class VLLMEagle3(VLLM, Eagle3Format):
    """EAGLE-3 head of any layers and switches."""

    classes = (CLASS, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
    bias_fields = {"qkv": ("attention_bias",), "o": ("attention_bias", "bias"), "mlp": ("mlp_bias",)}

    def flags(self, raw: Mapping[str, Any]) -> Flags:
        # norm_before_residual is on by default in directories of speculators, which themselves have it off
        # (transformers_utils/configs/speculators/algos.py).
        before = raw.get("norm_before_residual", "speculators_model_type" in raw)
        return super().flags(raw)._replace(norm_before_residual=bool(before))

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        # Number k is the state after k layers; vLLM sorts them and drops duplicates (models/interfaces.py).
        ids = layer_ids(raw, "", "eagle_config")
        return None if ids is None else tuple(sorted(set(ids)))

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        # It does not read the architectures of a directory of speculators.
        return [] if "speculators_model_type" in raw else super().problems(raw, target)


def command(served: Served, method: str) -> str:
    """Return the command that serves a drafter by a method of vLLM's speculative config."""
    settings = {"method": method, "model": served.directory, "num_speculative_tokens": served.num_drafted}
    return f"vllm serve {shlex.quote(served.model)} --speculative-config {shlex.quote(json.dumps(settings))}"
