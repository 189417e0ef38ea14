"""`draftsmith.json`: what an exported directory says of the head it came from, and whether a system still reads that.

The weights are named by content, so a tensor that was renamed, cut, permuted or lost on its way is told by its name, on
any machine and without the original head.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.store.manifest import compare_identity, git_commit, package_versions
from draftsmith.data.store.reading import read_object
from draftsmith.modules.drafters import learned
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Finding, HeadFormat, Reading

RECORD = "draftsmith.json"


def content_hash(tensor: Tensor) -> str:
    """Hash of the values in float32, whatever type they are stored in."""
    data = tensor.detach().to("cpu", torch.float32).contiguous()
    return hashlib.sha256(str(tuple(data.shape)).encode() + data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def make_record(
    format: HeadFormat, config: Any, state: Mapping[str, Tensor], head: Mapping[str, Any]
) -> dict[str, Any]:
    """config, state: the head as it was exported, in the export's type. head: where it lies, its sha256, what it was
    trained for."""
    return {
        "format": format.name,
        "kind": format.kind,
        "head": dict(head),
        "config": dataclasses.asdict(config),
        "tensors": {name: content_hash(tensor) for name, tensor in sorted(state.items())},
        **made_with(),
    }


def read_record(directory: Path) -> dict[str, Any] | None:
    """None for a directory that this project did not write.

    Raises:
        InputError: a damaged file.
    """
    path = Path(directory) / RECORD
    if not path.exists():
        return None
    shape = {"format": str, "tensors": {"*": str}, "config": dict, "head": dict}
    return read_object(path, shape, "Export the head again.")


def against_record(record: Mapping[str, Any], reading: Reading, format: HeadFormat) -> list[Finding]:
    """What a system holds in memory against what was exported. format: by which it was read."""
    # Earlier versions knew one kind of head by each name.
    kind = record.get("kind", format.kind)
    if kind != format.kind or (record["format"], kind) not in formats():
        return [Finding("error", RECORD, f"this was exported as {record['format']}")]
    found = []
    for name, expected in record["tensors"].items():
        if name not in reading.weights:
            found.append(Finding("error", name, "was exported, and this system does not hold it"))
        elif content_hash(reading.weights[name]) != expected:
            found.append(Finding("error", name, "is not what was exported (other values, order or shape)"))
    for name, tensor in reading.weights.items():
        extra = name not in record["tensors"] and name != "embed_tokens.weight"
        if extra and not (name.endswith(".bias") and not tensor.any()):
            found.append(Finding("error", name, "was not exported, and this system computes with it"))
    return found + format.settings_differ(record["config"], reading)


def against_model(
    record: Mapping[str, Any] | None, identity: Mapping[str, str], with_drafter: bool = True
) -> tuple[list[str], list[str]]:
    """Hashes by which the model of this identity is another than the head was trained for, and those that were not
    recorded. Nothing differs from a record that is absent or names no model.

    with_drafter: the hash of a drafting head, whose hidden states an acceptance head reads, is one of them.
    """
    recorded = (record or {}).get("head", {}).get("target") or {}
    recorded = {key: value for key, value in recorded.items() if with_drafter or key not in learned()}
    if not recorded:
        return [], []
    differing, unrecorded = compare_identity({"model": identity}, {"model": recorded})
    return [key.removeprefix("model.") for key, _, _ in differing], [key.removeprefix("model.") for key in unrecorded]


def made_with() -> dict[str, Any]:
    """Versions and commit, as manifests have them."""
    return {"packages": package_versions(), "git_commit": git_commit()}
