"""What an acceptance head reads while it is trained: a frozen drafter's states of drafted tokens, of mixed text made
anew in every step, of labelled rounds once (stored_tokens.py). They hold frozen models, none of which is a torch
module's child."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.heads.directory import FrozenDrafter
from draftsmith.data.store.datasets import AcceptanceTokens, RolloutTokens
from draftsmith.modules.acceptance.head import AcceptanceHeadConfig, feature_value
from draftsmith.modules.decoding.confidence import TokenConfidences
from draftsmith.modules.types import AcceptanceBatch
from draftsmith.train.data_module import Part
from draftsmith.train.telemetry import features_flops


@dataclass(frozen=True)
class DraftedTokens:
    """The N tokens of a batch that count.

    batch: their inputs and labels, each [N] in the place of [B, T]. row: [N] int64, which row of the batch each is of.
    log_q: [N] log-probability that the draft gave it, where that was asked for.
    """

    batch: AcceptanceBatch
    row: Tensor
    log_q: Tensor | None = None


class MixedText:
    """Labels of mixed text (SpecDec++, section 3.3): the draft reads z, and its states are those after each token."""

    weighted = False

    def __init__(self, drafter: FrozenDrafter, greedy: bool):
        """drafter: a language model. greedy: the labels are those of greedy decoding."""
        self.drafter, self.lm, self.model, self.greedy = drafter, drafter.lm, drafter.name, greedy

    def read(self, data: AcceptanceTokens, with_log_q: bool = False) -> DraftedTokens:
        """States and labels of a collated batch."""
        with torch.no_grad():
            hidden = self.lm.features(data.z_ids)
        mask = data.loss_mask
        log_q = None
        if with_log_q:
            log_q = (self.draft_log_prob(hidden, data.z_ids) if self.greedy else data.log_q)[mask]
        batch = AcceptanceBatch(hidden[mask], data.accept_prob[mask], mask[mask])
        return DraftedTokens(batch, mask.nonzero()[:, 0], log_q)

    def draft_log_prob(self, hidden: Tensor, z_ids: Tensor) -> Tensor:
        """Log-probability [B, T] at temperature 1 that the draft gave z_t, 0 at t = 0. For greedy labels: there q is
        one-hot, so that log q(y) is 0 for every drafted token and says nothing."""
        result = torch.zeros(z_ids.shape, device=hidden.device)
        for row in range(len(z_ids)):  # one row at a time: [T, V] is in memory, not [B, T, V]
            log_prob = self.lm.lm_head(hidden[row, :-1]).float().log_softmax(-1)
            result[row, 1:] = log_prob.gather(-1, z_ids[row, 1:, None])[:, 0]
        return result

    def flops(self, part: Part, lengths: Sequence[int]) -> tuple[float, int]:
        """Model FLOPs of `read`, and how many tokens it gives. lengths: of the part's rows."""
        return features_flops(self.lm, lengths), int(part.tokens)


class RolloutDrafts:
    """Labels of real rounds: the drafter reads each text once, and the labelled drafts that hang off it."""

    def __init__(self, drafter: FrozenDrafter, head: AcceptanceHeadConfig, depth: int):
        """head: what reads. depth: tokens of a draft."""
        self.drafter, self.head, self.model = drafter, head, drafter.name
        self.branches = drafter.branches(depth)

    def read(self, data: RolloutTokens, with_log_q: bool = False) -> DraftedTokens:
        """The labelled tokens."""
        head, mask = self.head, data.loss_mask
        numbers = {name: values[mask] for name, values in vars(data.confidences).items() if values is not None}
        known = TokenConfidences(**numbers)
        batch = AcceptanceBatch(
            hidden=self.states(data)[mask],
            accept_prob=(data.overlap if head.state == "undrawn" else data.accept_prob)[mask],
            loss_mask=mask[mask],
            weight=data.weight[mask],
            embeds=self.embeds(data.draft_ids[mask]) if head.reads_token else None,
            features=torch.stack([feature_value(name, known) for name in head.features], -1) if head.features else None,
        )
        row = data.owner[:, None].expand(mask.shape)[mask]
        return DraftedTokens(batch, row, known.log_q if with_log_q else None)

    def states(self, data: RolloutTokens) -> Tensor:
        """[drafts, K, H]: before each token, or after it."""
        late, depth = self.head.state == "after", data.draft_ids.shape[1]
        found, first = [], 0
        for text, starts in zip(data.texts, data.starts, strict=True):
            drafted = data.draft_ids[first : first + len(starts)]
            first += len(starts)
            self.branches.open(text[: starts[-1]], self.drafter.features(text[: starts[-1]]))
            # Only a head that predicts by states after the tokens needs the last one to be read.
            states = self.branches.states(starts, drafted if late or depth == 1 else drafted[:, :-1])
            found.append(states[:, 1:] if late else states[:, :depth])
        # A copy, as tensors of inference mode are no inputs of a graph.
        return torch.cat(found).to(data.draft_ids.device).clone()

    def embeds(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.branches.embed(ids).to(ids.device)
