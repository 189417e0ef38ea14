"""DFlash and DSpark heads of llama.cpp, in one GGUF file (its conversion/qwen.py and src/models/dflash.cpp).

Rotary pairs are halves there too, so that q and k keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.formats.base import Package, Problem, Served, TargetFacts
from draftsmith.modules.formats.block import OUTPUTS, BlockFormat, settings, window
from draftsmith.modules.formats.gguf import LAYER_NAMES, llama_metadata, rope_divisors
from draftsmith.modules.formats.llama import llama_config
from draftsmith.modules.formats.llamacpp import NAME, command, read_fields, required, target_problems
from draftsmith.modules.layers import rope_settings

ARCHITECTURE = "dflash"  # of GGUF, for both
# Our directory's names -> GGUF's, each with .weight or .bias; those of a layer are LAYER_NAMES.
NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


class LlamaCppBlock(BlockFormat):
    """Drafters of llama.cpp, which lays as many slots as --spec-draft-n-max drafts tokens."""

    name, system = NAME, "llama.cpp"
    markov_types = ("vanilla",)

    def fields(self, config: BlockConfig, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Any]:
        return super().fields(config, dtype, target) | {"gguf": ARCHITECTURE}

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        return target_problems(target)

    def serve(self, served: Served) -> str:
        return command(served, f"draft-{self.kind}")


def to_gguf(package: Package) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors of a head's GGUF file; the tokenizer's other fields are the caller's."""
    raw = settings(package.config)
    llama = llama_config(raw, rope_settings(raw))
    tensors = rope_divisors(llama) | {gguf_name(name): tensor for name, tensor in package.tensors.items()}
    span = window(raw, llama.num_layers)
    own: dict[str, Any] = {
        "target_layers": [number + 1 for number in raw[OUTPUTS]],
        "block_size": int(raw["block_size"]),
        "sample_from_anchor": bool(raw["sample_from_anchor"]),
        "has_confidence_head": bool(raw.get("enable_confidence_head")),
        "attention.causal": span is not None,
    }
    if span is not None:
        own |= {"attention.sliding_window": span, "attention.sliding_window_pattern": [True] * llama.num_layers}
    metadata = llama_metadata(ARCHITECTURE, llama) | {f"{ARCHITECTURE}.{name}": value for name, value in own.items()}
    return metadata | {"tokenizer.ggml.mask_token_id": int(raw["mask_token_id"])}, tensors


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Package:
    """Return a head's GGUF file as a directory in vLLM's layout.

    Raises:
        InputError: metadata are missing.
    """

    def setting(name: str, default: Any = None) -> Any:
        return metadata.get(f"{ARCHITECTURE}.{name}", default)

    markov = tensors.get("markov_w1.weight")
    slides = setting("attention.sliding_window_pattern", [])
    config = read_fields(ARCHITECTURE, metadata, tensors) | {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": setting("attention.sliding_window"),
        "is_causal": bool(setting("attention.causal")),
        OUTPUTS: [int(number) - 1 for number in required(ARCHITECTURE, metadata, "target_layers")],
        "block_size": setting("block_size"),
        "mask_token_id": metadata.get("tokenizer.ggml.mask_token_id"),
        # A file without a Markov head is drafted with as DFlash, whatever it says.
        "sample_from_anchor": markov is not None and bool(setting("sample_from_anchor", True)),
        "markov_rank": 0 if markov is None else markov.shape[-1],
        "enable_confidence_head": bool(setting("has_confidence_head", "conf_proj.weight" in tensors)),
    }
    package = {our_name(name): tensor for name, tensor in tensors.items() if name != "rope_freqs.weight"}
    return Package(config, package)


def gguf_name(name: str) -> str:
    """Return the name in a GGUF file of one of our parameters."""
    module, _, part = name.rpartition(".")
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", module):
        return f"blk.{match[1]}.{LAYER_NAMES[match[2]]}.{part}"
    return f"{NAMES[module]}.{part}"


def our_name(name: str) -> str:
    """Return our name of a tensor in a GGUF file; an unknown one as it is."""
    module, _, part = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", module):
        inner = next((known for known, theirs in LAYER_NAMES.items() if theirs == match[2]), match[2])
        return f"layers.{match[1]}.{inner}.{part}"
    ours = {theirs: known for known, theirs in NAMES.items()}
    return f"{ours.get(module, module)}.{part}"
