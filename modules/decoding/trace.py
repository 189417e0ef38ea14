"""Counts and rates of a generation, defined once.

N emitted tokens, cut at the end token (kept) and at `max_new_tokens` before counting. N_target target calls, the
prefill included (it yields the first token). N_draft drafted tokens that were verified or thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields


def tau(num_tokens: float, num_target_calls: float) -> float:
    """Return the acceptance length: emitted tokens per target call, the prefill and each round's own token included.

    Every tau is this one, of sums over answers: of decoding, of a server's counters, and of rounds read along a text.
    """
    return num_tokens / max(num_target_calls, 1)


@dataclass(frozen=True)
class DecodeStep:
    """Counts of one round: tokens drafted, accepted and emitted (after any cut), and the drafter's forwards."""

    num_drafted: int
    num_accepted: int
    num_emitted: int
    draft_calls: int


@dataclass
class DecodeTrace:
    """Counts of one generation. The prefill is not a step: it is the target call that emits the first token.

    prefill_calls: 0 for an engine whose first draft rides on the prefill, which is then a step like any other.
    """

    steps: list[DecodeStep] = field(default_factory=list)
    prefill_emitted: int = 0
    prefill_calls: int = 1

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.prefill_emitted + sum(step.num_emitted for step in self.steps)

    @property
    def num_target_calls(self) -> int:
        """N_target: one for the prefill, one a round."""
        return self.prefill_calls + len(self.steps)

    @property
    def num_draft_tokens(self) -> int:
        """N_draft."""
        return sum(step.num_drafted for step in self.steps)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were emitted; a round's own token is not one of them."""
        return sum(min(step.num_accepted, step.num_emitted) for step in self.steps)

    @property
    def num_discarded(self) -> int:
        """N_discarded = N_draft + N_target - N (SpecDec++, section 2): drafted tokens that were not emitted.

        Tokens cut at the end count as well, a round's own token among them.
        """
        return self.num_draft_tokens + self.num_target_calls - self.num_tokens

    @property
    def draft_calls(self) -> int:
        return sum(step.draft_calls for step in self.steps)


@dataclass(frozen=True)
class Totals:
    """Sums over prompts. Every rate is a ratio of sums, never a mean of ratios."""

    prompts: int
    num_tokens: int
    num_target_calls: int
    num_draft_tokens: int
    num_accepted: int
    num_discarded: int
    draft_calls: int

    @property
    def tau(self) -> float:
        return tau(self.num_tokens, self.num_target_calls)

    @property
    def acceptance_rate(self) -> float:
        """Accepted by drafted tokens."""
        return self.num_accepted / max(self.num_draft_tokens, 1)

    @property
    def discard_rate(self) -> float:
        """N_discarded / N."""
        return self.num_discarded / max(self.num_tokens, 1)

    @property
    def verification_rate(self) -> float:
        """N_target / N = 1 / tau: SpecDec++'s verification rate, and HSDDW's utilization eta."""
        return self.num_target_calls / max(self.num_tokens, 1)


def pool(traces: Iterable[DecodeTrace]) -> Totals:
    """Sum traces over prompts."""
    items = list(traces)
    summed = [spec.name for spec in fields(Totals) if spec.name != "prompts"]
    return Totals(len(items), **{name: sum(getattr(trace, name) for trace in items) for name in summed})
