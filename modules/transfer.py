"""Tensors and the host: what goes to a device does not wait for it, and what is counted there already is not asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device) -> Tensor:
    """A tensor of the host, or integers as int64, without waiting for what the device is doing."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_device_together(values: Sequence[Any], device: torch.device) -> list[Tensor]:
    """`to_device` of several sets of integers in one transfer."""
    tensors = [torch.tensor(own, dtype=torch.int64) for own in values]
    if device.type == "cpu":
        return tensors
    whole = to_device(torch.cat([tensor.flatten() for tensor in tensors]), device)
    parts = whole.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def true_places(mask: Tensor, count: int | None = None) -> Tensor:
    """[N] int64, where in mask.flatten() it is true, ascending. count: how often, where that is known: the host then
    does not wait for the device to say it."""
    flat = mask.flatten()
    found = flat.nonzero() if count is None else torch.nonzero_static(flat, size=count)
    return found[:, 0]
