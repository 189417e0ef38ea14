"""EAGLE-3's objectives against their formulas as autograd differentiates them, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.modules import losses
from draftsmith.modules.drafters.eagle3.loss import distances

N, V, H = 13, 11, 5
D2T = torch.tensor([0, 2, 3, 7, 8, 10])


def same(logits: Tensor) -> Tensor:
    """lm_head of a target whose states are its logits."""
    return logits


def case(d2t: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    rng = torch.Generator().manual_seed(1)
    target = 3 * torch.randn(N, V, generator=rng, dtype=torch.float64)
    lm_head = torch.randn(V if d2t is None else len(d2t), H, generator=rng, dtype=torch.float64, requires_grad=True)
    hidden = [torch.randn(N, H, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weights = torch.rand(3, N, generator=rng, dtype=torch.float64)
    weights[1, :2] = 0
    return target, lm_head, hidden, weights


def formula(drop: bool, target: Tensor, lm_head: Tensor, d2t: Tensor | None, hidden: Tensor, weight: Tensor):
    """Total, acceptance and hits of one prediction, written out."""
    ids = torch.arange(V) if d2t is None else d2t
    p = target.softmax(-1)
    known = torch.isin(p.argmax(-1), ids)
    if drop:
        weight = weight * known
    q = (hidden @ lm_head.T).softmax(-1)
    renormed = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
    entropy = -(renormed * q.log()).sum(-1)
    accepted = torch.minimum(p[:, ids], q).sum(-1)
    return (entropy * weight).sum(), accepted, ids[q.argmax(-1)] == p.argmax(-1), known


@pytest.mark.parametrize(("d2t", "rows_at_once"), [(None, 100), (D2T, 2)], ids=["whole", "reduced"])
@pytest.mark.parametrize("drop", [True, False])
def test_values_and_gradients(monkeypatch, drop: bool, d2t: Tensor | None, rows_at_once: int) -> None:
    target, lm_head, hidden, weights = case(d2t)
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", rows_at_once * V)
    ours = distances(same, target, lm_head, d2t, hidden, weights, drop)
    theirs = [formula(drop, target, lm_head, d2t, h, w) for h, w in zip(hidden, weights, strict=True)]
    for i, (total, accepted, right, known) in enumerate(theirs):
        assert abs(ours.totals[i] - total) < 1e-10
        assert (ours.accepted[i] - accepted).abs().max() < 1e-10
        assert torch.equal(ours.right[i], right) and torch.equal(ours.known, known)
    scale = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
    inputs = [lm_head, *hidden]
    got = torch.autograd.grad((ours.totals * scale).sum(), inputs)
    wanted = torch.autograd.grad(sum(s * row[0] for s, row in zip(scale, theirs, strict=True)), inputs)
    assert max((a - b).abs().max() for a, b in zip(got, wanted, strict=True)) < 1e-10


@pytest.mark.parametrize("d2t", [D2T, None], ids=["reduced", "whole"])
def test_totals_and_gradients_are_the_same_where_nothing_is_measured(d2t: Tensor | None) -> None:
    target, lm_head, hidden, weights = case(d2t)
    before = target.clone()
    outcomes = []
    for measured in (True, False):
        found = distances(same, target, lm_head, d2t, hidden, weights, measured=measured)
        outcomes.append([found.totals, *torch.autograd.grad(found.totals.sum(), [lm_head, *hidden])])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert not found.right.any() and not found.accepted.any()
    assert torch.equal(target, before)  # whose logits they are, they stay


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    """In float32, where exp(100) is infinite, and where the draft vocabulary has next to nothing of p."""
    target, lm_head, hidden, weights = case(D2T)
    target[0, 1], target[1] = 300, target[1] * 40
    ours = distances(
        torch.Tensor.float,
        target,
        lm_head.float().detach() * 60,
        D2T,
        [h.float() for h in hidden],
        weights.float(),
        drop_unknown=False,
    )
    wanted = [formula(False, target, lm_head * 60, D2T, h, w)[0] for h, w in zip(hidden, weights, strict=True)]
    torch.testing.assert_close(ours.totals, torch.stack(wanted).float(), rtol=1e-5, atol=0)


def test_a_frozen_lm_head_and_no_tokens() -> None:
    target, lm_head, hidden, weights = case(D2T)
    frozen = lm_head.detach()
    distances(same, target, frozen, D2T, hidden, weights).totals.sum().backward()
    assert lm_head.grad is None and all(h.grad is not None for h in hidden)
    nothing = distances(same, target, frozen, D2T, [h[:0] for h in hidden], weights[:, :0])
    assert nothing.totals.tolist() == [0, 0, 0]


def reverse(logits, p):
    """A loss of the user's own: KL(q|p)."""
    q = logits.softmax(-1)
    return (q * (q.log() - p.log())).sum(-1)


@pytest.mark.parametrize("divergence", ["forward", "tvd", reverse])
def test_distillations_divergences_and_their_gradients_are_their_formulas(divergence):
    """DistillSpec (Zhou et al. 2023, table 1) in float64; KL(p|q) is counted up to p's entropy."""
    generator = torch.Generator().manual_seed(0)
    wanted, hidden, teacher, lm_head = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 5), (7, 5), (11, 5), (11, 5))
    )
    weights = torch.rand(1, 7, generator=generator, dtype=torch.float64)
    leaves = [lm_head.clone().requires_grad_(), hidden.clone().requires_grad_()]
    found = distances(
        lambda states: states @ teacher.T, wanted, leaves[0], None, leaves[1:], weights, divergence=divergence
    )
    found.totals[0].backward()

    plain = [lm_head.clone().requires_grad_(), hidden.clone().requires_grad_()]
    p, q = (wanted @ teacher.T).softmax(-1), (plain[1] @ plain[0].T).softmax(-1)
    formulas = {"forward": -(p * q.log()).sum(-1), "tvd": (p - q).abs().sum(-1) / 2}
    value = (q * (q / p).log()).sum(-1) if divergence is reverse else formulas[divergence]
    (value * weights[0]).sum().backward()
    assert torch.allclose(found.totals[0], (value * weights[0]).sum(), rtol=1e-12, atol=0)
    for ours, theirs in zip(leaves, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
