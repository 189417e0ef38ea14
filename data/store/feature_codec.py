"""How hidden states are stored: bf16 as they are, or fp8 with one scale a token, which is half the bytes.

fp8 is float8_e4m3fn: 4 significant bits, and the exponent range of 2^-9 to 448. A token's scale is a power of two, so
dividing by it loses nothing, and a decoded value is exact in bf16: what is read is bf16 either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.data.store.manifest import Field

FeatureDtype = Literal["bf16", "fp8"]
SCALE = ".scale"  # of a row's fp8 values, beside them under their key
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def encode(features: Tensor, dtype: FeatureDtype) -> dict[str, Tensor]:
    """What is stored of features [T, H]: their tensors by the suffix of their key.

    fp8: |decoded - x| <= 2^-4 |x|, and at most 2^-10 of the token's scale for what is smaller than 2^-6 of it; the
    scale is at most 2^-7.8 of the token's largest magnitude. A token with an infinity or a NaN becomes NaN.
    """
    if dtype == "bf16":
        return {"": features.to(torch.bfloat16)}
    values = features.float()
    scale = token_scale(values)
    return {"": (values / scale[:, None]).to(torch.float8_e4m3fn), SCALE: scale.to(torch.bfloat16)}


def token_scale(features: Tensor) -> Tensor:
    """The smallest power of two [T] that brings each token's [T, H] values into fp8's range; 1 where all are 0, NaN
    where one is not finite: fp8 has no infinity, and converting to it cuts at 448."""
    largest = features.abs().amax(-1)
    # m * 2^e with m in [0.5, 1): 448 = 0.875 * 2^9.
    mantissa, exponent = torch.frexp(largest / LARGEST)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(-126, 127)
    scale = torch.where(largest > 0, torch.exp2(exponent.float()), 1.0)
    return torch.where(largest.isfinite(), scale, math.nan)


def decode(stored: Mapping[str, Tensor]) -> Tensor:
    """Features [T, H] in bf16, as a training reads them."""
    values = stored[""]
    if SCALE not in stored:
        return values
    return (values.float() * stored[SCALE].float()[:, None]).to(torch.bfloat16)


def rounded(features: Tensor, dtype: FeatureDtype) -> Tensor:
    """What features [T, H] are once they were stored and read."""
    return decode(encode(features, dtype))


def stored_features(file: Any, key: str) -> Tensor:
    """A row's features [T, H] from an open safetensors file, whichever way they are stored."""
    values = file.get_tensor(key)
    coded = values.dtype == torch.float8_e4m3fn
    return decode({"": values, SCALE: file.get_tensor(key + SCALE)} if coded else {"": values})


def token_bytes(hidden_size: int, dtype: FeatureDtype) -> int:
    """Bytes of one token's features."""
    return 2 * hidden_size if dtype == "bf16" else hidden_size + 2


def fields(dtype: FeatureDtype) -> tuple[Field, ...]:
    """What a manifest says of the tensors."""
    if dtype == "bf16":
        return (Field("features", "bfloat16", ("T", "H")),)
    return Field("features", "float8_e4m3fn", ("T", "H")), Field("features.scale", "bfloat16", ("T",))
