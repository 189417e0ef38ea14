"""EAGLE-3 heads of speculators 0.9.0 (config.py, model.py, models/eagle3/), which vLLM reads as they are.

The layer's settings are an object inside `config.json`, and the file has the target's embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle3.net import Eagle3Config
from draftsmith.modules.formats.base import ImportedHead, Package, Problem, Served, TargetFacts
from draftsmith.modules.formats.eagle3 import IDS, Eagle3Format, Flags, count_field, layer_ids
from draftsmith.modules.formats.llama import llama_fields
from draftsmith.modules.formats.vllm import command
from draftsmith.modules.types import InputError

VERSION = "0.9.0"
TYPE = "speculators_model_type"


class SpeculatorsEagle3(Eagle3Format):
    """EAGLE-3 head of any layers and switches, with the target's embedding."""

    name = system = "speculators"
    layer = "layers.0"
    accepted = ("layers.0",)
    bias_fields = {"qkv": ("attention_bias",), "o": ("attention_bias",), "mlp": ("mlp_bias",)}

    def write(
        self, config: Eagle3Config, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        if target is None or target.embed_tokens is None:
            raise InputError("target", "none", "the target, whose embedding the file has", "Pass --target.")
        package = super().write(config, state, dtype, target)
        table = target.embed_tokens.detach().to(dtype).contiguous().clone()
        return Package(package.config, {**package.tensors, "embed_tokens.weight": table}, package.metadata)

    def fields(self, config: Eagle3Config, dtype: torch.dtype, ids: tuple[int, ...] | None) -> dict[str, Any]:
        return {
            TYPE: "eagle3",
            "speculators_version": VERSION,
            "architectures": ["Eagle3DraftModel"],
            "speculators_config": speculators_config(None, None),
            "transformer_layer_config": {
                **llama_fields(config.llama, dtype),
                "attention_bias": False,
                "mlp_bias": False,
                **(count_field(ids) if ids is not None else {}),
            },
            "draft_vocab_size": config.draft_vocab_size,
            # Always explicit: vLLM and speculators have different defaults.
            **{name: getattr(config, name) for name in Flags._fields},
            "target_hidden_size": None,
            IDS: None if ids is None else list(ids),
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
        }

    def extra_fields(self, target: Mapping[str, Any], path: str) -> dict[str, Any]:
        config = speculators_config(path, target.get("architectures"))
        return {**super().extra_fields(target, path), "speculators_config": config}

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        head, tensors = super().read(package, target), {name.removeprefix("model.") for name in package.tensors}
        lost = {
            "embed_tokens.weight": ("embed_tokens.weight" not in tensors, "may leave it undefined"),
            "t2d": (head.config.reduced and "t2d" not in tensors, "raises: t2d tensor hasn't been set"),
        }
        return dataclasses.replace(head, problems=(*head.problems, *self.listed(lost)))

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        return layer_ids(raw, "")

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        layer = isinstance(raw.get("transformer_layer_config"), Mapping)
        other = raw.get("model_type", "qwen3")
        wrong = {
            TYPE: (raw.get(TYPE) != "eagle3", f"does not load {raw.get(TYPE)!r} as an EAGLE-3 head"),
            "transformer_layer_config": (not layer, "does not find it"),
            "model_type": (layer and other != "llama", f"builds the layer of {other!r}: write llama"),
        }
        return self.listed(wrong)

    def serve(self, served: Served) -> str:
        # vLLM reads these directories.
        return command(served, "eagle3")


def speculators_config(target: str | None, architectures: Any) -> dict[str, Any]:
    """Return the object that states the head's use. target: path or hub id."""
    method = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target, "architectures": architectures or []},
    }
