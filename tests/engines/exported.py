"""What `directories.py` wrote, for the engines' tests, which know nothing else of this project."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WORLD = Path(os.environ["DRAFTSMITH_ENGINES"])
# Largest differences, one line each, for the end of the run.
FIGURES: list[str] = []
Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


@dataclass(frozen=True)
class Exported:
    """One case: directories, and our own results (see `directories.py`)."""

    target: Path
    directory: Path
    ours: dict[str, Tensor]

    @property
    def state(self) -> dict[str, Tensor]:
        return {name.removeprefix("state."): t for name, t in self.ours.items() if name.startswith("state.")}


def cases(kind: str) -> list[str]:
    """Names of the cases that were exported in that format."""
    names = sorted(path.parent.name for path in WORLD.glob(f"*/{kind}"))
    assert names, f"{WORLD} has no export in the format {kind}"
    return names


def read(case: str, kind: str) -> Exported:
    return Exported(WORLD / case / "target", WORLD / case / kind, load_file(WORLD / case / "ours.safetensors"))


def edited(exported: Exported, copy: Path, edit: Edit) -> Exported:
    """A copy of the directory after `edit` changed its config and tensors."""
    shutil.copytree(exported.directory, copy)
    config, tensors = json.loads((copy / "config.json").read_text()), load_file(copy / "model.safetensors")
    edit(config, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return Exported(exported.target, copy, exported.ours)


def configured(**fields: Any) -> Edit:
    """An edit that sets these fields of the config; None takes one out."""

    def edit(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        config.update(fields)
        for name in [name for name, value in fields.items() if value is None]:
            config.pop(name, None)

    return edit


def stray(name: str) -> Edit:
    """An edit that adds a tensor [H] of this name."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones(config["hidden_size"])

    return edit


def rename(tensors: dict[str, Tensor], start: str, by: str) -> None:
    """Names that begin with `start` begin with `by` instead."""
    for name in [name for name in tensors if name.startswith(start)]:
        tensors[by + name.removeprefix(start)] = tensors.pop(name)


# Base 7777, linear scaling by 2: every way of writing it that transformers 5 folds into one. Where both generations are
# there, a `rope_scaling` replaces `rope_parameters`, and the base is then `rope_theta`.
ROPE_SPELLINGS: list[dict[str, Any]] = [
    {"rope_theta": 7777.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 7777.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7777.0}},
    {"rope_theta": 1111.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7777.0}},
    {
        "rope_theta": 7777.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1111.0},
    },
]


def fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters under the names of vLLM and SGLang, which fuse q, k, v and gate, up."""
    result = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            result["model." + name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            parts = [tensor, state[name.replace("gate_proj", "up_proj")]]
            result["model." + name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            result["model." + name] = tensor
    return result


def unfilled(model: nn.Module) -> set[str]:
    """Names of the parameters that are NaN somewhere: no tensor reached them."""
    return {name for name, parameter in model.named_parameters() if parameter.isnan().any()}


def assert_loaded(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """All of them and no others, bit by bit; NaN, which stands for what nothing filled, equals nothing."""
    assert sorted(loaded) == sorted(expected)
    for name, parameter in loaded.items():
        assert torch.equal(parameter, expected[name]), name


def assert_close(what: str, ours: dict[str, Tensor], **theirs: Tensor) -> None:
    """Within float32's rounding: sums of a hundred terms of order 1 in another order, and errors of the target's states
    that pass on. A wrong rotary base alone makes 1e-2."""
    for name, tensor in theirs.items():
        difference = (tensor - ours[name]).abs().max().item()
        FIGURES.append(f"{what} {name}: {difference:.1e} of {ours[name].abs().max().item():.1f}")
        assert difference < 5e-5, name


class CausalAttention(nn.Module):
    """One sequence without a cache, in place of an engine's compiled attention: q, k, v [T, heads * D] in, the heads'
    outputs out. Projections, biases, rotation and scale are the engine's."""

    def __init__(self, heads: int, kv_heads: int, scale: float):
        super().__init__()
        self.heads, self.kv_heads, self.scale = heads, kv_heads, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = len(query)
        query, key, value = (
            x.reshape(rows, heads, -1).transpose(0, 1)
            for x, heads in ((query, self.heads), (key, self.kv_heads), (value, self.kv_heads))
        )
        mixed = F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=self.scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(rows, -1)
