"""Where an acceptance head for real rounds begins: at the logistic of what the draft itself knows, of a size that was
tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.metrics import binary_kl, fit_logistic
from draftsmith.train.acceptance_objective import predicted
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import say_on_rank_zero
from draftsmith.train.schedules import lr_schedule
from draftsmith.train.stored_tokens import BLOCK, StoredDrafts, StoredTokens

# Tried out, the smallest first: where two predict alike it is taken.
WIDTHS, EPOCHS = (32, 128, 256), (2, 8)
TOKENS_AT_ONCE = 2**14
SMALLEST_SCALE = 1e-3  # of an input that never changes
RIDGE = 1e-2  # in tokens: keeps the logistic finite where labels are separable


@dataclass(frozen=True)
class Tried:
    """A size, and the KL(P || P^) of held-out tokens that a head of it came to, in nats."""

    width: int
    epochs: int
    kl: float


@torch.no_grad()
def begin(head: AcceptanceHead, tokens: StoredTokens, reader: StoredDrafts) -> None:
    """Set means and scales of what `head` reads to those of the tokens, and its output to the logistic of its features
    that fits them best: what a training goes on from is no worse than that.

    The hidden layer's part of the output begins at 0, and learns what the logistic does not know.
    """
    config = head.config
    if config.standardize:
        count, sums = len(tokens.ids), torch.zeros(2, config.input_size, dtype=torch.float64)
        for part in pieces(tokens):
            given = all_inputs(part, reader).double()
            sums += torch.stack([given.sum(0), given.square().sum(0)])
        mean, square = sums / count
        head.mean.copy_(mean)
        head.scale.copy_((square - mean.square()).clamp_min(0).sqrt().clamp_min(SMALLEST_SCALE))
    head.out.weight.zero_()
    if head.direct is None:
        return
    own = slice(config.input_size - len(config.features), None)
    known = tokens.features
    if config.standardize:
        known = (known - head.mean[own].cpu()) / head.scale[own].cpu()
    zeros = [0.0] * (len(config.features) + 1)
    *weights, bias = fit_logistic(known, tokens.accept_prob, zeros, RIDGE, tokens.weight).tolist()
    head.direct.weight.copy_(torch.tensor([weights]))
    # Of the probability; what the loss' weights make of it is taken off again (`AcceptanceHead.corrected`).
    head.out.bias.fill_(bias - float(head.corrected(0.0)))


def all_inputs(part: StoredTokens, reader: StoredDrafts) -> Tensor:
    """[N, input_size] in the order in which a head reads them."""
    batch = reader.read(part).batch
    given = (batch.hidden, batch.embeds, batch.features)
    return torch.cat([values.float() for values in given if values is not None], -1)


def pieces(tokens: StoredTokens) -> Iterator[StoredTokens]:
    for start in range(0, len(tokens.ids), TOKENS_AT_ONCE):
        yield tokens[slice(start, start + TOKENS_AT_ONCE)]


def tried_sizes(
    make: Callable[[int], AcceptanceHead],
    train: StoredTokens,
    val: StoredTokens,
    reader: StoredDrafts,
    config: TrainConfig,
) -> list[Tried]:
    """What heads of each width come to in each number of epochs, the best first. make: a head of a width, which has not
    begun."""
    found = []
    for width in WIDTHS:
        for epochs in EPOCHS:
            head = make(width)
            begin(head, train, reader)
            found.append(Tried(width, epochs, held_out_kl(head, train, val, reader, config, epochs)))
    say_on_rank_zero(
        "sizes: held-out KL "
        + ", ".join(f"{tried.kl:.4f} (width {tried.width}, {tried.epochs} epochs)" for tried in found)
    )
    return sorted(found, key=lambda tried: tried.kl)


def held_out_kl(
    head: AcceptanceHead,
    train: StoredTokens,
    val: StoredTokens,
    reader: StoredDrafts,
    config: TrainConfig,
    epochs: int,
) -> float:
    """KL of the held-out tokens after so many epochs of AdamW on batches of all answers' tokens."""
    size, order = config.batch_size * BLOCK, torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.AdamW(head.parameters(), config.lr, config.betas, weight_decay=config.weight_decay)
    total = epochs * -(-len(train.ids) // size)
    share = lr_schedule(config.schedule, total, config.warmup_share, config.min_lr_share)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for _ in range(epochs):
        for rows in torch.randperm(len(train.ids), generator=order).split(size):
            batch = reader.read(train[rows]).batch
            loss = acceptance_loss(predicted(head, batch), batch, head.config.w_acc, head.config.w_rej).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), config.clip or float("inf"))
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        logits = torch.cat([head.corrected(predicted(head, reader.read(part).batch)) for part in pieces(val)])
    return float(binary_kl(logits, val.accept_prob, val.weight))
