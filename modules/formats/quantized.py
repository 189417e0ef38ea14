"""Weights of 8 bits, which servers multiply with states of 16 bits (W8A16), in the layout of compressed-tensors.

Sources: compressed-tensors 0.17 (compressors/pack_quantized, naive_quantized), vLLM 0.33 and SGLang 0.5.23
(layers/quantization/compressed_tensors). `pretrained/quantized.py` reads such weights.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.llama import Fields

# The servers take weight-only int8 as pack-quantized alone. Largest value of a row, by which its scale is chosen.
FORMATS, LARGEST = {"int8": "pack-quantized", "fp8": "float-quantized"}, {"int8": 127.0, "fp8": 448.0}
# Weights that all draft classes of vLLM and SGLang read quantized, and the layers into which servers join them.
LAYERS = r"(midlayer|layers?(?:\.\d+)?)\.(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.weight"
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "o": ("o",), "down": ("down",)}
# Layers that vLLM would take for quantized ones, and SGLang reads as they are, as it does an lm_head without its name.
IGNORED = [f"re:.*{name}$" for name in ("fc", "lm_head", "kernel_projection")]


def quantizable(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of a head's weights that can have 8 bits.

    A server's layer has to fit the tiles of its Marlin kernel, n % 64 and k % 128 or n % 128 and k % 64: SGLang pads
    none. Weights that it joins stay alike.
    """
    layers = dict[tuple[str, str], list[str]]()
    for name in state:
        if match := re.fullmatch(LAYERS, name):
            joined = next(layer for layer, parts in JOINED.items() if match[2] in parts)
            layers.setdefault((match[1], joined), []).append(name)
    sizes = [(names, sum(len(state[name]) for name in names), state[names[0]].shape[1]) for names in layers.values()]
    return [name for names, n, k in sizes if n % 64 == k % 128 == 0 or n % 128 == k % 64 == 0 for name in names]


def quantize(weight: Tensor, scheme: str) -> dict[str, Tensor]:
    """Return what a file holds of a weight [N, K]: its values, and a scale for each row [N, 1].

    Scales are values of bfloat16, in which servers compute with them.
    """
    weight = weight.detach().cpu().float().contiguous()
    scale = (weight.abs().amax(1, keepdim=True) / LARGEST[scheme]).bfloat16()
    values = (weight / scale.float().where(scale > 0, 1)).clamp(-LARGEST[scheme], LARGEST[scheme])
    if scheme == "fp8":
        return {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scale.float()}
    packed = (values.round() + 128).to(torch.uint8).view(torch.int32)  # [N, K / 4], the first value in the lowest bits
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def with_quantized(package: Package, weights: Mapping[str, Tensor], scheme: str) -> Package:
    """Return a directory with these weights, by their names in it, in 8 bits."""
    tensors = {name: tensor for name, tensor in package.tensors.items() if name not in weights}
    for name, weight in weights.items():
        tensors |= {f"{name.removesuffix('weight')}{part}": stored for part, stored in quantize(weight, scheme).items()}
    whole = [layer for layer, parts in JOINED.items() if not any(f".{parts[0]}_proj." in name for name in weights)]
    whole = [name for layer in whole for name in dict.fromkeys([layer, *JOINED[layer]])]
    kind: Fields = {"num_bits": 8, "type": "int" if scheme == "int8" else "float", "strategy": "channel"}
    config: Fields = {
        "quant_method": "compressed-tensors",
        "format": FORMATS[scheme],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": kind | {"symmetric": True, "dynamic": False}}},
        "ignore": IGNORED + [rf"re:.*\.{name}_proj$" for name in whole],
    }
    return dataclasses.replace(package, config={**package.config, "quantization_config": config}, tensors=tensors)


def served_memory(state: Mapping[str, Tensor], eight_bits: bool) -> str:
    """Return the memory that a head takes on a server in 16 bits. eight_bits: and with layers in 8 bits."""
    sizes = {name: tensor.numel() * (2 if tensor.is_floating_point() else 8) for name, tensor in state.items()}
    whole, saved = sum(sizes.values()), sum(sizes[name] // 2 - 2 * len(state[name]) for name in quantizable(state))
    less = f", {(whole - saved) / 1e6:,.1f} MB in fp8 or int8" if eight_bits and saved else ""
    return f"{whole / 1e6:,.1f} MB{less}"
