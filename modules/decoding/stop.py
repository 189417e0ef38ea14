"""Stop policies that need no acceptance head."""

from __future__ import annotations

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

    The token that falls below stays in the draft. Greedy drafts are judged by the softmax at temperature 1.
    """

    def __init__(self, threshold: float, min_drafted: int, max_drafted: int):
        self.threshold, self.min_drafted, self.max_drafted = threshold, min_drafted, max_drafted

    def should_stop(self, view: DraftView) -> bool:
        if view.num_drafted >= self.max_drafted:
            return True
        # "Not at least", so that NaN stops.
        return (
            view.num_drafted >= self.min_drafted and not draft_distribution(view)[view.token].item() >= self.threshold
        )


class Around(StopPolicy):
    """Wrapper of another policy, for watchers that add something to some of its calls.

    innermost: the policy inside all wrappers.
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


class RunningEntropy:
    """Mean entropy of the distributions whose token was rejected, over one sequence (HSDDW).

    It is 0 before the first rejection.
    """

    def __init__(self) -> None:
        # Of this round's drafted tokens.
        self.entropies: list[float] = []
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
    """Stop once the entropy of a token's distribution exceeds the mean at rejected tokens (HSDDW,
    self-verification)."""

    def __init__(self, max_drafted: int):
        super().__init__()
        self.max_drafted = max_drafted

    def should_stop(self, view: DraftView) -> bool:
        self.entropies.append(entropy(draft_distribution(view)))
        return view.num_drafted >= self.max_drafted or not self.entropies[-1] <= self.threshold


def entropy(distribution: Tensor) -> float:
    """Compute -sum p log p in nats of a distribution [V]; entries of probability zero add nothing."""
    return entropies(distribution).item()
