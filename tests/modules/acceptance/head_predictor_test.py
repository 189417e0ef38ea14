"""Predictions for one token while decoding, against the head's definition in float64 and its batched forward."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, HeadPredictor
from draftsmith.modules.decoding.stop import DraftView
from draftsmith.modules.losses import acceptance_loss

H, V, DEPTH = 8, 30, 4
CASES = {
    "published": {"num_blocks": 3},
    "tied": {"num_blocks": 2, "tied": True},
    "calibrated": {"num_blocks": 1, "w_rej": 3.0, "calibration": (1.3, 0.2)},
    "bare": {"num_blocks": 0},
}


@pytest.fixture(params=list(CASES))
def head(request) -> AcceptanceHead:
    torch.manual_seed(1)
    made = AcceptanceHead(AcceptanceHeadConfig(H, **CASES[request.param])).requires_grad_(False)
    for weight in made.parameters():
        weight.normal_(std=0.4)
    return made


@pytest.fixture
def views() -> list[DraftView]:
    """A round: the view of token n holds the state that predicted it."""
    states = torch.randn(DEPTH, H, generator=torch.Generator().manual_seed(2))
    return [DraftView(n + 1, n, states[n : n + 1], torch.zeros(V), None) for n in range(DEPTH)]


def by_definition(head: AcceptanceHead, state: torch.Tensor, calibrated: bool) -> float:
    """Compute a token's probability in float64."""
    config, weights = head.config, {name: weight.double() for name, weight in head.state_dict().items()}
    x = state.double()
    for block in range(config.num_blocks):
        name = f"blocks.{0 if config.tied else block}.linear"
        z = weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]
        x = x + z / (1 + torch.exp(-z))
    logit = float(weights["out.weight"][0] @ x + weights["out.bias"][0])
    if calibrated:
        scale, shift = config.calibration
        logit = scale * (logit + math.log(config.w_rej / config.w_acc)) + shift
    return 1 / (1 + math.exp(-logit))


@pytest.mark.parametrize("calibrated", [True, False])
def test_every_token_is_predicted_by_the_heads_definition(head, views, calibrated):
    predictor = HeadPredictor(head, calibrated)
    assert predictor.late and not predictor.learns
    # The state that has read a token is in the next one's view.
    expected = [1.0, *(by_definition(head, view.hidden, calibrated) for view in views[1:])]
    for _ in range(2):  # a second round is not disturbed by the first
        predictor.start_round()
        assert [predictor.prob(view) for view in views] == pytest.approx(expected, abs=1e-5)


def test_one_token_is_predicted_as_in_training(head, views):
    many = torch.sigmoid(head.calibrated(head(torch.stack([view.hidden for view in views[1:]])))).tolist()
    assert [HeadPredictor(head).prob(view) for view in views[1:]] == pytest.approx(many, abs=1e-5)


@pytest.mark.parametrize("w_rej", [1.0, 3.0, 6.0, 12.0])
def test_calibration_undoes_the_weights_of_the_loss(w_rej):
    # Minimize the loss of a constant logit over soft labels, then calibrate: out comes their mean.
    prob, logit = torch.tensor([0.2, 0.9, 0.7, 1.0]), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([logit], max_iter=100, tolerance_grad=1e-9)

    def closure():
        optimizer.zero_grad()
        loss = acceptance_loss(logit.expand(4), prob, 1.0, w_rej).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    found = AcceptanceHead(AcceptanceHeadConfig(H, w_rej=w_rej)).calibrated(logit)
    assert torch.sigmoid(found).item() == pytest.approx(prob.mean().item(), abs=1e-4)
