"""One training step of a real module, run dry: what it holds, phase by phase, and what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.data.store.datasets import Item
from draftsmith.modules.flops import causal_pairs
from draftsmith.train.data_module import Key, Part
from draftsmith.train.lit_head import LitHead
from draftsmith.train.planning.dry_run import DryRun, HeldBytes

WEIGHTS, GRADIENTS, OPTIMIZER, BATCH = "weights", "gradients", "optimizer", "batch"


class Subject(Protocol):
    """A training that is planned (subjects.py). lookahead: rows fewer than tokens that a head makes of a document."""

    lookahead: int

    @property
    def kind(self) -> str:
        """Of the data, where there are none yet."""

    @property
    def context(self) -> int:
        """Most tokens of a document: longer ones are split."""

    def item(self, length: int, counted: int, read: bool = False) -> Item:
        """A sample of so many tokens without content, of which the last ones count in the loss. read: with what a
        frozen model would make of it first, if that can be stored."""

    def collate(self, items: Sequence[Item]) -> Any:
        """A batch of samples."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one optimizer step takes in one process.

    weights: of what is trained. optimizer: its averages. batch: of the samples of one part. peaks: of forward, backward
    and update, each the moment of most.
    """

    weights: int
    optimizer: int
    batch: int
    peaks: dict[str, HeldBytes]


def batch_of(subject: Subject, lengths: Sequence[int], share: float, read: bool = False) -> Part:
    """A part of a step: documents of these lengths, of whose tokens a share counts in the loss."""
    counted = [round(length * share) for length in lengths]
    items = [subject.item(length, count, read) for length, count in zip(lengths, counted, strict=True)]
    keys = tuple(Key(0, number) for number in range(len(lengths)))
    return Part(subject.collate(items), keys, sum(counted), sum(counted), True, True)


def dry_step(
    run: DryRun, module: LitHead, part: Part, lengths: Sequence[int], accumulates: bool, on_gpu: bool
) -> StepBytes:
    """The second step of a training: in the first one there are no averages yet. part: with `lengths` tokens."""
    trained = [parameter for parameter in module.head.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda p: run.count_as(GRADIENTS, p.grad))
    optimizer = module.configure_optimizers()["optimizer"]
    for group in optimizer.param_groups:
        if on_gpu and "foreach" in group:
            group["foreach"] = True  # as torch chooses on a GPU: all temporaries at once
    for number in range(2):
        for first in (True, False) if accumulates else (True,):
            run.begin("forward")
            loss = loss_of(module, part, lengths)
            if first:
                optimizer.zero_grad()  # Lightning does it here: the last step's gradients are there until then
            run.begin("backward")
            loss.backward()
            del loss
        run.begin("update")
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(trained, 1.0, norm)
        with run.making(OPTIMIZER if number == 0 else run.part):
            optimizer.step()
    peaks = {phase: run.peaks[phase] for phase in ("forward", "backward", "update")}
    optimizer.zero_grad()
    return StepBytes(sum(p.nbytes for p in trained), averages(optimizer), run.now[BATCH], peaks)


def averages(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state, counters aside."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.ndim)


def loss_of(module: LitHead, part: Part, lengths: Sequence[int]) -> Tensor:
    """The loss at the end of a training, when all of its passes run."""
    samples = SimpleNamespace(lengths=list(lengths))
    trainer: Any = SimpleNamespace(global_step=module.total_steps, datamodule=SimpleNamespace(train=samples))
    module.trainer = trainer
    with module.autocast():
        return module.loss(part).loss


class Counted:
    """FLOPs of training on documents of any length, once they have been read, from those of two runs of one document.

    Products grow with a document's rows, and those of the loss with its tokens that count; attention with pairs of
    rows.
    """

    def __init__(self, run: DryRun, subject: Subject, module: LitHead, length: int):
        """length: tokens of the document."""
        few, many = length // 4, length - length // 4
        (few_products, few_pairs), (products, pairs) = (_flops(run, subject, module, length, n) for n in (few, many))
        self._lookahead, rows = subject.lookahead, length - subject.lookahead
        self._counted = (products - few_products) / (many - few)
        self._row = (products - many * self._counted) / rows
        self._pair = (few_pairs + pairs) / 2 / causal_pairs([rows])

    def of(self, lengths: Sequence[int], share: float) -> float:
        """Forward and backward of all these documents, without padding. share: of their tokens that count."""
        rows = [max(length - self._lookahead, 0) for length in lengths]
        return self._row * sum(rows) + self._counted * share * sum(lengths) + self._pair * causal_pairs(rows)


def _flops(run: DryRun, subject: Subject, module: LitHead, length: int, counted: int) -> tuple[float, float]:
    """FLOPs of products, and of attention."""
    products, attention = run.flops, run.attention_flops
    loss_of(module, batch_of(subject, [length], counted / length, read=True), [length]).backward()
    module.zero_grad()
    return run.flops - products, run.attention_flops - attention
