"""Loss of a block drafter against the target's distributions, chunk by chunk."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.modules.losses import LmHead, TokenLoss, row_chunks, with_gradient, with_pull
from draftsmith.modules.transfer import to_device


class Predictions(NamedTuple):
    """N predictions of a block drafter, each of the token at one of P positions of the text.

    hidden: [N, H], normed. biases: [N, r], the Markov head's z; None without one. position: [N] int64 on the host, the
    number of each one's position, ascending from 0 without gaps. labels: [N], the text's tokens there. weights: [N].
    """

    hidden: Tensor
    biases: Tensor | None
    position: Tensor
    labels: Tensor
    weights: Tensor


class Columns(NamedTuple):
    """Tokens [S] of the vocabulary over which a loss is computed, and the logarithm of how many each stands for, [S].

    Adding that to the logits makes sums over the columns unbiased estimates of those over the vocabulary (sampled
    softmax: Jean et al. 2015).
    """

    tokens: Tensor
    log_counts: Tensor

    def places(self, tokens: Tensor) -> Tensor:
        """Return the columns of tokens that are among them."""
        return torch.searchsorted(self.tokens, tokens)


def sampled_columns(lm_head: LmHead, wanted: Tensor, labels: Tensor, size: int, rng: torch.Generator) -> Columns:
    """Return the labels and the tokens that the target finds likeliest, half of `size`, and as many random others.

    A token is likely by the sum of its probabilities over the P positions. Of more positions than half of `size`, whose
    labels might not fit, as many tokens are kept as there are positions.

    lm_head, wanted [P, H]: give the target's logits. labels: one for each position, repeated or not.
    """
    mass = torch.zeros(lm_head(wanted[:1]).shape[-1], device=wanted.device)
    for part in row_chunks(len(wanted), len(mass), wanted.device):
        mass += lm_head(wanted[part]).float().softmax(-1).sum(0)
    mass[labels] = torch.inf
    num_kept = min(max(size // 2, len(wanted)), len(mass))
    num_drawn = min(max(size // 2, 1), len(mass) - num_kept)
    kept = mass.topk(num_kept).indices
    order = to_device(torch.rand(len(mass), generator=rng), wanted.device).index_fill_(0, kept, -1.0)
    tokens, places = torch.cat([kept, order.topk(num_drawn).indices]).sort()
    log_count = math.log((len(mass) - num_kept) / num_drawn) if num_drawn else 0.0
    return Columns(tokens, torch.where(places < num_kept, 0.0, log_count))


class Comparison(NamedTuple):
    """Comparison of N predictions q with the target's distributions p.

    total: sum of w (ce * -log q(label) + l1 * sum_v |p_v - q_v|), with a gradient. accepted: [N], sum_v min(p_v, q_v),
    the probability that a drawn token is accepted at temperature 1. right: [N] bool, q's first choice is p's.
    label_prob: [N], q(label).
    """

    total: Tensor
    accepted: Tensor
    right: Tensor
    label_prob: Tensor


def compare(
    lm_head: LmHead,
    wanted: Tensor,
    predictions: Predictions,
    markov_w2: Tensor | None,
    ce: float,
    l1: float,
    log_counts: Tensor | None = None,
    own_loss: TokenLoss | None = None,
) -> Comparison:
    """Compare predictions with the target.

    lm_head: the target's, frozen; of the states `wanted` [P, H] it gives the target's logits, of `hidden` the draft's.
    markov_w2: [V, r], added to the draft's logits as markov_w2 @ z. ce, l1: weights of the two terms. log_counts: of
    `Columns`, if lm_head, markov_w2 and labels are of these only; None for the whole vocabulary. own_loss: takes the
    two terms' place.
    """
    hidden, biases, *rest = predictions
    return Comparison(*_Compare.apply(lm_head, wanted, rest, ce, l1, log_counts, own_loss, hidden, biases, markov_w2))


def reach_weights(label_prob: Tensor, block: Tensor, token: Tensor, counted: Tensor) -> Tensor:
    """Return weights [N] of predictions by how much each one adds to its block's accepted length (D-PACE).

    With q' = (1 + q(label)) / 2, so that an unlearned token does not hide those behind it, a token's weight is the sum
    over its own and all later places of the products of q' up to there; a block's weights add up to 1.

    label_prob: [N]. block, token: [N], where each prediction stands in counted [M, n].
    """
    chance = torch.zeros(counted.shape, dtype=label_prob.dtype, device=counted.device)
    chance[block, token] = (1 + label_prob) / 2
    gained = chance.cumprod(1).flip(1).cumsum(1).flip(1)
    return (gained / gained.sum(1, keepdim=True))[block, token]


class _Compare(torch.autograd.Function):
    """`compare` with its gradient computed beside it: of a chunk [C, V] no more is kept than [C, H] and [C, r].

    Blocks overlap, so that several predictions share a position: p is computed once for each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        lm_head: LmHead,
        wanted: Tensor,
        rest: tuple[Tensor, Tensor, Tensor],
        ce: float,
        l1: float,
        log_counts: Tensor | None,
        own_loss: TokenLoss | None,
        hidden: Tensor,
        biases: Tensor | None,
        markov_w2: Tensor | None,
    ) -> tuple[Tensor, ...]:
        position, labels, weights = rest
        count, trained = len(hidden), ctx.needs_input_grad[7]
        total = weights.new_zeros(())
        accepted, right = torch.zeros_like(weights), weights.new_zeros(count, dtype=torch.bool)
        label_prob = torch.zeros_like(weights)
        to_hidden = torch.zeros_like(hidden) if trained else None
        to_biases = torch.zeros_like(biases) if trained and biases is not None else None
        to_w2 = torch.zeros_like(markov_w2, dtype=weights.dtype) if trained and markov_w2 is not None else None
        vocabulary = lm_head(wanted[:1]).shape[-1] if count else 1
        for part in row_chunks(count, vocabulary, hidden.device):
            own = position[part]
            begin, end = int(own[0]), int(own[-1]) + 1
            own = to_device(own - begin, hidden.device)
            target_logits = lm_head(wanted[begin:end]).to(weights.dtype)
            first = target_logits.argmax(-1)[own]
            if log_counts is not None:
                target_logits += log_counts
            p = target_logits.softmax(-1)[own]  # [C, V]
            logits, pull = with_pull(lm_head, hidden[part].to(wanted.dtype), trained)
            logits = logits.to(weights.dtype)
            if biases is not None and markov_w2 is not None:
                logits += (biases[part].to(markov_w2.dtype) @ markov_w2.T).to(weights.dtype)
            right[part] = logits.argmax(-1) == first
            if log_counts is not None:
                logits += log_counts
            own_values = None if own_loss is None else with_gradient(own_loss, logits, p)
            logits -= logits.amax(-1, keepdim=True)
            at_label = labels[part][:, None]
            label_logits = logits.gather(1, at_label)[:, 0]
            norm = logits.exp_().sum(-1, keepdim=True)
            q = logits.div_(norm)  # in place of the logits
            label_prob[part] = q.gather(1, at_label)[:, 0]
            distance = q - p
            apart = distance.abs().sum(-1)
            accepted[part] = 1 - apart / 2
            values = own_values[0] if own_values else ce * (norm[:, 0].log() - label_logits) + l1 * apart
            total += (weights[part] * values).sum()
            if to_hidden is None:
                continue
            if own_values:
                grad = own_values[1]
            else:
                # d L1 / d logits = q (s - <q, s>) with s = sign(q - p); d CE / d logits = q - label.
                sign = distance.sign_()
                grad = sign.sub_(torch.linalg.vecdot(q, sign)[:, None]).mul_(l1).add_(ce).mul_(q)
                grad.scatter_add_(1, at_label, grad.new_full((1, 1), -ce).expand(len(grad), 1))
            grad *= weights[part][:, None]
            to_hidden[part] = pull(grad).to(hidden.dtype)
            if to_biases is not None and to_w2 is not None and biases is not None and markov_w2 is not None:
                narrow = grad.to(markov_w2.dtype)
                to_biases[part] = (narrow @ markov_w2).to(biases.dtype)
                to_w2 += narrow.T @ biases[part].to(markov_w2.dtype)
        ctx.grads = to_hidden, to_biases, to_w2 if to_w2 is None or markov_w2 is None else to_w2.to(markov_w2.dtype)
        ctx.mark_non_differentiable(accepted, right, label_prob)
        return total, accepted, right, label_prob

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> Any:
        grads = [None if grad is None else grad * outer.to(grad.dtype) for grad in ctx.grads]
        return None, None, None, None, None, None, None, *grads
