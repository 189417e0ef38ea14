"""Batches of a training: the samples of every step, on every rank, as a function of the seed and the step alone.

A step's batch is global: it has the same samples for any number of devices and micro-batches. A resumed run starts at
the step it had reached, in the middle of an epoch or not. Lightning sees the whole training as one epoch whose batches
are steps, so its batch index is the step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from draftsmith.data.store.datasets import (
    BATCH_COLUMNS,
    TEXT_COLUMNS,
    TURN,
    ArtifactDataset,
    collate_features,
    is_held_out,
    open_dataset,
    pack_features,
    prompt_hash,
)
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import gathered, num_ranks, rank, say_on_rank_zero
from draftsmith.train.strategies import device_kind

# Samples of so many steps are sorted by length together: enough to save padding, few enough to stay random.
STEPS_SORTED_TOGETHER = 32


@dataclass(frozen=True)
class SampleKey:
    """Sample to read. A filler only keeps a rank busy: nothing of it counts in the loss."""

    epoch: int
    index: int
    filler: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """Samples that one rank computes at once: a part of a step's batch.

    data: dataclass of tensors that the collate function made. keys, lengths: its samples, and the tokens of each
    without padding. tokens: tokens that count in its loss. logit_rows: positions that the
    loss makes logits for, if the host has counted them. spans: its loss is computed for each of these ranges of packed
    tokens alone (`TrainStep.span`). The last one is repeated where another rank has more, and counts once.
    """

    data: Any
    keys: tuple[SampleKey, ...]
    lengths: tuple[int, ...]
    tokens: float = 0
    logit_rows: int | None = None
    spans: tuple[tuple[int, int] | None, ...] = (None,)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on the device. Copies from pinned memory are asynchronous."""
        return self._each_tensor(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """Return a copy in pinned memory; `DataLoader` calls it."""
        return self._each_tensor(Tensor.pin_memory)

    def _each_tensor(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        tensors = {name: change(value) for name, value in vars(self.data).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, data=dataclasses.replace(self.data, **tensors))

    @property
    def real_lengths(self) -> list[int]:
        """Tokens of each sample, without fillers."""
        return [length for key, length in zip(self.keys, self.lengths, strict=True) if not key.filler]

    @property
    def samples(self) -> list[int]:
        """Numbers of the samples, without fillers."""
        return [key.index for key in self.keys if not key.filler]


class Order:
    """Samples of every step, shuffled anew in each epoch by (seed, epoch) alone.

    A step holds `batch_size` samples, fewer at the end of an epoch. With `tokens_per_batch`, an epoch's tokens are cut
    into equal steps of about that many, give or take a sample.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, seed: int, batch_size: int, tokens_per_batch: int = 0):
        """lengths: tokens of each sample.

        Raises:
            InputError: a sample is longer than a step may be.
        """
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.seed, self.batch_size, self.tokens_per_batch = seed, batch_size, tokens_per_batch
        count, longest = len(self.lengths), int(self.lengths.max(initial=0))
        if tokens_per_batch and longest > tokens_per_batch:
            expected = f"at least {longest}, the longest sample"
            raise InputError("tokens_per_batch", tokens_per_batch, expected, "Raise it, or split with --max-length.")
        by_tokens = min(count, -(-int(self.lengths.sum()) // max(1, tokens_per_batch)))
        self.steps_per_epoch = by_tokens if tokens_per_batch else -(-count // batch_size)
        self._cached: tuple[int, np.ndarray, np.ndarray] | None = None

    def step(self, step: int) -> tuple[int, list[int]]:
        """Return the epoch and the sample numbers of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, *self._epoch(epoch))
        _, order, bounds = self._cached
        start, stop = bounds[position]
        return epoch, order[start:stop].tolist()

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the samples [N], and the first and last place of each step in it [steps, 2]."""
        rng = random.Random(f"{self.seed}/{epoch}")
        order = _shuffled(len(self.lengths), rng)

        # Sort windows by length. Where steps are cut by tokens one may straddle two windows: sort up and down in turn.
        per_step = -(-len(order) // self.steps_per_epoch) if self.tokens_per_batch else self.batch_size
        for number, start in enumerate(range(0, len(order), STEPS_SORTED_TOGETHER * per_step)):
            window = order[start : start + STEPS_SORTED_TOGETHER * per_step]
            lengths = self.lengths[window]
            downwards = bool(self.tokens_per_batch) and number % 2 == 1
            window[:] = window[np.argsort(-lengths if downwards else lengths, kind="stable")]

        edges = np.arange(self.steps_per_epoch + 1)
        if self.tokens_per_batch:
            # Steps of equal tokens: a sample belongs to the step that its middle falls into.
            lengths = self.lengths[order]
            middle = lengths.cumsum() - lengths / 2
            steps = (middle * self.steps_per_epoch / lengths.sum()).astype(np.int64)
            cuts = np.searchsorted(steps, edges)
            # A very long sample can cover a whole step and leave it empty.
            if (np.diff(cuts) == 0).any():
                cuts = np.linspace(0, len(order), self.steps_per_epoch + 1).astype(np.int64)
        else:
            cuts = np.minimum(edges * self.batch_size, len(order))
        bounds = np.stack([cuts[:-1], cuts[1:]], axis=1)
        return order, bounds[_shuffled(len(bounds), rng)]


def _shuffled(count: int, rng: random.Random) -> np.ndarray:
    """Return 0 to count - 1 as `rng` shuffles a list of them, in 8 bytes each."""
    numbers = array("q", range(count))
    rng.shuffle(numbers)
    return np.frombuffer(numbers, dtype=np.int64)


def rank_keys(
    order: Order, start: int, stop: int, own_rank: int, ranks: int, accumulate: int
) -> Iterator[tuple[SampleKey, ...]]:
    """Yield the samples of each micro-batch of this rank, from step `start` to before `stop`."""
    for step in range(start, stop):
        epoch, batch = order.step(step)
        for part in range(accumulate):
            # Strided, so that samples of similar length spread evenly over ranks and micro-batches.
            own = batch[part * ranks + own_rank :: ranks * accumulate]
            yield tuple(SampleKey(epoch, i) for i in own) or (SampleKey(epoch, batch[0], filler=True),)


def cut_spans(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut packed sequences of these lengths into spans of at most `most` tokens.

    Each is several whole sequences, or one of equal parts of a longer one.
    """
    spans: list[tuple[int, int]] = []
    start, whole = 0, False  # whole: the last span has whole sequences
    for length in lengths:
        stop, parts = start + length, -(-length // most)
        if whole and stop - spans[-1][0] <= most:
            spans[-1] = (spans[-1][0], stop)
        else:
            edges = [start + length * i // parts for i in range(parts + 1)]
            spans += itertools.pairwise(edges)
            whole = parts == 1
        start = stop
    return spans


def with_spans(parts: Sequence[MicroBatch], order: Order, step: int, most: int) -> list[MicroBatch]:
    """Cut this rank's packed micro-batches of a step into spans, as many on every rank: ZeRO exchanges gradients in
    every backward."""
    ranks, cut = num_ranks(), []
    keys = [rank_keys(order, step, step + 1, number, ranks, len(parts)) for number in range(ranks)]
    for part, all_ranks in zip(parts, zip(*keys, strict=True), strict=True):
        count = max(len(cut_spans([int(order.lengths[key.index]) for key in own], most)) for own in all_ranks)
        spans = cut_spans(part.lengths, most)
        spans += spans[-1:] * (count - len(spans))
        cut.append(dataclasses.replace(part, spans=tuple(spans)) if count > 1 else part)
    return cut


class Samples(Dataset):
    """Some rows of a dataset, numbered 0, 1, ..., as training reads them.

    lengths: tokens of each sample, [N] int64. collate: turns items, dictionaries with a `loss_mask`, into a dataclass
    of tensors. count: tokens of such a batch that count in the loss. logit_rows: positions
    of such a batch that the loss makes logits for. stream: server of features, which is given the keys of coming
    samples (`features.FeatureStream`).
    """

    collate: Callable[[list[Any]], Any]
    count: Callable[[Any], float]
    logit_rows: Callable[[Any], int] | None = None
    stream: Any = None

    def __init__(self, dataset: Any, indices: Sequence[int] | np.ndarray):
        self.dataset, self.indices = dataset, np.asarray(indices, dtype=np.int64)
        self.lengths = np.asarray(dataset.lengths, dtype=np.int64)[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, keys: tuple[SampleKey, ...]) -> MicroBatch:
        """Read a micro-batch. Keys hold the epoch, so that reader processes need not agree on one."""
        items = []
        for key in keys:
            item = self.item(key.index, key.epoch)
            items.append({**item, "loss_mask": torch.zeros_like(item["loss_mask"])} if key.filler else item)
        data, lengths = self.collate(items), tuple(self.lengths[[key.index for key in keys]].tolist())
        logit_rows = None if self.logit_rows is None else self.logit_rows(data)
        return MicroBatch(data, keys, lengths, self.count(data), logit_rows)

    def item(self, index: int, epoch: int) -> dict[str, Tensor]:
        item = self.dataset.item(int(self.indices[index]), epoch)
        return item if self.stream is None else {**item, **self.stream.item(item["input_ids"])}

    def text(self, index: int) -> Tensor:
        """Return the token ids [T] of a sample of texts."""
        return self.dataset.item(int(self.indices[index]), 0)["input_ids"]

    def name(self, index: int) -> str:
        """Return the id that users know a sample by."""
        return self.dataset.name(int(self.indices[index]))


class ListedRows:
    """Dataset of rows in memory, `{"input_ids": [T], "loss_mask": [T]}`.

    Each is a conversation of its own, but for rows of one session, which have the same `id` up to the turn, and `turn`.

    digest: hash of their texts, and of their features if they bring any. id_range: smallest and largest token id.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        """rows: tensors, arrays or lists.

        Raises:
            InputError: something else.
        """
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise InputError("data", type(rows).__name__, "a sequence of rows", "Pass list(rows).")
        self.rows, digest, ids = rows, hashlib.sha256(), list[Tensor]()
        # Of each row its session, and of each session its first turn and the row that has it.
        sessions, first = list[str](), dict[str, tuple[int, int]]()
        for number in range(len(rows)):
            item = self.item(number, 0)
            in_session = "id" in item and "turn" in item
            sessions.append(TURN.sub("", str(item["id"])) if in_session else f"row {number}")
            turn = int(item["turn"]) if in_session else 1, number
            first[sessions[-1]] = min(first.get(sessions[-1], turn), turn)
            for name in (name for name in BATCH_COLUMNS if name in item):
                digest.update(f"{name} {item[name].dtype} {list(item[name].shape)}".encode())
                digest.update(item[name].contiguous().view(torch.uint8).numpy().tobytes())
            ids.append(item["input_ids"])
        self.digest = digest.hexdigest()
        self.lengths = np.array([len(row) for row in ids], dtype=np.int64)
        begins = [first[name][1] for name in sessions]
        self.hashes = np.array([prompt_hash(*text) for text in self.whole_texts(begins)], dtype=np.uint64)
        self.id_range = tuple(map(int, torch.cat(ids).aminmax())) if ids else (0, 0)

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, row: int, epoch: int) -> dict[str, Tensor]:
        """Return a row with tensors, ids int64 and the mask bool."""
        remedy = "Each row is {'input_ids': [T], 'loss_mask': [T]}, the mask true on answers (labels != -100)."
        try:
            item = dict(self.rows[row])
            item |= {name: torch.as_tensor(item[name]) for name in BATCH_COLUMNS if name in item}
            given = [item[name] for name in TEXT_COLUMNS]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(self.name(row), repr(error), "input_ids and loss_mask", remedy) from error
        ids, mask = given[0].long(), given[1].bool()
        as_given = bool((ids == given[0]).all() and (mask == given[1]).all())
        if ids.ndim != 1 or not len(ids) or ids.shape != mask.shape or not as_given:
            found = " and ".join(f"{name} {list(item[name].shape)} {item[name].dtype}" for name in TEXT_COLUMNS)
            raise InputError(self.name(row), found, "token ids [T] and as many of 0 and 1, T at least 1", remedy)
        return {**item, "input_ids": ids, "loss_mask": mask}

    def name(self, row: int) -> str:
        return f"row {row}"

    def answer_lengths(self, rows: Iterable[int]) -> np.ndarray:
        return np.array([int(self.item(row, 0)["loss_mask"].sum()) for row in rows])

    def whole_texts(self, rows: Iterable[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for item in (self.item(row, 0) for row in rows):
            yield item["input_ids"].numpy(), item["loss_mask"].numpy()


class WholeSteps:
    """Steps of a training, each a list of this rank's micro-batches: one batch of Lightning's is one step."""

    def __init__(self, data: HeadDataModule):
        self._data, self._start = data, 0

    def __len__(self) -> int:
        """Return all steps, also those before a resumed one, as Lightning counts."""
        return self._data.total_steps

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        data, accumulate, most = self._data, self._data.config.accumulate, self._data.config.most_at_once
        keys = rank_keys(data.order, self._start, len(self), rank(), num_ranks(), accumulate)
        parts = iter(data.batches(data.train, keys))
        for step in range(self._start, len(self)):
            own = list(itertools.islice(parts, accumulate))
            yield with_spans(own, data.order, step, most) if most else own

    def state_dict(self) -> dict[str, int]:
        """Return the state that Lightning stores. Checkpoints are taken between steps only."""
        assert self._data.trainer is not None
        return {"step": self._data.trainer.global_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["step"]


def held_out(hashes: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Split sample numbers into training and validation, each with at least one sample.

    hashes: of the prompt that each sample's conversation begins with, [N] uint64. It alone decides the side, so a
    conversation keeps it whatever else is in the data, and its turns, its copies, pieces of its rows and other answers
    to it have the same. Of P prompts this holds out share * P, give or take its square root. If it holds out none, the
    one with the smallest hash is held out, which is logged.

    Raises:
        InputError: nothing is left to train on.
    """
    held = is_held_out(hashes, share)
    prompts = len(np.unique(hashes))
    if not held.any():
        held = hashes == hashes.min()
        say_on_rank_zero(f"held out: 1 of {prompts:,} different prompts; too few for --val-share {share:g}")
    if held.all():
        found, remedy = f"{prompts} different first prompts", "Make more, or pass --val."
        raise InputError("data", found, "at least 2, to hold one out", remedy)
    return np.flatnonzero(~held), np.flatnonzero(held)


def train_and_val(
    config: TrainConfig, train: Any, val: Any | None, context: int, overlap: int = 0
) -> tuple[Samples, Samples]:
    """Return training and validation samples; `val` is the dataset of --val, if there is one.

    Sequences longer than --max-length, or than the frozen model's `context`, are split into pieces that share
    `overlap` tokens.

    Raises:
        InputError: there are too few samples.
    """
    if not len(train):
        raise InputError(
            "data",
            f"{' '.join(map(str, config.parts))} without samples",
            "at least one",
            "Check the stage that made it.",
        )
    limit = min(config.max_length or context, context)

    def split(dataset: Any) -> Any:
        if int(np.max(dataset.lengths, initial=0)) <= limit:
            return dataset
        if not hasattr(dataset, "in_pieces"):
            found = f"rows of {int(np.max(dataset.lengths)):,} tokens"
            raise InputError("max_length", found, f"at most {limit:,}", "Split them, or leave max_length out.")
        sequences = f"{int((np.asarray(dataset.lengths) > limit).sum()):,} of {len(dataset):,} sequences"
        say_on_rank_zero(f"{sequences} are longer than {limit:,} tokens: split into pieces")
        return dataset.in_pieces(limit, overlap)

    train = split(train)
    if val is not None:
        val = split(val)
        if trained := int(np.isin(val.hashes, train.hashes).sum()):
            say_on_rank_zero(f"{trained:,} of {len(val):,} samples of --val begin with a prompt that is trained on too")
        return Samples(train, range(len(train))), Samples(val, range(len(val)))
    if config.val_share == 0:
        raise InputError("val_share", 0, "a share above 0, or --val", "Validation picks the best head.")
    kept, held = held_out(train.hashes, config.val_share)
    # What an epoch repeats is validated once.
    held = held[train.copies[held] == 0] if isinstance(train, ArtifactDataset) else held
    return Samples(train, kept), Samples(train, held)


class HeadDataModule(pl.LightningDataModule):
    """Training and validation batches of a head; both read samples in the order of `config.seed`, `batch_size`, ....

    total_steps: steps of the whole training.
    """

    def __init__(
        self,
        train: Any,
        val: Any | None,
        config: TrainConfig,
        collate: Callable[[list[Any]], Any] | None = None,
        count: Callable[[Any], float] | None = None,
    ):
        """train, val: `Samples`, the directory of an artifact or a list of such (`open_dataset`), or a sequence of rows
        (such as a `datasets.Dataset`), dictionaries of `input_ids` [T] and `loss_mask` [T]. Without val a share of
        train is held out (`config.val_share`). collate, count: see `Samples`; default: those of the config's drafter.

        Raises:
            InputError: there are no samples, or one is longer than a step may be.
        """
        super().__init__()
        self.config, parts = config, []
        for name, part in (("train", train), ("val", train if val is None else val)):
            if isinstance(part, str | Path) or (
                isinstance(part, list) and part and all(isinstance(d, str | Path) for d in part)
            ):
                part = open_dataset(part)
                if part.manifest.kind == "prompts" and "loss_mask" not in part.manifest.field_names:
                    raise InputError(name, "prompts without answers", "responses", "Make them: data responses.")
            if not isinstance(part, Samples):
                part = part if hasattr(part, "item") else ListedRows(part)
                part = Samples(part, range(len(part)))
            if not len(part):
                raise InputError(name, "no samples", "at least one", "Give some.")
            parts.append(part)
        self.train, self.val = parts
        if val is None:
            longest = int(self.train.lengths.max())
            self.train, self.val = train_and_val(config, self.train.dataset, None, longest)
        for samples in (self.train, self.val):
            if count is None:
                drafter = cast(Any, config).drafter
                samples.collate = pack_features if config.tokens_per_batch else collate_features
                samples.count = functools.partial(drafter.loss_count, settings=config)
                samples.logit_rows = functools.partial(drafter.logit_rows, settings=config)
            else:
                samples.collate, samples.count = collate or collate_features, count
        self.order = Order(self.train.lengths, config.seed, config.batch_size, config.tokens_per_batch)
        self.total_steps = config.num_steps(self.order.steps_per_epoch)

    def train_dataloader(self) -> WholeSteps:
        return WholeSteps(self)

    def val_dataloader(self) -> DataLoader:
        """Return this rank's share of the validation samples as they are in epoch 0, each once over all ranks.

        The longest come first, so that running out of memory shows at once. Fillers give all ranks as many batches, one
        at least: ranks agree before each of them whether to stop, and Lightning would skip a loader without batches.
        """
        lengths, shares = self.val.lengths, self.config.accumulate * num_ranks()
        order = np.argsort(-lengths, kind="stable")[rank() :: num_ranks()].tolist()
        keys: list[tuple[SampleKey, ...]] = []
        while order:
            by_tokens = self.config.tokens_per_batch // (shares * int(lengths[order[0]]))
            size = max(1, by_tokens if self.config.tokens_per_batch else self.config.batch_size // shares)
            keys.append(tuple(SampleKey(0, i) for i in order[:size]))
            order = order[size:]
        missing = max(1, *gathered(len(keys))) - len(keys)
        return self.batches(self.val, keys + [(SampleKey(0, 0, filler=True),)] * missing)

    def batches(self, samples: Samples, keys: Any) -> DataLoader:
        """Return a loader of one micro-batch for each tuple of keys; for a GPU they are in pinned memory."""
        return DataLoader(
            samples,
            batch_size=None,
            sampler=keys if samples.stream is None else PrefetchedKeys(samples, keys),
            num_workers=self.config.num_workers,
            pin_memory=device_kind(self.config) == "gpu",
        )


class PrefetchedKeys:
    """Keys of micro-batches whose features the stream is asked for ahead of time, anew in each iteration."""

    def __init__(self, samples: Samples, keys: Iterable[tuple[SampleKey, ...]]):
        self._samples, self._keys = samples, keys

    def __iter__(self) -> Iterator[tuple[SampleKey, ...]]:
        return self._samples.stream.ahead(self._samples, self._keys)
