"""Which samples make up which step, on which rank: a function of the seed and the step, and of nothing else.

A step's batch is global: the same samples whatever the number of devices and of accumulated parts. A run that is
continued starts at the step it had reached, in the middle of an epoch or not. For Lightning the whole training is one
epoch, so that its own bookkeeping of epochs, which can not continue in the middle of one, is never asked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from draftsmith.modules.types import InputError

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
    the loss; step_tokens: in all parts of this step on this rank. first, last: of this step.
    """

    data: Any
    keys: tuple[Key, ...]
    tokens: int
    step_tokens: int
    first: bool
    last: bool


def move(part: Part, device: torch.device) -> Part:
    """The part with its tensors on the device."""
    data = part.data
    moved = {
        field.name: value.to(device, non_blocking=True)
        for field in dataclasses.fields(data)
        if isinstance(value := getattr(data, field.name), Tensor)
    }
    return dataclasses.replace(part, data=dataclasses.replace(data, **moved))


class Order:
    """The samples of every step: shuffled anew in each epoch, by (seed, epoch) alone. An epoch's last step may be
    short.

    lengths: tokens of each sample, to put like with like; None leaves the batches random.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, lengths: Sequence[int] | None = None):
        self.num_samples, self.batch_size, self.seed, self.lengths = num_samples, batch_size, seed, lengths
        self.steps_per_epoch = -(-num_samples // batch_size)
        self._cached: tuple[int, list[list[int]]] = (-1, [])

    def step(self, step: int) -> tuple[int, list[int]]:
        """The epoch and the sample numbers of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._cached[0] != epoch:
            self._cached = (epoch, self._batches(epoch))
        return epoch, self._cached[1][position]

    def _batches(self, epoch: int) -> list[list[int]]:
        rng = random.Random(f"{self.seed}/{epoch}")
        order = list(range(self.num_samples))
        rng.shuffle(order)
        if self.lengths is None:
            return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        batches: list[list[int]] = []
        window = STEPS_SORTED_TOGETHER * self.batch_size
        for start in range(0, len(order), window):
            block = sorted(order[start : start + window], key=self.lengths.__getitem__)
            batches += [block[i : i + self.batch_size] for i in range(0, len(block), self.batch_size)]
        rng.shuffle(batches)
        return batches


class RankSteps:
    """A batch sampler: the keys of each part of this rank, from step `start` on."""

    def __init__(self, order: Order, start: int, stop: int, rank: int, num_ranks: int, accumulate: int):
        self.order, self.start, self.stop = order, start, stop
        self.rank, self.num_ranks, self.accumulate = rank, num_ranks, accumulate

    def __len__(self) -> int:
        return (self.stop - self.start) * self.accumulate

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.start, self.stop):
            epoch, batch = self.order.step(step)
            for part in range(self.accumulate):
                slot = part * self.num_ranks + self.rank
                # Strided, so that samples of like length spread evenly over ranks and parts.
                own = batch[slot :: self.num_ranks * self.accumulate]
                yield [Key(epoch, i) for i in own] or [Key(epoch, batch[0], filler=True)]


class Samples:
    """Some samples of a dataset under new numbers 0, 1, ..., with their `lengths` in tokens."""

    def __init__(self, dataset: Any, indices: Sequence[int]):
        self.dataset, self.indices = dataset, indices
        lengths = dataset.lengths
        self.lengths = [lengths[i] for i in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def item(self, index: int, epoch: int) -> Any:
        """A sample as it is in an epoch, for datasets whose samples change; else as it always is."""
        if hasattr(self.dataset, "item"):
            return self.dataset.item(self.indices[index], epoch)
        return self.dataset[self.indices[index]]


class Keyed(Dataset):
    """Samples by `Key`. The epoch comes with the key, so that reader processes that are ahead of each other, in
    different epochs, do not disturb one another."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def __getitem__(self, key: Key) -> tuple[Key, Any]:
        item = self.samples.item(key.index, key.epoch)
        if key.filler:
            item = {**item, "loss_mask": torch.zeros_like(item["loss_mask"])}
        return key, item


class StepLoader:
    """Parts, with the number of tokens that the whole step counts on this rank known from its first part on.

    Dividing the loss by it (summed over ranks) before back-propagation makes the gradient that of the mean over the
    step's tokens, whatever the accumulation, the ranks and the strategy. It holds a step's parts in memory at once.
    """

    def __init__(self, loader: DataLoader, steps: RankSteps, count: Callable[[Any], int], reached: Callable[[], int]):
        self._loader, self._steps, self._count, self._reached = loader, steps, count, reached

    def __len__(self) -> int:
        """All parts of the training, those of steps before `start` included: Lightning counts from the beginning."""
        return self._steps.stop * self._steps.accumulate

    def __iter__(self) -> Iterator[Part]:
        parts: list[tuple[tuple[Key, ...], Any, int]] = []
        for keys, data in self._loader:
            parts.append((keys, data, self._count(data)))
            if len(parts) == self._steps.accumulate:
                total = sum(tokens for *_, tokens in parts)
                for i, (own, own_data, tokens) in enumerate(parts):
                    yield Part(own_data, own, tokens, total, i == 0, i == len(parts) - 1)
                parts = []

    def state_dict(self) -> dict[str, int]:
        """What Lightning stores; checkpoints are taken between steps only."""
        return {"step": self._reached()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._steps.start = state["step"]


def held_out(num_samples: int, share: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """Sample numbers for training and for validation. A sample's side depends on its number alone, so it does not
    change when data is added; each side has at least one sample."""
    scores = [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(num_samples)]
    bound = int(share * 2**32).to_bytes(4, "big")
    val = [i for i in range(num_samples) if scores[i][:4] < bound]
    if share > 0 and not val:
        val = [min(range(num_samples), key=scores.__getitem__)]
    chosen = set(val)
    train = [i for i in range(num_samples) if i not in chosen]
    if not train:
        raise InputError("data", f"{num_samples} samples", "at least 2 to hold one out", "Make more, or pass --val.")
    return train, val


@dataclass(frozen=True)
class LoaderOptions:
    """batch_size: sequences a step, over all ranks and parts; total_steps: of the whole training."""

    batch_size: int
    accumulate: int
    total_steps: int
    seed: int
    group_by_length: bool
    num_workers: int


class HeadDataModule(pl.LightningDataModule):
    """Training and validation batches of a head.

    train, val: dictionaries that hold `loss_mask`; validation sees them as they are in epoch 0. collate: list of items
        -> a dataclass of tensors. count: how many tokens of such a batch count in the loss.
    """

    def __init__(
        self,
        train: Samples,
        val: Samples,
        collate: Callable[[list[Any]], Any],
        count: Callable[[Any], int],
        options: LoaderOptions,
    ):
        super().__init__()
        self.train, self.val, self.collate, self.count, self.options = train, val, collate, count, options
        lengths = train.lengths if options.group_by_length else None
        self.order = Order(len(train), options.batch_size, options.seed, lengths)

    def train_dataloader(self) -> StepLoader:
        assert self.trainer is not None
        options, trainer = self.options, self.trainer
        steps = RankSteps(
            self.order, 0, options.total_steps, trainer.global_rank, trainer.world_size, options.accumulate
        )
        loader = self._loader(self.train, steps)
        return StepLoader(loader, steps, self.count, lambda: trainer.global_step)

    def transfer_batch_to_device(self, batch: Part, device: torch.device, dataloader_idx: int) -> Part:
        return move(batch, device)

    def val_batches(self, rank: int, num_ranks: int) -> Iterator[Part]:
        """This rank's share of the validation samples, each exactly once over all ranks, longest first: running out of
        memory shows at once."""
        size = max(1, self.options.batch_size // (self.options.accumulate * num_ranks))
        lengths = self.val.lengths
        order = sorted(range(len(self.val)), key=lengths.__getitem__, reverse=True)[rank::num_ranks]
        batches = [[Key(0, i) for i in order[start : start + size]] for start in range(0, len(order), size)]
        for keys, data in self._loader(self.val, batches):
            tokens = self.count(data)
            yield Part(data, keys, tokens, tokens, True, True)

    def _loader(self, samples: Samples, batches: Any) -> DataLoader:
        return DataLoader(
            Keyed(samples),
            batch_sampler=batches,
            num_workers=self.options.num_workers,
            collate_fn=_Collate(self.collate),
            pin_memory=torch.cuda.is_available(),
        )


class _Collate:
    """Keeps the keys beside the collated data. A class, not a closure: reader processes may have to pickle it."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def __call__(self, samples: list[tuple[Key, Any]]) -> tuple[tuple[Key, ...], Any]:
        return tuple(key for key, _ in samples), self._collate([item for _, item in samples])
