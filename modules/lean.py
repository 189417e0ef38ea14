"""Llama-family layers for inference: fused projections, one preallocated cache, no per-call framework work.

The same weights and the same function as `layers.DecoderLayer`; what is gone is dispatch, which at batch size one is
most of a small model's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.kv_cache import KVCache
from draftsmith.modules.layers import DecoderLayer, LlamaConfig, RMSNorm, rope_table


def _fuse(linears: Sequence[torch.nn.Linear], share: bool) -> tuple[Tensor, Tensor | None]:
    """Weights, and biases where there are any, of linears that read the same input, stacked by rows.

    share: let the linears' weights be views of the stacked tensor from now on, so that a large model is held once.
    """
    weight = (
        torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
    )
    if share and len(linears) > 1:
        for linear, rows in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
            linear.weight.data = rows
    if all(linear.bias is None for linear in linears):
        return weight, None
    return weight, torch.cat([linear.bias.detach() for linear in linears])


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
    """One decoder layer with q/k/v and gate/up fused; reads and writes a `KVCache`. Results are written in place."""

    def __init__(self, layer: DecoderLayer, share: bool):
        attention = layer.self_attn
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim
        self.qkv_weight, self.qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj], share)
        self.o_weight, self.o_bias = _fuse([attention.o_proj], share)
        self.gate_up_weight, self.gate_up_bias = _fuse([layer.mlp.gate_proj, layer.mlp.up_proj], share)
        self.down_weight, self.down_bias = _fuse([layer.mlp.down_proj], share)
        self.qk_norm = None
        if attention.qk_norm:
            weights: list[Tensor] = [attention.q_norm.weight] * self.num_heads
            weights += [attention.k_norm.weight] * self.num_kv_heads
            self.qk_norm = LeanNorm(torch.stack(weights), attention.q_norm.eps)
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        self.input_norm = LeanNorm(first.weight, first.eps) if isinstance(first, RMSNorm) else None
        self.post_norm = LeanNorm(second.weight, second.eps)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, index: int, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """x [B, T, H], fed after `cache.length` tokens -> [B, T, H]. cos, sin: [B or 1, T, 1, D].

        mask: added to the scores, [B or 1, 1, T, cache.length + T] (`as_bias`); None with T == 1, or with `causal`.
        """
        batch, length, size = x.shape
        rows = x.view(-1, size)
        normed = rows if self.input_norm is None else self.input_norm(rows)
        qkv = F.linear(normed, self.qkv_weight, self.qkv_bias).view(batch, length, -1, self.head_dim)
        rotated = qkv[:, :, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            rotated.copy_(self.qk_norm(rotated))
        # sin carries the sign of its first half, so a roll by half the width is the rotation.
        rolled = rotated.roll(self.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(rolled, sin)
        keys, values = cache.write(index, cache.length, qkv[:, :, self.num_heads :])
        attended = F.scaled_dot_product_attention(
            qkv[:, :, : self.num_heads].transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        rows = _add_linear(rows, attended.transpose(1, 2).reshape(batch * length, -1), self.o_weight, self.o_bias)
        normed = self.post_norm(rows)
        gate, up = F.linear(normed, self.gate_up_weight, self.gate_up_bias).chunk(2, -1)
        rows = _add_linear(rows, F.silu(gate).mul_(up), self.down_weight, self.down_bias)
        return rows.view(batch, length, size)


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual + linear(x), all [N, ...], without a pass of its own for the sum."""
    added = torch.addmm(residual, x, weight.t())
    return added if bias is None else added.add_(bias)


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """True = may attend -> 0, false -> -inf: made once a forward, where attention would make it once a layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


class LeanStack:
    """Decoder layers over one cache: positions, masks and the layers' loop, for targets, drafts and the EAGLE head."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        config: LlamaConfig,
        dtype: torch.dtype,
        device: torch.device,
        share: bool = False,
    ):
        """share: the layers are frozen and may become views of the fused weights (see `_fuse`)."""
        self.layers = [LeanLayer(layer, share) for layer in layers]
        self.config, self.dtype, self.device = config, dtype, device
        cos, sin = rope_table(config, config.max_position)
        signed = torch.cat([-sin[:, : config.head_dim // 2], sin[:, config.head_dim // 2 :]], -1)
        self.cos, self.sin = cos.to(device, dtype)[:, None], signed.to(device, dtype)[:, None]  # [positions, 1, D]
        self._causal = torch.ones(0, 0, dtype=torch.bool)
        self._causal_bias = as_bias(self._causal, dtype)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        config = self.config
        return KVCache(len(self.layers), batch, config.num_kv_heads, capacity, config.head_dim, self.dtype, self.device)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, mask: Tensor | None, causal: bool) -> Tensor:
        """[B, T, H] -> [B, T, H] before any final norm. Slots are written but not kept: `cache.length` stays.

        mask: bool, true = may attend, or a bias of the stack's dtype.
        """
        if mask is not None and mask.dtype == torch.bool:
            mask = as_bias(mask, self.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, cache, index, mask, causal)
        return x

    def chain(self, x: Tensor, cache: KVCache) -> Tensor:
        """A chain of T inputs [1, T, H] at positions cache.length.. ."""
        start, length = cache.length, x.shape[1]
        end = start + length
        cos, sin = self.cos[start:end], self.sin[start:end]
        if self.config.sliding_window is not None and end > self.config.sliding_window:
            positions = torch.arange(end, device=self.device)
            return self.run(x, cos, sin, cache, self._windowed(self._chain_mask(start, end), positions), False)
        if length == 1:
            return self.run(x, cos, sin, cache, None, False)
        if start == 0:
            return self.run(x, cos, sin, cache, None, True)
        self._chain_mask(start, end)
        return self.run(x, cos, sin, cache, self._causal_bias[start:end, :end], False)

    def tree(self, x: Tensor, parents: Sequence[int], cache: KVCache) -> Tensor:
        """A tree of T inputs [1, T, H]; parents[i] < i, -1 = the last kept token; position = cache.length + depth."""
        depths, mask = tree_mask(parents, cache.length, x.device)
        positions = depths + cache.length
        if self.config.sliding_window is not None:
            kept = torch.arange(cache.length, device=self.device)
            mask = self._windowed(mask, torch.cat([kept, positions]))
        return self.run(x, self.cos[positions], self.sin[positions], cache, mask, False)

    def _chain_mask(self, start: int, end: int) -> Tensor:
        """Bool [end - start, end]: a slice of one triangle that grows by doubling."""
        if self._causal.shape[0] < end:
            size = max(256, 2 * end)
            self._causal = torch.ones(size, size, dtype=torch.bool, device=self.device).tril()
            self._causal_bias = as_bias(self._causal, self.dtype)
        return self._causal[start:end, :end]

    def _windowed(self, mask: Tensor, positions: Tensor) -> Tensor:
        """Add the sliding window (Mistral 7B, section 2) to mask [T, S]; positions [S] of all slots, the last T fed."""
        assert self.config.sliding_window is not None
        distance = positions[-mask.shape[0] :, None] - positions[None]
        return mask & (distance < self.config.sliding_window)


def tree_mask(parents: Sequence[int], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depths int64 [T] (0 = follows the kept tokens) and the mask bool [T, start + T] of a tree fed after `start`
    tokens: each sees the kept tokens, its ancestors and itself."""
    size = len(parents)
    ancestors = torch.eye(size, dtype=torch.bool)
    depths = [0] * size
    for i, parent in enumerate(parents):
        if parent >= 0:
            ancestors[i] |= ancestors[parent]
            depths[i] = depths[parent] + 1
    mask = torch.ones(size, start + size, dtype=torch.bool)
    mask[:, start:] = ancestors
    return torch.tensor(depths, device=device), mask.to(device)
