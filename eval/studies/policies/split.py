"""Which prompts settings are chosen on, and which are reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from draftsmith.data.progress import say
from draftsmith.data.text.sources import named_split
from draftsmith.eval.bench.prompts import BenchPrompt, has_splits, kept_rows, read_prompts
from draftsmith.eval.studies.overlap import texts_of
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.eval.studies.policies.study import PoliciesConfig

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
