"""What a head with its own lm_head minimises, chunk by chunk: q over the draft vocabulary against the target's p."""

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
# -log of less than this has no use for a gradient, and too large a one (Nebius, arXiv 2602.23881).
LEAST_ACCEPTED = 1e-5


@dataclass(frozen=True)
class Objective:
    """How far q is from p.

    kind: ce, the cross-entropy of q with p; lk, -log of the acceptance sum_v min(p, q); lk-hybrid, lam * ce +
        (1 - lam) * (1 - acceptance), lam = exp(-eta * acceptance) without a gradient (arXiv 2602.23881).
    eta: of lk-hybrid. mean: its lam is that of the mean acceptance of the tokens at hand, not each token's own.
    drop_unknown: tokens where the target's first choice cannot be drafted count nothing, as nothing is accepted there
        greedily.

    ce is against p renormalised over the draft vocabulary; acceptance is of p as it is, so what cannot be drafted is
    rejected.
    """

    kind: Kind = "ce"
    eta: float = 3.0
    mean: bool = False
    drop_unknown: bool = True


@dataclass(frozen=True)
class Distances:
    """Of P predictions of N tokens each.

    totals: [P] weighted sums of the objective, with a gradient. accepted: [P, N] sum_v min(p_v, q_v), the probability
    that a drawn token is accepted at temperature 1. right: [P, N] bool, q's first choice is p's. known: [N] bool, p's
    first choice can be drafted. Where they are not asked for, all three are 0 or whatever the totals needed.
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
    """target_logits: [C, V] of a slice of the N tokens; they get no gradient. lm_head: [draft vocabulary, H], with a
    gradient where it asks for one. d2t: [draft vocabulary], the target's ids; None where the vocabulary is whole.
    hidden: [N, H] of each prediction, normed. weights: [P, N] of each token in each. measured: find `accepted`, `right`
    and `known` too, where the objective needs them not: that takes as long as half of the rest beside the products.

    `losses.row_chunks` of logits are made at a time, and their gradient with them, so that no more of a chunk has to
    be kept than that of `hidden`.
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
        # One gradient of lm_head a pass: each pass's total may be weighted by what comes after.
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
                # The tokens' weights go to the smaller factors, [C, H] each.
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
    """total += left @ right; where the precisions are one without the product as a tensor of its own, as large as
    lm_head for every chunk."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


@dataclass(frozen=True)
class _Wanted:
    """p [C, draft vocabulary] renormalised over it, and its share [C, 1] of the whole, None for all. first [C], p's
    first choice, and known [C] or all, whether it can be drafted, where they are asked for."""

    prob: Tensor
    share: Tensor | None
    first: Tensor | None
    known: Tensor | bool

    @property
    def whole(self) -> Tensor:
        """p [C, draft vocabulary] as it is."""
        return self.prob if self.share is None else self.prob * self.share


def _target(logits: Tensor, d2t: Tensor | None, choose: bool) -> _Wanted:
    """p of logits [C, V]."""
    first = logits.argmax(-1) if choose else None
    if d2t is None:
        return _Wanted(logits.softmax(-1), None, first, True)
    drafted = logits[:, d2t]
    share = (drafted.logsumexp(-1, keepdim=True) - logits.logsumexp(-1, keepdim=True)).exp()
    if first is None:
        return _Wanted(drafted.softmax(-1), share, None, True)
    # Looked up: `isin` waits for the device.
    known = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device).index_fill_(0, d2t, True)[first]
    return _Wanted(drafted.softmax(-1), share, first, known)


def _compare_(
    objective: Objective, logits: Tensor, wanted: _Wanted, lam: Tensor | None, measured: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Value [C], its gradient [C, draft vocabulary] with respect to logits, in whose place it may come, and acceptance
    [C], None where nobody asks. Of each logit there is one exponential."""
    p = wanted.prob
    logits -= logits.amax(-1, keepdim=True)
    expected = torch.linalg.vecdot(p, logits)
    norm = logits.exp_().sum(-1, keepdim=True)
    q, entropy = logits.div_(norm), norm[:, 0].log() - expected
    if objective.kind == "ce":
        accepted = _acceptance(wanted.whole, q) if measured else None
        return entropy, q.sub_(p), accepted
    whole = wanted.whole
    accepted = _acceptance(whole, q)
    # d(acceptance)/d(logits): a token's q counts where it is below p.
    inside = torch.where(q < whole, q, 0)
    pull = inside - q * inside.sum(-1, keepdim=True)
    if objective.kind == "lk":
        bounded = accepted.clamp_min(LEAST_ACCEPTED)
        return -bounded.log(), -pull / bounded[:, None], accepted
    lam = (-objective.eta * accepted).exp() if lam is None else lam.expand_as(accepted)
    return lam * entropy + (1 - lam) * (1 - accepted), lam[:, None] * (q - p) - (1 - lam)[:, None] * pull, accepted


def _acceptance(p: Tensor, q: Tensor) -> Tensor:
    """sum_v min(p, q) [C]."""
    return torch.minimum(p, q).sum(-1)


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
    """lam [P] of each prediction's mean acceptance: the chunks are read once more for it."""
    sums, counts = weights.new_zeros(len(hidden), dtype=wide), weights.new_zeros(len(hidden), dtype=wide)
    for part in chunks:
        wanted = _target(target_logits(part).to(wide), d2t, objective.drop_unknown)
        counted = weights[:, part] * wanted.known if objective.drop_unknown else weights[:, part]
        p = wanted.whole
        for i, states in enumerate(hidden):
            q = F.linear(states[part], lm_head).to(wide).softmax(-1)
            sums[i] += (_acceptance(p, q) * counted[i]).sum()
            counts[i] += counted[i].sum()
    return (-objective.eta * sums / counts.clamp_min(1e-9)).exp()
