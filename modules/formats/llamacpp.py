"""EAGLE-3 heads of llama.cpp, in one GGUF file (its conversion/llama.py and src/models/eagle3.cpp).

The file holds the target's tokenizer too. `to_gguf` and `from_gguf` map between its names and a directory of vLLM's
layout, so that settings and tensors are read by the rules of `Eagle3Format`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle3.net import Eagle3Config
from draftsmith.modules.formats.base import ForeignHead, Package, Problem, Served, TargetFacts
from draftsmith.modules.formats.eagle3 import IDS, NUM_STATES, Eagle3Format, layer_ids
from draftsmith.modules.formats.gguf import (
    LAYER_NAMES,
    llama_metadata,
    read_layers,
    rope_divisors,
    to_adjacent,
    to_halves,
)
from draftsmith.modules.formats.llama import Biases, llama_config
from draftsmith.modules.layers import rope_settings
from draftsmith.modules.types import InputError

NAME = "llamacpp"
ARCHITECTURE = "eagle3"  # of GGUF
# Model types whose graphs give a head the states of their layers; llama.cpp aborts with all others.
TARGETS = (
    "llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma4", "gpt_oss", "lfm2",
    "nemotron_h",
)  # fmt: skip
# Our directory's names -> GGUF's. The layer's are those of a target's layer, and one more norm.
NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    **{f"midlayer.{ours}.weight": f"blk.0.{theirs}.weight" for ours, theirs in LAYER_NAMES.items()},
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
}
RETRAIN = "Train the head with --version 3 and default layers."


class LlamaCppEagle3(Eagle3Format):
    """EAGLE-3 head, version 3 only: three states of the target, plain norms, no biases."""

    name = NAME
    system = "llama.cpp"
    notes = (
        "For several requests at once serve another kind of head: llama.cpp then accepts a third of an EAGLE-3 head's "
        "drafts (docs/guides/llamacpp.md).",
    )

    def recognises(self, foreign: ForeignHead) -> bool:
        return foreign.config.get("gguf") == ARCHITECTURE

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        return layer_ids(raw, "")

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        return Biases(fc=False, qkv=False, o=False, mlp=False)

    def fields(self, config: Eagle3Config, dtype: torch.dtype, ids: tuple[int, ...] | None) -> dict[str, Any]:
        # The file has no default layers: they are always named.
        return super().fields(config, dtype, config.capture) | {"gguf": ARCHITECTURE}

    def check_system(self, config: Eagle3Config) -> None:
        refused = {
            "fc_norm": (config.fc_norm, "no norms of the target's states: llama.cpp has no EAGLE-3.1"),
            "norm_output": (config.norm_output, "states fed back as they are: llama.cpp has no EAGLE-3.1"),
        }
        for field, (value, expected) in refused.items():
            if value:
                raise InputError(field, value, expected, RETRAIN)
        if len(config.capture) != NUM_STATES:
            raise InputError("layers", list(config.capture), f"{NUM_STATES} layers, as llama.cpp reads", RETRAIN)

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        return target_problems(target)

    def serve(self, served: Served) -> str:
        return command(served, "draft-eagle3")


def target_problems(target: TargetFacts | None) -> list[Problem]:
    """Return the problem of a target whose states llama.cpp does not give to a head."""
    kind = None if target is None else target.raw.get("model_type")
    if kind is None or kind in TARGETS:
        return []
    return [Problem("target", f"llama.cpp aborts: its {kind} graphs do not give the states of their layers")]


def command(served: Served, kind: str) -> str:
    """Return the command that serves a drafter; model and directory are GGUF files."""
    drafts = f"--spec-type {kind} --spec-draft-n-max {served.num_drafted}"
    return f"llama-server -m {shlex.quote(served.model)} -md {shlex.quote(served.directory)} {drafts}"


def to_gguf(package: Package) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors of a head's GGUF file; the tokenizer's fields are the caller's."""
    raw = package.config
    llama = llama_config(raw, rope_settings(raw))
    heads = {"q_proj": llama.num_heads, "k_proj": llama.num_kv_heads}
    tensors = rope_divisors(llama)
    for name, tensor in package.tensors.items():
        if name == "t2d":
            continue
        if name == "d2t":
            # The target's ids, where other systems store what is added to the drafted one.
            tensors["d2t"] = tensor + torch.arange(len(tensor))
            continue
        part = name.split(".")[-2]
        tensors[NAMES[name]] = to_adjacent(tensor, heads[part]) if part in heads else tensor
    metadata = llama_metadata(ARCHITECTURE, llama) | {
        f"{ARCHITECTURE}.target_layers": list(raw[IDS]),
        f"{ARCHITECTURE}.target_hidden_size": int(raw.get("target_hidden_size") or llama.hidden_size),
        f"{ARCHITECTURE}.norm_before_residual": bool(raw.get("norm_before_residual")),
        f"{ARCHITECTURE}.norm_before_fc": bool(raw.get("norm_before_fc")),
    }
    return metadata, tensors


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Package:
    """Return a head's GGUF file as a directory in vLLM's layout.

    Raises:
        InputError: metadata are missing.
    """

    config = read_fields(ARCHITECTURE, metadata, tensors)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    ours = {theirs: name for name, theirs in NAMES.items()}
    package: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "d2t":
            package["d2t"] = tensor - torch.arange(len(tensor))
        elif name != "rope_freqs.weight":
            known = ours.get(name, name)
            part = known.split(".")[-2] if "." in known else ""
            package[known] = to_halves(tensor, heads[part]) if part in heads else tensor
    config |= {
        IDS: [int(number) for number in required(ARCHITECTURE, metadata, "target_layers")],
        "norm_before_residual": bool(metadata.get(f"{ARCHITECTURE}.norm_before_residual")),
        "norm_before_fc": bool(metadata.get(f"{ARCHITECTURE}.norm_before_fc")),
    }
    return Package(config, package)


def required(architecture: str, metadata: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a head's GGUF file.

    Raises:
        InputError: it is missing.
    """
    if (value := metadata.get(f"{architecture}.{name}")) is None:
        raise InputError("directory", f"a GGUF file without {architecture}.{name}", "it", "Export the head again.")
    return value


def read_fields(architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sizes and rotary settings of a head's GGUF file as fields of `config.json`.

    Raises:
        InputError: metadata are missing, or other ones than our layers compute with.
    """
    own = {"draft_vocab_size": len(tensors["output.weight"])} if "output.weight" in tensors else {}
    vocab_size = metadata.get(f"{architecture}.vocab_size") or len(metadata["tokenizer.ggml.tokens"])
    layers = read_layers(architecture, metadata, tensors.get("rope_freqs.weight"))
    return {"gguf": architecture, "vocab_size": vocab_size, **layers, **own}
