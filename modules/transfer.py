"""Transfers to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Whole numbers, in nested lists of one shape.
Integers = Sequence[int] | Sequence[Sequence[int]]


def to_device(values: Tensor | Integers, device: torch.device) -> Tensor:
    """Send a tensor, or integers as int64, from the host without waiting for the device's work.

    A tensor that is on a device already is returned as it is.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_device_together(values: Sequence[Integers], device: torch.device) -> list[Tensor]:
    """Send several sets of integers in one transfer."""
    tensors = [torch.tensor(own, dtype=torch.int64) for own in values]
    if device.type == "cpu":
        return tensors
    whole = to_device(torch.cat([tensor.flatten() for tensor in tensors]), device)
    parts = whole.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def true_places(mask: Tensor, count: int | None = None) -> Tensor:
    """Return the places where mask.flatten() is true, int64 [N], ascending.

    count: their number, if the host knows it; without it the host waits for the device.
    """
    flat = mask.flatten()
    places = flat.nonzero() if count is None else torch.nonzero_static(flat, size=count)
    return places[:, 0]
