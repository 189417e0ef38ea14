"""The record of an export, which names the head that was exported: compare what is read with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.formats.base import ImportedHead, Problem
from draftsmith.modules.formats.llama import frequencies
from draftsmith.modules.llama_config import RopeScaling, RotarySettings
from draftsmith.modules.pretrained.provenance import compare_identity


def hashes_of(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a hash of every tensor's shape and values."""
    hashes = {}
    for name, tensor in sorted(state.items()):
        # In float32, whatever type they are stored in: a copy of another type that holds the same is the same.
        data = tensor.detach().to("cpu", torch.float32).contiguous()
        content = str(tuple(data.shape)).encode() + data.view(torch.uint8).numpy().tobytes()
        hashes[name] = hashlib.sha256(content).hexdigest()[:16]
    return hashes


def types_of(tensors: Iterable[Tensor]) -> list[str]:
    """Return the types of weights, such as `bfloat16`."""
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()})


def differences(
    config: Mapping[str, Any], hashes: Mapping[str, str], head: ImportedHead, made: str = "exported", types: Any = ()
) -> list[Problem]:
    """Compare a head, as a system reads it, with settings and tensor hashes of the head that was exported.

    made: `exported`, or `trained` where these are how the head's own system reads the same files. types: of the
    exported tensors, if they are known.
    """
    problems = []
    theirs = hashes_of(head.state)
    weights = {name: tensor for name, tensor in head.state.items() if tensor.is_floating_point() and name in hashes}
    others = {name: theirs[name] for name in weights if theirs[name] != hashes[name]}
    converted = types_of(weights[name] for name in others)
    if others and types and not set(converted) & set(types):
        text = f"are in {', '.join(converted)}, and were {made} in {', '.join(types)}: rounded, or of other values"
        problems.append(Problem(f"{len(others)} tensors", text))
        hashes = {**hashes, **others}
    for name in sorted(hashes.keys() | theirs.keys()):
        if name not in theirs:
            problems.append(Problem(name, f"was {made}, and this system does not hold it"))
        elif name not in hashes:
            problems.append(Problem(name, f"was not {made}, and this system computes with it"))
        elif theirs[name] != hashes[name]:
            problems.append(Problem(name, f"is not what was {made} (other values, order or shape)"))
    read, exported = (
        {**fields.pop("llama", {}), **fields}
        for fields in json.loads(json.dumps([dataclasses.asdict(head.config), config]))
    )
    # An import raises the number of positions to the target's; rope is compared by its frequencies.
    skipped = {"max_position", "rope_theta", "rope_scaling", "tie_embeddings"}
    for name in sorted((exported.keys() | read.keys()) - skipped):
        if exported.get(name) != read.get(name):
            problems.append(Problem(name, f"{read.get(name)} in this system, {made} with {exported.get(name)}"))
    if "llama" in config and (llama := getattr(head.config, "llama", None)) is not None:
        scaling = RopeScaling(**config["llama"]["rope_scaling"])
        rope = RotarySettings(config["llama"]["rope_theta"], scaling)
        if not torch.allclose(frequencies(llama), frequencies(llama, rope), rtol=1e-5):
            problems.append(Problem("rope", f"other rotary frequencies than the head was {made} with"))
    return problems


def against_model(record: Mapping[str, Any] | None, identity: Mapping[str, str]) -> list[str]:
    """Return the names of the hashes by which a model is not the one that the head was trained for.

    record: None, or without a target, for a head of unknown origin.
    """
    recorded = (record or {}).get("head", {}).get("target") or {}
    differing = compare_identity({"model": identity}, {"model": recorded}) if recorded else []
    return [key.removeprefix("model.") for key, _, _ in differing]
