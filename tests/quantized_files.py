"""Weights as quantization methods publish them, written number by number from the formats' own packing code.

A writer draws stored numbers and scales for a weight [N, K], and returns its tensors by the ends of their names, with
the weight that they stand for in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 16


def float8(codes: Tensor) -> Tensor:
    """Decode bytes of FP8 (e4m3) by its definition."""
    sign, exponent, mantissa = 1 - 2 * (codes >> 7).double(), (codes >> 3 & 15).double(), (codes & 7).double() / 8
    return sign * torch.where(exponent > 0, (1 + mantissa) * 2 ** (exponent - 7), mantissa * 2.0**-6)


def fp8(rows: int, columns: int, scale: Tensor, spread: Tensor, name: str, **more: Tensor) -> tuple[Parts, Tensor]:
    codes = torch.randint(0, 127, (rows, columns)) + 128 * torch.randint(0, 2, (rows, columns))
    stored = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    return {"weight": stored, name: scale, **more}, float8(codes) * spread.double()


def fp8_blocks(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """DeepSeek's blocks, here of 48 x 32: the last ones are cut."""
    scale = torch.rand(-(-rows // 48), -(-columns // 32)) * 0.003
    spread = torch.stack([scale[row // 48] for row in range(rows)])
    spread = torch.stack([spread[:, column // 32] for column in range(columns)], 1)
    return fp8(rows, columns, scale, spread, "weight_scale_inv")


def fp8_tensor(rows: int, columns: int) -> tuple[Parts, Tensor]:
    return fp8(rows, columns, scale := torch.tensor(0.0017), scale, "weight_scale", input_scale=torch.tensor(0.01))


def fp8_rows(rows: int, columns: int) -> tuple[Parts, Tensor]:
    return fp8(rows, columns, scale := (torch.rand(rows, 1) * 0.003).bfloat16(), scale, "weight_scale")


def int8(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """INT8 with static inputs, whose zero points change no weight."""
    stored, scale = torch.randint(-127, 128, (rows, columns)), torch.rand(rows, 1) * 0.005
    inputs = {"input_scale": torch.tensor([0.1]), "input_zero_point": torch.zeros(1, dtype=torch.int8)}
    return {"weight": stored.to(torch.int8), "weight_scale": scale, **inputs}, stored * scale.double()


def fp4(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 16, (rows, columns))
    values = torch.tensor([*FP4, *(-value for value in FP4)]).double()[codes]
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), values


def nvfp4(rows: int, columns: int, modelopt: bool = True) -> tuple[Parts, Tensor]:
    stored, values = fp4(rows, columns)
    codes, outer = torch.randint(8, 100, (rows, columns // GROUP)), torch.tensor(0.011)
    scale = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    values = values * float8(codes).repeat_interleave(GROUP, 1) * outer.double()
    if modelopt:
        return {"weight": stored, "weight_scale": scale, "weight_scale_2": outer}, values
    # compressed-tensors divides by its scale of the whole weight.
    return {"weight_packed": stored, "weight_scale": scale, "weight_global_scale": (1 / outer)[None]}, values


def mxfp4(rows: int, columns: int) -> tuple[Parts, Tensor]:
    stored, values = fp4(rows, columns)
    exponents = torch.randint(120, 126, (rows, columns // 32))
    spread = 2.0 ** (exponents.double() - 127).repeat_interleave(32, 1)
    return {"weight_packed": stored, "weight_scale": exponents.to(torch.uint8)}, values * spread


def packed(values: Tensor, bits: int, order: Sequence[int]) -> Tensor:
    """Pack the columns of integers into words of 32 bits. order: of the columns in a word, from the lowest bits."""
    words = torch.zeros(len(values), values.shape[1] // len(order), dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, column in enumerate(order):
            words[:, word] |= values[:, word * len(order) + column] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def integers(rows: int, columns: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw stored numbers [N, K], zero points [N, G] and scales [N, G]."""
    groups = columns // GROUP
    numbers, zeros = (torch.randint(1, 2**bits, (rows, size)) for size in (columns, groups))
    return numbers, zeros, (torch.rand(rows, groups) / 2**bits).half()


def packed_int4(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """compressed-tensors' W4A16 with zero points, which are packed along the rows."""
    numbers, zeros, scales = integers(rows, columns, 4)
    spread = [each.double().repeat_interleave(GROUP, 1) for each in (zeros, scales)]
    parts = {
        "weight_packed": packed(numbers, 4, range(8)),
        "weight_scale": scales,
        "weight_zero_point": packed(zeros.T, 4, range(8)).T.contiguous(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    return parts, (numbers - spread[0]) * spread[1]


def awq(rows: int, columns: int) -> tuple[Parts, Tensor]:
    numbers, zeros, scales = integers(rows, columns, 4)
    spread = [each.double().repeat_interleave(GROUP, 1) for each in (zeros, scales)]
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": packed(numbers.T, 4, order), "qzeros": packed(zeros.T, 4, order), "scales": scales.T}
    return parts, (numbers - spread[0]) * spread[1]


def gptq(rows: int, columns: int, bits: int = 4) -> tuple[Parts, Tensor]:
    """GPTQ with activation order, whose first format stores zero points less one."""
    numbers, zeros, scales = integers(rows, columns, bits)
    groups, order = torch.randperm(columns) // GROUP, range(32 // bits)
    parts = {
        "qweight": packed(numbers, bits, order).T,
        "qzeros": packed(zeros.T - 1, bits, order),
        "scales": scales.T,
        "g_idx": groups.to(torch.int32),
    }
    return parts, (numbers - zeros[:, groups]) * scales[:, groups].double()


def groups(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


Writer = Callable[[int, int], tuple[Parts, Tensor]]
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}}
# The rows of docs/models.md that every engine computes: quantization_config, and the writer of a weight.
COMPUTED: dict[str, tuple[dict[str, Any], Writer]] = {
    "FP8 in blocks": ({"quant_method": "fp8", "weight_block_size": [48, 32]}, fp8_blocks),
    "ModelOpt FP8": (MODELOPT | {"quant_algo": "FP8"}, fp8_tensor),
    "ModelOpt NVFP4": (MODELOPT | {"quant_algo": "NVFP4"}, nvfp4),
    "compressed-tensors FP8": (groups(num_bits=8, type="float", strategy="channel"), fp8_rows),
    "compressed-tensors INT8": (
        groups(num_bits=8, type="int", strategy="channel") | {"sparsity_config": {"format": "dense"}},
        int8,
    ),
    "compressed-tensors W4A16": (groups(num_bits=4, type="int", group_size=GROUP), packed_int4),
    "compressed-tensors NVFP4": (groups(num_bits=4, type="float"), lambda *size: nvfp4(*size, modelopt=False)),
    "compressed-tensors MXFP4": (groups(num_bits=4, type="float"), mxfp4),
    "AWQ": ({"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": GROUP}, awq),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "desc_act": True}, gptq),
    "GPTQ in 8 bits": ({"quant_method": "gptq", "bits": 8}, lambda *size: gptq(*size, bits=8)),
}


def change_config(directory: Path, **changes: Any) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, **changes}))


def quantize(directory: Path, twin: Path, settings: dict[str, Any] | None, writer: Writer, ends: str = "_proj") -> None:
    """Quantize the weights of a directory, and write those that they stand for into its twin.

    ends: of the names of the modules with quantized weights.
    """
    torch.manual_seed(3)
    plain = load_file(directory / "model.safetensors")
    stored = dict(plain)
    for name, weight in plain.items():
        if name.endswith(f"{ends}.weight"):
            parts, exact = writer(*stored.pop(name).shape)
            stored |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
            plain[name] = exact.to(torch.float32)
            assert weight.shape == exact.shape
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    if settings:
        change_config(directory, quantization_config=settings)
