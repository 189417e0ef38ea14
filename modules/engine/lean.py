"""Llama-family layers for inference: fused projections, one preallocated cache, no per-call framework work.

Same weights and same function as `layers.DecoderLayer`, without its dispatch, which at batch size one is most of a
small model's time. Targets, draft models and EAGLE heads share these layers.

Weights lie in the layout that the CPU's matrix kernels read fastest. A decoder multiplies few rows (1 to some dozens)
with large weights, over and over: oneDNN lays a weight out for that once, where `F.linear` reads the plain layout,
which is slower for a few rows (benchmarks/README.md). Its operators are private to torch, so they are compared with
`F.linear` before use, and `F.linear` is used where they fail. For small weights oneDNN's call overhead costs more than
it gains; in float32 they lie [in, out] in memory, which BLAS reads faster.

B rows, T new tokens of each, N = B * T, H hidden size, D head_dim.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.engine.cache import CachedAttention, KVCache, LayerCache, as_bias, prepared, tree_mask
from draftsmith.modules.layers import Attend, DecoderLayer, Layer, RMSNorm
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.rotary import rope_table

# States by layer: the caller gives the numbers, the forward fills in the states.
Captured = dict[int, Tensor]
# Smaller weights stay in the processor's caches, where the layout matters less than the cost of oneDNN's call. Products
# in bf16 pay that call in any layout.
MIN_WEIGHTS = 2**19
# Rows of a long text that pass an MLP together: what is wider than a hidden state exists for these alone.
MLP_ROWS = 4096
# Rows that a weight is laid out for; the layout for 8 is good at 1 and at 60.
PACKED_ROWS = 8


class Linear(Protocol):
    """A linear layer of frozen weights."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual [N, out] + linear(x [N, in])."""


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's operators exist here and agree with `F.linear` (bf16, for one, needs AVX-512)."""
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
        # Raised by torch, in this order, for an operator that it lacks, that its build lacks, and that this CPU lacks
        # for this dtype. Nothing is lost: the plain layout computes the same.
        return False
    # Sums of 32 products in another order differ by some roundings of the dtype; values are around 6.
    tolerance = 32 * torch.finfo(dtype).eps
    return all(torch.allclose(ours, plain, rtol=tolerance, atol=tolerance) for ours, plain in pairs)


@functools.cache
def plain_row_is_faster() -> bool:
    """Return whether one bf16 row is multiplied faster by weights in the plain layout than by packed ones.

    So it is on an EPYC with AVX-512; on a Xeon with AMX packed weights take a quarter to two thirds of the time.
    """
    return not torch.cpu.get_capabilities().get("amx_tile", False)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    # By name of the overload: choosing one by the arguments takes time in every call.
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


class _WithoutOneDNN:
    """Context in which torch multiplies without oneDNN, whose switch belongs to the whole process: the last thread that
    leaves puts it back."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch._C._get_mkldnn_enabled()
                torch._C._set_mkldnn_enabled(False)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch._C._set_mkldnn_enabled(self._before)


_without_onednn = _WithoutOneDNN()


def _one_row(x: Tensor, weight: Tensor) -> Tensor:
    # With oneDNN, torch reads bf16 weights for one row at half of the memory's speed, from any layout. Every product of
    # torch 2.13 that could take its place asks the same switch.
    with _without_onednn:
        return F.linear(x, weight)


def _linear_add(residual: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")


class LeanLinear:
    """x @ weight.T + bias in the weights' own type: weight [out, in], bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = False):
        """pack: lay the weight out for the CPU's kernels where that pays and works. The caller may then free it, or, if
        `packed` stays false, use `weight`, the same numbers, in its place."""
        pack = pack and weight.device.type == "cpu"
        small = weight.numel() < MIN_WEIGHTS and weight.dtype != torch.bfloat16
        self.packed = pack and not small and can_pack(weight.dtype)
        self.weight = weight = weight.detach()
        # Both layouts, where the plain one is faster for a single row.
        plain = weight.dtype == torch.bfloat16 and plain_row_is_faster()
        self._plain = weight if self.packed and plain else None
        self._transposed = None if self.packed else weight.t()  # [in, out], a view made once
        self._turned: Tensor | None = None  # [in, out] contiguous in memory
        if self.packed:
            self.weight = _pack(weight)
        elif pack and small and bias is None:
            self._transposed = self._turned = weight.t().contiguous()
            self.weight = self._transposed.t()
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        if self._plain is not None and x.numel() == self._plain.shape[1]:
            product = _one_row(x, self._plain)
            return product if self._bias is None else product.add_(self._bias)
        if self.packed:
            return _linear(x, self.weight, self._bias)
        if self._turned is not None and x.dim() == 2:
            return torch.mm(x, self._turned)
        return F.linear(x, self.weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._plain is not None and x.numel() == self._plain.shape[1]:
            return self(x).add_(residual)
        # One call for product and sum.
        if self._transposed is None:
            return _linear_add(residual, x, self.weight, self._bias)
        added = torch.addmm(residual, x, self._transposed)
        return added if self._bias is None else added.add_(self._bias)


class LeanNorm:
    """x / rms(x) * weight [..., H] over the last dimension, the mean in float32 or wider, in few calls."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self._eps, self._size = weight.detach(), eps, weight.shape[-1]
        self._wide = weight.dtype in (torch.float32, torch.float64)
        self._eps_tensor = torch.tensor(eps, dtype=weight.dtype if self._wide else torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            # One fused kernel instead of seven.
            return F.rms_norm(x, (self._size,), None, self._eps) * self.weight
        if x.is_cpu and x.numel() == self._size:
            # One row is scaled by a number, in half of the calls.
            norm = torch.linalg.vector_norm(x, dtype=self._eps_tensor.dtype).item()
            return x.mul(1 / math.sqrt(norm * norm / self._size + self._eps)).mul_(self.weight)
        wide = x if self._wide else x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scaled = wide * torch.addcmul(self._eps_tensor, norm, norm, value=1 / self._size).rsqrt_()
        return (scaled if self._wide else scaled.to(x.dtype)).mul_(self.weight)


def _fuse(linears: Sequence[nn.Linear], pack: bool, share: bool) -> LeanLinear:
    """Stack linears that read the same input.

    pack: see `LeanLinear`. share: keep one copy of the weights. The linears' become views of the stacked tensor, or, if
    that is packed, empty: calling them is then an error of shape.
    """
    weights = [linear.weight.detach() for linear in linears]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    has_bias = any(linear.bias is not None for linear in linears)
    fused = LeanLinear(weight, torch.cat([linear.bias.detach() for linear in linears]) if has_bias else None, pack)
    if share and fused.packed:
        for linear in linears:
            linear.weight.data = weight.new_empty(0)
    elif share:
        for linear, rows in zip(linears, fused.weight.split([len(own) for own in weights]), strict=True):
            linear.weight.data = rows
    return fused


class LeanLayer:
    """A `DecoderLayer` with q/k/v and gate/up fused, of tokens [N, ..] (`layers.Layer`). It writes into its own tensors
    in place, so nothing can be learned through it."""

    unit = 1  # rows that belong together, and pass the MLP together
    # Others may be put in the place of the fused ones.
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear

    def __init__(self, layer: DecoderLayer, pack: bool = False, share: bool = False):
        """pack, share: see `_fuse`."""
        attention = layer.self_attn
        self.head_dim, self.num_rotated = attention.head_dim, attention.num_heads + attention.num_kv_heads
        self.heads = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
        self.qkv = _fuse([attention.q_proj, attention.k_proj, attention.v_proj], pack, share)
        self.o = _fuse([attention.o_proj], pack, share)
        self.gate_up = _fuse([layer.mlp.gate_proj, layer.mlp.up_proj], pack, share)
        self.down = _fuse([layer.mlp.down_proj], pack, share)
        self.qk_norm = None
        if attention.qk_norm:
            weights: list[Tensor] = [attention.q_norm.weight] * attention.num_heads
            weights += [attention.k_norm.weight] * attention.num_kv_heads
            self.qk_norm = LeanNorm(torch.stack(weights), attention.q_norm.eps)
        # What the layer does before attention, with the engine's norms. The layer itself stays as it is.
        entry = copy.copy(layer)
        entry.__dict__["_modules"] = {}
        for name, part in layer.named_children():
            if isinstance(part, RMSNorm | nn.Identity):
                entry.__dict__[name] = LeanNorm(part.weight, part.eps) if isinstance(part, RMSNorm) else _same
        self.enter = entry.enter
        self.post_norm = LeanNorm(layer.post_attention_layernorm.weight, layer.post_attention_layernorm.eps)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed, rows = self.enter(x)
        count = x.shape[0]
        qkv = self.qkv(normed).view(count, -1, self.head_dim)  # [N, heads + 2 kv_heads, D]
        rotated = qkv.narrow(1, 0, self.num_rotated)
        if self.qk_norm is not None:
            rotated.copy_(self.qk_norm(rotated))
        if (size := cos.shape[-1]) < self.head_dim:
            rotated = rotated[..., :size]
        # sin carries the sign of its first half, so a roll by half the width is the rotation.
        rolled = rotated.roll(size // 2, -1)
        rotated.mul_(cos).addcmul_(rolled, sin)
        attended = attend(*qkv.split_with_sizes(self.heads, 1))
        rows = self.o.add_to(rows.contiguous(), attended.reshape(count, -1))
        if count <= MLP_ROWS:
            return self._mlp(rows)
        for part in rows.split(MLP_ROWS // self.unit * self.unit):
            part.copy_(self._mlp(part))
        return rows

    def _mlp(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_up(self.post_norm(rows)).chunk(2, -1)
        return self.down.add_to(rows, F.silu(gate).mul_(up))


def _same(x: Tensor) -> Tensor:
    return x


def swap_modules(module: nn.Module, pack: bool) -> Any:
    """Replace linears, norms and decoder layers inside a module by those for inference, and return it.

    A module that is one of these itself is returned as its replacement. All others keep their own `forward`.
    """
    if isinstance(module, nn.Linear):
        return LeanLinear(module.weight, module.bias, pack)
    if isinstance(module, RMSNorm):
        return LeanNorm(module.weight, module.eps)
    if isinstance(module, DecoderLayer):
        return LeanLayer(module, pack)
    # Not by `setattr`, which takes modules only; containers call whatever is here. In `__dict__` it is found without
    # `Module.__getattr__`, which takes a microsecond.
    children: dict[str, Any] = module._modules
    for name, child in children.items():
        if child is not None:
            children[name] = module.__dict__[name] = swap_modules(child, pack)
    return module


class LeanStack:
    """Decoder layers over one cache: positions, masks and the loop over layers."""

    def __init__(
        self,
        layers: Sequence[Layer | LeanLayer],
        config: LlamaConfig,
        dtype: torch.dtype,
        device: torch.device,
        pack: bool = False,
        share: bool = False,
        tables: tuple[Tensor, Tensor] | None = None,
    ):
        """pack: see `LeanLinear`. share: the layers are frozen and give their weights away (`_fuse`). tables: cos and
        sin [positions, rotary_dim]; None: those of the config."""
        self.layers = [LeanLayer(own, pack, share) if isinstance(own, DecoderLayer) else own for own in layers]
        self.config, self.dtype, self.device = config, dtype, device
        cos, sin = rope_table(config, config.max_position) if tables is None else tables
        if tables is None:
            # As the fused layers take it.
            half = config.rotary_dim // 2
            sin = torch.cat([-sin[:, :half], sin[:, half:]], -1)
        self.cos, self.sin = cos.to(device, dtype)[:, None], sin.to(device, dtype)[:, None]  # [positions, 1, D]
        self._strip = torch.zeros(0, 0, dtype=dtype)
        # Views of cos and sin, one pair for each of the first positions.
        self._ready: list[tuple[Tensor, Tensor]] = []

    @property
    def reach(self) -> int | None:
        """Inputs that a window lets an output depend on: what a layer sees has seen as much in the layer before."""
        window = self.config.sliding_window
        return None if window is None else 1 + len(self.layers) * (window - 1)

    def new_slots(self, batch: int, capacity: int) -> Tensor:
        """Allocate keys and values of a cache: [layers, 2, B, kv_heads, capacity, D]."""
        shape = len(self.layers), 2, batch, self.config.num_kv_heads, capacity, self.config.head_dim
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.new_slots(batch, capacity), written=0)

    def run(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        mask: Tensor | list[Tensor] | None,
        causal: bool,
        captured: Captured | None = None,
    ) -> Tensor:
        """Run all layers on x [B, T, H], or [T, H] of a single sequence; no final norm. `cache.length` stays.

        mask: bool (true = may attend), or a bias of the stack's dtype; or `prepared` biases, one for each layer.
        captured: filled with the states [N, H] after the first k layers, for every number k in it.
        """
        groups, bias = self.config.num_heads // self.config.num_kv_heads, None
        if isinstance(mask, Tensor):
            bias = prepared(as_bias(mask, self.dtype) if mask.dtype == torch.bool else mask, groups)
        batch, rows = (1, x) if x.dim() == 2 else (x.shape[0], x.reshape(-1, x.shape[-1]))  # [N, H]
        if batch > 1:
            shape = batch, len(rows) // batch, 1, cos.shape[-1]
            cos, sin = cos.expand(shape).flatten(0, 1), sin.expand(shape).flatten(0, 1)  # [N, 1, D]
        elif cos.dim() == 4:
            cos, sin = cos[0], sin[0]
        attention = CachedAttention(cache, batch, groups, bias, causal)
        for index, layer in enumerate(self.layers):
            if captured and index in captured:
                captured[index] = rows
            attention.layer = index
            if isinstance(mask, list):
                attention.mask = mask[index]
            rows = layer(rows, cos, sin, attention)
        return rows if x.dim() == 2 else rows.view(*x.shape[:-1], -1)

    def chain(self, x: Tensor, cache: LayerCache, captured: Captured | None = None) -> Tensor:
        """Run chains of T inputs [B, T, H] or [T, H], behind the cached tokens."""
        start, length, window = cache.length, x.shape[-2], self.config.sliding_window
        # Looking up a view takes less time than slicing.
        position = start + cache.offset
        if length == 1:
            if position >= len(self._ready):
                first, last = len(self._ready), max(1024, 2 * position)
                self._ready += zip(self.cos[first:last].split(1), self.sin[first:last].split(1), strict=True)
            cos, sin = self._ready[position]
        else:
            cos, sin = self.cos[position : position + length], self.sin[position : position + length]
        if window is not None and start + length > window:
            cache.first = max(0, start + 1 - window)
            kept = start - cache.first
            # Input i sees the slot of its own and window - 1 before it; of a single one no other slot is read.
            visible = torch.ones(length, kept + length, dtype=torch.bool, device=self.device)
            bias = as_bias(visible.tril(kept).triu(kept + 1 - window), self.dtype) if length > 1 else None
            outputs = self.run(x, cos, sin, cache, bias, False, captured)
            cache.first = 0
            return outputs
        bias = None
        if length > 1 and start > 0:
            # Input i sees the first start + i + 1 slots. The strip's row i is 0 up to column `kept` + i: shifted left
            # by kept - start columns it fits.
            rows, kept = self._strip.shape[0], self._strip.shape[1] - self._strip.shape[0]
            if length > rows or start > kept:
                rows, kept = max(16, length), max(1024, 2 * start)
                visible = torch.ones(rows, kept + rows, dtype=torch.bool, device=self.device).tril(kept)
                self._strip = as_bias(visible, self.dtype)
            bias = self._strip[:length, kept - start : kept + length]  # [T, start + T]
        return self.run(x, cos, sin, cache, bias, start == 0 and length > 1, captured)

    def tree(self, x: Tensor, parents: Sequence[int], cache: KVCache, captured: Captured | None = None) -> Tensor:
        """Run a tree of T inputs [T, H]; parents[i] < i, -1 = the last kept token; position = cache.length + depth."""
        depths, visible = tree_mask(parents, cache.length, x.device)
        kept = torch.arange(cache.length, device=self.device)
        return self.read_masked(x, torch.cat([kept, depths + cache.length]), visible, cache, captured)

    def read_masked(
        self, x: Tensor, positions: Tensor, visible: Tensor, cache: KVCache, captured: Captured | None = None
    ) -> Tensor:
        """Run any T inputs [T, H].

        positions: [cache.length + T] of all slots, the new ones last. visible: [T, cache.length + T], bool.
        """
        own, window = positions[-len(x) :], self.config.sliding_window
        if window is not None:
            # Mistral 7B, section 2.
            visible = visible & (own[:, None] - positions < window)
        return self.run(x, self.cos[own], self.sin[own], cache, visible, False, captured)
