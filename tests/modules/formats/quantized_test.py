"""Weights of 8 bits in the layout of compressed-tensors: its own numbers, what is refused, what has 8 bits."""

from __future__ import annotations

import pytest
import torch

from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.quantized import dequantize, dequantized, quantizable, quantize, with_quantized
from draftsmith.modules.types import InputError

# compress() and decompress() of compressed-tensors 0.17: rows of int8, asymmetric groups of int4, blocks of float8.
PUBLISHED = [
    (
        {"weight_scale": [[0.0146484375], [0.01171875]], "weight_shape": [2, 8],
         "weight_packed": [[2005091912, 75482318], [-1263063371, -2063990876]]},
        [[-0.8203125, -0.849609375, 0.0439453125, -0.1318359375, 1.142578125, 0.99609375, -0.0146484375, -1.81640625],
         [0.62109375, -0.9609375, 0.64453125, 0.609375, 0.421875, 1.48828125, 1.41796875, 0.046875]],
    ),
    (
        {"weight_scale": [[0.166015625, 0.2275390625], [0.0888671875, 0.162109375]], "weight_shape": [2, 8],
         "weight_zero_point": [[56, 54]], "weight_packed": [[-167052030], [201163791]]},
        [[-0.99609375, -1.328125, 0.830078125, 1.162109375, 0.91015625, -1.365234375, 0.0, 2.0478515625],
         [1.06640625, -0.2666015625, 0.0888671875, 0.4443359375, 1.62109375, 1.9453125, 1.296875, -0.486328125]],
    ),
    (
        {"weight_scale": [[0.001953125, 0.005859375]],
         "weight": [[-160.0, 176.0, -96.0, 288.0, 128.0, 72.0, 160.0, 128.0],
                    [104.0, 448.0, 5.5, 176.0, 144.0, 448.0, -192.0, -224.0]]},
        [[-0.3125, 0.34375, -0.1875, 0.5625, 0.75, 0.421875, 0.9375, 0.75],
         [0.203125, 0.875, 0.0107421875, 0.34375, 0.84375, 2.625, -1.125, -1.3125]],
    ),
]  # fmt: skip
TYPES = {"weight_packed": torch.int32, "weight_zero_point": torch.int32, "weight_shape": torch.int64}
TYPES |= {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}


@pytest.mark.parametrize(("parts", "weight"), PUBLISHED, ids=["int8", "int4", "float8"])
def test_published_weights_are_read_as_compressed_tensors_reads_them(parts, weight):
    tensors = {f"fc.{name}": torch.tensor(values).to(TYPES[name]) for name, values in parts.items()}
    package = dequantized(Package({"quantization_config": {"quant_method": "compressed-tensors"}}, tensors))
    assert package.tensors["fc.weight"].tolist() == weight and package.quantized == ("fc.weight",)
    assert package.config == {} and len(package.tensors) == 1


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_rounding_is_within_half_a_step_and_is_not_repeated(scheme):
    torch.manual_seed(0)
    weight = torch.randn(64, 128).T.contiguous().T * torch.logspace(-6, 2, 64)[:, None]  # strides of a transposed one
    weight[3] = 0
    back = dequantize(quantize(weight, scheme), "w")
    largest = weight.abs().amax(1, keepdim=True)
    # Half a step of int8, and of float8 half of the last of three bits; the scale's own 8 bits may cut the largest.
    bound = largest / 254 if scheme == "int8" else weight.abs() / 16 + largest / 448 / 2**7
    assert ((back - weight).abs() <= bound + largest / 256).all()
    assert torch.equal(dequantize(quantize(back, scheme), "w"), back)


def test_what_is_no_weight_of_8_bits_is_refused():
    good = quantize(torch.randn(64, 128), "int8")
    half = good["weight_packed"].view(torch.int16)
    for wrong in (
        {"weight_packed": good["weight_packed"][:, :-1]},  # cut
        {"weight_packed": half},  # another type
        {"weight_scale": good["weight_scale"][:-1]},  # of other rows
        {"weight_shape": torch.tensor([64, 0])},
        {"weight": torch.randn(64, 128)},  # not quantized, beside a scale
    ):
        with pytest.raises(InputError, match=r"w: found .*, expected integers of 4 or 8 bits"):
            dequantize({**good, **wrong}, "w")
    with pytest.raises(InputError, match="expected integers of 4 or 8 bits"):
        dequantize({"weight_packed": good["weight_packed"]}, "w")


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
