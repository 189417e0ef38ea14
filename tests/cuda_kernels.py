"""What CUDA's fused attention kernels take, on a CPU: code that asks for more fails here and becomes slow there.

From torch's aten/src/ATen/native/transformers/cuda: sdp_utils.cpp (`use_flash_attention`: no mask, half precision;
`use_mem_efficient_attention`: as many heads of keys as of queries) and mem_eff_attention/kernel_forward.h
(`check_supported`: where a mask begins, and its strides).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.engine import cache


class CudaKernels:
    """Stands for `scaled_dot_product_attention` of a GPU. masked, plain: calls so far; data: where the keys lay."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.masked = self.plain = 0
        self.data: list[int] = []
        # In that module alone: the oracles attend too.
        patch.setattr(cache, "F", SimpleNamespace(scaled_dot_product_attention=self))
        patch.setattr(cache, "takes_shared", lambda tensor: False)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        shared = query.shape[1] != key.shape[1]
        assert shared <= enable_gqa
        flash = attn_mask is None and query.dtype in (torch.float16, torch.bfloat16)
        assert flash or not shared, "the memory-efficient kernel knows no shared keys: they would be copied"
        if attn_mask is not None:
            assert not is_causal
            whole = attn_mask.expand(*query.shape[:3], key.shape[2])  # as torch does it
            assert not any(step % 8 for step in (attn_mask.storage_offset(), *whole.stride()[:-1]))
            assert attn_mask.stride(-1) == 1 and attn_mask.dtype == query.dtype
        self.masked += attn_mask is not None
        self.plain += attn_mask is None
        self.data.append(key.untyped_storage().data_ptr())
        options: Any = {"attn_mask": attn_mask, "is_causal": is_causal, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, **options)
