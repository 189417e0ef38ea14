"""Of which size an acceptance head for real rounds is: of one that was tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from draftsmith.modules.acceptance.fitting import begin, descend, predicted, shuffled
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.metrics import binary_kl
from draftsmith.modules.types import AcceptanceBatch
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import say_on_rank_zero
from draftsmith.train.schedules import lr_schedule
from draftsmith.train.stored_tokens import BLOCK, StoredDrafts, StoredTokens

# Tried out, the smallest first: where two predict alike it is taken.
WIDTHS, EPOCHS = (32, 128, 256), (2, 8)
TOKENS_AT_ONCE = 2**14


@dataclass(frozen=True)
class Tried:
    """A size, and the KL(P || P^) of held-out tokens that a head of it came to, in nats."""

    width: int
    epochs: int
    kl: float


def batches(tokens: StoredTokens, reader: StoredDrafts) -> Iterator[AcceptanceBatch]:
    """What a head reads of tokens, in their order."""
    for start in range(0, len(tokens.ids), TOKENS_AT_ONCE):
        yield reader.read(tokens[slice(start, start + TOKENS_AT_ONCE)]).batch


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
            begin(head, batches(train, reader))
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
    size = config.batch_size * BLOCK
    optimizer = torch.optim.AdamW(head.parameters(), config.lr, config.betas, weight_decay=config.weight_decay)
    total = epochs * -(-len(train.ids) // size)
    share = lr_schedule(config.schedule, total, config.warmup_share, config.min_lr_share)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    read = (reader.read(train[rows]).batch for rows in shuffled(len(train.ids), size, epochs, config.seed))
    descend(head, read, optimizer, schedule, config.clip)
    with torch.no_grad():
        logits = torch.cat([head.corrected(predicted(head, batch)) for batch in batches(val, reader)])
    return float(binary_kl(logits, val.accept_prob, val.weight))
