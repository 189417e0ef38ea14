"""Predicting for one token while decoding, against the head's definition in float64 and what the head says of many."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from draftsmith.modules.acceptance import predictor as acceptance
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.acceptance.predictor import HeadPredictor
from draftsmith.modules.decoding.confidence import confidence_of, confidences_of
from draftsmith.modules.decoding.protocols import DraftView
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import SamplingParams

H, V, DEPTH = 8, 30, 4
ALL = ("log_q", "logit_q", "logit_max_q", "entropy", "depth", "temperature")
CASES = {
    "published": {"num_blocks": 3},
    "tied": {"num_blocks": 2, "tied": True},
    "after, with features": {"features": ("entropy", "log_q")},
    "before": {"state": "before", "num_blocks": 1, "w_rej": 1.0},
    "before, all features": {"state": "before", "features": ALL, "calibration": (0.7, -0.3)},
    "before, one feature": {"state": "before", "features": ("logit_q",), "w_rej": 3.0},
}


@pytest.fixture(params=list(CASES))
def head(request) -> AcceptanceHead:
    torch.manual_seed(1)
    made = AcceptanceHead(AcceptanceHeadConfig(H, **CASES[request.param])).requires_grad_(False)
    for weight in made.parameters():
        weight.normal_(std=0.4)
    return made


@pytest.fixture(params=[SamplingParams(), SamplingParams(0.8, top_k=12)], ids=["greedy", "sampling"])
def views(request) -> list[DraftView]:
    """A round: in the view of token n the state is that which predicted it."""
    rng = torch.Generator().manual_seed(2)
    states, logits = torch.randn(DEPTH, H, generator=rng), 2 * torch.randn(DEPTH, V, generator=rng)
    distributions = None if request.param.greedy else probabilities(logits, request.param)
    tokens = logits.topk(2).indices[:, 0 if distributions is None else 1].tolist()
    return [
        DraftView(n + 1, tokens[n], states[n][None], logits[n], None if distributions is None else distributions[n],
                  request.param.temperature)
        for n in range(DEPTH)
    ]  # fmt: skip


EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(3)).double()


def embed(ids: torch.Tensor) -> torch.Tensor:
    return EMBEDDING[ids]


def numbers(view: DraftView, names: tuple[str, ...]) -> list[float]:
    """The features of a token, from its distribution in float64."""
    distribution = (view.logits.double().softmax(-1) if view.draft_prob is None else view.draft_prob.double()).numpy()
    q, most = distribution[view.token], distribution.max()
    entropy = -(distribution[distribution > 0] * np.log(distribution[distribution > 0])).sum()
    found = {"log_q": np.log(q), "logit_q": np.log(q / (1 - q)), "logit_max_q": np.log(most / (1 - most)),
             "entropy": entropy, "depth": math.log(view.num_drafted), "temperature": view.temperature}  # fmt: skip
    return [float(found[name]) for name in names]


def by_definition(head: AcceptanceHead, state: torch.Tensor, predicted: DraftView) -> float:
    """The raw logit of a token, in float64: join [state; embedding; features], then blocks, then one logit."""
    weights = {name: weight.double() for name, weight in head.state_dict().items()}
    features = torch.tensor(numbers(predicted, head.config.features), dtype=torch.float64)
    parts = (
        [state.double(), embed(torch.tensor(predicted.token))] if head.config.state == "before" else [state.double()]
    )
    x = torch.cat([*parts, features])
    if len(x) > H:
        x = weights["join.weight"] @ x + weights["join.bias"]
    for block in range(head.config.num_blocks):
        name = f"blocks.{0 if head.config.tied else block}.linear"
        z = weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]
        x = x + z / (1 + torch.exp(-z))
    logit = float(weights["out.weight"][0] @ x + weights["out.bias"][0])
    return logit + (float(weights["direct.weight"][0] @ features) if head.config.features else 0.0)


def calibrated(head: AcceptanceHead, logit: float) -> float:
    config = head.config
    logit += math.log(config.w_rej / config.w_acc)
    return config.calibration[0] * logit + config.calibration[1]


def prob(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def expected(head: AcceptanceHead, views: list[DraftView], how) -> list[float]:
    """Token n is predicted by its own view's state, or by the next one's, which has read it."""
    if head.config.state == "before":
        return [prob(how(by_definition(head, view.hidden, view))) for view in views]
    pairs = itertools.pairwise(views)
    return [1.0, *(prob(how(by_definition(head, after.hidden, predicted))) for predicted, after in pairs)]


def say(predictor: HeadPredictor, views: list[DraftView]) -> list[float]:
    predictor.start_round()
    return [predictor.prob(view) for view in views]


@pytest.mark.parametrize("raw", [False, True])
def test_every_token_is_predicted_by_the_heads_definition(head, views, raw):
    predictor = HeadPredictor(head, embed, calibrated=not raw)
    assert predictor.late == (head.config.state == "after") and not predictor.learns
    for _ in range(2):  # a second round is not disturbed by the first
        assert say(predictor, views) == pytest.approx(
            expected(head, views, (lambda x: x) if raw else (lambda x: calibrated(head, x))), abs=1e-5
        )


def test_large_vocabularies_go_another_way_to_the_same_numbers(head, views, monkeypatch):
    usual = say(HeadPredictor(head, embed), views)
    monkeypatch.setattr(acceptance, "LARGEST_TABLE", 0)
    assert say(HeadPredictor(head, embed), views) == pytest.approx(usual, abs=1e-5)


def test_one_token_is_predicted_as_many_are(head, views):
    """As training sees them: the features of all tokens at once."""
    if head.config.state == "after":
        predicted, states = views[:-1], torch.stack([view.hidden for view in views[1:]])
    else:
        predicted, states = views, torch.stack([view.hidden for view in views])
    distributions = torch.stack([v.logits.softmax(-1) if v.draft_prob is None else v.draft_prob for v in predicted])
    tokens = torch.tensor([view.token for view in predicted])
    places = torch.tensor([view.num_drafted for view in predicted])
    heats = torch.tensor([view.temperature for view in predicted])
    features = (
        head.feature_values(confidences_of(distributions, tokens, places, heats)) if head.config.features else None
    )
    embeds = embed(tokens) if head.config.state == "before" else None
    many = torch.sigmoid(head.calibrated(head(states, embeds, features))).tolist()
    assert say(HeadPredictor(head, embed), views)[-len(many) :] == pytest.approx(many, abs=1e-5)
    assert confidence_of(predicted[0]).log_q == pytest.approx(float(distributions[0, tokens[0]].log()), abs=1e-5)
