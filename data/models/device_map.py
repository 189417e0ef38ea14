"""Targets larger than a GPU: accelerate places their layers on the GPUs that this process sees; one works at a time."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from draftsmith.data.ranks import place
from draftsmith.modules.types import InputError


def placement() -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that spread a model."""
    ranks = place()
    if ranks.local_world > 1:
        found = f"{ranks.local_world} processes on this machine"
        remedy = "Start one process, or let vLLM run the target (docs/guides/large-targets.md)."
        raise InputError("device_map", found, "one, which has all GPUs", remedy)
    if find_spec("accelerate") is None:
        remedy = 'Install it: pip install "draftsmith[large]"'
        raise InputError("device_map", "no package accelerate", "accelerate", remedy)
    return {"device_map": "auto"}


def check_placed(model: Any) -> None:
    """Raise InputError if layers did not fit the devices."""
    # There is no map if one device holds everything.
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    outside = sorted(devices & ({"cpu", "disk"} if torch.cuda.is_available() else {"disk"}))
    if outside:
        found = f"layers on {' and '.join(outside)}: the GPUs are too small"
        raise InputError("device_map", found, "all of them on GPUs", "Use more GPUs, or --dtype bfloat16.")
