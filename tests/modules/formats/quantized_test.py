"""Weights of 8 bits in the layout of compressed-tensors: how they are rounded, and which have them."""

from __future__ import annotations

import pytest
import torch

from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.quantized import quantizable, quantize, with_quantized
from draftsmith.modules.pretrained.quantized import Quantized


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_rounding_is_within_half_a_step_and_is_not_repeated(scheme):
    torch.manual_seed(0)
    weight = torch.randn(64, 128).T.contiguous().T * torch.logspace(-6, 2, 64)[:, None]  # strides of a transposed one
    weight[3] = 0
    back = Quantized().compute("w", quantize(weight, scheme))
    largest = weight.abs().amax(1, keepdim=True)
    # Half a step of int8, and of float8 half of the last of three bits; the scale's own 8 bits may cut the largest.
    bound = largest / 254 if scheme == "int8" else weight.abs() / 16 + largest / 448 / 2**7
    assert ((back - weight).abs() <= bound + largest / 256).all()
    assert torch.equal(Quantized().compute("w", quantize(back, scheme)), back)


def test_layers_that_fit_the_kernels_have_8_bits_and_the_config_ignores_the_others():
    sizes = {"q": (64, 128), "k": (32, 128), "v": (32, 128), "o": (64, 64), "gate": (64, 64), "up": (64, 64)}
    names = {part: f"layer.{'mlp' if part in ('gate', 'up') else 'self_attn'}.{part}_proj.weight" for part in sizes}
    state = {names[part]: torch.randn(size) for part, size in sizes.items()} | {"fc.weight": torch.randn(64, 192)}
    # o [64, 64] fits neither tile; gate and up fit together, and q, k, v do.
    assert quantizable(state) == [names[part] for part in sizes if part != "o"]
    chosen = {name: state[name] for name in quantizable(state)}
    package = with_quantized(Package({}, state), chosen, "int8")
    ignored = package.config["quantization_config"]["ignore"]
    assert r"re:.*\.o_proj$" in ignored and r"re:.*\.down_proj$" in ignored and not any("qkv" in one for one in ignored)
    assert {name for name in package.tensors if name.endswith("_packed")} == {f"{name}_packed" for name in chosen}
