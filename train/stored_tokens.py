"""Drafted tokens of real rounds with the states that an acceptance head reads of them, made once and kept in memory.

A training on whole answers sees tokens that are alike together; here every batch is drawn from all answers, and a
drafter that reads nothing more costs nothing in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.console import progress_bar
from draftsmith.data.store.datasets import Item, collate_rollouts
from draftsmith.modules.types import AcceptanceBatch, InputError
from draftsmith.train.data_module import Part, Samples
from draftsmith.train.drafted_tokens import DraftedTokens, MixedText, RolloutDrafts

# A sample of a training: enough tokens that a batch is put together quickly, few enough that it is drawn from many.
BLOCK = 64
# Tokens that fewer rounds reach count for nothing measurable, and are most of what was drafted.
LEAST_WEIGHT = 1e-3


@dataclass(frozen=True)
class StoredTokens:
    """N drafted tokens. weight: the probability that a round verifies each. owner: the sample that it is of, counted in
    its batch; of what is stored, the answer."""

    hidden: Tensor  # [N, H], of the drafter's type
    ids: Tensor  # [N] int64
    features: Tensor  # [N, F] float32
    log_q: Tensor  # [N] float32, as all below
    accept_prob: Tensor
    weight: Tensor
    owner: Tensor  # [N] int64
    loss_mask: Tensor  # [N] bool

    @property
    def num_slots(self) -> int:
        """Tokens; there is no padding."""
        return len(self.ids)

    def __getitem__(self, rows: Tensor | slice) -> StoredTokens:
        return StoredTokens(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))


def stored(samples: Samples, reader: RolloutDrafts, title: str) -> StoredTokens:
    """The tokens of labelled answers, answer after answer; `title` is said beside the bar.

    Raises:
        InputError: no round reaches any.
    """
    parts: list[StoredTokens] = []
    with progress_bar(title, len(samples), "answers") as advance:
        for index in range(len(samples)):
            data = collate_rollouts([samples.item(index, 0)])
            read, ids = reader.read(data, with_log_q=True), data.draft_ids[data.loss_mask]
            batch = read.batch
            assert batch.weight is not None and read.log_q is not None
            numbers = batch.features if batch.features is not None else torch.empty(len(ids), 0)
            owner, counts = torch.full_like(ids, index), torch.ones_like(ids, dtype=torch.bool)
            tokens = (batch.hidden, ids, numbers, read.log_q, batch.accept_prob, batch.weight, owner, counts)
            parts.append(StoredTokens(*(values.cpu() for values in tokens))[batch.weight.cpu() >= LEAST_WEIGHT])
            advance(1)
    whole = joined(parts)
    if not len(whole.ids):
        raise InputError("data", "no drafted token that a round reaches", "labels of real rounds", "Make more.")
    return whole


def joined(parts: Sequence[StoredTokens]) -> StoredTokens:
    """One after the other."""
    names = [field.name for field in fields(StoredTokens)]
    return StoredTokens(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


class StoredDataset:
    """Stored tokens as samples: blocks of tokens of all answers, shuffled once; or, for validation, answers.

    lengths: tokens of each sample. answers: what the tokens are of.
    """

    def __init__(self, tokens: StoredTokens, answers: Samples, seed: int | None):
        """seed: of the blocks; None for answers."""
        self.answers = answers
        if seed is None:
            self.tokens = tokens
            self.bounds = torch.bincount(tokens.owner, minlength=len(answers)).cumsum(0).tolist()
        else:
            order = torch.randperm(len(tokens.ids), generator=torch.Generator().manual_seed(seed))
            self.tokens = tokens[order]
            self.bounds = [*range(BLOCK, len(order), BLOCK), len(order)]
        self.lengths = np.diff(self.bounds, prepend=0).tolist()
        self.by_answer = seed is None

    def item(self, index: int, epoch: int) -> Item:
        start = self.bounds[index] - self.lengths[index]
        return dict(vars(self.tokens[slice(start, self.bounds[index])]))

    def name(self, index: int) -> str:
        """What a user knows a sample by: the answer; of a block, its first token's."""
        start = self.bounds[index] - self.lengths[index]
        return self.answers.name(index if self.by_answer else int(self.tokens.owner[start]))

    def answer_lengths(self, indices: Sequence[int]) -> np.ndarray:
        """Tokens of every answer that drafts were made along."""
        return self.answers.dataset.answer_lengths(self.answers.indices)


def collate_stored(items: Sequence[Item]) -> StoredTokens:
    """Samples one after the other, the owner of each token now its sample's place among them."""
    counts = torch.tensor([len(item["ids"]) for item in items])
    owner = torch.arange(len(items)).repeat_interleave(counts)
    batch = joined([StoredTokens(**item) for item in items])
    return StoredTokens(**{**vars(batch), "owner": owner})


class StoredDrafts:
    """Gives a head what is stored; of the drafter nothing is needed any more but the embeddings of tokens."""

    weighted = True

    def __init__(self, drafts: RolloutDrafts):
        """drafts: what the tokens were read by."""
        self.drafts, self.model = drafts, drafts.model

    def read(self, data: StoredTokens, with_log_q: bool = False) -> DraftedTokens:
        """What a batch holds, and the embeddings of its tokens."""
        batch = AcceptanceBatch(
            hidden=data.hidden,
            accept_prob=data.accept_prob,
            loss_mask=data.loss_mask,
            weight=data.weight,
            embeds=self.drafts.embeds(data.ids) if self.drafts.head.reads_token else None,
            features=data.features if self.drafts.head.features else None,
        )
        return DraftedTokens(batch, data.owner, data.log_q if with_log_q else None)

    def flops(self, part: Part, lengths: Sequence[int]) -> tuple[float, int]:
        """As of `MixedText`: the drafter has read everything before."""
        return 0.0, len(part.data.ids)


# Gives a head its inputs.
StateReader = MixedText | StoredDrafts
