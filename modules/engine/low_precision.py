"""Linear layers in int8 and int4 on a CPU.

int8 as in LLM.int8() (Dettmers et al. 2022, section 2.1): one scale for each output of the weight and for each input
row. Rows are scaled one by one and products are summed as integers, so a row's result does not depend on the rows read
together with it: verifying a draft gives the logits that reading token by token gives.

int4 as in GGUF's Q4_0 and Q4_1: groups of 32 weights of an output, each with 16 levels. Inputs and results are bf16,
sums float32. Up to FEW_ROWS rows are read by a kernel that sums every row in one order, so that here too a row's result
does not depend on the others; more rows are read in bf16, whose results differ by roundings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.engine.lean import LeanLinear, Linear
from draftsmith.modules.types import InputError

Precision = Literal["dtype", "int8", "int4"]
LARGEST = 127  # of int8, both ways
# Stands for 0 in the unsigned bytes of input rows.
ZERO = 128
# The int4 kernel's smallest group is GGUF's block. Outputs are padded to the width of its tiles.
GROUP, TILE = 32, 16
# The int4 kernel takes as long for this many rows as bf16 products; it reads 1 row in a third of their time.
FEW_ROWS = 8


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


def round_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [out, in] to 16 levels (code - 8) * scale + zero in each group.

    A group's levels go from its smallest to its largest weight, as in Q4_1, or are multiples of an eighth of the
    largest, as in Q4_0, whichever is nearer. So the weights of such a file keep their levels, but for the rounding of
    scale and zero to bf16.

    Returns codes [out, in / GROUP, GROUP], and scales with zeros [out, in / GROUP, 2] in bf16.
    """
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    step = (high - low) / 15
    errors, codes, numbers = list[Tensor](), list[Tensor](), list[Tensor]()
    for scale, zero in ((step, low + 8 * step), (torch.where(high > -low, high, low) / -8, torch.zeros_like(low))):
        numbers.append(torch.stack([torch.where(scale == 0, 1, scale), zero], -1).bfloat16())
        scale, zero = numbers[-1].float()[..., None].unbind(-2)
        code = ((groups - zero) / scale).round_().clamp_(-8, 7)
        errors.append((code * scale).add_(zero).sub_(groups).square_().sum(-1, keepdim=True))
        codes.append(code.add_(8))
    nearer = errors[0] <= errors[1]
    return torch.where(nearer, codes[0], codes[1]), torch.where(nearer, numbers[0], numbers[1])


class Int4Linear:
    """x @ weight.T + bias in int4: weight [out, in] with a scale and a zero for each group of GROUP inputs.

    The weights are held twice: in int4 (0.63 bytes each) and, for more than FEW_ROWS rows, in bf16.
    """

    packed = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self._size = len(weight)
        codes, scales = round_int4(weight.detach().float())
        values = (codes - 8).mul_(scales[..., :1]).add_(scales[..., 1:]).flatten(1)
        self._many = LeanLinear(values.bfloat16(), None, pack=True, one_row=False)
        missing = -self._size % TILE
        packed = F.pad(codes.flatten(1), (0, 0, 0, missing)).int()
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(packed, 1)
        self._scales = F.pad(scales, (0, 0, 0, 0, 0, missing)).transpose(0, 1).contiguous()  # [in / GROUP, out, 2]
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).bfloat16()  # [N, in]
        if rows.shape[0] > FEW_ROWS:
            product = self._many(rows)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu.default(rows, self._weight, GROUP, self._scales)
            if product.shape[1] != self._size:
                product = product[:, : self._size].contiguous()
        product = product.to(x.dtype).view(*x.shape[:-1], -1)
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(residual)


def linear_of(weight: Tensor, bias: Tensor | None, pack: bool, precision: Precision) -> Linear:
    """Build a linear layer of frozen weights [out, in] in this precision. pack: see `LeanLinear`.

    In int4 weights stay as they are if their inputs make no whole groups, as in GGUF.
    """
    if precision == "int8":
        return Int8Linear(weight, bias)
    if precision == "int4" and weight.shape[1] % GROUP == 0:
        return Int4Linear(weight, bias)
    return LeanLinear(weight, bias, pack)


def copy_of(linear: Callable[[Tensor], Tensor], like: Tensor, precision: Precision) -> Linear:
    """Copy a linear function into another precision; its weights are read off its outputs for unit vectors.

    like: [in], of its type and device.
    """
    size = len(like)
    with torch.inference_mode():
        outputs = linear(torch.cat([torch.eye(size), torch.zeros(1, size)]).to(like))  # [in + 1, out]
        bias = outputs[-1]
        return linear_of((outputs[:-1] - bias).t(), bias if bool(bias.any()) else None, True, precision)


def check_precision(field: str, precision: Precision, device: str) -> None:
    """Raise InputError if this device or this torch has no products of that precision."""
    if precision == "dtype":
        return
    if torch.device(device).type != "cpu":
        raise InputError(field, f"{precision} on {device}", "dtype where the device is no CPU", "Leave it out.")
    if not can_multiply(precision):
        found = f"{precision} without its products, which this torch or CPU lacks"
        raise InputError(field, found, "dtype", "Leave it out.")


@functools.cache
def can_multiply(precision: Precision) -> bool:
    """Return whether products in this precision exist here and are right for the largest numbers too.

    Processors without VNNI add pairs of int8 products in 16 bits, which some kernels let overflow.
    """
    weight = torch.full((32, 64), float(LARGEST))
    weight[::2] *= -1
    try:
        product = linear_of(weight, None, False, precision)(torch.full((3, 64), 2.0))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False  # see `lean.can_pack`
    return torch.allclose(product, 128 * weight[:, 0].expand(3, -1), rtol=1e-5)
