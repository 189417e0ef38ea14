"""Linear layers of weights in fewer bits than their model's: bfloat16, or int8 (LLM.int8(), Dettmers et al. 2022,
section 2.1: a scale for each output of the weight and for each row that is read), on a CPU.

Rows are scaled one by one and products summed as integers, so that what a row gives does not depend on what it is read
together with: verifying a draft gives the logits that reading token by token gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from draftsmith.modules.engine.packed import LeanLinear
from draftsmith.modules.types import InputError

Precision = Literal["dtype", "bf16", "int8"]
LARGEST = 127  # of int8, both ways
ZERO = 128  # what 0 is in the unsigned bytes that rows become


class Bf16Linear:
    """`LeanLinear` over a copy of the weight in bfloat16, for rows of any type."""

    packed = True  # it holds its own copy: the caller may free the weight

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self._linear = LeanLinear(weight.bfloat16(), None, pack=True)
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        found = self._linear(x.bfloat16()).to(x.dtype)
        return found if self._bias is None else found.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [N, out] + linear(x [N, in])."""
        return self(x).add_(residual)


class Int8Linear:
    """x @ weight.T + bias in int8: weight [out, in] by a scale an output, x by a scale a row."""

    packed = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        wide = weight.detach().float().contiguous()  # packing takes it for granted
        self._scales = (wide.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        rounded = (wide / self._scales[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._zeros = torch.zeros(len(wide), dtype=torch.int64)
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).float()
        # NaN stays NaN here, and so in the result.
        top = torch.linalg.vector_norm(rows, torch.inf, -1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
        scaled = rows.mul(LARGEST / top).round_().add_(ZERO)
        found = _product(scaled.to(torch.uint8), self._weight, self._scales, self._zeros).mul_(top.div_(LARGEST))
        found = found.to(x.dtype).view(*x.shape[:-1], -1)
        return found if self._bias is None else found.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [N, out] + linear(x [N, in])."""
        return self(x).add_(residual)


Linear = LeanLinear | Bf16Linear | Int8Linear


def linear_of(weight: Tensor, bias: Tensor | None, pack: bool, precision: Precision) -> Linear:
    """A linear layer of frozen weights [out, in] in this precision. pack: as of `LeanLinear`."""
    if precision == "int8":
        return Int8Linear(weight, bias)
    return Bf16Linear(weight, bias) if precision == "bf16" else LeanLinear(weight, bias, pack)


def copy_of(linear: Callable[[Tensor], Tensor], like: Tensor, precision: Precision) -> Linear:
    """A linear layer, whatever holds its weights, in another precision: read off what it makes of unit vectors.

    like: [in] of its type and device.
    """
    size = len(like)
    with torch.inference_mode():
        found = linear(torch.cat([torch.eye(size), torch.zeros(1, size)]).to(like))
        bias = found[-1]
        return linear_of((found[:-1] - bias).t(), bias if bool(bias.any()) else None, True, precision)


def check_precision(field: str, precision: str, device: str) -> None:
    """Raises:
    InputError: a device or a torch that has no such products.
    """
    if precision == "dtype":
        return
    if torch.device(device).type != "cpu":
        raise InputError(field, f"{precision} on {device}", "dtype where the device is no CPU", "Leave it out.")
    if precision == "int8" and not can_int8():
        found = "int8 without oneDNN's integer products, which this torch or CPU lacks"
        raise InputError(field, found, "dtype or bf16", "Pass one of these.")


@functools.cache
def can_int8() -> bool:
    """Whether oneDNN's integer products exist here and are right, those of the largest numbers too: processors without
    VNNI add pairs of products in 16 bits, which some kernels let overflow."""
    weight = torch.full((32, 64), float(LARGEST))
    weight[::2] *= -1
    try:
        found = Int8Linear(weight)(torch.full((3, 64), 2.0))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False  # as in `packed.can_pack`
    return torch.allclose(found, 128 * weight[:, 0].expand(3, -1), rtol=1e-5)


def _product(rows: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """uint8 rows [N, in], of which `ZERO` is 0, by a packed weight: float32 [N, out], by the weight's scales."""
    return torch.ops.onednn.qlinear_pointwise.default(
        rows, 1.0, ZERO, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
