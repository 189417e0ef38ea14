"""Which prompts settings are chosen on, which are reported, and how much of an answer stands in the text that heads
were trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from draftsmith.data.console import log_note
from draftsmith.data.store.manifest import open_artefact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.repetition import Repetition
from draftsmith.data.text.sources import named_split
from draftsmith.eval.bench.prompts import BenchPrompt, has_splits, kept_rows, read_prompts
from draftsmith.eval.replay.rollouts import TargetAnswer
from draftsmith.eval.studies.policies.settings import PoliciesConfig
from draftsmith.modules.types import InputError

HASHED_TOGETHER = 2**18  # tokens
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
    log_note(
        f"Settings are chosen on {len(dev)} prompts of the last {total - reported}; the first {limit} are reported."
    )
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


class KnownGrams:
    """The n-grams of some texts: 8 bytes for each that differs, and 32 while the table is made, whatever n is.

    Each is kept as 64 bits that are drawn from its tokens. Of N known ones an unknown one is among them by mistake with
    a probability of N / 2^64: 5e-11 of a thousand million.
    """

    def __init__(self, texts: Iterable[Sequence[int]], n: int):
        self._n = n
        parts = [np.unique(_hashes(together, n)) for together in _batched(texts)]
        self._hashes = np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *parts]))

    def __len__(self) -> int:
        return len(self._hashes)

    def share(self, tokens: Sequence[int]) -> float:
        """Of the n-grams of these tokens those that are known; 0 of fewer than n tokens."""
        own = _hashes([tokens], self._n)
        places = np.searchsorted(self._hashes, own)
        found = places < len(self._hashes)
        found[found] = self._hashes[places[found]] == own[found]
        return float(found.mean()) if len(own) else 0.0


def _batched(texts: Iterable[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """As many texts together as have HASHED_TOGETHER tokens."""
    together, count = list[Sequence[int]](), 0
    for tokens in texts:
        together.append(tokens)
        count += len(tokens)
        if count >= HASHED_TOGETHER:
            yield together
            together, count = [], 0
    if together:
        yield together


def _hashes(texts: Sequence[Sequence[int]], n: int) -> np.ndarray:
    """64 bits of every n tokens that follow each other in one of the texts."""
    lengths = np.array([len(tokens) for tokens in texts], dtype=np.int64)
    tokens = np.concatenate([np.asarray(own, dtype=np.uint64) for own in texts])
    left = lengths.cumsum().repeat(lengths) - np.arange(len(tokens))  # to the end of its text, with this one
    starts = np.flatnonzero(left >= n)
    bits = np.zeros(len(starts), dtype=np.uint64)
    for i in range(n):
        bits = _mixed(bits + tokens[starts + i] + np.uint64(0x9E3779B97F4A7C15))
    return bits


def _mixed(bits: np.ndarray) -> np.ndarray:
    """One to one, each bit of the outcome depending on all (SplitMix64's finalizer: Steele, Lea and Flood 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def copied_shares(prompts: Iterable[BenchPrompt], answers: Iterable[TargetAnswer]) -> list[float]:
    """Of each answer, the share of its tokens that go on with a repetition of its prompt or of itself."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        mask = [False] * len(prompt.prompt_ids) + [True] * len(answer.tokens)
        shares = Repetition.of([([*prompt.prompt_ids, *answer.tokens], mask)])
        found.append(shares.from_prompt + shares.from_answer)
    return found
