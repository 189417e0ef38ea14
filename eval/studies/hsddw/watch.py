"""What HSDDW's stop rules see, and what becomes of every draft: entropies, verdicts, windows, at M2 and at the target.

Nothing after an answer's end token counts: models go on there with text of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from draftsmith.modules.decoding.confidence import draft_distribution
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.protocols import Drafter, DraftView, EachRow, StopPolicy
from draftsmith.modules.decoding.stop import Around, RunningEntropy, entropy
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter

VERIFIED = ["prompt", "by", "entropy", "accepted"]
WINDOWS = ["prompt", "round", "start", "drafted", "accepted", "threshold", "length"]


class WatchedStop(Around):
    """A stop policy that keeps what it was shown: entropies of this round's draft, and of every draft since the caller
    last took them, its tokens' entropies and how many of them the next model accepted."""

    def __init__(self, policy: StopPolicy):
        super().__init__(policy)
        self.entropies: list[float] = []
        self.drafts: list[tuple[list[float], int]] = []

    def start_round(self) -> None:
        self.entropies = []
        super().start_round()

    def should_stop(self, view: DraftView) -> bool:
        self.entropies.append(entropy(draft_distribution(view)))
        return super().should_stop(view)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.drafts.append((self.entropies[:num_drafted], num_accepted))
        super().observe(num_drafted, num_accepted)


class Watcher:
    """Watches one drafter, a chain's or a hierarchy's; `on_round` is called with every round of `generate`.

    verified: a row of VERIFIED for every token down to and with the first that was rejected. by: drafter and verifier,
    "M1 by target", ... entropy: of the distribution that it was drawn from [nats].
    windows: a row of WINDOWS for every round. start: tokens of the answer before it. drafted: tokens handed to the
    target. threshold: the running mean [nats] that the entropies of whoever hands over are compared with; None where
    there is none. length: left to the caller, who knows the whole answer.
    inner: M1's drafts as rounds whose target is M2. origin: tokens of the rounds by who made them, M1, M2 or the target
    (the first token of an answer, which the prefill gives, left out).
    """

    def __init__(self, drafter: Drafter, eos_ids: Sequence[int]):
        self._eos = frozenset(eos_ids)
        own = drafter.drafters[0] if isinstance(drafter, EachRow) else drafter
        self._hierarchy = own if isinstance(own, HierarchicalDrafter) else None
        chain: Any = drafter if self._hierarchy is None else self._hierarchy.inner
        self._stop = chain.wrap_stops(WatchedStop)[0]
        self._prompt, self._emitted, self._number = "", 0, 0
        self.verified: list[dict[str, Any]] = []
        self.windows: list[dict[str, Any]] = []
        self.inner, self.origin = DecodeTrace(), Counter[str]()

    def on_round(self, prompt: str, done: Round) -> None:
        """`prompt` is its id. To be called before the drafter learns of the verdict, as `generate` does."""
        if done.tree is None:  # the prefill: a new answer
            self._prompt, self._emitted, self._number = prompt, 0, 0
        elif done.tree.tokens:
            self._round(done)
        else:
            self.origin["target"] += len(done.tokens)
        self._stop.drafts = []
        self._emitted += len(done.tokens)

    def _round(self, done: Round) -> None:
        assert done.tree is not None and done.verdict is not None
        tokens, hierarchy = done.tree.tokens, self._hierarchy
        end = next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        if hierarchy is None:
            by, entropies, rule = "M1 by target", self._stop.entropies, self._stop.innermost
            of_m1 = set(range(len(tokens)))
        else:
            by, entropies, rule = "M2 by target", hierarchy.rule.entropies, hierarchy.rule
            of_m1 = self._inner_drafts(end)
        self._verify(by, entropies[: len(tokens)], len(done.verdict.path), 0, end)
        kept = set(range(done.num_accepted))
        self.origin += Counter(M1=len(kept & of_m1), M2=len(kept - of_m1), target=len(done.tokens) - len(kept))
        window = {"prompt": self._prompt, "round": self._number, "start": self._emitted, "drafted": len(tokens)}
        threshold = rule.threshold if isinstance(rule, RunningEntropy) else None
        self.windows.append({**window, "accepted": done.num_accepted, "threshold": threshold})
        self._number += 1

    def _inner_drafts(self, end: int) -> set[int]:
        """M1's drafts of this round, each followed by a token of M2's own; the places of M1's accepted ones."""
        places: set[int] = set()
        start = 0
        for entropies, accepted in self._stop.drafts:
            self._verify("M1 by M2", entropies, accepted, start, end)
            alive = min(accepted + 1, max(0, end + 1 - start))
            self.inner.steps.append(DecodeStep(len(entropies), accepted, alive, len(entropies)))
            places |= set(range(start, start + accepted))
            start += accepted + 1
        return places

    def _verify(self, by: str, entropies: Sequence[float], accepted: int, start: int, end: int) -> None:
        """start: place of the draft's first token among the round's; end: of the end token, where there is one."""
        for i, value in enumerate(entropies[: accepted + 1]):
            if start + i <= end:
                verdict = {"prompt": self._prompt, "by": by, "entropy": value, "accepted": i < accepted}
                self.verified.append(verdict)
