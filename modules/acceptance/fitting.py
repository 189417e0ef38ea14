"""How an acceptance head for real rounds is fitted: where it begins, at the logistic of what the draft itself knows,
and how it goes on from there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.metrics import fit_logistic
from draftsmith.modules.types import AcceptanceBatch

SMALLEST_SCALE = 1e-3  # of an input that never changes
RIDGE = 1e-2  # in tokens: keeps the logistic finite where labels are separable


def predicted(head: AcceptanceHead, batch: AcceptanceBatch) -> Tensor:
    """Raw logits, in float32 also where the rest runs under bf16 autocast."""
    with torch.autocast(batch.hidden.device.type, enabled=False):
        return head(batch.hidden, batch.embeds, batch.features)


@torch.no_grad()
def begin(head: AcceptanceHead, batches: Iterable[AcceptanceBatch]) -> None:
    """Set means and scales of what `head` reads to those of the tokens in weighted batches, and its output to the
    logistic of its features that fits them best: what a training goes on from is no worse than that.

    The hidden layer's part of the output begins at 0, and learns what the logistic does not know.
    """
    config = head.config
    count, sums = 0, torch.zeros(2, config.input_size, dtype=torch.float64)
    labels = []
    for batch in batches:
        given = (batch.hidden, batch.embeds, batch.features)
        read = torch.cat([values.double() for values in given if values is not None], -1)
        count, sums = count + len(read), sums + torch.stack([read.sum(0), read.square().sum(0)]).cpu()
        labels.append((batch.features, batch.accept_prob, batch.weight))
    if config.standardize:
        mean, square = sums / count
        head.mean.copy_(mean)
        head.scale.copy_((square - mean.square()).clamp_min(0).sqrt().clamp_min(SMALLEST_SCALE))
    head.out.weight.zero_()
    if head.direct is None:
        return
    own = slice(config.input_size - len(config.features), None)
    known, accept_prob, weight = (torch.cat(parts) for parts in zip(*labels, strict=True))
    if config.standardize:
        known = (known - head.mean[own].to(known)) / head.scale[own].to(known)
    *weights, bias = fit_logistic(known, accept_prob, [0.0] * (len(config.features) + 1), RIDGE, weight).tolist()
    head.direct.weight.copy_(torch.tensor([weights]))
    # Of the probability; what the loss' weights make of it is taken off again (`AcceptanceHead.corrected`).
    head.out.bias.fill_(bias - float(head.corrected(0.0)))


def descend(
    head: AcceptanceHead,
    batches: Iterable[AcceptanceBatch],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    clip: float,
) -> None:
    """A step for each batch. clip: largest gradient norm; 0 is any."""
    for batch in batches:
        loss = acceptance_loss(predicted(head, batch), batch, head.config.w_acc, head.config.w_rej).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), clip or float("inf"))
        optimizer.step()
        schedule.step()


def shuffled(count: int, size: int, epochs: int, seed: int) -> Iterable[Tensor]:
    """Numbers below `count` in random order, `size` at a time, epoch after epoch."""
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=order).split(size)
