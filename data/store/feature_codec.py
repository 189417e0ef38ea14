"""How hidden states are stored: bf16 as they are, or fp8 with one scale a token, which is half the bytes.

fp8 is float8_e4m3fn: 4 significant bits, and the exponent range of 2^-9 to 448. A token's scale is a power of two, so
dividing by it loses nothing, and a decoded value is exact in bf16: what is read is bf16 either way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.data.store.manifest import Field
from draftsmith.modules.finite import first_broken
from draftsmith.modules.types import InputError

FeatureDtype = Literal["bf16", "fp8"]
SCALE = ".scale"  # of a row's fp8 values, beside them under their key
LARGEST = torch.finfo(torch.float8_e4m3fn).max
LARGE_SCALE = 2.0**96  # below it neither a decoded value nor the sum of 2^20 of them is infinite


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
    return decoded(stored[""], stored.get(SCALE))


def decoded(values: Tensor, scale: Tensor | None) -> Tensor:
    """Features [..., H] in bf16 of stored values [..., H] with their scales [...], if they have any. Nothing is
    rounded, so every device gives the same bits."""
    return values if scale is None else (values.float() * scale.float()[..., None]).to(torch.bfloat16)


def as_item(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a sample has of them, by the names of `FeatureBatch`: fp8 stays as it is until it is on its device."""
    return {"features": stored[""]} | ({"scale": stored[SCALE]} if SCALE in stored else {})


def broken_position(stored: Mapping[str, Tensor]) -> int | None:
    """The first token whose features are not finite; fp8 is decoded only where something looks like it."""
    if SCALE in stored:
        nan = (stored[""].view(torch.uint8) & 0x7F) == 0x7F
        if not bool(nan.any()) and bool((stored[SCALE].float() < LARGE_SCALE).all()):
            return None
    return first_broken(decode(stored))


def rounded(features: Tensor, dtype: FeatureDtype) -> Tensor:
    """What features [T, H] are once they were stored and read."""
    return decode(encode(features, dtype))


def stored_features(file: Any, key: str) -> dict[str, Tensor]:
    """What an open safetensors file holds of a row's features."""
    values = file.get_tensor(key)
    coded = values.dtype == torch.float8_e4m3fn
    return {"": values, SCALE: file.get_tensor(key + SCALE)} if coded else {"": values}


class FeatureFiles:
    """The safetensors files of a directory of features, each opened once in each process: a forked reader must not
    share its parent's, and a spawned one gets none."""

    def __init__(self, directory: Path, remedy: str):
        """remedy: for a file that cannot be read."""
        self._directory, self._remedy = Path(directory), remedy
        self._files: dict[tuple[int, str], Any] = {}

    def keys(self, name: str) -> list[str]:
        """Rows of a file."""
        return [key for key in self._open(name).keys() if not key.endswith(SCALE)]  # noqa: SIM118 (it is no mapping)

    def read(self, name: str, key: str, row: str) -> dict[str, Tensor]:
        """A row's features as they are stored. row: what a user knows it by.

        Raises:
            InputError: the file is damaged, or a number in it is not finite.
        """
        stored = stored_features(self._open(name), key)
        position = broken_position(stored)
        if position is not None:
            found = f"NaN or infinity in {row}, position {position}"
            remedy = "Its target was broken, or it was damaged: check the target, delete the file and make it again."
            raise InputError(str(self._directory / name), found, "finite features", remedy)
        return stored

    def _open(self, name: str) -> Any:
        place = (os.getpid(), name)
        if place not in self._files:
            path = self._directory / name
            try:
                self._files[place] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(str(path), f"unreadable ({error})", "a safetensors shard", self._remedy) from error
        return self._files[place]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


def token_bytes(hidden_size: int, dtype: FeatureDtype) -> int:
    """Bytes of one token's features."""
    return 2 * hidden_size if dtype == "bf16" else hidden_size + 2


def fields(dtype: FeatureDtype) -> tuple[Field, ...]:
    """What a manifest says of the tensors."""
    if dtype == "bf16":
        return (Field("features", "bfloat16", ("T", "H")),)
    return Field("features", "float8_e4m3fn", ("T", "H")), Field("features.scale", "bfloat16", ("T",))
