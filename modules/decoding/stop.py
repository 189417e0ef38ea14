"""Stop policies that need no head."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from draftsmith.modules.decoding.confidence import draft_distribution, entropies
from draftsmith.modules.decoding.protocols import DraftView, StopPolicy


class FixedLength(StopPolicy):
    """Draft K tokens a round (Leviathan et al. 2023)."""

    def __init__(self, k: int):
        self.max_drafted = k

    def should_stop(self, view: DraftView) -> bool:
        return view.num_drafted >= self.max_drafted


class Confidence(StopPolicy):
    """Stop once the drafted token's own probability falls below `threshold` (assisted generation of transformers).

    The token that falls below stays in the draft. Greedy drafts look at the softmax at temperature 1.
    """

    def __init__(self, threshold: float, min_drafted: int, max_drafted: int):
        self.threshold, self.min_drafted, self.max_drafted = threshold, min_drafted, max_drafted

    def should_stop(self, view: DraftView) -> bool:
        if view.num_drafted >= self.max_drafted:
            return True
        return (
            view.num_drafted >= self.min_drafted and not draft_distribution(view)[view.token].item() >= self.threshold
        )


class Around(StopPolicy):
    """Another policy, to which something is added at some of its calls.

    innermost: the policy itself, for those who look at its numbers.
    """

    def __init__(self, policy: StopPolicy):
        self.policy = policy
        self.innermost: Any = policy.innermost if isinstance(policy, Around) else policy
        self.max_drafted = policy.max_drafted
        self.learners = policy.learners

    def reset(self) -> None:
        self.policy.reset()

    def start_round(self) -> None:
        self.policy.start_round()

    def should_stop(self, view: DraftView) -> bool:
        return self.policy.should_stop(view)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.policy.observe(num_drafted, num_accepted)


class UntilEnd(Around):
    """The draft's end at a token that ends the answer, too: what is drafted behind it is thrown away, whether it is
    accepted or not (SpecDec++, footnote 1). The end token itself stays in the draft.
    """

    def __init__(self, policy: StopPolicy, ends: Collection[int]):
        super().__init__(policy)
        self._ends = frozenset(ends)

    def should_stop(self, view: DraftView) -> bool:
        # The policy is asked in any case: what learns has to see every token.
        return self.policy.should_stop(view) or view.token in self._ends


class RunningEntropy:
    """Mean entropy of the distributions whose token was rejected, over one sequence; 0 before the first rejection
    (HSDDW)."""

    def __init__(self) -> None:
        self.entropies: list[float] = []  # of this round's drafted tokens
        self.reset()

    def reset(self) -> None:
        self._sum, self._count = 0.0, 0

    @property
    def threshold(self) -> float:
        return self._sum / self._count if self._count else 0.0

    def start_round(self) -> None:
        self.entropies = []

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        if num_accepted < num_drafted:
            self._sum += self.entropies[num_accepted]
            self._count += 1


class SelfVerify(RunningEntropy, StopPolicy):
    """Stop once the entropy of the distribution that a token was drawn from exceeds the running mean at rejected tokens
    (HSDDW, self-verification)."""

    def __init__(self, max_drafted: int):
        super().__init__()
        self.max_drafted = max_drafted

    def should_stop(self, view: DraftView) -> bool:
        self.entropies.append(entropy(draft_distribution(view)))
        return view.num_drafted >= self.max_drafted or not self.entropies[-1] <= self.threshold


def entropy(distribution: Tensor) -> float:
    """-sum p log p [nats] of a distribution [V]; entries of probability zero add nothing."""
    return entropies(distribution).item()
