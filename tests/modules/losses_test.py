"""Values and gradients of the losses against their formulas, written out in float64, and what masks must keep out."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules import losses
from draftsmith.modules.drafters.medusa import token_loss
from draftsmith.modules.losses import (
    acceptance_loss,
    compare_blocks,
    distances,
    sampled_columns,
)

# The losses are taken in float32 and summed over tens of tokens.
TOLERANCE = 1e-5


@pytest.mark.parametrize(("w_acc", "w_rej"), [(1.0, 6.0), (2.0, 3.0)])
def test_acceptance_loss_is_the_papers(w_acc, w_rej):
    rng = torch.Generator().manual_seed(0)
    logit, label = 2 * torch.randn(27, generator=rng), torch.rand(27, generator=rng)
    label[0], label[10] = 0.0, 1.0
    total = kl = 0.0
    for prob, z in zip(label.tolist(), logit.tolist(), strict=True):
        predicted = 1 / (1 + math.exp(-z))
        total -= w_acc * prob * math.log(predicted) + w_rej * (1 - prob) * math.log(1 - predicted)
        kl += prob * math.log(prob / predicted) if prob else 0.0
        kl += (1 - prob) * math.log((1 - prob) / (1 - predicted)) if prob < 1 else 0.0
    output = acceptance_loss(logit, label, w_acc, w_rej)
    assert output.loss.item() == pytest.approx(total / 27, rel=TOLERANCE)
    assert output.sums["loss"].item() == pytest.approx(total, rel=TOLERANCE)
    assert output.sums["kl"].item() == pytest.approx(kl, rel=TOLERANCE)
    assert output.counts["loss"].item() == output.counts["kl"].item() == 27
    assert torch.isfinite(acceptance_loss(logit * 1e4, label).loss)
    assert acceptance_loss(logit[:0], label[:0]).loss == 0


# -- every loss of draft heads

N, V, H, R = 13, 11, 5, 3
D2T = torch.tensor([0, 2, 3, 7, 8, 10])
PLACES = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 5, 6, 6])
KEPT = torch.rand(N, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
KEPT[:2, 1] = 0
LABELS = torch.randint(V, (N,), generator=torch.Generator().manual_seed(3))
LOG_COUNTS = torch.rand(V, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class Leaves:
    """What a loss may be trained through, and the target: [N, H] of three predictions, lm_heads and a Markov head."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        self.target, self.wanted = 2 * draw(V, H), draw(N, H)
        self.hidden = [draw(N, H).requires_grad_() for _ in range(3)]
        self.lm_head, self.reduced = draw(V, H).requires_grad_(), draw(len(D2T), H).requires_grad_()
        self.bias, self.z, self.w2 = draw(V).requires_grad_(), draw(N, R).requires_grad_(), draw(V, R).requires_grad_()

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.target.T

    def p(self) -> Tensor:
        return self.logits(self.wanted).softmax(-1)

    def trained(self) -> list[Tensor]:
        return [*self.hidden, self.lm_head, self.reduced, self.bias, self.z, self.w2]


def reverse(logits: Tensor, p: Tensor) -> Tensor:
    """A loss of the user's own: KL(q|p)."""
    q = logits.softmax(-1)
    return (q * (q.log() - p.log())).sum(-1)


def plain_distance(logits: Tensor, p: Tensor, divergence: str | Callable[..., Tensor]) -> Tensor:
    """Cross-entropy or total variation as DistillSpec's table 1 has them."""
    if callable(divergence):
        return divergence(logits, p)
    q = logits.softmax(-1)
    return -(p * q.log()).sum(-1) if divergence == "forward" else (q - p).abs().sum(-1) / 2


def whole(x: Leaves, divergence: str | Callable[..., Tensor], lm_head: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """By an lm_head of the head's own, or by the target's."""
    ours = distances(x.logits, V, x.wanted, lm_head, None, x.hidden, KEPT, divergence=divergence).total
    logits = [x.logits(h) if lm_head is None else h @ lm_head.T for h in x.hidden]
    pairs = zip(logits, KEPT.unbind(-1), strict=True)
    return ours, sum((plain_distance(own, x.p(), divergence) * weight).sum() for own, weight in pairs)


def reduced(x: Leaves, drop: bool) -> tuple[Tensor, Tensor]:
    """Over a draft vocabulary, with p renormalized over it, and what is measured beside the loss."""
    ours, p = distances(x.logits, V, x.wanted, x.reduced, D2T, x.hidden, KEPT, drop), x.p()
    known, share = torch.isin(p.argmax(-1), D2T), p[:, D2T].sum(-1, keepdim=True)
    assert torch.equal(ours.known, known) and not known.all() and ours.right.dtype == ours.known.dtype == torch.bool
    total = torch.zeros((), dtype=torch.float64)
    for i, (h, weight) in enumerate(zip(x.hidden, KEPT.unbind(-1), strict=True)):
        logits = h @ x.reduced.T
        distance = plain_distance(logits, p[:, D2T] / share, "forward")
        total = total + (distance * weight * (known if drop else 1)).sum()
        accepted = torch.minimum(p[:, D2T], logits.softmax(-1)).sum(-1)
        assert (ours.accepted[:, i] - accepted).abs().max() < 1e-10
        assert torch.equal(ours.right[:, i], D2T[logits.argmax(-1)] == p.argmax(-1))
    return ours.total, total


def blocks(x: Leaves, markov: bool, sampled: bool, own: Callable[..., Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Several predictions of a position share the target's p. Sampled columns stand for exp(LOG_COUNTS) tokens each."""
    counts, weight = LOG_COUNTS if sampled else torch.zeros(V), KEPT[:, 0]
    ours = compare_blocks(
        x.logits, V, x.wanted[:7], x.hidden[0], PLACES, LABELS, weight, (x.z, x.w2) if markov else None, 0.3, 0.6,
        LOG_COUNTS if sampled else None, own,
    )  # fmt: skip
    bare = x.logits(x.hidden[0]) + (x.z @ x.w2.T if markov else 0)
    logits, target_logits = bare + counts, x.logits(x.wanted)[PLACES]
    q, p = logits.softmax(-1), (target_logits + counts).softmax(-1)
    label_prob, apart = q[torch.arange(N), LABELS], (q - p).abs().sum(-1)
    assert (ours.accepted - 1 + apart / 2).abs().max() < 1e-10
    assert torch.equal(ours.right, bare.argmax(-1) == target_logits.argmax(-1))
    values = 0.6 * apart - 0.3 * label_prob.log() if own is None else own(logits, p)
    return ours.total, (values * weight).sum()


def medusa(x: Leaves, own: bool, soft: bool) -> tuple[Tensor, Tensor]:
    lm_head, weights = (F.linear, [x.lm_head, x.bias]) if own else (x.logits, [])
    ours, hits = token_loss(lm_head, V, x.hidden[0], LABELS, weights, (x.logits, x.wanted) if soft else None)
    log_q = (x.hidden[0] @ x.lm_head.T + x.bias if own else x.logits(x.hidden[0])).log_softmax(-1)
    assert int(hits) == int((log_q.argmax(-1) == LABELS).sum())
    return ours, -(x.p() * log_q).sum() if soft else -log_q[torch.arange(N), LABELS].sum()


LOSSES = {
    "eagle": lambda x: whole(x, "forward"),
    "eagle, own loss": lambda x: whole(x, reverse),
    "eagle3, drop unknown": lambda x: reduced(x, True),
    "eagle3, keep unknown": lambda x: reduced(x, False),
    "draft": lambda x: whole(x, "forward", x.lm_head),
    "draft, total variation": lambda x: whole(x, "tvd", x.lm_head),
    "draft, own loss": lambda x: whole(x, reverse, x.lm_head),
    "dflash": lambda x: blocks(x, markov=False, sampled=False),
    "dspark": lambda x: blocks(x, markov=True, sampled=False),
    "dspark, sampled": lambda x: blocks(x, markov=True, sampled=True),
    "dspark, own loss": lambda x: blocks(x, markov=True, sampled=True, own=reverse),
    "medusa": lambda x: medusa(x, own=False, soft=False),
    "medusa, soft": lambda x: medusa(x, own=False, soft=True),
    "medusa, own lm_head": lambda x: medusa(x, own=True, soft=False),
    "hydra, own lm_head": lambda x: medusa(x, own=True, soft=True),
}


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_its_formula_in_float64(monkeypatch, name, rows_at_once):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", rows_at_once * V + 5)
    x = Leaves()
    before = [tensor.clone() for tensor in (*x.trained(), x.target, x.wanted)]
    ours, formula = LOSSES[name](x)
    # A sum of some dozen float64 numbers. A factor, as training applies one.
    assert abs((ours - formula).item()) < 1e-10
    found, expected = (torch.autograd.grad(3 * loss, x.trained(), allow_unused=True) for loss in (ours, formula))
    assert any(grad is not None for grad in expected)
    for own, grad in zip(found, expected, strict=True):
        assert (own is None) == (grad is None)
        assert own is None or (own - grad).abs().max() < 1e-10
    with torch.no_grad():  # the same value, and nothing is trained
        again = LOSSES[name](x)[0]
    assert abs((again - formula).item()) < 1e-10 and not again.requires_grad
    # Logits are overwritten, nothing else is.
    assert all(torch.equal(a, b) for a, b in zip(before, (*x.trained(), x.target, x.wanted), strict=True))


def test_totals_and_gradients_are_the_same_where_nothing_is_measured():
    outcomes = []
    for measured in (True, False):
        x = Leaves()
        found = distances(x.logits, V, x.wanted, x.reduced, D2T, x.hidden, KEPT, measured=measured)
        outcomes.append([found.total, *torch.autograd.grad(found.total, [x.reduced, *x.hidden])])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert not found.right.numel() and not found.accepted.numel() and not found.known.numel()


def test_large_logits_neither_overflow_nor_lose_the_loss():
    """In float32, where exp(100) is infinite, and where the draft vocabulary has next to nothing of p."""
    x = Leaves()
    states, lm_head = (40 * x.wanted).float(), (60 * x.reduced.detach()).float()
    hidden, target = [h.detach().float() for h in x.hidden], x.target.float()
    ours = distances(
        lambda states: states @ target.T, V, states, lm_head, D2T, hidden, KEPT.float(), drop_unknown=False
    )
    log_q = torch.stack([(h.double() @ lm_head.double().T).log_softmax(-1) for h in hidden], 1)  # [N, 3, draft vocab.]
    p = (states.double() @ target.double().T)[:, D2T].softmax(-1)[:, None]
    wanted = -((p * log_q).sum(-1) * KEPT).sum()
    assert ours.total.item() == pytest.approx(float(wanted), rel=TOLERANCE)


def test_a_frozen_lm_head_and_no_tokens():
    x = Leaves()
    frozen = x.reduced.detach()
    distances(x.logits, V, x.wanted, frozen, D2T, x.hidden, KEPT).total.backward()
    assert x.reduced.grad is None and all(h.grad is not None for h in x.hidden)
    nothing = distances(x.logits, V, x.wanted[:0], frozen, D2T, [h[:0] for h in x.hidden], KEPT[:0])
    assert nothing.total == 0 and nothing.accepted.shape == (0, 3)


def columns_case() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    torch.manual_seed(0)
    lm_head = torch.randn(300, 8, dtype=torch.float64)
    return lambda states: states @ lm_head.T, torch.randn(7, 8, dtype=torch.float64)


def test_columns_of_a_sampled_loss_stand_for_the_whole_vocabulary():
    """They have the labels and what the target finds likeliest; sums over them are right in the mean of many draws."""
    (lm_head, wanted), labels, values = columns_case(), torch.arange(20, 27), torch.rand(300)
    likely = lm_head(wanted).softmax(-1).sum(0).topk(20).indices
    rng, sums = torch.Generator().manual_seed(1), []
    for _ in range(400):
        tokens, log_counts = columns = sampled_columns(lm_head, wanted, labels, 60, rng)
        assert len(tokens.unique()) == 60 and torch.equal(tokens[columns.places(labels)], labels)
        assert torch.isin(likely, tokens[log_counts == 0]).all() and log_counts.exp().sum() == pytest.approx(300)
        sums.append(float((values[tokens] * log_counts.exp()).sum()))
    assert np.mean(sums) == pytest.approx(float(values.sum()), abs=4 * np.std(sums) / 20)


@pytest.mark.parametrize("size", [1, 2, 3, 299, 300, 301])
def test_some_column_stands_for_the_tokens_that_have_none(size):
    lm_head, wanted = columns_case()
    for rows in (4, 7):  # half of 1 would be none, and nothing would stand for the other tokens
        columns = sampled_columns(
            lm_head, wanted[:rows], torch.arange(20, 20 + rows), size, torch.Generator().manual_seed(1)
        )
        assert columns.log_counts.exp().sum() == pytest.approx(300) and len(columns.tokens) >= rows


@pytest.mark.parametrize(("device", "rows"), [("cpu", losses.CPU_ROWS), ("meta", 2**15)])
def test_rows_whose_logits_are_made_at_a_time(device, rows):
    """Small blocks where there are caches to stay in, of many tokens of vocabulary no more than are to exist, and of
    like sizes."""
    count = 2**16 + 1
    sizes = [len(range(count)[part]) for part in losses.row_chunks(count, 2**10, torch.device(device))]
    assert sum(sizes) == count and len(sizes) == math.ceil(count / rows)
    assert max(sizes) <= rows and max(sizes) - min(sizes) <= 1
    assert len(list(losses.row_chunks(7, 2**26, torch.device(device)))) == 7
    assert len(list(losses.row_chunks(0, 1, torch.device(device)))) == 1  # and it has no row
