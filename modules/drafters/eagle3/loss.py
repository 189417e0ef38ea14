"""Loss of a head with its own lm_head, chunk by chunk: q over the draft vocabulary against the target's p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.modules import losses

# Distances from the target's p (DistillSpec, Zhou et al. 2023, table 1): KL(p|q) up to p's entropy; total variation,
# 1 - sum_v min(p_v, q_v); or one of the user's own.
Divergence = Literal["forward", "tvd"] | losses.TokenLoss


class Distances(NamedTuple):
    """Comparison of P predictions of N tokens each with the target.

    totals: [P] weighted sums of the divergence of q from p renormalised over the draft vocabulary, with a gradient.
    accepted: [P, N] sum_v min(p_v, q_v) of the whole p, the probability that a drawn token is accepted at temperature
    1. right: [P, N] bool, q's first choice is p's. known: [N] bool, p's first choice can be drafted. `accepted` and
    `right` are zeros if they are not measured.
    """

    totals: Tensor
    accepted: Tensor
    right: Tensor
    known: Tensor


def distances(
    target_lm_head: losses.LmHead,
    wanted: Tensor,
    lm_head: Tensor,
    d2t: Tensor | None,
    hidden: Sequence[Tensor],
    weights: Tensor,
    drop_unknown: bool = True,
    measured: bool = True,
    divergence: Divergence = "forward",
) -> Distances:
    """Compare P predictions of N tokens with the target, chunk by chunk (`losses.row_chunks`).

    target_lm_head: of the states `wanted` [N, H] gives the target's logits [N, V]; neither gets a gradient. lm_head:
    [draft vocabulary, H], with a gradient if it requires one. d2t: [draft vocabulary], the target's ids; None if the
    vocabulary is whole. hidden: [N, H] of each prediction, normed. weights: [P, N]. drop_unknown: ignore tokens where
    the target's first choice cannot be drafted: greedily none is accepted there. measured: compute `accepted` and
    `right`, which takes as long as half of the rest beside the products. divergence: `forward` is the cross-entropy.
    """
    kind = lm_head.device.type
    if not lm_head.requires_grad and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # Once, where autocast would do it for every chunk.
        lm_head = lm_head.to(torch.get_autocast_dtype(kind))
    options = d2t, weights, drop_unknown, measured, divergence
    return Distances(*_Distances.apply(target_lm_head, wanted, *options, lm_head, *hidden))


class _Distances(torch.autograd.Function):
    """`distances` with its gradient computed beside it: no more of a chunk is kept than the gradient of hidden."""

    @staticmethod
    def forward(
        ctx: Any,
        target_lm_head: losses.LmHead,
        wanted: Tensor,
        d2t: Tensor | None,
        weights: Tensor,
        drop_unknown: bool,
        measured: bool,
        divergence: Divergence,
        lm_head: Tensor,
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        passes, count = weights.shape
        needs_head, *needs = ctx.needs_input_grad[7:]
        wide = torch.promote_types(lm_head.dtype, torch.float32)
        totals, accepted = weights.new_zeros(passes, dtype=wide), weights.new_zeros(passes, count, dtype=wide)
        right, known = weights.new_zeros(passes, count, dtype=torch.bool), weights.new_ones(count, dtype=torch.bool)
        # One gradient of lm_head for each pass, because the passes' totals are weighted afterwards.
        to_head = [torch.zeros_like(lm_head, dtype=wide) for _ in hidden] if needs_head else []
        to_hidden = [torch.empty_like(h) if need else None for h, need in zip(hidden, needs, strict=True)]
        vocabulary = target_lm_head(wanted[:1]).shape[-1] if count else 1
        for part in losses.row_chunks(count, vocabulary, weights.device):
            target_logits = target_lm_head(wanted[part]).to(wide)  # [C, V]
            first, drafted, share = target_logits.argmax(-1), target_logits, None
            if d2t is not None:
                drafted = target_logits[:, d2t]  # [C, draft vocabulary]
                if measured:
                    # Of the target's probability, what lies on tokens that can be drafted, [C, 1].
                    share = (drafted.logsumexp(-1, keepdim=True) - target_logits.logsumexp(-1, keepdim=True)).exp()
                # A look-up, because `isin` waits for the device.
                known[part] = known.new_zeros(target_logits.shape[-1]).index_fill_(0, d2t, True)[first]
            p = drafted.softmax(-1)
            counted = weights[:, part] * known[part] if drop_unknown else weights[:, part]
            for i, states in enumerate(hidden):
                logits = F.linear(states[part], lm_head).to(wide)
                if measured:
                    chosen = logits.argmax(-1)
                    right[i, part] = known[part] & ((chosen if d2t is None else d2t[chosen]) == first)
                own_loss = losses.with_gradient(divergence, logits, p) if callable(divergence) else None
                # Logits are overwritten; each is exponentiated once.
                logits -= logits.amax(-1, keepdim=True)
                expected = torch.linalg.vecdot(p, logits)
                norm = logits.exp_().sum(-1, keepdim=True)
                q, entropy = logits.div_(norm), norm[:, 0].log() - expected
                if measured:
                    accepted[i, part] = torch.minimum(p if share is None else p * share, q).sum(-1)
                if own_loss is not None:
                    distance, grad = own_loss
                elif divergence == "forward":
                    distance, grad = entropy, q.sub_(p)  # [C, draft vocabulary], of the logits
                else:
                    excess = q - p
                    distance, by_q = excess.abs().sum(-1) / 2, excess.sign_() / 2
                    grad = q.mul_(by_q.sub_(torch.linalg.vecdot(q, by_q)[:, None]))
                totals[i] += (distance * counted[i]).sum()
                # The tokens' weights are multiplied into the smaller factors, [C, H] each.
                if to_head:
                    left, weighted = grad.to(states.dtype).T, states[part] * counted[i][:, None].to(states.dtype)
                    if left.dtype == wide:
                        # The product, as large as lm_head, is no tensor of its own.
                        to_head[i].addmm_(left, weighted)
                    else:
                        to_head[i] += left @ weighted
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
        return None, None, None, None, None, None, None, head, *hidden
