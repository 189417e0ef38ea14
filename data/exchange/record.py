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

from draftsmith.data.store.reading import read_object
from draftsmith.modules.interop import formats
from draftsmith.modules.interop.base import Finding, HeadFormat, Reading

RECORD = "draftsmith.json"


def content_hash(tensor: Tensor) -> str:
    """Hash of the values in float32, whatever type they are stored in."""
    data = tensor.detach().to("cpu", torch.float32).contiguous()
    return hashlib.sha256(str(tuple(data.shape)).encode() + data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def make_record(
    format: str, config: Any, state: Mapping[str, Tensor], head: Mapping[str, Any], made_with: Mapping[str, Any]
) -> dict[str, Any]:
    """config, state: the head as it was exported, in the export's type. head: where it lies, its sha256, what it was
    trained for. made_with: versions and commit."""
    return {
        "format": format,
        "head": dict(head),
        "config": dataclasses.asdict(config),
        "tensors": {name: content_hash(tensor) for name, tensor in sorted(state.items())},
        **made_with,
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
    written = formats().get(record["format"])
    if written is None or written.kind != format.kind:
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
