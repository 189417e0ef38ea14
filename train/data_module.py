"""Which samples make up which step, on which rank: a function of the seed and the step, and of nothing else.

A step's batch is global: the same samples whatever the number of devices and of accumulated parts. A run that is
continued starts at the step it had reached, in the middle of an epoch or not. For Lightning the whole training is one
epoch, so that its own bookkeeping of epochs, which cannot continue in the middle of one, is never asked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import say_on_rank_zero
from draftsmith.train.strategies import device_kind

# Steps whose samples are sorted by length together: enough for little padding, few enough to stay random.
STEPS_SORTED_TOGETHER = 32


@dataclass(frozen=True)
class Key:
    """A sample to read. `filler`: it only keeps a rank busy, so nothing of it counts in the loss."""

    epoch: int
    index: int
    filler: bool = False


@dataclass(frozen=True)
class Part:
    """What one rank computes at once: a part of a step's batch.

    data: what the dataset's collate made of the samples. keys: which they are. tokens: how many of its tokens count in
    the loss, or the sum of their weights; step_tokens: in all parts of this step on this rank. first, last: of this
    step. chosen: how many positions the loss is made at (`DraftHead.num_chosen`), if it was counted.
    """

    data: Any
    keys: tuple[Key, ...]
    tokens: float
    step_tokens: float
    first: bool
    last: bool
    chosen: int | None = None

    @property
    def indices(self) -> list[int]:
        """Numbers of its samples, fillers aside."""
        return [key.index for key in self.keys if not key.filler]


class Collated(NamedTuple):
    """What a dataset's collate made of some samples, a dataclass, and which they are."""

    keys: tuple[Key, ...]
    data: Any

    def pin_memory(self) -> Collated:
        """With its tensors in pinned memory, which a `DataLoader` asks of whatever it does not know."""
        return self._replace(data=_each_tensor(self.data, Tensor.pin_memory))


def _each_tensor(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass with its tensors changed."""
    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    changed = {name: change(value) for name, value in fields.items() if isinstance(value, Tensor)}
    return dataclasses.replace(data, **changed)


def move(part: Part, device: torch.device) -> Part:
    """The part with its tensors on the device; from pinned memory nothing waits for that."""
    moved = _each_tensor(part.data, lambda tensor: tensor.to(device, non_blocking=True))
    return dataclasses.replace(part, data=moved)


class Order:
    """The samples of every step: shuffled anew in each epoch, by (seed, epoch) alone.

    A step holds `batch_size` samples, the last one of an epoch may hold fewer; or, with `tokens_per_batch`, as many
    whole samples as come near to that number of tokens: an epoch's tokens are cut into equal steps of at most so many,
    give or take a sample.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        seed: int,
        batch_size: int,
        tokens_per_batch: int = 0,
        group_by_length: bool = True,
    ):
        """lengths: tokens of each sample. group_by_length: put like with like.

        Raises:
            InputError: a sample is longer than a step may be.
        """
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.seed, self.batch_size, self.tokens_per_batch = seed, batch_size, tokens_per_batch
        self.group_by_length = group_by_length
        count, longest = len(self.lengths), int(self.lengths.max(initial=0))
        if tokens_per_batch and longest > tokens_per_batch:
            expected = f"at least {longest}, the longest sample"
            raise InputError("tokens_per_batch", tokens_per_batch, expected, "Raise it, or split with --max-length.")
        by_tokens = min(count, -(-int(self.lengths.sum()) // max(1, tokens_per_batch)))
        self.steps_per_epoch = by_tokens if tokens_per_batch else -(-count // batch_size)
        self._cached: tuple[int, np.ndarray, np.ndarray] | None = None

    def step(self, step: int) -> tuple[int, list[int]]:
        """The epoch and the sample numbers of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, *self._batches(epoch))
        _, order, bounds = self._cached
        start, stop = bounds[position]
        return epoch, order[start:stop].tolist()

    def _batches(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples in an order [N], and where in it each step begins and ends [steps, 2]."""
        rng = random.Random(f"{self.seed}/{epoch}")
        order = _shuffled(len(self.lengths), rng)
        if self.group_by_length:
            self._group(order)
        if self.tokens_per_batch:
            cuts = self._cuts(order)
        else:
            cuts = np.minimum(np.arange(self.steps_per_epoch + 1) * self.batch_size, len(order))
        bounds = np.stack([cuts[:-1], cuts[1:]], axis=1)
        return order, bounds[_shuffled(len(bounds), rng)] if self.group_by_length else bounds

    def _group(self, order: np.ndarray) -> None:
        """Sort within windows of STEPS_SORTED_TOGETHER steps; up and down in turn where steps may straddle two."""
        per_step = -(-len(order) // self.steps_per_epoch) if self.tokens_per_batch else self.batch_size
        for number, start in enumerate(range(0, len(order), STEPS_SORTED_TOGETHER * per_step)):
            window = order[start : start + STEPS_SORTED_TOGETHER * per_step]
            lengths = self.lengths[window]
            downwards = bool(self.tokens_per_batch) and number % 2 == 1
            window[:] = window[np.argsort(-lengths if downwards else lengths, kind="stable")]

    def _cuts(self, order: np.ndarray) -> np.ndarray:
        """Where steps of equal tokens begin and the last one ends: a sample belongs to the step that its middle falls
        into."""
        lengths = self.lengths[order]
        middle = lengths.cumsum() - lengths / 2
        steps = (middle * self.steps_per_epoch / lengths.sum()).astype(np.int64)
        cuts = np.searchsorted(steps, np.arange(self.steps_per_epoch + 1))
        if (np.diff(cuts) == 0).any():  # very unlike lengths: a long sample fills a step and covers the next one
            cuts = np.linspace(0, len(order), self.steps_per_epoch + 1).astype(np.int64)
        return cuts


def _shuffled(count: int, rng: random.Random) -> np.ndarray:
    """0 to count - 1, as `rng` shuffles a list of them, in 8 bytes each."""
    numbers = array("q", range(count))
    rng.shuffle(numbers)
    return np.frombuffer(numbers, dtype=np.int64)


def order_of(config: TrainConfig, lengths: Sequence[int] | np.ndarray) -> Order:
    """The steps of a training on samples of these lengths."""
    return Order(lengths, config.seed, config.batch_size, config.tokens_per_batch, config.group_by_length)


def rank_keys(
    order: Order, start: int, stop: int, rank: int, num_ranks: int, accumulate: int
) -> Iterator[tuple[Key, ...]]:
    """The samples of each part of this rank, from step `start` to before `stop`."""
    for step in range(start, stop):
        epoch, batch = order.step(step)
        for part in range(accumulate):
            # Strided, so that samples of like length spread evenly over ranks and parts.
            own = batch[part * num_ranks + rank :: num_ranks * accumulate]
            yield tuple(Key(epoch, i) for i in own) or (Key(epoch, batch[0], filler=True),)


class Samples:
    """Some samples of a dataset under new numbers 0, 1, ..., with their `lengths` in tokens, [N] int64.

    cached: gives what there is of the features of token ids [T] (`FeatureCache.item`).
    """

    def __init__(self, dataset: Any, indices: Sequence[int] | np.ndarray):
        self.dataset, self.indices = dataset, np.asarray(indices, dtype=np.int64)
        self.cached: Callable[[Tensor], dict[str, Tensor]] | None = None
        self.lengths = np.asarray(dataset.lengths, dtype=np.int64)[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def item(self, index: int, epoch: int) -> dict[str, Tensor]:
        item = self.dataset.item(int(self.indices[index]), epoch)
        return item if self.cached is None else {**item, **self.cached(item["input_ids"])}

    def name(self, index: int) -> str:
        """What a user knows a sample by."""
        return self.dataset.name(int(self.indices[index]))


class Batches(Dataset):
    """Collated samples by their keys. The epoch comes with a key, so that reader processes that are ahead of each
    other, in different epochs, do not disturb one another."""

    def __init__(self, samples: Samples, collate: Callable[[list[Any]], Any]):
        self.samples, self.collate = samples, collate

    def __getitem__(self, keys: tuple[Key, ...]) -> Collated:
        return Collated(keys, self.collate([self._item(key) for key in keys]))

    def _item(self, key: Key) -> dict[str, Tensor]:
        item = self.samples.item(key.index, key.epoch)
        return {**item, "loss_mask": torch.zeros_like(item["loss_mask"])} if key.filler else item


def _as_it_is(batch: Any) -> Any:
    return batch


class StepLoader:
    """Parts, with the number of tokens that the whole step counts on this rank known from its first part on.

    Dividing the loss by it (summed over ranks) before back-propagation makes the gradient that of the mean over the
    step's tokens, whatever the accumulation, the ranks and the strategy. It holds a step's parts in memory at once.
    """

    def __init__(self, data: HeadDataModule, trainer: pl.Trainer):
        self._data, self._trainer, self._start = data, trainer, 0

    def __len__(self) -> int:
        """All parts of the training, those before a continued run's too: Lightning counts from the beginning."""
        return self._data.total_steps * self._data.config.accumulate

    def __iter__(self) -> Iterator[Part]:
        data, trainer, accumulate = self._data, self._trainer, self._data.config.accumulate
        rank, num_ranks = trainer.global_rank, trainer.world_size
        keys = rank_keys(data.order, self._start, data.total_steps, rank, num_ranks, accumulate)
        batches = iter(data.batches(data.train, keys))
        while step := list(itertools.islice(batches, accumulate)):
            counts = [data.count(batch) for _, batch in step]
            for i, ((own, batch), tokens) in enumerate(zip(step, counts, strict=True)):
                chosen = None if data.chosen is None else data.chosen(batch)
                yield Part(batch, own, tokens, sum(counts), i == 0, i == accumulate - 1, chosen)

    def state_dict(self) -> dict[str, int]:
        """What Lightning stores; checkpoints are taken between steps only."""
        return {"step": self._trainer.global_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["step"]


def held_out(num_samples: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sample numbers for training and for validation. A sample's side depends on its number alone, so it does not
    change when data is added; each side has at least one sample."""

    def score(sample: int) -> bytes:
        return hashlib.sha256(f"{seed}/{sample}".encode()).digest()

    heads = (int.from_bytes(score(sample)[:4], "big") for sample in range(num_samples))
    kept = np.fromiter(heads, dtype=np.int64, count=num_samples) >= int(share * 2**32)
    if share > 0 and kept.all():
        kept[min(range(num_samples), key=score)] = False
    if not kept.any():
        raise InputError("data", f"{num_samples} samples", "at least 2 to hold one out", "Make more, or pass --val.")
    return np.flatnonzero(kept), np.flatnonzero(~kept)


def train_and_val(
    config: TrainConfig, train: Any, val: Any | None, context: int, overlap: int = 0, told: bool = True
) -> tuple[Samples, Samples]:
    """Training and validation samples; `val` is the dataset of --val, if it is given.

    Sequences longer than --max-length, or than the frozen model's `context`, are split and not dropped, which is told;
    their pieces share `overlap` tokens.

    Raises:
        InputError: there are too few of them.
    """
    if not len(train):
        raise InputError("data", f"{config.data} without samples", "at least one", "Check the stage that made it.")
    limit = min(config.max_length or context, context)

    def cut(dataset: Any) -> Any:
        longest = int(np.max(dataset.lengths, initial=0))
        pieces = dataset.in_pieces(limit, overlap) if longest > limit else dataset
        if told and pieces is not dataset:
            longer = int((np.asarray(dataset.lengths) > limit).sum())
            said = f"{longer:,} of {len(dataset):,} sequences are longer than {limit:,} tokens: split into pieces"
            say_on_rank_zero(said)
        return pieces

    train = cut(train)
    if val is not None:
        val = cut(val)
        return Samples(train, range(len(train))), Samples(val, range(len(val)))
    if config.val_share == 0:
        raise InputError("val_share", 0, "a share above 0, or --val", "Validation picks the best head.")
    rows = np.asarray(train.conversations)  # those, and pieces of one sequence, stay on one side
    kept = np.zeros(int(rows[-1]) + 1, dtype=bool)
    kept[held_out(len(kept), config.val_share)[0]] = True
    return Samples(train, np.flatnonzero(kept[rows])), Samples(train, np.flatnonzero(~kept[rows]))


class HeadDataModule(pl.LightningDataModule):
    """Training and validation batches of a head.

    train, val: dictionaries that hold `loss_mask`; validation sees them as they are in epoch 0. collate: list of items
        -> a dataclass of tensors. count: how many tokens of such a batch count in the loss, or the sum of their
        weights, as the loss itself counts them. chosen: as of `Part`, of such a batch.
    """

    def __init__(
        self,
        train: Samples,
        val: Samples,
        collate: Callable[[list[Any]], Any],
        count: Callable[[Any], float],
        config: TrainConfig,
        chosen: Callable[[Any], int] | None = None,
    ):
        super().__init__()
        self.train, self.val, self.collate, self.config = train, val, collate, config
        self.count, self.chosen = count, chosen
        self.order = order_of(config, train.lengths)
        self.total_steps = config.max_steps or config.epochs * self.order.steps_per_epoch

    def train_dataloader(self) -> StepLoader:
        assert self.trainer is not None
        return StepLoader(self, self.trainer)

    def transfer_batch_to_device(self, batch: Part, device: torch.device, dataloader_idx: int) -> Part:
        return move(batch, device)

    def val_batches(self, rank: int, num_ranks: int) -> Iterator[Part]:
        """This rank's share of the validation samples, each exactly once over all ranks, longest first: running out of
        memory shows at once."""
        lengths, shares = self.val.lengths, self.config.accumulate * num_ranks
        order = np.argsort(-lengths, kind="stable")[rank::num_ranks].tolist()
        batches: list[tuple[Key, ...]] = []
        while order:
            by_tokens = self.config.tokens_per_batch // (shares * int(lengths[order[0]]))
            size = max(1, by_tokens if self.config.tokens_per_batch else self.config.batch_size // shares)
            batches.append(tuple(Key(0, i) for i in order[:size]))
            order = order[size:]
        for keys, data in self.batches(self.val, batches):
            tokens = self.count(data)
            yield Part(data, keys, tokens, tokens, True, True)

    def batches(self, samples: Samples, keys: Any) -> DataLoader:
        """Collated samples with their keys, of each batch of keys, read by `num_workers` processes; for a GPU in pinned
        memory."""
        return DataLoader(
            Batches(samples, self.collate),
            batch_size=None,
            sampler=keys,
            num_workers=self.config.num_workers,
            collate_fn=_as_it_is,
            pin_memory=device_kind(self.config) == "gpu",
        )
