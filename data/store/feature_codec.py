"""Storage of hidden states: bf16 unchanged, or fp8 with one scale per token, which is half the bytes.

fp8 is float8_e4m3fn: 4 significant bits and an exponent range of 2^-9 to 448. A token's scale is a power of two, so
dividing by it loses nothing and a decoded value is exact in bf16: readers get bf16 either way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.data.settings import FeatureDtype
from draftsmith.data.store.manifest import Field
from draftsmith.modules.finite import first_broken
from draftsmith.modules.types import InputError

# Key suffix of the scales that belong to a row's fp8 values.
SCALE = ".scale"
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# Below it, neither a decoded value nor the sum of 2^20 of them is infinite.
LARGE_SCALE = 2.0**96


def encode(features: Tensor, dtype: FeatureDtype) -> dict[str, Tensor]:
    """Return what is stored of features [T, H]: tensors by the suffix of their key.

    fp8: a token's scale is the smallest power of two that brings its values into fp8's range (1 where all are 0).
    |decoded - x| <= 2^-4 |x|, and at most 2^-10 of the token's scale for values below 2^-6 of it; the scale is at most
    2^-7.8 of the token's largest magnitude. A token with an infinity or a NaN becomes NaN.
    """
    if dtype == "bf16":
        return {"": features.to(torch.bfloat16)}
    values = features.float()
    largest = values.abs().amax(-1)  # [T]
    # log2 would round near powers of two; frexp is exact: m * 2^e with m in [0.5, 1).
    mantissa, exponent = torch.frexp(largest / FP8_MAX)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(-126, 127)
    scale = torch.where(largest > 0, torch.exp2(exponent.float()), 1.0)
    # fp8 has no infinity: converting one would clip it at 448.
    scale = torch.where(largest.isfinite(), scale, math.nan)
    return {"": (values / scale[:, None]).to(torch.float8_e4m3fn), SCALE: scale.to(torch.bfloat16)}


def decode(stored: Mapping[str, Tensor]) -> Tensor:
    """Decode what `encode` returned to features [T, H] in bf16."""
    return decoded(stored[""], stored.get(SCALE))


def decoded(values: Tensor, scale: Tensor | None) -> Tensor:
    """Decode values [..., H] with their scales [...], if any, to bf16. Exact, so all devices give the same bits."""
    return values if scale is None else (values.float() * scale.float()[..., None]).to(torch.bfloat16)


def as_item(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a sample's fields, named as in `FeatureBatch`; fp8 is decoded later, on the training's device."""
    return {"features": stored[""]} | ({"scale": stored[SCALE]} if SCALE in stored else {})


def broken_position(stored: Mapping[str, Tensor]) -> int | None:
    """Return the first token whose features are not finite. fp8 is decoded only if its bits show a NaN."""
    if SCALE in stored:
        nan = (stored[""].view(torch.uint8) & 0x7F) == 0x7F
        if not bool(nan.any()) and bool((stored[SCALE].float() < LARGE_SCALE).all()):
            return None
    return first_broken(decode(stored))


class FeatureFiles:
    """The safetensors files of a feature directory, each opened once per process.

    Before each read a file's size and time are compared: files are mapped, and the system ends a process that reads
    what was cut off meanwhile.
    """

    def __init__(self, directory: Path):
        self._directory = Path(directory).resolve()
        self._files: dict[tuple[int, str], Any] = {}
        self._stamps = {path.name: _stamp(path) for path in self._directory.glob("*.safetensors")}

    def keys(self, name: str) -> list[str]:
        """Return the row keys of a file."""
        return [key for key in self._open(name).keys() if not key.endswith(SCALE)]  # noqa: SIM118 (it is no mapping)

    def read(self, name: str, key: str, row: str) -> dict[str, Tensor]:
        """Read a row's encoded features. row: names the row in errors.

        Raises:
            InputError: the file is damaged, or a number in it is not finite.
        """
        file = self._open(name)
        # The stored dtype says how a row is encoded.
        stored = {"": file.get_tensor(key).clone()}
        if stored[""].dtype == torch.float8_e4m3fn:
            stored[SCALE] = file.get_tensor(key + SCALE).clone()
        position = broken_position(stored)
        if position is not None:
            found = f"NaN or infinity in {row}, position {position}"
            remedy = "Its target was broken, or it was damaged: check the target, delete the file and make it again."
            raise InputError(str(self._directory / name), found, "finite features", remedy)
        return stored

    def close(self, name: str) -> None:
        """Forget a file of this process, which is about to be deleted."""
        self._files.pop((os.getpid(), name), None)

    def _open(self, name: str) -> Any:
        # Per process: a forked reader must not share its parent's file, and a spawned one gets none.
        process_file, path = (os.getpid(), name), self._directory / name
        # A file that was deleted or replaced stays readable for those who have it open.
        now = _stamp(path)
        known = self._stamps.setdefault(name, now) if now else None
        replaced = now and known and now[0] != known[0] and process_file in self._files
        if now != known and not replaced:
            remedy = "Make it again if it is damaged, and give this command again."
            raise InputError(str(path), "another content than at the beginning", "a file at rest", remedy)
        if process_file not in self._files:
            try:
                self._files[process_file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                remedy = "Delete it, and give the command that wrote it again."
                raise InputError(str(path), f"unreadable ({error})", "a safetensors shard", remedy) from error
        return self._files[process_file]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a file's number on its disk, size and time of change; None if there is none."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    return None


def token_bytes(hidden_size: int, dtype: FeatureDtype) -> int:
    """Return the bytes of one token's features."""
    return 2 * hidden_size if dtype == "bf16" else hidden_size + 2


def fields(dtype: FeatureDtype) -> tuple[Field, ...]:
    """Return the manifest's fields for the tensors."""
    if dtype == "bf16":
        return (Field("features", "bfloat16", ("T", "H")),)
    return Field("features", "float8_e4m3fn", ("T", "H")), Field("features.scale", "bfloat16", ("T",))
