"""What SGLang imports and the tests never call; imported before it.

PyPI's torchvision is built for a GPU's torch: its operators do not load, and its Python part, which is all that is
needed, registers shapes for two of them. Without a GPU the rotary kernel is sought in vLLM.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
kernels = ModuleType("vllm._custom_ops")
kernels.rotary_embedding = None
sys.modules |= {"vllm": ModuleType("vllm"), kernels.__name__: kernels}
