"""Linear layers of frozen weights, on a CPU in the layout that its matrix kernels read fastest.

A decoder multiplies few rows (1 to some dozens) with large weights, over and over. oneDNN can lay a weight out for that
once; `F.linear` reads the plain layout, which a few rows at a time is slower (docs/performance.md). The ops are private
to torch: they are tried against `F.linear` before they are used, and where they fail `F.linear` it is. What oneDNN's
calls take is too much for small weights; these lie [in, out] in memory, which BLAS reads faster.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# Smaller weights stay in the processor's caches, where oneDNN's layout matters less than what its call costs.
MIN_WEIGHTS = 2**19
# Rows that a weight is laid out for; the layout for 8 is good at 1 and at 60.
PACKED_ROWS = 8


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether the packed ops exist here and agree with `F.linear` (bf16, for one, needs AVX-512)."""
    rng = torch.Generator().manual_seed(0)
    x, weight, bias, added = (
        torch.randn(shape, generator=rng).to(dtype) for shape in ((3, 32), (48, 32), (48,), (3, 48))
    )
    try:
        packed = _pack(weight)
        pairs = [
            (_linear(x, packed, None), F.linear(x, weight)),
            (_linear(x[:1], packed, bias), F.linear(x[:1], weight, bias)),
            (_linear_add(added, x, packed, bias), added + F.linear(x, weight, bias)),
        ]
    except (AttributeError, NotImplementedError, RuntimeError):
        # What torch raises, in this order, for an op that it has not, has not for this build, and has not for this
        # dtype on this CPU. Nothing is lost: the plain layout computes the same.
        return False
    # Sums of 32 products in another order: some roundings of the dtype apart, values are around 6.
    tolerance = 32 * torch.finfo(dtype).eps
    return all(torch.allclose(ours, plain, rtol=tolerance, atol=tolerance) for ours, plain in pairs)


class LeanLinear:
    """x @ weight.T + bias for frozen weights: weight [out, in], bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = False):
        """pack: lay the weight out for the CPU's kernels where that pays and works; the caller may then free it, or
        where `packed` stays false take `weight`, the same in its place."""
        pack, small = pack and weight.device.type == "cpu", weight.numel() < MIN_WEIGHTS
        self.packed = pack and not small and can_pack(weight.dtype)
        self.weight = weight = weight.detach()
        self._transposed = None if self.packed else weight.t()  # [in, out], a view made once
        self._turned: Tensor | None = None  # [in, out] as it lies in memory
        if self.packed:
            self.weight = _pack(weight)
        elif pack and small and bias is None:
            self._transposed = self._turned = weight.t().contiguous()
            self.weight = self._transposed.t()
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.packed:
            return _linear(x, self.weight, self._bias)
        if self._turned is not None and x.dim() == 2:
            return torch.mm(x, self._turned)
        return F.linear(x, self.weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [N, out] + linear(x [N, in]), without a pass of its own for the sum."""
        if self._transposed is None:
            return _linear_add(residual, x, self.weight, self._bias)
        added = torch.addmm(residual, x, self._transposed)
        return added if self._bias is None else added.add_(self._bias)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    # By its overload: choosing one by the arguments takes time in every call.
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _linear_add(residual: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
