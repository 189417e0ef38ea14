"""Hierarchical speculative decoding (HSDDW): M1 drafts for M2, and M2's output is the target's draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from draftsmith.modules.decoding.drafter import Drafter, Outcome
from draftsmith.modules.decoding.stop import FixedLengthStop, RunningEntropy, SelfVerifyStop
from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree, chain_parents
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.finite import NO_TOKEN, NonFinite, located
from draftsmith.modules.sampling import Sampler, best_token, entropies, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


class HierarchicalDrafter(Drafter):
    """Drafter in which M2 decodes speculatively with M1: its output follows M2 exactly, and M2's distributions are q.

    The paper leaves out M2's own token when M1's draft is accepted whole; keeping it is as lossless, and faster.

    inner: M1. rule: entropies of M2's distributions in this round, and their threshold.
    """

    def __init__(self, middle: CausalLM, inner: ChainDrafter, max_drafted: int, dynamic: bool, capacity: int):
        """inner: M1. max_drafted: most tokens handed to the target.

        dynamic: continue while M2's entropy stays below the threshold (HSDDW); else hand over after one M2 round.
        """
        self._lm, self.inner, self.max_drafted, self.dynamic = middle, inner, max_drafted, dynamic
        self._session = middle.session(1, min(capacity, middle.info.max_position), static=False)
        self.rule = RunningEntropy()
        # Committed ones, then this round's draft; M2 has read the first `_read`.
        self._tokens: list[int] = []
        self._read = 0
        self._num_drafted = self._calls = 0

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        self._session.reset(1)
        self.rule.reset()
        # M2 may not draft on a text that it has read wrong, even if the target's first token comes next.
        if best_token(self._session.extend([prompt]).logits[0, -1]) == NO_TOKEN:
            raise NonFinite(model="mid", position=-1)
        self._tokens, self._read = [*prompt, first_token], len(prompt)
        self.inner.start(prompt, features, first_token)
        self._inner_length = len(self._tokens)

    def propose(self, max_drafted: int, sampler: Sampler) -> DraftTree:
        # M2's context may be shorter than the target's; one of its positions goes to the last token that it reads.
        limit = min(max_drafted, self.max_drafted, self._lm.info.max_position - len(self._tokens))
        self._calls = self._num_drafted = 0
        self.rule.start_round()
        if limit < 1:
            return NO_DRAFT
        # Drafted tokens follow the committed ones until they are handed over.
        start = len(self._tokens)
        distributions: list[Tensor] = []
        while (room := limit - (len(self._tokens) - start)) > 0:
            with located("mid", len(self._tokens) - start):
                rows = self._round(room, sampler)
            distributions += rows
            if not self.dynamic or max(self.rule.entropies[-len(rows) :]) > self.rule.threshold:
                break
        drafted = self._tokens[start:]
        del self._tokens[start:]
        self._num_drafted = len(drafted)
        drawn_from = None if sampler.greedy else torch.stack(distributions)
        return DraftTree(tuple(drafted), chain_parents(len(drafted)), drawn_from, draft_calls=self._calls)

    def _round(self, room: int, sampler: Sampler) -> list[Tensor]:
        """Let M1 draft and M2 verify. Appends at most `room` tokens and returns M2's distributions of them."""
        # The target's own tokens are new to M1.
        self.inner.commit(self._tokens[self._inner_length :], None)
        tree = self.inner.propose(room - 1, sampler) if room > 1 else NO_DRAFT
        assert tree.is_chain, "M1 drafts chains"
        self._calls += tree.draft_calls
        unread = [*self._tokens[self._read :], *tree.tokens]
        scores = self._session.extend([unread], logits_to_keep=len(tree.tokens) + 1)
        self._calls += 1
        self._read += len(unread)
        logits = scores.logits[0, : len(tree.tokens) + 1]
        verdict = verify(tree, logits, sampler)
        emitted = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        self._keep(len(self._tokens) + len(verdict.path))
        if tree.tokens:
            self.inner.advance(Outcome(tuple(emitted), len(verdict.path), scores.features[0], logits))
        else:
            self.inner.commit(emitted, None)
        self._tokens += emitted
        self._inner_length = len(self._tokens)
        drawn_from = SamplingParams(1.0) if sampler.greedy else sampler.params
        distributions = [probabilities(row, drawn_from) for row in logits[: len(emitted)]]
        self.rule.entropies += [entropies(distribution).item() for distribution in distributions]
        return distributions

    def _keep(self, length: int) -> None:
        """Drop all that M2 has read behind the first `length` tokens."""
        self._read = min(self._read, length)
        self._session.keep([self._read])

    def advance(self, outcome: Outcome) -> None:
        length = len(self._tokens) + outcome.num_accepted
        self._tokens += outcome.emitted
        self._keep(length)
        self.inner.rewind(length)
        self._inner_length = min(self._inner_length, length)
        self.rule.observe(self._num_drafted, outcome.num_accepted)


MAX_HANDED_OVER = 64


@dataclass(frozen=True)
class PreVerifyMethod(Method):
    """M1 drafts k tokens, M2 verifies them once, and what M2 emits is the draft for the target."""

    k: int = 10
    uses = ("mid", "draft")
    ranges: ClassVar = {"k": (1, MAX_HANDED_OVER - 1)}
    stop: ClassVar[type[FixedLengthStop] | type[SelfVerifyStop]] = FixedLengthStop

    def build(self, models: Models) -> HierarchicalDrafter:
        assert models.mid is not None and models.draft is not None
        inner = ChainDrafter(DraftModelNet(models.draft), self.stop(self.k), models.capacity)
        return HierarchicalDrafter(models.mid, inner, self.k + 1, False, models.capacity)


@dataclass(frozen=True)
class PreAndSelfVerifyMethod(PreVerifyMethod):
    """The method pre-verify, where M1 stops by its own entropy (HSDDW, figure 5b)."""

    stop = SelfVerifyStop


@dataclass(frozen=True)
class HsddwMethod(PreAndSelfVerifyMethod):
    """HSDDW: M1 and M2 take turns until M2's entropy exceeds its mean at rejected tokens, then the target verifies.

    The paper reads M2's entropy at all drafted positions (algorithm 2, line 28). Here only those of the tokens that M2
    emits count: positions behind M1's first rejected token belong to another text.

    max: most tokens handed to the target at once.
    """

    max: int = 20
    ranges: ClassVar = PreVerifyMethod.ranges | {"max": (1, MAX_HANDED_OVER)}

    def build(self, models: Models) -> HierarchicalDrafter:
        drafter = super().build(models)
        drafter.max_drafted, drafter.dynamic = self.max, True
        return drafter


METHODS = {
    "pre-verify": PreVerifyMethod(),
    "pre+self-verify": PreAndSelfVerifyMethod(),
    "hsddw": HsddwMethod(),
}
