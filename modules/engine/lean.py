"""Llama-family layers for inference: fused projections, one preallocated cache, no per-call framework work.

The same weights and the same function as `layers.DecoderLayer`; what is gone is dispatch, which at batch size one is
most of a small model's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.engine.attention import attend, prepared
from draftsmith.modules.engine.cache import KVCache, LayerCache
from draftsmith.modules.engine.packed import LeanLinear
from draftsmith.modules.engine.quantized import Linear, Precision, linear_of
from draftsmith.modules.layers import DecoderLayer, LlamaConfig, RMSNorm, rope_table

Taps = dict[int, Tensor]  # numbers of layers -> states, of which the caller gives the numbers


def _fuse(linears: Sequence[torch.nn.Linear], share: bool, pack: bool, precision: Precision) -> Linear:
    """Linears that read the same input as one, stacked by rows.

    share: leave one copy of the weights: the linears' become views of the stacked tensor, or empty where it is packed
    (using them is then an error of shape).
    """
    weights = [linear.weight.detach() for linear in linears]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    has_bias = any(linear.bias is not None for linear in linears)
    bias = torch.cat([linear.bias.detach() for linear in linears]) if has_bias else None
    fused = linear_of(weight, bias, pack, precision)
    if share and fused.packed:
        for linear in linears:
            linear.weight.data = weight.new_empty(0)
    elif share and isinstance(fused, LeanLinear):
        for linear, rows in zip(linears, fused.weight.split([len(own) for own in weights]), strict=True):
            linear.weight.data = rows
    return fused


class LeanNorm:
    """x / rms(x) * weight over the last dimension, the mean in float32 or wider, in few calls. weight: [..., H]."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self._eps, self._size = weight.detach(), eps, weight.shape[-1]
        self._wide = weight.dtype in (torch.float32, torch.float64)
        self._eps_tensor = torch.tensor(eps, dtype=weight.dtype if self._wide else torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (self._size,), None, self._eps) * self.weight  # one fused kernel there, seven here
        norm = torch.linalg.vector_norm(x if self._wide else x.float(), dim=-1, keepdim=True)
        scaled = x * torch.addcmul(self._eps_tensor, norm, norm, value=1 / self._size).rsqrt_()
        return (scaled if self._wide else scaled.to(x.dtype)).mul_(self.weight)


class LeanLayer:
    """One decoder layer with q/k/v and gate/up fused; reads and writes a cache. Results are written in place."""

    def __init__(self, layer: DecoderLayer, share: bool, pack: bool, precision: Precision = "dtype"):
        attention = layer.self_attn
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.groups, self.head_dim = self.num_heads // self.num_kv_heads, attention.head_dim
        self.qkv = _fuse([attention.q_proj, attention.k_proj, attention.v_proj], share, pack, precision)
        self.o = _fuse([attention.o_proj], share, pack, precision)
        self.gate_up = _fuse([layer.mlp.gate_proj, layer.mlp.up_proj], share, pack, precision)
        self.down = _fuse([layer.mlp.down_proj], share, pack, precision)
        self.qk_norm = None
        if attention.qk_norm:
            weights: list[Tensor] = [attention.q_norm.weight] * self.num_heads
            weights += [attention.k_norm.weight] * self.num_kv_heads
            self.qk_norm = LeanNorm(torch.stack(weights), attention.q_norm.eps)
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        self.input_norm = LeanNorm(first.weight, first.eps) if isinstance(first, RMSNorm) else None
        self.post_norm = LeanNorm(second.weight, second.eps)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The residual [N, H], and what attention reads, of the layer's input [N, ..]."""
        return rows, rows if self.input_norm is None else self.input_norm(rows)

    def __call__(
        self,
        rows: Tensor,
        batch: int,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        index: int,
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """rows [B * T, H], sequence by sequence, fed after `cache.length` tokens -> the same.

        cos, sin: [B or 1, T, 1, D].
        mask: added to the scores, [B or 1, 1, T, cache.length + T] (`as_bias`), `attention.prepared`; None with T == 1,
        or with `causal`.
        Where the cache is `ragged` a batch of 1 and T of all rows together, but in the mask.
        """
        rows, normed = self.read(rows)
        qkv = self.qkv(normed).view(batch, -1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        rotated = qkv[:, :, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            rotated.copy_(self.qk_norm(rotated))
        # sin carries the sign of its first half, so a roll by half the width is the rotation.
        rolled = rotated.roll(self.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(rolled, sin)
        keys, values = cache.write(index, cache.length, qkv[:, :, self.num_heads :])
        queries = qkv[:, :, : self.num_heads]
        if cache.ragged is not None:
            assert mask is not None
            attended = cache.ragged.attend(queries[0], keys, values, self.groups, mask)
        else:
            attended = attend(queries, keys, values, self.groups, mask, causal)
        rows = self.o.add_to(rows, attended.reshape(len(rows), -1))
        normed = self.post_norm(rows)
        gate, up = self.gate_up(normed).chunk(2, -1)
        return self.down.add_to(rows, F.silu(gate).mul_(up))


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """True = may attend -> 0, false -> -inf: made once a forward, where attention would make it once a layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


class LeanStack:
    """Decoder layers over one cache: positions, masks and the layers' loop, for targets, drafts and the EAGLE head."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer | LeanLayer],
        config: LlamaConfig,
        dtype: torch.dtype,
        device: torch.device,
        share: bool = False,
        pack: bool = False,
        precision: Precision = "dtype",
    ):
        """share: the layers are frozen and give their weights away (see `_fuse`). pack, precision: see `linear_of`."""
        self.layers = [
            layer if isinstance(layer, LeanLayer) else LeanLayer(layer, share, pack, precision) for layer in layers
        ]
        self.config, self.dtype, self.device = config, dtype, device
        cos, sin = rope_table(config, config.max_position)
        signed = torch.cat([-sin[:, : config.head_dim // 2], sin[:, config.head_dim // 2 :]], -1)
        self.cos, self.sin = cos.to(device, dtype)[:, None], signed.to(device, dtype)[:, None]  # [positions, 1, D]
        self._strip = torch.zeros(0, 0, dtype=dtype)
        self._ready: list[tuple[Tensor, Tensor]] = []  # cos and sin of the first positions, a view for each

    def new_slots(self, batch: int, capacity: int) -> Tensor:
        """What a cache keeps keys and values in, zeros."""
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
        mask: Tensor | None,
        causal: bool,
        taps: Taps | None = None,
    ) -> Tensor:
        """x [B, T, H], or [T, H] of a single sequence -> the same before any final norm. Slots are written but not
        kept: `cache.length` stays.

        mask: bool, true = may attend, or a bias of the stack's dtype.
        taps: the states after so many layers, [B * T, H], are put here under the numbers that it has.
        """
        if mask is not None:
            bias = as_bias(mask, self.dtype) if mask.dtype == torch.bool else mask
            mask = prepared(bias, self.config.num_heads // self.config.num_kv_heads)
        single = x.dim() == 2
        rows, batch = (x, 1) if single else (x.reshape(-1, x.shape[-1]), x.shape[0])
        for index, layer in enumerate(self.layers):
            if taps and index in taps:
                taps[index] = rows
            rows = layer(rows, batch, cos, sin, cache, index, mask, causal)
        return rows if single else rows.view(*x.shape[:-1], -1)

    def chain(self, x: Tensor, cache: LayerCache, taps: Taps | None = None) -> Tensor:
        """Chains of T inputs [B, T, H] or [T, H], all at positions cache.length.. ."""
        start, length = cache.length, x.shape[-2]
        end = start + length
        cos, sin = self._rotation(start) if length == 1 else (self.cos[start:end], self.sin[start:end])
        if self.config.sliding_window is not None and end > self.config.sliding_window:
            positions = torch.arange(end, device=self.device)
            mask = self._windowed(positions[start:, None] >= positions, positions)
            return self.run(x, cos, sin, cache, mask, False, taps)
        bias = None if length == 1 or start == 0 else self._chain_bias(start, length)
        return self.run(x, cos, sin, cache, bias, start == 0 and length > 1, taps)

    def tree(self, x: Tensor, parents: Sequence[int], cache: KVCache, taps: Taps | None = None) -> Tensor:
        """A tree of T inputs [T, H]; parents[i] < i, -1 = the last kept token; position = cache.length + depth."""
        depths, visible = tree_mask(parents, cache.length, x.device)
        kept = torch.arange(cache.length, device=self.device)
        return self.graft(x, torch.cat([kept, depths + cache.length]), visible, cache, taps)

    def graft(self, x: Tensor, positions: Tensor, visible: Tensor, cache: KVCache, taps: Taps | None = None) -> Tensor:
        """Any T inputs [T, H]. positions: [cache.length + T] of all slots, the new ones last; visible: [T, the same],
        bool."""
        if self.config.sliding_window is not None:
            visible = self._windowed(visible, positions)
        own = positions[-len(x) :]
        return self.run(x, self.cos[own], self.sin[own], cache, visible, False, taps)

    def _rotation(self, position: int) -> tuple[Tensor, Tensor]:
        """cos and sin of one position, [1, 1, D] each: slicing takes longer than looking up."""
        if position >= len(self._ready):
            first, end = len(self._ready), max(1024, 2 * position)
            self._ready += zip(self.cos[first:end].split(1), self.sin[first:end].split(1), strict=True)
        return self._ready[position]

    def _chain_bias(self, start: int, length: int) -> Tensor:
        """The bias [T, start + T] of a chain: input i sees the first start + i + 1 slots.

        A slice of a strip whose row i is 0 up to column `kept` + i: moved to the left by kept - start columns it fits.
        """
        rows, kept = self._strip.shape[0], self._strip.shape[1] - self._strip.shape[0]
        if length > rows or start > kept:
            rows, kept = max(16, length), max(1024, 2 * start)
            visible = torch.ones(rows, kept + rows, dtype=torch.bool, device=self.device).tril(kept)
            self._strip = as_bias(visible, self.dtype)
        return self._strip[:length, kept - start : kept + length]

    def _windowed(self, mask: Tensor, positions: Tensor) -> Tensor:
        """Add the sliding window (Mistral 7B, section 2) to mask [T, S]; positions [S] of all slots, the last T fed."""
        assert self.config.sliding_window is not None
        distance = positions[-mask.shape[0] :, None] - positions[None]
        return mask & (distance < self.config.sliding_window)


def tree_mask(parents: Sequence[int], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depths int64 [T] (0 = follows the kept tokens) and the mask bool [T, start + T] of a tree fed after `start`
    tokens: each sees the kept tokens, its ancestors and itself."""
    size = len(parents)
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    # By pointer doubling: each node takes over what its pointer sees, then goes on from its pointer's pointer. The
    # extra last node stands for the kept tokens: it sees no node and points to itself.
    above = torch.tensor([*(parent if parent >= 0 else size for parent in parents), size], device=device)
    sees = torch.eye(size + 1, size, dtype=torch.bool, device=device)
    for _ in range(max(depths).bit_length()):
        sees, above = sees | sees[above], above[above]
    sees = sees[:size]
    return torch.tensor(depths, device=device), torch.cat([sees.new_ones(size, start), sees], 1)
