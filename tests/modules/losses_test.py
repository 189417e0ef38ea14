"""The losses against their formulas, written out in float64, and what masks must keep out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from draftsmith.modules import losses
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.eagle.head import eagle_loss
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.types import AcceptanceBatch, InputError

# The losses are taken in float32 and summed over tens of tokens.
TOLERANCE = 1e-5


def acceptance_case(seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    logit = 2 * torch.randn(3, 9, generator=rng)
    prob = torch.rand(3, 9, generator=rng)
    prob[0, 0], prob[1, 1] = 0.0, 1.0
    mask = torch.rand(3, 9, generator=rng) < 0.6
    mask[0, 0] = mask[1, 1] = True
    return logit, AcceptanceBatch(torch.zeros(3, 9, 4), prob, mask)


@pytest.mark.parametrize(("w_acc", "w_rej", "weighted"), [(1.0, 6.0, False), (2.0, 3.0, True)])
def test_acceptance_loss_is_the_papers(w_acc, w_rej, weighted):
    logit, batch = acceptance_case()
    if weighted:
        batch = dataclasses.replace(batch, weight=torch.rand(3, 9, generator=torch.Generator().manual_seed(1)))
    total = kl = count = 0.0
    for b in range(3):
        for t in range(9):
            if not batch.loss_mask[b, t]:
                continue
            prob, predicted = float(batch.accept_prob[b, t]), 1 / (1 + math.exp(-float(logit[b, t])))
            weight = float(batch.weight[b, t]) if weighted else 1.0
            total -= weight * (w_acc * prob * math.log(predicted) + w_rej * (1 - prob) * math.log(1 - predicted))
            kl += weight * prob * math.log(prob / predicted) if prob else 0.0
            kl += weight * (1 - prob) * math.log((1 - prob) / (1 - predicted)) if prob < 1 else 0.0
            count += weight
    output = acceptance_loss(logit, batch, w_acc, w_rej)
    assert output.loss.item() == pytest.approx(total / count, rel=TOLERANCE)
    assert output.sums["loss"].item() == pytest.approx(total, rel=TOLERANCE)
    assert output.sums["kl"].item() == pytest.approx(kl, rel=TOLERANCE)
    assert output.counts["loss"].item() == output.counts["kl"].item() == pytest.approx(count, rel=TOLERANCE)


def test_acceptance_loss_ignores_what_the_mask_hides_and_stays_finite_at_extreme_logits():
    logit, batch = acceptance_case()
    expected = acceptance_loss(logit, batch).loss
    spoiled = torch.where(batch.loss_mask, logit, torch.nan)
    prob = torch.where(batch.loss_mask, batch.accept_prob, torch.nan)
    assert acceptance_loss(spoiled, AcceptanceBatch(batch.hidden, prob, batch.loss_mask)).loss == expected
    assert torch.isfinite(acceptance_loss(logit * 1e4, batch).loss)


def test_losses_of_an_empty_mask_are_zero():
    logit, batch = acceptance_case()
    nothing = torch.zeros_like(batch.loss_mask)
    assert acceptance_loss(logit, AcceptanceBatch(batch.hidden, batch.accept_prob, nothing)).loss == 0
    hidden = torch.randn(3, 9, 4)
    assert eagle_loss([hidden], hidden, [nothing], torch.nn.Linear(4, 7)).loss == 0


def eagle_case(seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    hidden, wanted = (2 * torch.randn(2, 5, 6, generator=rng) for _ in range(2))
    lm_head = torch.randn(11, 6, generator=rng)
    mask = torch.tensor([[True, False, True, True, False], [False, True, True, False, False]])
    return hidden, wanted, mask, lm_head


@pytest.mark.parametrize(("feature_weight", "token_weight"), [(1.0, 0.1), (0.5, 2.0)])
def test_eagle_loss_is_the_papers(feature_weight, token_weight):
    hidden, wanted, mask, weight = eagle_case()
    feature = token = 0.0
    top1 = top3 = 0
    for b, t in mask.nonzero().tolist():
        difference = (hidden[b, t].double() - wanted[b, t].double()).abs()
        feature += float(torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean())
        scores = weight.double() @ hidden[b, t].double()
        log_q = scores - scores.logsumexp(0)
        target_scores = weight.double() @ wanted[b, t].double()
        p = (target_scores - target_scores.logsumexp(0)).exp()
        token += -float((p * log_q).sum())
        rank = int((scores > scores[target_scores.argmax()]).sum())
        top1, top3 = top1 + (rank < 1), top3 + (rank < 3)
    count = int(mask.sum())
    defaults = () if (feature_weight, token_weight) == (1.0, 0.1) else (feature_weight, token_weight)
    output = eagle_loss([hidden], wanted, [mask], lambda x: x @ weight.T, *defaults)
    assert output.loss.item() == pytest.approx((feature_weight * feature + token_weight * token) / count, rel=TOLERANCE)
    assert output.sums["feature_loss"].item() == pytest.approx(feature, rel=TOLERANCE)
    assert output.sums["token_loss"].item() == pytest.approx(token, rel=TOLERANCE)
    assert (output.sums["top1"].item(), output.sums["top3"].item()) == (top1, top3)
    assert {n.item() for n in output.counts.values()} == {count}


def test_without_the_first_choices_the_losses_and_gradients_are_the_same():
    hidden, wanted, mask, weight = eagle_case()
    grads, outputs = [], []
    for step in (None, TrainStep(0, 1, (), (), logged=False)):
        states = hidden.clone().requires_grad_()
        outputs.append(eagle_loss([states], wanted, [mask], lambda x: x @ weight.T, step=step))
        grads.append(*torch.autograd.grad(outputs[-1].loss, states))
    assert outputs[0].loss.equal(outputs[1].loss) and grads[0].equal(grads[1])
    assert outputs[0].sums.keys() - outputs[1].sums.keys() == {"top1", "top3"}


def test_eagle_loss_does_not_train_the_target_and_ignores_hidden_rows():
    hidden, wanted, mask, weight = eagle_case()
    hidden.requires_grad_()
    wanted.requires_grad_()
    eagle_loss([hidden], wanted, [mask], lambda x: x @ weight.T, 0.0, 1.0).loss.backward()
    assert wanted.grad is None or not wanted.grad.any()
    assert hidden.grad[mask].any(-1).all() and not hidden.grad[~mask].any()


def test_a_loss_of_the_users_own_takes_the_cross_entropys_place():
    """One that computes the same gives the same, value and gradient; one that returns a mean is refused."""

    def same(logits, p):
        return -(p * logits.log_softmax(-1)).sum(-1)

    hidden, wanted, mask, weight = eagle_case()
    found = []
    for own in (None, same):
        states = hidden.clone().requires_grad_()
        output = eagle_loss([states, states], wanted, [mask, mask], lambda x: x @ weight.T, 0.5, 2.0, own_loss=own)
        found.append((output.loss, torch.autograd.grad(output.loss, states)[0]))
    torch.testing.assert_close(found[0], found[1])
    with pytest.raises(InputError, match=r"the loss of each token"):
        eagle_loss([hidden], wanted, [mask], torch.nn.Linear(6, 11), own_loss=lambda *given: same(*given).mean())


def plain_eagle_loss(passes, wanted, masks, weight, decay):
    """The weighted mean over passes with all logits at once, as autograd differentiates it."""
    totals = []
    for hidden, mask in zip(passes, masks, strict=True):
        distance = F.smooth_l1_loss(hidden, wanted, reduction="none").mean(-1)[mask].sum()
        target_prob = (wanted[mask] @ weight.T).softmax(-1)
        totals.append(distance + 0.1 * F.cross_entropy(hidden[mask] @ weight.T, target_prob, reduction="sum"))
    weights = [decay**i for i in range(len(totals))]
    return sum(w * t for w, t in zip(weights, totals, strict=True)) / sum(weights) / masks[0].sum()


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_the_chunked_loss_and_its_gradient_are_those_of_all_logits_at_once(monkeypatch, rows_at_once):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 11 * rows_at_once + 5)
    (first, wanted, mask, weight), (second, *_) = eagle_case(0), eagle_case(1)
    later = mask.clone()
    later[:, 1] = False
    ours, theirs = ([h.clone().requires_grad_() for h in (first, second)] for _ in range(2))
    loss = eagle_loss(ours, wanted, [mask, later], lambda x: x @ weight.T, 1.0, 0.1, decay=0.8).loss
    oracle = plain_eagle_loss(theirs, wanted, [mask, later], weight, 0.8)
    assert loss.item() == pytest.approx(oracle.item(), rel=TOLERANCE)
    (3 * loss).backward()  # a factor, as training applies one
    (3 * oracle).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)  # float32, sums in another order


def test_a_huge_logit_makes_no_nan():
    hidden, wanted, mask, weight = eagle_case()
    hidden = (1e4 * hidden).requires_grad_()
    output = eagle_loss([hidden], 1e4 * wanted, [mask], lambda x: x @ weight.T)
    output.loss.backward()
    assert output.loss.isfinite() and hidden.grad.isfinite().all()


@pytest.mark.parametrize(("device", "rows"), [("cpu", losses.CPU_ROWS), ("meta", 2**15)])
def test_rows_whose_logits_are_made_at_a_time(device, rows):
    """Small blocks where there are caches to stay in, and of many tokens of vocabulary no more than are to exist."""
    parts = list(losses.row_chunks(2**16 + 1, 2**10, torch.device(device)))
    assert [part.start for part in parts] == list(range(0, 2**16 + 1, rows))
    assert len(list(losses.row_chunks(7, 2**26, torch.device(device)))) == 7
    assert not list(losses.row_chunks(0, 1, torch.device(device)))
