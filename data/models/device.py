"""Devices by the names that users write."""

from __future__ import annotations

import torch

from draftsmith.data.ranks import place
from draftsmith.modules.types import InputError


def pick_device(name: str) -> str:
    """`auto` is this rank's CUDA device where there is one, else the CPU; another name is checked.

    Raises:
        InputError: as `check_device`.
    """
    if name == "auto":
        return f"cuda:{place().local_rank}" if torch.cuda.is_available() else "cpu"
    check_device(name)
    return name


def check_device(name: str) -> None:
    """Raises:
    InputError: no name of a device, or a device that this machine does not have.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError("device", repr(name), "cpu, cuda or cuda:N", "Correct it.") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type not in ("cpu", "cuda"):
        raise InputError("device", name, "cpu, cuda or cuda:N", "Correct it.")
    if device.type == "cpu" and device.index:
        raise InputError("device", name, "cpu, which is one device", "Pass --device cpu.")
    if device.type == "cuda" and not count:
        raise InputError("device", name, "a device of this machine (no GPU is visible)", "Pass --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= count:
        last = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise InputError("device", name, f"one of the {count} visible: {last}", "Correct it.")
