"""Which prompts settings are chosen on, which are reported, and how much of an answer stands in the text that heads
were trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from draftsmith.data.progress import say
from draftsmith.data.store.manifest import open_artefact
from draftsmith.data.store.shards import Rows
from draftsmith.data.text.repetition import Repetition
from draftsmith.data.text.sources import named_split
from draftsmith.eval.bench.prompts import BenchPrompt, has_splits, kept_rows, read_prompts
from draftsmith.eval.replay.rollouts import TargetAnswer
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
    config = dataclasses.replace(config, split=named_split(config.split) if splits else None)
    source = config.dev_prompts or config.prompts
    dev_splits = splits if config.dev_prompts is None else has_splits(source, config.target)
    dev_split = named_split(config.dev_split) if dev_splits else None
    if config.dev_prompts is None and dev_split == config.split:
        return hold_out(config)
    if config.dev_prompts is None and None in (config.split, dev_split):
        found = f"{config.dev_split or 'none'}, with split {config.split or 'none'}: the same prompts would be in both"
        remedy = "Name two splits, none for both (the last quarter is held out then), or pass --dev-prompts."
        raise InputError("dev_split", found, "other prompts than the reported ones", remedy)
    return read_prompts(source, config.target, dev_split, config.keep_tasks, config.dev_limit), config


def hold_out(config: PoliciesConfig) -> tuple[list[BenchPrompt], PoliciesConfig]:
    """The last quarter of the prompts for choosing; of the others as many as are to be reported."""
    source = config.prompts, config.target, config.split, config.keep_tasks
    total = sum(1 for _ in kept_rows(*source))
    if total < 2:
        found = f"{total} prompt in {config.prompts}"
        raise InputError("prompts", found, "two or more, some to choose settings on", "Pass --dev-prompts.")
    reported = total - -(-total // HELD_OUT)
    dev = read_prompts(*source, config.dev_limit, skip=reported)
    limit = min(config.limit or reported, reported)
    say(f"Settings are chosen on {len(dev)} prompts of the last {total - reported}; the first {limit} are reported.")
    return dev, dataclasses.replace(config, limit=limit, bench_limit=min(config.bench_limit, limit))


def training_texts(config: PoliciesConfig) -> Iterator[Sequence[int]]:
    """What heads were trained on, as token ids; nothing where nobody says it.

    Raises:
        InputError: what is no artefact, or one without `input_ids`.
    """
    for directory in config.train_text:
        manifest = open_artefact(directory)
        if all(field.name != "input_ids" for field in manifest.fields):
            found = f"{directory}, an artefact of {manifest.kind} without input_ids"
            raise InputError("train_text", found, "responses, features, acceptance labels or rollouts", "Name another.")
        for row in Rows(directory, manifest, ["input_ids"]).iterate():
            yield row["input_ids"]
    train_split = named_split(config.train_split)
    if not config.train_text and train_split is not None and has_splits(config.prompts, config.target):
        for prompt in read_prompts(config.prompts, config.target, train_split):
            yield prompt.prompt_ids


def ngrams_of(tokens: Sequence[int], n: int) -> Iterator[Gram]:
    """Every n tokens that follow each other."""
    return zip(*(tokens[i:] for i in range(n)), strict=False)


def overlap(tokens: Sequence[int], known: set[Gram], n: int) -> float:
    """Share of the n-grams of these tokens that are known; 0 of fewer than n tokens."""
    grams = list(ngrams_of(tokens, n))
    return sum(gram in known for gram in grams) / len(grams) if grams else 0.0


def known_grams(texts: Iterable[Sequence[int]], n: int) -> set[Gram]:
    return {gram for tokens in texts for gram in ngrams_of(tokens, n)}


def copied_shares(prompts: Iterable[BenchPrompt], answers: Iterable[TargetAnswer]) -> list[float]:
    """Of each answer, the share of its tokens that go on with a repetition of its prompt or of itself."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        mask = [False] * len(prompt.prompt_ids) + [True] * len(answer.tokens)
        shares = Repetition.of([([*prompt.prompt_ids, *answer.tokens], mask)])
        found.append(shares.from_prompt + shares.from_answer)
    return found
