"""What HSDDW's stop rules see, and what becomes of every draft: entropies, verdicts, windows, at M2 and at the target.

Nothing after an answer's end token counts: models go on there with text of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.modules.decoding.confidence import draft_distribution
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.protocols import Drafter, DraftView, EachRow, StopPolicy
from draftsmith.modules.decoding.stop import Around, RunningEntropy, entropy
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter


@dataclass(frozen=True)
class DraftedChain:
    """A chain that one model drafted, and how many of its tokens the next one accepted. entropy: of the distribution
    that each token was drawn from [nats]."""

    entropy: list[float]
    num_accepted: int


@dataclass(frozen=True)
class VerifiedToken:
    """A token down to and with the first that was rejected. by: "M1 by target", ..., drafter and verifier."""

    prompt: str
    by: str
    entropy: float
    accepted: bool


@dataclass(frozen=True)
class RoundWindow:
    """One round: tokens handed to the target and accepted, after `start` tokens of the answer. threshold: the
    running mean [nats] that the entropies of whoever hands over are compared with; None where there is none."""

    prompt: str
    number: int
    start: int
    drafted: int
    accepted: int
    threshold: float | None


@dataclass
class Observations:
    """Everything watched with one method. inner: M1's drafts as rounds whose target is M2. origin: tokens of the
    rounds by who made them, M1, M2 or the target (the first token of an answer, which the prefill gives, left out)."""

    verified: list[VerifiedToken] = field(default_factory=list)
    windows: list[RoundWindow] = field(default_factory=list)
    inner: DecodeTrace = field(default_factory=DecodeTrace)
    origin: Counter[str] = field(default_factory=Counter)


class VerifiedStop(Around):
    """A stop policy that keeps what it was shown, and the verdicts."""

    def __init__(self, policy: StopPolicy):
        super().__init__(policy)
        self.entropies: list[float] = []
        self.drafts: list[DraftedChain] = []

    def start_round(self) -> None:
        self.entropies = []
        super().start_round()

    def should_stop(self, view: DraftView) -> bool:
        self.entropies.append(entropy(draft_distribution(view)))
        return super().should_stop(view)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.drafts.append(DraftedChain(self.entropies[:num_drafted], num_accepted))
        super().observe(num_drafted, num_accepted)


class Watcher:
    """Watches one drafter, a chain's or a hierarchy's; `on_round` is called with every round of `generate`."""

    def __init__(self, drafter: Drafter, eos_ids: Sequence[int]):
        self._eos = frozenset(eos_ids)
        own = drafter.drafters[0] if isinstance(drafter, EachRow) else drafter
        self._hierarchy = own if isinstance(own, HierarchicalDrafter) else None
        chain: Any = drafter if self._hierarchy is None else self._hierarchy.inner
        self._stop = chain.wrap_stops(VerifiedStop)[0]
        self._prompt, self._emitted, self._number = "", 0, 0
        self.seen = Observations()

    def on_round(self, prompt: str, done: Round) -> None:
        """`prompt` is its id. To be called before the drafter learns of the verdict, as `generate` does."""
        if done.tree is None:  # the prefill: a new answer
            self._prompt, self._emitted, self._number = prompt, 0, 0
        elif done.tree.tokens:
            self._round(done)
        else:
            self.seen.origin["target"] += len(done.tokens)
        self._stop.drafts = []
        self._emitted += len(done.tokens)

    def _round(self, done: Round) -> None:
        assert done.tree is not None and done.verdict is not None
        tokens = done.tree.tokens
        end = next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        entropies = self._stop.entropies if self._hierarchy is None else self._hierarchy.rule.entropies
        by = "M1 by target" if self._hierarchy is None else "M2 by target"
        self._verify(by, DraftedChain(entropies[: len(tokens)], len(done.verdict.path)), 0, end)
        of_m1 = set(range(len(tokens))) if self._hierarchy is None else self._inner_drafts(end)
        kept = set(range(done.num_accepted))
        self.seen.origin += Counter(M1=len(kept & of_m1), M2=len(kept - of_m1), target=len(done.tokens) - len(kept))
        rule = self._stop.innermost if self._hierarchy is None else self._hierarchy.rule
        threshold = rule.threshold if isinstance(rule, RunningEntropy) else None
        self.seen.windows.append(
            RoundWindow(self._prompt, self._number, self._emitted, len(tokens), done.num_accepted, threshold)
        )
        self._number += 1

    def _inner_drafts(self, end: int) -> set[int]:
        """M1's drafts of this round, each followed by a token of M2's own; the places of M1's accepted ones."""
        places: set[int] = set()
        start = 0
        for draft in self._stop.drafts:
            self._verify("M1 by M2", draft, start, end)
            emitted = draft.num_accepted + 1
            alive = min(emitted, max(0, end + 1 - start))
            self.seen.inner.steps.append(DecodeStep(len(draft.entropy), draft.num_accepted, alive, len(draft.entropy)))
            places |= set(range(start, start + draft.num_accepted))
            start += emitted
        return places

    def _verify(self, by: str, draft: DraftedChain, start: int, end: int) -> None:
        """start: place of the draft's first token among the round's; end: of the end token, where there is one."""
        for i, value in enumerate(draft.entropy[: draft.num_accepted + 1]):
            if start + i <= end:
                self.seen.verified.append(VerifiedToken(self._prompt, by, value, i < draft.num_accepted))
