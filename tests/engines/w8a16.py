"""Layers of 8 bits without the compiled kernels of GPUs: what an engine's own loader put into them becomes an ordinary
layer, with the weights that compressed-tensors makes of it. Read by the engines' tests alone."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import nn

PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight")


def make_plain(layer: Any, unquantized: Any) -> None:
    """Replace the loaded parts of a layer by its weight in float32. unquantized: the engine's method of such layers."""
    scale = layer.weight_scale.data.float()
    if hasattr(layer, "weight_packed"):
        shape = torch.Size((len(scale), layer.input_size))
        values = unpack_from_int32(layer.weight_packed.data, 8, shape)
    else:
        values = layer.weight.data
    weight = dequantize(values, scale)
    for part in PARTS:
        layer._parameters.pop(part, None)
    layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    layer.quant_method = unquantized
    unquantized.process_weights_after_loading(layer)


def patch_vllm() -> None:
    """Let vLLM choose a kernel that makes layers plain, where it has none for a CPU."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a16_fp8,
        compressed_tensors_wNa16,
    )

    class Kernel:
        def __init__(self, *_: Any, **__: Any):
            self.config = self

        def process_weights_after_loading(self, layer: Any) -> None:
            make_plain(layer, UnquantizedLinearMethod())

    compressed_tensors_wNa16.choose_mp_linear_kernel = lambda config: Kernel
    compressed_tensors_w8a16_fp8.init_wfp8_a16_linear_kernel = lambda **_: Kernel()
    schemes.CompressedTensorsW8A16Fp8.process_weights_after_loading = lambda self, layer: (
        self.linear_kernel.process_weights_after_loading(layer)
    )


def patch_sglang() -> None:
    """Let SGLang's schemes make layers plain, without a GPU to ask for its capability."""
    from sglang.srt.layers.quantization.compressed_tensors import schemes
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    for scheme in (schemes.CompressedTensorsWNA16, schemes.CompressedTensorsW8A16Fp8):
        scheme.process_weights_after_loading = lambda self, layer: make_plain(layer, UnquantizedLinearMethod())
