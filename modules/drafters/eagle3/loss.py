"""Loss of a head with its own lm_head, chunk by chunk: q over the draft vocabulary against the target's p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.modules import losses

Kind = Literal["ce", "lk", "lk-hybrid"]
# Below this acceptance the gradient of its -log is too large to be useful (Nebius, arXiv 2602.23881).
LEAST_ACCEPTED = 1e-5


@dataclass(frozen=True)
class Objective:
    """Distance of q from p.

    ce is against p renormalised over the draft vocabulary. Acceptance is that of the whole p: tokens that cannot be
    drafted are rejected.

    kind: ce, the cross-entropy of q with p; lk, -log of the acceptance sum_v min(p, q); lk-hybrid, lam * ce +
        (1 - lam) * (1 - acceptance), lam = exp(-eta * acceptance) without a gradient (arXiv 2602.23881).
    eta: of lk-hybrid. mean: lam of the tokens' mean acceptance, not of each token's own.
    drop_unknown: ignore tokens where the target's first choice cannot be drafted: greedily none is accepted there.
    """

    kind: Kind = "ce"
    eta: float = 3.0
    mean: bool = False
    drop_unknown: bool = True


@dataclass(frozen=True)
class Distances:
    """Comparison of P predictions of N tokens each with the target.

    totals: [P] weighted sums of the objective, with a gradient. accepted: [P, N] sum_v min(p_v, q_v), the probability
    that a drawn token is accepted at temperature 1. right: [P, N] bool, q's first choice is p's. known: [N] bool, p's
    first choice can be drafted. The last three are arbitrary if they are not measured.
    """

    totals: Tensor
    accepted: Tensor
    right: Tensor
    known: Tensor


def distances(
    objective: Objective,
    target_logits: Callable[[slice], Tensor],
    lm_head: Tensor,
    d2t: Tensor | None,
    hidden: Sequence[Tensor],
    weights: Tensor,
    measured: bool = True,
) -> Distances:
    """Compare P predictions of N tokens with the target, chunk by chunk (`losses.row_chunks`).

    The gradient is computed with the value, so that no more of a chunk is kept than the gradient of `hidden`.

    target_logits: returns [C, V] of a slice of the N tokens; they get no gradient. lm_head: [draft vocabulary, H], with
    a gradient if it requires one. d2t: [draft vocabulary], the target's ids; None if the vocabulary is whole. hidden:
    [N, H] of each prediction, normed. weights: [P, N]. measured: compute `accepted`, `right` and `known` even if the
    objective does not need them, which takes as long as half of the rest beside the products.
    """
    totals, accepted, right, known = _Distances.apply(
        objective, target_logits, d2t, weights, measured, lm_head, *hidden
    )
    return Distances(totals, accepted, right, known)


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        objective: Objective,
        target_logits: Callable[[slice], Tensor],
        d2t: Tensor | None,
        weights: Tensor,
        measured: bool,
        lm_head: Tensor,
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        passes, count = weights.shape
        needs_head, *needs = ctx.needs_input_grad[5:]
        wide = torch.float64 if lm_head.dtype == torch.float64 else torch.float32
        totals, accepted = weights.new_zeros(passes, dtype=wide), weights.new_zeros(passes, count, dtype=wide)
        right, known = weights.new_zeros(passes, count, dtype=torch.bool), weights.new_ones(count, dtype=torch.bool)
        # One gradient of lm_head for each pass, because the passes' totals are weighted afterwards.
        to_head = [torch.zeros_like(lm_head, dtype=wide) for _ in hidden] if needs_head else []
        to_hidden = [torch.empty_like(h) if need else None for h, need in zip(hidden, needs, strict=True)]
        vocabulary = target_logits(slice(0, 1)).shape[-1] if count else 1
        chunks = list(losses.row_chunks(count, vocabulary, weights.device))
        lam = None
        if objective.kind == "lk-hybrid" and objective.mean:
            lam = _mean_lam(objective, chunks, target_logits, d2t, weights, lm_head, hidden, wide)
        for part in chunks:
            wanted = _target(target_logits(part).to(wide), d2t, measured or objective.drop_unknown)
            known[part] = wanted.known
            counted = weights[:, part] * known[part] if objective.drop_unknown else weights[:, part]
            for i, states in enumerate(hidden):
                logits = F.linear(states[part], lm_head).to(wide)
                if measured:
                    chosen = logits.argmax(-1)
                    right[i, part] = known[part] & ((chosen if d2t is None else d2t[chosen]) == wanted.first)
                value, grad, found = _compare_(objective, logits, wanted, None if lam is None else lam[i], measured)
                if found is not None:
                    accepted[i, part] = found
                totals[i] += (value * counted[i]).sum()
                # The tokens' weights are multiplied into the smaller factors, [C, H] each.
                if to_head:
                    _add_product(
                        to_head[i], grad.to(states.dtype).T, states[part] * counted[i][:, None].to(states.dtype)
                    )
                if (own := to_hidden[i]) is not None:
                    own[part] = (grad.to(lm_head.dtype) @ lm_head).to(own.dtype) * counted[i][:, None].to(own.dtype)
        ctx.to_head, ctx.to_hidden, ctx.head_dtype = to_head, to_hidden, lm_head.dtype
        ctx.mark_non_differentiable(accepted, right, known)
        return totals, accepted, right, known

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> Any:
        head = None
        if ctx.to_head:
            head = sum(outer[i] * grad for i, grad in enumerate(ctx.to_head)).to(ctx.head_dtype)
        hidden = [None if grad is None else grad * outer[i].to(grad.dtype) for i, grad in enumerate(ctx.to_hidden)]
        return None, None, None, None, None, head, *hidden


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total. In one precision the product, as large as lm_head, is no tensor of its own."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


@dataclass(frozen=True)
class _Wanted:
    """Target's distribution over the draft vocabulary.

    prob: p [C, draft vocabulary], renormalised. share: [C, 1] of the whole p, None for all of it. first: [C], p's first
    choice, if asked for. known: [C], it can be drafted; True for all.
    """

    prob: Tensor
    share: Tensor | None
    first: Tensor | None
    known: Tensor | bool

    @property
    def whole(self) -> Tensor:
        """Return p [C, draft vocabulary] without renormalisation."""
        return self.prob if self.share is None else self.prob * self.share


def _target(logits: Tensor, d2t: Tensor | None, choose: bool) -> _Wanted:
    """Return p for logits [C, V]; choose: find its first choice too."""
    first = logits.argmax(-1) if choose else None
    if d2t is None:
        return _Wanted(logits.softmax(-1), None, first, True)
    drafted = logits[:, d2t]
    share = (drafted.logsumexp(-1, keepdim=True) - logits.logsumexp(-1, keepdim=True)).exp()
    if first is None:
        return _Wanted(drafted.softmax(-1), share, None, True)
    # A look-up, because `isin` waits for the device.
    known = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device).index_fill_(0, d2t, True)[first]
    return _Wanted(drafted.softmax(-1), share, first, known)


def _compare_(
    objective: Objective, logits: Tensor, wanted: _Wanted, lam: Tensor | None, measured: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return value [C], gradient [C, draft vocabulary] with respect to logits, and acceptance [C] if it is needed.

    Logits are overwritten; each is exponentiated once.
    """
    p = wanted.prob
    logits -= logits.amax(-1, keepdim=True)
    expected = torch.linalg.vecdot(p, logits)
    norm = logits.exp_().sum(-1, keepdim=True)
    q, entropy = logits.div_(norm), norm[:, 0].log() - expected
    if objective.kind == "ce":
        accepted = torch.minimum(wanted.whole, q).sum(-1) if measured else None
        return entropy, q.sub_(p), accepted
    whole = wanted.whole
    accepted = torch.minimum(whole, q).sum(-1)
    # d(acceptance)/d(logits): only tokens with q below p contribute.
    inside = torch.where(q < whole, q, 0)
    pull = inside - q * inside.sum(-1, keepdim=True)
    if objective.kind == "lk":
        bounded = accepted.clamp_min(LEAST_ACCEPTED)
        return -bounded.log(), -pull / bounded[:, None], accepted
    lam = (-objective.eta * accepted).exp() if lam is None else lam.expand_as(accepted)
    return lam * entropy + (1 - lam) * (1 - accepted), lam[:, None] * (q - p) - (1 - lam)[:, None] * pull, accepted


def _mean_lam(
    objective: Objective,
    chunks: Sequence[slice],
    target_logits: Callable[[slice], Tensor],
    d2t: Tensor | None,
    weights: Tensor,
    lm_head: Tensor,
    hidden: Sequence[Tensor],
    wide: torch.dtype,
) -> Tensor:
    """Return lam [P] of each prediction's mean acceptance, from another pass over the chunks."""
    sums, counts = weights.new_zeros(len(hidden), dtype=wide), weights.new_zeros(len(hidden), dtype=wide)
    for part in chunks:
        wanted = _target(target_logits(part).to(wide), d2t, objective.drop_unknown)
        counted = weights[:, part] * wanted.known if objective.drop_unknown else weights[:, part]
        p = wanted.whole
        for i, states in enumerate(hidden):
            q = F.linear(states[part], lm_head).to(wide).softmax(-1)
            sums[i] += (torch.minimum(p, q).sum(-1) * counted[i]).sum()
            counts[i] += counted[i].sum()
    return (-objective.eta * sums / counts.clamp_min(1e-9)).exp()
