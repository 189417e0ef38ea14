"""Stop policies against rules worked out by hand, the cost rule against the best fixed length in closed form, and what
a distribution says of its token against the definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from draftsmith.modules.decoding.stop import (
    ConfidenceStop,
    CostRule,
    DraftView,
    PredictorStop,
    RecentRatio,
    SelfVerifyStop,
    StopPolicy,
    ThresholdRule,
)
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import SamplingParams

NOTHING = torch.zeros(1, 2)


def view(n: int, token: int = 0, distribution: torch.Tensor | None = None) -> DraftView:
    return DraftView(n, token, NOTHING, torch.zeros(2) if distribution is None else distribution.log(), distribution)


class Says:
    """Predicts for drafted tokens 1, 2, ... as it is told to; a late one speaks of the token before the one it is
    shown."""

    learners = ()

    def __init__(self, probs: Sequence[float], late: bool = False, learns: bool = False):
        self._probs, self.late, self.learns = probs, late, learns
        self.asked: list[int] = []
        self.verdicts: list[tuple[int, int]] = []

    def reset(self) -> None:
        """A new prompt."""

    def start_round(self) -> None:
        self.asked = []

    def prob(self, view: DraftView) -> float:
        self.asked.append(view.num_drafted)
        place = view.num_drafted - self.late
        return self._probs[place - 1] if place else 1.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.verdicts.append((num_drafted, num_accepted))


def drafted(policy: StopPolicy, distributions: Sequence[torch.Tensor | None] = (None,) * 99) -> int:
    """Return the length of a draft that only the policy ends. distributions: of its tokens, all of them 0."""
    policy.start_round()
    return next(
        n for n, distribution in enumerate(distributions, start=1) if policy.should_stop(view(n, 0, distribution))
    )


@pytest.mark.parametrize(
    ("late", "h", "minimum", "maximum", "length"),
    [
        # Survival of 1, 2, 3, 4 tokens: 0.9, 0.72, 0.504, 0.2016.
        (False, 0.05, 1, 9, 1), (False, 0.2, 1, 9, 2), (False, 0.4, 1, 9, 3), (False, 0.6, 1, 9, 4),
        (True, 0.05, 1, 9, 2), (True, 0.2, 1, 9, 3), (True, 0.4, 1, 9, 4), (True, 0.6, 1, 9, 5),
        (False, 0.05, 3, 9, 3), (False, 0.6, 1, 2, 2), (True, 0.05, 1, 1, 1),
        (False, 0.05, 9, 9, 9), (True, 0.05, 2, 9, 2), (True, 0.05, 3, 9, 3),
    ],
)  # fmt: skip
def test_a_threshold_ends_a_draft_by_survival(late, h, minimum, maximum, length):
    policy = PredictorStop(Says([0.9, 0.8, 0.7, 0.4, *[0.1] * 5], late), ThresholdRule(h), minimum, maximum)
    assert drafted(policy) == drafted(policy) == length


@pytest.mark.parametrize(
    ("t", "minimum", "maximum", "length"),
    [
        (0.5, 1, 9, 4),
        (0.51, 1, 9, 2),
        (0.75, 1, 9, 2),
        (0.76, 1, 9, 1),
        (0.51, 3, 9, 3),
        (0.51, 1, 1, 1),
        (0.1, 1, 3, 3),
    ],
)
def test_confidence_stops_at_the_first_token_below_the_threshold(t, minimum, maximum, length):
    distributions = [
        torch.tensor(distribution) for distribution in ([0.75, 0.25], [0.5, 0.5], [0.5, 0.5], [0.25, 0.75], [1.0, 0.0])
    ]
    assert drafted(ConfidenceStop(t, minimum, maximum), distributions) == length


def test_self_verification_compares_with_the_mean_at_rejected_tokens_of_this_prompt():
    even, sure, doubtful = (torch.tensor(distribution) for distribution in ([0.5, 0.5], [1.0, 0.0], [0.25] * 4))
    policy = SelfVerifyStop(4)
    for _ in range(2):
        assert policy.threshold == 0 and drafted(policy, [sure, even, sure]) == 2  # any doubt is more than none yet
        policy.observe(2, 2)  # nothing was rejected
        assert policy.threshold == 0
        drafted(policy, [sure, even, sure])
        policy.observe(2, 1)
        assert policy.threshold == pytest.approx(math.log(2))
        # A doubt that equals the mean goes on; the first rejected token counts, not the last one drafted.
        assert drafted(policy, [even, even, doubtful, sure]) == 3
        policy.observe(3, 0)
        assert policy.threshold == pytest.approx(math.log(2))
        assert drafted(policy, [sure] * 9) == 4
        policy.observe(4, 2)
        assert policy.threshold == pytest.approx(2 / 3 * math.log(2))
        policy.reset()


@pytest.mark.parametrize("learns", [True, False])
def test_only_a_learning_predictor_sees_the_last_token_of_a_full_draft(learns):
    predictor = Says([0.9] * 3, learns=learns)
    policy = PredictorStop(predictor, ThresholdRule(0.99), 1, 3)
    assert drafted(policy) == 3 and predictor.asked == ([1, 2, 3] if learns else [1, 2])
    assert policy.probs == [0.9] * len(predictor.asked)
    policy.observe(3, 1)
    policy.observe(0, 0)  # a round without a draft
    assert predictor.verdicts == [(3, 1)]


def test_the_cost_rule_compares_expected_tokens_with_the_pace():
    rule = CostRule(0.2)
    assert rule.pace == pytest.approx(1.5 / 1.2) and rule.acceptance == 0.5
    # 0.4 x 0.5 and 0.6 x 0.5 against 0.2 x 1.25; a token without a prediction stands for its mean.
    assert rule.enough(0.4, 0) and not rule.enough(0.6, 0) and rule.enough(0.6, 1) and not rule.enough(1.0, 1)


def test_pace_and_acceptance_are_means_over_rounds():
    rule = CostRule(0.1)
    rounds = [(4, 2), (1, 1), (3, 0)]  # drafted, accepted; of these 3, 1 and 1 tokens were verified
    for num_drafted, num_accepted in rounds:
        rule.observe(num_drafted, num_accepted)
    kept = [(1 - 1 / RecentRatio.MEMORY) ** age for age in (3, 2, 1, 0)]  # of the start, and of each round
    tokens = sum(map(math.prod, zip(kept, (1.5, 3, 2, 1), strict=True)))
    time = sum(map(math.prod, zip(kept, (1.1, 1.4, 1.1, 1.3), strict=True)))
    accepted = sum(map(math.prod, zip(kept, (0.5, 2, 1, 0), strict=True)))
    verified = sum(map(math.prod, zip(kept, (1, 3, 1, 1), strict=True)))
    assert rule.pace == pytest.approx(tokens / time) and rule.acceptance == pytest.approx(accepted / verified)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("a", "c"), [(0.9, 0.05), (0.8, 0.1), (0.7, 0.1), (0.8, 0.3), (0.5, 0.2), (0.3, 0.4)])
def test_the_cost_rule_finds_the_best_fixed_length(a, c, late):
    """Every token is accepted with probability a, which the predictor knows: K tokens a round bring 1 + a + .. + a^K in
    the time 1 + c K (Leviathan et al. 2023, theorem 3.8), and some K is the best."""
    speed = {k: sum(a**i for i in range(k + 1)) / (1 + c * k) for k in range(1, 41)}
    best = max(speed, key=speed.__getitem__)
    policy = PredictorStop(Says([a] * 40, late), CostRule(c), 1, 40)
    rng = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(1500):
        lengths.append(drafted(policy))
        accepts = (torch.rand(lengths[-1], generator=rng) < a).tolist()
        policy.observe(lengths[-1], (accepts + [False]).index(False))
    late_lengths = lengths[500:]
    worth = sum(speed[k] * (1 + c * k) for k in late_lengths) / sum(1 + c * k for k in late_lengths)
    assert worth > 0.99 * speed[best]
    assert abs(sorted(late_lengths)[len(late_lengths) // 2] - best) <= 1


@pytest.mark.parametrize(("late", "length"), [(False, 3), (True, 4)])
def test_a_threshold_that_is_met_but_not_exceeded_does_not_stop(late, length):
    # Survival 0.5, then still 0.5, then 0.25: 1 - survival equals h, which no rounding decides.
    policy = PredictorStop(Says([0.5, 1.0, 0.5, 0.5], late), ThresholdRule(0.5), 1, 9)
    assert drafted(policy) == drafted(policy) == length


def test_a_token_that_exactly_pays_is_drafted():
    rule = CostRule(0.25)
    for number in range(60):  # the pace comes to lie where a half of the acceptance is worth a quarter of it
        rule.observe(1, number % 2)
    worth = rule.c * rule.pace / rule.acceptance
    assert rule.acceptance * worth == rule.c * rule.pace  # no rounding decides
    assert not rule.enough(worth, 0) and rule.enough(math.nextafter(worth, 0) * (1 - 1e-12), 0)


V = 50
SETTINGS = {
    "greedy": SamplingParams(),
    "T=1": SamplingParams(1.0),
    "T=0.3": SamplingParams(0.3),
    "T=1.7, top_k": SamplingParams(1.7, top_k=7),
    "T=1, top_p": SamplingParams(1.0, top_p=0.8),
}


def some_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (20 + 4 * torch.randn(V, generator=torch.Generator().manual_seed(3))).to(dtype)


def shown(params: SamplingParams, logits: torch.Tensor, token: int) -> tuple[DraftView, list[float]]:
    """What a policy sees, and the distribution by its definition in float64."""
    distribution = None if params.greedy else probabilities(logits, params)
    wide = logits.double() / (params.temperature or 1.0)
    if distribution is not None:
        wide[distribution == 0] = -math.inf
    weights = [math.exp(x - float(wide.max())) for x in wide.tolist()]
    exact = [weight / sum(weights) for weight in weights]
    return DraftView(1, token, torch.zeros(1, 4), logits, distribution), exact


def entropy(distribution: list[float]) -> float:
    return -sum(p * math.log(p) for p in distribution if p > 0)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tokens_probability_and_entropy(name, dtype):
    params, logits = SETTINGS[name], some_logits(dtype)
    best = int(logits.argmax())
    second = int(logits.float().topk(2).indices[1])
    for token in {best} if params.greedy else {best, second}:
        seen, distribution = shown(params, logits, token)
        assert math.log(seen.prob) == pytest.approx(math.log(distribution[token]), abs=1e-5)
        assert seen.entropy == pytest.approx(entropy(distribution), abs=1e-4)  # logits of 20 in float32
