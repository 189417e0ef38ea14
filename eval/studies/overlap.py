"""How much of an answer stands in the text that heads were trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftsmith.data.store.manifest import open_artefact
from draftsmith.data.store.shards import Rows
from draftsmith.modules.types import InputError

Gram = tuple[int, ...]


def grams_of(tokens: Sequence[int], n: int) -> Iterator[Gram]:
    """Every n tokens that follow each other."""
    return zip(*(tokens[i:] for i in range(n)), strict=False)


def overlap(tokens: Sequence[int], known: set[Gram], n: int) -> float:
    """Share of the n-grams of these tokens that are known; 0 of fewer than n tokens."""
    grams = list(grams_of(tokens, n))
    return sum(gram in known for gram in grams) / len(grams) if grams else 0.0


def known_grams(texts: Iterable[Sequence[int]], n: int) -> set[Gram]:
    return {gram for tokens in texts for gram in grams_of(tokens, n)}


def texts_of(directory: Path) -> Iterator[list[int]]:
    """Token ids of every row of an artefact that has `input_ids`.

    Raises:
        InputError: none, or one without them.
    """
    manifest = open_artefact(directory)
    if all(field.name != "input_ids" for field in manifest.fields):
        found = f"{directory}, an artefact of {manifest.kind} without input_ids"
        raise InputError("train_text", found, "responses, features, acceptance labels or rollouts", "Name another.")
    for row in Rows(directory, manifest, ["input_ids"]).iterate():
        yield row["input_ids"]


def least_third(overlaps: Sequence[float]) -> NDArray[np.bool_]:
    """[N]: the third (rounded up) with the least overlap, of equal ones the first."""
    order = np.argsort(np.asarray(overlaps), kind="stable")
    chosen = np.zeros(len(order), bool)
    chosen[order[: -(-len(order) // 3)]] = True
    return chosen
