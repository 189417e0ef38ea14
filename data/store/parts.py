"""Several artifacts as the data of one training: `PATH` or `PATH*N`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from draftsmith.modules.types import InputError

# One or several of PATH and PATH*N.
Data = str | Path | Sequence[str | Path]
WEIGHT = re.compile(r"\d+\.?\d*|\.\d+")
LARGEST_WEIGHT = 1000


class Part(NamedTuple):
    """An artifact, and how many times an epoch has its rows; a fraction takes that share of its chats."""

    path: Path
    weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.path}{self.times}"

    @property
    def times(self) -> str:
        return "" if self.weight == 1 else f"*{self.weight:.15g}"


def parts_of(data: Data) -> tuple[Part, ...]:
    """Parse PATH and PATH*N. A path may itself have a star: what is there is taken as the path that it is.

    Raises:
        InputError: none, N is no positive number, or both PATH and PATH*N are there.
    """
    words = words_of(data)
    if not words:
        raise InputError("data", "none", "an artifact's directory", "Pass --data DIR.")
    return tuple(map(part_of, words))


def words_of(data: Data) -> tuple[str, ...]:
    """Return data as texts, one for each artifact."""
    return (str(data),) if isinstance(data, str | Path) else tuple(map(str, data))


def part_of(word: str) -> Part:
    """Parse one of `parts_of`."""
    path, star, weight = word.rpartition("*")
    if not star:
        return Part(Path(word))
    if Path(word).exists():
        if WEIGHT.fullmatch(weight) and Path(path).exists():
            remedy = f"Pass {word}*1 for the first, {path}/*{weight} for the second."
            raise InputError("data", f"{word} and {path}, which are both there", "one reading", remedy)
        return Part(Path(word))
    if not path or not WEIGHT.fullmatch(weight) or not 0 < float(weight) <= LARGEST_WEIGHT:
        expected = f"DIR or DIR*N, N above 0 and at most {LARGEST_WEIGHT}, such as 2 or 0.5"
        raise InputError("data", repr(word), expected, "Correct it.")
    return Part(Path(path), float(weight))
