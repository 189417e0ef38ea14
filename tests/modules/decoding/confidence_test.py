"""What a distribution says of its token, against the definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.modules.decoding.confidence import (
    MAX_LOGIT,
    confidence_of,
    confidences_of,
    log_odds,
    sigmoid,
)
from draftsmith.modules.decoding.stop import DraftView
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import SamplingParams

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
    return DraftView(1, token, torch.zeros(1, 4), logits, distribution, params.temperature), exact


def entropy(distribution: list[float]) -> float:
    return -sum(p * math.log(p) for p in distribution if p > 0)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tokens_confidence(name, dtype):
    params, logits = SETTINGS[name], some_logits(dtype)
    best = int(logits.argmax())
    second = int(logits.float().topk(2).indices[1])
    for token in {best} if params.greedy else {best, second}:
        seen, distribution = shown(params, logits, token)
        known = confidence_of(seen)
        assert known.log_q == pytest.approx(math.log(distribution[token]), abs=1e-5)
        assert known.log_max_q == pytest.approx(math.log(max(distribution)), abs=1e-5)
        assert known.entropy == pytest.approx(entropy(distribution), abs=1e-4)  # logits of 20 in float32
        fewer = {"token": (known[0], math.nan, math.nan), "mode": (*known[:2], math.nan), "entropy": known[:3]}
        for asked, expected in fewer.items():  # what is not asked for is not made up
            assert confidence_of(seen, asked)[:3] == pytest.approx(expected, rel=0, nan_ok=True)
        assert math.log(seen.prob) == known.log_q


def test_tokens_that_a_model_rules_out():
    logits = some_logits()
    logits[::3] = -math.inf
    token = int(logits.argmax())
    for params in SETTINGS.values():
        seen, distribution = shown(params, logits, token)
        assert confidence_of(seen).entropy == pytest.approx(entropy(distribution), abs=1e-4)


@pytest.mark.parametrize("token", range(3))
def test_the_mode_of_what_was_drawn_is_looked_for(token):
    """Of the token's own half of the mass, of less, and of a tie at half."""
    for distribution in ([0.5, 0.5, 0.0], [0.6, 0.3, 0.1], [0.3, 0.3, 0.4], [0.0, 0.1, 0.9]):
        probs = torch.tensor(distribution)
        seen = DraftView(1, token, torch.zeros(1, 4), probs.log(), probs, 1.0)
        assert confidence_of(seen, "mode").log_max_q == pytest.approx(math.log(max(distribution)))


def test_a_distribution_of_one_token_is_certain():
    distribution = torch.zeros(V)
    distribution[7] = 1.0
    seen = DraftView(1, 7, torch.zeros(1, 4), some_logits(), distribution, 1.0)
    assert log_odds(confidence_of(seen).log_q) == log_odds(confidence_of(seen).log_max_q) == MAX_LOGIT


def test_many_tokens_at_once_are_as_one_by_one():
    logits = torch.stack([some_logits(), some_logits().flip(0), some_logits() / 3])
    params = SamplingParams(0.8, top_k=9)
    distributions, tokens = probabilities(logits, params), logits.topk(2).indices[:, 1]
    found = confidences_of(distributions, tokens, torch.tensor([1, 2, 3]), torch.tensor([0.8] * 3))
    for row, token in enumerate(tokens.tolist()):
        one = confidence_of(DraftView(row + 1, token, torch.zeros(1, 4), logits[row], distributions[row], 0.8))
        many = [float(part[row]) for part in (found.log_q, found.log_max_q, found.entropy)]
        assert list(one[:3]) == pytest.approx(many, abs=1e-5)
    assert found.depth.tolist() == [1, 2, 3] and found.temperature.tolist() == pytest.approx([0.8] * 3)


def test_log_odds_and_their_inverse():
    for prob in (1e-4, 0.3, 0.5, 0.999):
        assert log_odds(math.log(prob)) == pytest.approx(math.log(prob / (1 - prob)))
        assert sigmoid(log_odds(math.log(prob))) == pytest.approx(prob)
    log_probs = torch.tensor([-200.0, -5.0, -0.1, -1e-9, 0.0], dtype=torch.float64)
    assert log_odds(log_probs).tolist() == pytest.approx([log_odds(x) for x in log_probs.tolist()])
    assert (sigmoid(-1e4), sigmoid(1e4)) == (0.0, 1.0)


def test_a_greedy_drafts_distribution_is_computed_once():
    seen, _ = shown(SamplingParams(), some_logits(), int(some_logits().argmax()))
    assert seen.distribution is seen.distribution
