"""Which prompts settings are chosen on, which are reported, and how much of an answer stands in the text that heads
were trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftsmith.data.progress import say
from draftsmith.data.store.manifest import open_artefact
from draftsmith.data.store.shards import Rows
from draftsmith.data.text.sources import named_split
from draftsmith.eval.bench.prompts import BenchPrompt, has_splits, kept_rows, read_prompts
from draftsmith.eval.studies.policies.settings import PoliciesConfig
from draftsmith.modules.types import InputError

Gram = tuple[int, ...]
HELD_OUT = 4  # one prompt in so many, the last ones, where no split says which are for choosing


def parted(config: PoliciesConfig) -> tuple[list[BenchPrompt], PoliciesConfig]:
    """The dev prompts, and the settings with which the reported ones are read: none is in both.

    Prompts of dev_prompts, where it is given; else those of dev_split. Where that is no other split than the reported
    one, or the prompts have no splits, the last quarter is for choosing.

    Raises:
        InputError: prompts that would be in both, too few to part, or none.
    """
    splits = has_splits(config.prompts, config.target)
    split = named_split(config.split) if splits else None
    config = dataclasses.replace(config, split=split)
    if config.dev_prompts is not None:
        dev_split = named_split(config.dev_split) if has_splits(config.dev_prompts, config.target) else None
        return chosen_on(config, config.dev_prompts, dev_split), config
    dev_split = named_split(config.dev_split) if splits else None
    if dev_split == split:
        return hold_out(config)
    if split is None or dev_split is None:
        found = f"{config.dev_split or 'none'}, with split {config.split or 'none'}: the same prompts would be in both"
        remedy = "Name two splits, none for both (the last quarter is held out then), or pass --dev-prompts."
        raise InputError("dev_split", found, "other prompts than the reported ones", remedy)
    return chosen_on(config, config.prompts, dev_split), config


def chosen_on(config: PoliciesConfig, source: str, split: str | None, skip: int = 0) -> list[BenchPrompt]:
    return read_prompts(source, config.target, split, config.keep_tasks, config.dev_limit, skip=skip)


def hold_out(config: PoliciesConfig) -> tuple[list[BenchPrompt], PoliciesConfig]:
    """The last quarter of the prompts for choosing; of the others as many as are to be reported."""
    total = sum(1 for _ in kept_rows(config.prompts, config.target, config.split, config.keep_tasks))
    if total < 2:
        found = f"{total} prompt in {config.prompts}"
        raise InputError("prompts", found, "two or more, some to choose settings on", "Pass --dev-prompts.")
    reported = total - -(-total // HELD_OUT)
    dev = chosen_on(config, config.prompts, config.split, skip=reported)
    limit = min(config.limit or reported, reported)
    say(f"Settings are chosen on {len(dev)} prompts of the last {total - reported}; the first {limit} are reported.")
    return dev, dataclasses.replace(config, limit=limit, bench_limit=min(config.bench_limit, limit))


def training_texts(config: PoliciesConfig) -> Iterator[Sequence[int]]:
    """What heads were trained on, as token ids; nothing where nobody says it."""
    for directory in config.train_text:
        yield from texts_of(directory)
    train_split = named_split(config.train_split)
    if not config.train_text and train_split is not None and has_splits(config.prompts, config.target):
        for prompt in read_prompts(config.prompts, config.target, train_split):
            yield prompt.prompt_ids


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


def ngrams_of(tokens: Sequence[int], n: int) -> Iterator[Gram]:
    """Every n tokens that follow each other."""
    return zip(*(tokens[i:] for i in range(n)), strict=False)


def overlap(tokens: Sequence[int], known: set[Gram], n: int) -> float:
    """Share of the n-grams of these tokens that are known; 0 of fewer than n tokens."""
    grams = list(ngrams_of(tokens, n))
    return sum(gram in known for gram in grams) / len(grams) if grams else 0.0


def known_grams(texts: Iterable[Sequence[int]], n: int) -> set[Gram]:
    return {gram for tokens in texts for gram in ngrams_of(tokens, n)}


def least_third(overlaps: Sequence[float]) -> NDArray[np.bool_]:
    """[N]: the third (rounded up) with the least overlap, of equal ones the first."""
    order = np.argsort(np.asarray(overlaps), kind="stable")
    chosen = np.zeros(len(order), bool)
    chosen[order[: -(-len(order) // 3)]] = True
    return chosen
