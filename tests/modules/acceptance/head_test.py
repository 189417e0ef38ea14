"""The acceptance head and its stop rule against the paper's formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from quick_heads import specdecpp

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.decoding.stop import DraftView, PredictorStop
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.types import AcceptanceBatch, InputError

HIDDEN = 8


def make_head(seed: int = 0, **changes) -> AcceptanceHead:
    torch.manual_seed(seed)
    head = AcceptanceHead(AcceptanceHeadConfig(HIDDEN, **changes))
    for weight in head.parameters():
        weight.data.normal_(std=0.5)
    return head.requires_grad_(False)


def logit_by_definition(head: AcceptanceHead, hidden: torch.Tensor) -> float:
    """D blocks x + SiLU(W x + b), then one logit, in float64."""
    x = hidden.double()
    for block in head.blocks:
        z = block.linear.weight.double() @ x + block.linear.bias.double()
        x = x + z / (1 + torch.exp(-z))
    return float(head.out.weight[0].double() @ x + head.out.bias.double())


@pytest.mark.parametrize("features", [(), ("log_q", "entropy", "depth")])
@pytest.mark.parametrize("state", ["before", "after"])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_inputs_are_standardized_before_the_join_layer_and_the_direct_path(features, state, activation):
    head = make_head(num_blocks=0, features=features, state=state, width=5, activation=activation, standardize=True)
    assert (
        torch.equal(head.scale, torch.ones(head.config.input_size)) and not head.mean.any()
    )  # nothing until it is set
    head.mean.normal_(std=2)
    head.scale.uniform_(0.2, 4)
    hidden, embeds, numbers = torch.randn(3, 7, HIDDEN), torch.randn(3, 7, HIDDEN), torch.randn(3, 7, len(features))
    w = {name: tensor.double().numpy() for name, tensor in head.state_dict().items()}
    given = np.concatenate([hidden, *([embeds] if state == "before" else []), numbers], -1)
    given = (given - w["mean"]) / w["scale"]
    states, own = given[..., : given.shape[-1] - len(features)], given[..., given.shape[-1] - len(features) :]
    joined = states if activation == "relu" else given  # of a rectified layer the numbers stay outside
    x = joined @ w["join.weight"].T + w["join.bias"]
    x = np.maximum(x, 0) if activation == "relu" else x
    logit = (x @ w["out.weight"].T + w["out.bias"])[..., 0]
    if features:
        logit = logit + own @ w["direct.weight"][0]
    for same in (head, head.folded()):
        read = (hidden, embeds if state == "before" else None, numbers if features else None)
        np.testing.assert_allclose(same(*read).numpy(), logit, atol=1e-5)
    assert not list(head.folded().buffers()) and head.folded()(*read).dtype == torch.float32


def test_a_head_without_a_join_layer_cannot_standardize():
    for changes in ({"activation": "relu"}, {"standardize": True}):
        with pytest.raises(InputError, match=r"head: found activation .*, expected neither without a first layer"):
            make_head(**changes)


@pytest.mark.parametrize("w_rej", [1.0, 3.0, 6.0, 12.0])
def test_calibration_undoes_the_weights_of_the_loss(w_rej):
    # Minimize the loss of a constant logit over soft labels, then calibrate: out comes their mean.
    head = make_head(w_rej=w_rej)
    prob = torch.tensor([[0.2, 0.9, 0.7, 1.0]])
    batch = AcceptanceBatch(torch.zeros(1, 4, HIDDEN), prob, torch.ones(1, 4, dtype=torch.bool))
    logit = torch.zeros(1, 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([logit], max_iter=100, tolerance_grad=1e-9)

    def closure():
        optimizer.zero_grad()
        loss = acceptance_loss(logit.expand(1, 4), batch, 1.0, w_rej).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.sigmoid(head.calibrated(logit)).item() == pytest.approx(prob.mean().item(), abs=1e-4)


def test_a_fitted_calibration_comes_after_the_correction_for_the_weights():
    head = make_head(w_rej=6.0, calibration=(0.5, -0.25))
    calibrated = head.calibrated(torch.tensor(1.0)).item()
    assert calibrated == pytest.approx(0.5 * (1 + math.log(6)) - 0.25)


def view(n: int, hidden: torch.Tensor) -> DraftView:
    return DraftView(n, 0, hidden[None], torch.zeros(4), None)


def stopped_at(policy: PredictorStop, states: torch.Tensor) -> int:
    policy.start_round()
    for n in range(1, len(states) + 1):
        if policy.should_stop(view(n, states[n - 1])):
            return n
    raise AssertionError("never stopped")


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("h", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("min_drafted", [1, 2, 4])
def test_drafting_stops_by_the_papers_rule(h, min_drafted, calibrated):
    head = make_head()
    policy = specdecpp(head, h=h, min_drafted=min_drafted, max_drafted=9, calibrated=calibrated)
    for seed in range(20):
        states = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(seed))
        # State n (from 1) is the drafter's once it has read token n-1, so it predicts for that token; state 1 for none.
        survival, expected = 1.0, 9
        for n in range(1, 9):
            if n >= 2:
                logit = logit_by_definition(head, states[n - 1]) + (math.log(6) if calibrated else 0)
                survival *= 1 / (1 + math.exp(-logit))
            if n >= min_drafted and 1 - survival > h:
                expected = n
                break
        assert stopped_at(policy, states) == expected
