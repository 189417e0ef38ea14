"""Predictions for one token while decoding, against the head's definition in float64 and its batched forward."""

from __future__ import annotations

import collections
import dataclasses
import math

import numpy as np
import pytest
import torch
from oracles.formulas import repeated

from draftsmith.modules.acceptance import predictor as acceptance
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.acceptance.online import OnlineLogistic, OnlinePredictor
from draftsmith.modules.acceptance.predictor import HeadPredictor
from draftsmith.modules.decoding.confidence import confidence_of, confidences_of
from draftsmith.modules.decoding.stop import DraftView, StepBatch
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import AcceptanceBatch, InputError, SamplingParams

H, V, DEPTH = 8, 30, 4
ALL = ("log_q", "logit_q", "logit_max_q", "entropy", "depth", "temperature", "repeat")
CONTEXT = [3, 1, 4, 1, 5, 9, 3, 1, 4, 2, 6, 3, 1, 4, 1, 5, 3, 1]
# Every pair of two values of (blocks, state, features, activation, standardize) is in one of these.
CASES = {
    "published": {"num_blocks": 3},
    "tied": {"num_blocks": 2, "tied": True},
    "default": {"state": "before", "num_blocks": 0, "features": ("log_q", "logit_q", "depth", "repeat"), "width": 5,
                "activation": "relu", "standardize": True, "calibration": (1.3, 0.2)},
    "after, all": {"features": ALL, "num_blocks": 0, "width": 5, "standardize": True},
    "after, rectified": {"features": ("entropy", "log_q"), "num_blocks": 1, "width": 5, "activation": "relu"},
    "before, bare": {"state": "before", "num_blocks": 1, "w_rej": 3.0},
    "before, all": {"state": "before", "features": ALL, "calibration": (0.7, -0.3), "num_blocks": 3, "width": 5},
    "before, mode": {"state": "before", "features": ("logit_max_q", "log_q"), "num_blocks": 0},
    "before, rectified": {"state": "before", "features": ALL, "num_blocks": 3, "tied": True, "width": 5,
                          "activation": "relu", "standardize": True},
    "narrow": {"num_blocks": 0, "width": 3},
}  # fmt: skip


@pytest.fixture(params=list(CASES))
def head(request) -> AcceptanceHead:
    torch.manual_seed(1)
    made = AcceptanceHead(AcceptanceHeadConfig(H, **CASES[request.param])).requires_grad_(False)
    for weight in made.parameters():
        weight.normal_(std=0.4)
    if made.config.standardize:
        made.mean.normal_()
        made.scale.uniform_(0.5, 3)
    return made


SAMPLING = SamplingParams(0.8, top_k=12)
# Heads whose predictions take different ways: by one row or many, with and without a table and joined features.
SOME = pytest.mark.parametrize(
    "head", ["default", "after, all", "before, all", "before, bare", "narrow"], indirect=True
)


@pytest.fixture
def views(request) -> list[DraftView]:
    """A round: the view of token n holds the state that predicted it."""
    params = getattr(request, "param", SAMPLING)
    rng = torch.Generator().manual_seed(2)
    states, logits = torch.randn(DEPTH, H, generator=rng), 2 * torch.randn(DEPTH, V, generator=rng)
    distributions = None if params.greedy else probabilities(logits, params)
    tokens = logits.topk(2).indices[:, 0 if distributions is None else 1].tolist()
    return [
        DraftView(n + 1, tokens[n], states[n : n + 1], logits[n], None if distributions is None else distributions[n],
                  params.temperature, CONTEXT)
        for n in range(DEPTH)
    ]  # fmt: skip


EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(3)).double()


def embed(ids: torch.Tensor) -> torch.Tensor:
    return EMBEDDING[ids]


def repeat(views: list[DraftView], number: int) -> float:
    half, followed = repeated(CONTEXT, [*CONTEXT, *(view.token for view in views[:number])])
    return half if followed == views[number].token else -half


def numbers(views: list[DraftView], number: int, names: tuple[str, ...]) -> list[float]:
    """Compute the features of a token from its distribution in float64."""
    view = views[number]
    distribution = (view.logits.double().softmax(-1) if view.draft_prob is None else view.draft_prob.double()).numpy()
    q, most = distribution[view.token], distribution.max()
    entropy = -(distribution[distribution > 0] * np.log(distribution[distribution > 0])).sum()
    found = {"log_q": np.log(q), "logit_q": np.log(q / (1 - q)), "logit_max_q": np.log(most / (1 - most)),
             "entropy": entropy, "depth": math.log(view.num_drafted), "temperature": view.temperature,
             "repeat": repeat(views, number)}  # fmt: skip
    return [float(found[name]) for name in names]


def by_definition(head: AcceptanceHead, state: torch.Tensor, views: list[DraftView], number: int) -> float:
    """Compute the raw logit of a token in float64: standardized inputs; the first layer, which features skip in a
    rectified head; blocks; one logit."""
    config, weights = head.config, {name: weight.double() for name, weight in head.state_dict().items()}
    features = numbers(views, number, config.features)
    given = [state.double(), *([embed(torch.tensor(views[number].token))] if config.state == "before" else [])]
    x = torch.cat([*given, torch.tensor(features, dtype=torch.float64)])
    if config.standardize:
        x = (x - weights["mean"]) / weights["scale"]
    features = x[len(x) - len(features) :]
    if config.activation == "relu":
        x = weights["join.weight"] @ x[: len(x) - len(features)] + weights["join.bias"]
        x = torch.where(x > 0, x, 0)
    elif "join.weight" in weights:
        x = weights["join.weight"] @ x + weights["join.bias"]
    for block in range(config.num_blocks):
        name = f"blocks.{0 if config.tied else block}.linear"
        z = weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]
        x = x + z / (1 + torch.exp(-z))
    logit = float(weights["out.weight"][0] @ x + weights["out.bias"][0])
    return logit + (float(weights["direct.weight"][0] @ features) if config.features else 0.0)


def calibrated(head: AcceptanceHead, logit: float) -> float:
    config = head.config
    logit += math.log(config.w_rej / config.w_acc)
    return config.calibration[0] * logit + config.calibration[1]


def prob(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def expected(head: AcceptanceHead, views: list[DraftView], how) -> list[float]:
    """Predict token n by its own view's state, or by the next one's, which has read it."""
    if head.config.state != "after":
        return [prob(how(by_definition(head, view.hidden, views, number))) for number, view in enumerate(views)]
    after = enumerate(views[1:])
    return [1.0, *(prob(how(by_definition(head, view.hidden, views, number))) for number, view in after)]


def say(predictor: HeadPredictor, views: list[DraftView]) -> list[float]:
    predictor.start_round()
    return [predictor.prob(view) for view in views]


@pytest.mark.parametrize("views", [SamplingParams(), SAMPLING], ids=["greedy", "sampling"], indirect=True)
def test_every_token_is_predicted_by_the_heads_definition(head, views):
    for predictor, how in (
        (HeadPredictor(head, embed), lambda x: calibrated(head, x)),
        (HeadPredictor(head, embed, calibrated=False), lambda x: x),
    ):
        assert predictor.late == (head.config.state == "after") and not predictor.learns
        for _ in range(2):  # a second round is not disturbed by the first
            assert say(predictor, views) == pytest.approx(expected(head, views, how), abs=1e-5)


@pytest.mark.parametrize("state", ["before", "after"])
def test_an_online_predictor_starts_at_the_heads_prediction(views, state):
    """It learns each token's label from that token's features, also with a head that predicts one token late."""
    torch.manual_seed(4)
    head = AcceptanceHead(AcceptanceHeadConfig(H, state=state, features=ALL, num_blocks=1)).requires_grad_(False)
    torch.nn.init.normal_(head.out.weight)
    both, alone = OnlinePredictor(head=HeadPredictor(head, embed)), HeadPredictor(head, embed)
    both.reset()
    assert both.learns and both.late == alone.late
    said = say(alone, views)
    assert say(both, views) == pytest.approx(said, abs=1e-6)
    by_hand = OnlineLogistic(3, prior=OnlinePredictor.TRUST, memory=OnlinePredictor.MEMORY)
    known = range(DEPTH - alone.late)
    logits = [math.log(p / (1 - p)) for p in said[alone.late :]]
    features = [(logits[n], *numbers(views, n, ("logit_q", "repeat"))) for n in known]
    both.observe(DEPTH, 2)
    for n in range(3):
        by_hand.update(features[n], float(n < 2))
    assert both.model.weights == pytest.approx(by_hand.weights, abs=1e-4)
    assert say(both, views)[alone.late :] == pytest.approx([by_hand.prob(x) for x in features], abs=1e-4)


def side_by_side(rounds: list[list[DraftView]]) -> list[list[DraftView]]:
    """Put the rounds into one batch as rows, beside rows that draft nothing."""
    rows = [0, 2, 3][: len(rounds)]
    for views in zip(*rounds, strict=True):
        states, logits = torch.full((5, H), math.nan), torch.full((5, V), math.nan)
        for row, view in zip(rows, views, strict=True):
            states[row], logits[row] = view.hidden, view.logits
        given = None if views[0].draft_prob is None else torch.stack([view.draft_prob for view in views])
        step = StepBatch(rows, [view.token for view in views], states, logits, given)
        for place, view in enumerate(views):
            view.batch, view.place = step, place
    return rounds


@SOME
def test_rows_that_draft_together_are_predicted_together(head, views, monkeypatch):
    """Each row by the definition; three rows take as many matrix products as two."""
    turned = [*views[1:], views[0]]
    others = [dataclasses.replace(own, num_drafted=n + 1) for n, own in enumerate(turned)]
    last = [dataclasses.replace(own, context=CONTEXT[::-1]) for own in views]
    calls = collections.Counter()
    for name in ("addmm", "mv"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, name=name, real=real: calls.update([name]) or real(*a))
    counted = []
    for rounds in ([views, others], [views, others, last]):
        first = HeadPredictor(head, embed)
        predictors = [first, *(first.for_row() for _ in rounds[1:])]
        told = say_together(predictors, rounds)
        counted.append(dict(calls))
        calls.clear()
        for said, own in zip(told, rounds, strict=True):
            alone = [dataclasses.replace(view, batch=None, _prob=None, _softmax=None) for view in own]
            assert said == pytest.approx(say(HeadPredictor(head, embed), alone), abs=1e-5)
        assert told[0] == pytest.approx(expected(head, views, lambda x: calibrated(head, x)), abs=1e-5)
        calls.clear()
    reads_numbers = bool(head.config.features) and head.config.activation == "none" and head.join is not None
    assert reads_numbers or counted[0] == counted[1]  # joined features belong to one row


def say_together(predictors: list[HeadPredictor], rounds: list[list[DraftView]]) -> list[list[float]]:
    for predictor in predictors:
        predictor.start_round()
    steps = [[predictor.prob(view) for predictor, view in zip(predictors, views, strict=True)]
             for views in zip(*side_by_side(rounds), strict=True)]  # fmt: skip
    return [list(said) for said in zip(*steps, strict=True)]


@SOME
def test_a_large_vocabulary_is_predicted_without_a_table(head, views, monkeypatch):
    usual = say(HeadPredictor(head, embed), views)
    monkeypatch.setattr(acceptance, "LARGEST_TABLE", 0)
    assert say(HeadPredictor(head, embed), views) == pytest.approx(usual, abs=1e-5)


def test_one_token_is_predicted_as_in_training(head, views):
    """Training computes the features of all tokens at once."""
    if head.config.state == "after":
        predicted, states = views[:-1], torch.stack([view.hidden for view in views[1:]])
    else:
        predicted, states = views, torch.stack([view.hidden for view in views])
    distributions = torch.stack([v.logits.softmax(-1) if v.draft_prob is None else v.draft_prob for v in predicted])
    tokens = torch.tensor([view.token for view in predicted])
    places = torch.tensor([view.num_drafted for view in predicted])
    heats = torch.tensor([view.temperature for view in predicted])
    known = confidences_of(distributions, tokens, places, heats)
    known = known._replace(repeat=torch.tensor([repeat(views, n) for n in range(len(predicted))]))
    features = head.feature_values(known) if head.config.features else None
    embeds = embed(tokens) if head.config.state == "before" else None
    many = torch.sigmoid(head.calibrated(head(states, embeds, features))).tolist()
    assert say(HeadPredictor(head, embed), views)[-len(many) :] == pytest.approx(many, abs=1e-5)
    assert confidence_of(predicted[0]).log_q == pytest.approx(float(distributions[0, tokens[0]].log()), abs=1e-5)


def test_a_head_without_a_join_layer_cannot_standardize():
    for changes in ({"activation": "relu"}, {"standardize": True}):
        with pytest.raises(InputError, match=r"head: found activation .*, expected neither without a first layer"):
            AcceptanceHeadConfig(H, **changes)


@pytest.mark.parametrize("w_rej", [1.0, 3.0, 6.0, 12.0])
def test_calibration_undoes_the_weights_of_the_loss(w_rej):
    # Minimize the loss of a constant logit over soft labels, then calibrate: out comes their mean.
    prob = torch.tensor([[0.2, 0.9, 0.7, 1.0]])
    batch = AcceptanceBatch(torch.zeros(1, 4, H), prob, torch.ones(1, 4, dtype=torch.bool))
    logit = torch.zeros(1, 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([logit], max_iter=100, tolerance_grad=1e-9)

    def closure():
        optimizer.zero_grad()
        loss = acceptance_loss(logit.expand(1, 4), batch, 1.0, w_rej).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    found = AcceptanceHead(AcceptanceHeadConfig(H, w_rej=w_rej)).calibrated(logit)
    assert torch.sigmoid(found).item() == pytest.approx(prob.mean().item(), abs=1e-4)
