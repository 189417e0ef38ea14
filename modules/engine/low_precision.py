"""Linear layers in int8 on a CPU, as in LLM.int8() (Dettmers et al. 2022, section 2.1): one scale for each output of
the weight and for each input row.

Rows are scaled one by one and products are summed as integers, so a row's result does not depend on the rows read
together with it: verifying a draft gives the logits that reading token by token gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from draftsmith.modules.engine.lean import LeanLinear, Linear
from draftsmith.modules.types import InputError

Precision = Literal["dtype", "int8"]
LARGEST = 127  # of int8, both ways
# Stands for 0 in the unsigned bytes of input rows.
ZERO = 128


class Int8Linear:
    """x @ weight.T + bias in int8: weight [out, in] with a scale for each output, x with a scale for each row."""

    packed = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        wide = weight.detach().float().contiguous()  # packing assumes it
        self._scales = (wide.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)  # [out]
        rounded = (wide / self._scales[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._zeros = torch.zeros(len(wide), dtype=torch.int64)
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()  # [N, in]
        # The maximum by a norm that keeps NaN, so that a broken row stays NaN in the result.
        top = torch.linalg.vector_norm(rows, torch.inf, -1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
        scaled = rows.mul(LARGEST / top).round_().add_(ZERO)
        # Unsigned bytes, in which ZERO is 0.
        unsigned, weight, scales, zeros = scaled.to(torch.uint8), self._weight, self._scales, self._zeros
        product = torch.ops.onednn.qlinear_pointwise.default(
            unsigned, 1.0, ZERO, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        product = product.mul_(top.div_(LARGEST)).to(x.dtype).view(*x.shape[:-1], -1)
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(residual)


def linear_of(weight: Tensor, bias: Tensor | None, pack: bool, precision: Precision) -> Linear:
    """Build a linear layer of frozen weights [out, in] in this precision. pack: see `LeanLinear`."""
    return Int8Linear(weight, bias) if precision == "int8" else LeanLinear(weight, bias, pack)


def copy_of(linear: Callable[[Tensor], Tensor], like: Tensor, precision: Precision) -> Linear:
    """Copy a linear function into another precision; its weights are read off its outputs for unit vectors.

    like: [in], of its type and device.
    """
    size = len(like)
    with torch.inference_mode():
        outputs = linear(torch.cat([torch.eye(size), torch.zeros(1, size)]).to(like))  # [in + 1, out]
        bias = outputs[-1]
        return linear_of((outputs[:-1] - bias).t(), bias if bool(bias.any()) else None, True, precision)


def check_precision(field: str, precision: str, device: str) -> None:
    """Raise InputError if this device or this torch has no products of that precision."""
    if precision == "dtype":
        return
    if torch.device(device).type != "cpu":
        raise InputError(field, f"{precision} on {device}", "dtype where the device is no CPU", "Leave it out.")
    if not can_int8():
        found = "int8 without oneDNN's integer products, which this torch or CPU lacks"
        raise InputError(field, found, "dtype", "Leave it out.")


@functools.cache
def can_int8() -> bool:
    """Return whether oneDNN's integer products exist here and are right for the largest numbers too.

    Processors without VNNI add pairs of products in 16 bits, which some kernels let overflow.
    """
    weight = torch.full((32, 64), float(LARGEST))
    weight[::2] *= -1
    try:
        product = Int8Linear(weight)(torch.full((3, 64), 2.0))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False  # see `lean.can_pack`
    return torch.allclose(product, 128 * weight[:, 0].expand(3, -1), rtol=1e-5)
