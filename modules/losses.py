"""Training losses, computed a chunk of logits at a time.

`chunked` sums any loss over chunks of rows, and `compare` compares q with p. The losses of all heads are made of these
two. They give sums; with counts these make means over ranks or batches exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.modules.sampling import wide
from draftsmith.modules.transfer import to_device
from draftsmith.modules.types import InputError, LossOutput

# Logits that exist at once: 128 MiB in float32, which is small beside a model. At a vocabulary of 128k these are 256
# rows, enough that reading lm_head's weight does not dominate.
CHUNK_ELEMENTS = 2**25
# On a CPU: rows at once, so that a chunk of a small vocabulary stays in its caches, and logits at once, because glibc
# maps larger tensors anew each time, which takes longer than a softmax.
CPU_ROWS, CPU_ELEMENTS = 256, 2**23

LmHead = Callable[[Tensor], Tensor]
# Draft logits [N, V] and the target's probabilities [N, V] -> the loss of each token, [N].
TokenLoss = Callable[[Tensor, Tensor], Tensor]
# Distance of q from the target's p (DistillSpec, Zhou et al. 2023, table 1): KL(p|q) up to p's entropy; total
# variation, 1 - sum_v min(p_v, q_v); or one of the user's own.
Divergence = Literal["forward", "tvd"] | TokenLoss


# -- any loss, chunk by chunk


def chunked(
    loss: Callable[..., Iterator[Tensor]], vocab_size: int, rows: Sequence[Tensor], weights: Sequence[Tensor] = ()
) -> Tensor:
    """Sum a loss over N rows, a chunk of them at a time: logits [N, V] never exist.

    The gradient is computed with the value, because of a chunk it needs [C, H] only, in place of [C, V]; backward
    scales it. Nothing is computed twice.

    loss: yields terms (scalars) of a chunk, given (*rows, *weights). The gradient of a term is taken before the next
        one is asked for, so that the logits of one term exist at a time.
    vocab_size: width of its widest logits.
    rows: [N, ..] each; the first one's device counts.
    weights: what `loss` reads whole, such as an lm_head [V, H].
    """
    if not torch.is_grad_enabled():
        rows, weights = [row.detach() for row in rows], [weight.detach() for weight in weights]
    return _Chunked.apply(loss, vocab_size, len(rows), *rows, *weights)


class _Chunked(torch.autograd.Function):
    """Sum of a loss whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, loss: Callable[..., Iterator[Tensor]], vocab_size: int, num_rows: int, *tensors: Tensor
    ) -> Tensor | float:
        needs, rows = ctx.needs_input_grad[3:], tensors[:num_rows]
        # Leaves: autograd adds up their gradients over terms and chunks.
        weights = [
            _in_autocast_dtype(weight).detach().requires_grad_(need)
            for weight, need in zip(tensors[num_rows:], needs[num_rows:], strict=True)
        ]
        grads = [torch.zeros_like(row) if need else None for row, need in zip(rows, needs, strict=False)]
        total: Tensor | float = 0.0
        # The gradient of a whole weight is added up over chunks: few large ones.
        fewest = any(needs[num_rows:])
        for part in row_chunks(len(rows[0]), vocab_size, rows[0].device, fewest):
            chunk = [row[part].detach().requires_grad_(need) for row, need in zip(rows, needs, strict=False)]
            trained = [leaf for leaf in (*chunk, *weights) if leaf.requires_grad]
            with torch.enable_grad():
                for term in loss(*chunk, *weights):
                    total = total + term.detach()
                    if trained:
                        term.backward(inputs=trained)
            for grad, leaf in zip(grads, chunk, strict=True):
                if grad is not None and leaf.grad is not None:
                    grad[part] = leaf.grad
        ctx.save_for_backward(*grads, *(weight.grad for weight in weights))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        # In place: the gradient of an lm_head is as large as a model.
        return None, None, None, *(grad if grad is None else grad.mul_(outer) for grad in ctx.saved_tensors)


def row_chunks(count: int, vocab_size: int, device: torch.device, fewest: bool = False) -> Iterator[slice]:
    """Yield slices of `count` rows whose logits are made together: at most CHUNK_ELEMENTS numbers, at least a row.

    They are of like sizes, because each reads the whole lm_head. No rows are one slice, which is empty.

    fewest: as few slices as that allows; a CPU takes smaller ones otherwise.
    """
    most = CHUNK_ELEMENTS // vocab_size
    if device.type == "cpu" and not fewest:
        most = min(most, CPU_ROWS, CPU_ELEMENTS // vocab_size)
    number = max(1, math.ceil(count / max(most, 1)))
    for i in range(number):
        yield slice(i * count // number, (i + 1) * count // number)


def _in_autocast_dtype(weight: Tensor) -> Tensor:
    """Convert a frozen weight once; autocast would do it for every chunk. It does those that are trained once."""
    kind = weight.device.type
    if weight.requires_grad or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return weight
    return weight.to(torch.get_autocast_dtype(kind))


def softmax_(logits: Tensor) -> Tensor:
    """Return softmax(logits) in their memory."""
    logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    return logits.div_(logits.sum(-1, keepdim=True))


# -- q and p


def compare(
    logits: Tensor, p: Tensor | None, labels: Tensor | None = None, l1: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare C predictions q = softmax(logits), which takes the memory of `logits`, with p [C, V].

    labels: [C], which take the place of p in the entropy.

    Returns the entropy [C], -sum_v p_v log q_v; l1 [C], sum_v |q_v - p_v|, zeros if it is not asked for; and q [C, V]
    without a gradient, valid until the gradient of the others is computed, which takes its memory.
    """
    return _Compare.apply(logits, p, labels, l1)


class _Compare(torch.autograd.Function):
    """`compare` in place, because a chunk of logits costs more to allocate than to compute. With s = sign(q - p):

    d entropy / d logits = q - p            d l1 / d logits = q (s - <q, s>)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, labels: Tensor | None, l1: bool) -> tuple[Tensor, ...]:
        q = logits.detach()
        q -= q.amax(-1, keepdim=True)
        expected = torch.linalg.vecdot(p, q) if labels is None else q.gather(1, labels[:, None])[:, 0]
        norm = q.exp_().sum(-1, keepdim=True)
        q /= norm
        excess = q - p if l1 else None
        apart = torch.zeros_like(expected) if excess is None else excess.abs().sum(-1)
        ctx.save_for_backward(q, p, labels, excess)
        ctx.mark_non_differentiable(q)
        return norm[:, 0].log() - expected, apart, q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_entropy: Tensor, by_l1: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, p, labels, excess = ctx.saved_tensors
        factor = by_entropy = by_entropy[:, None]
        if excess is not None:
            sign = excess.sign_()
            factor = sign.sub_(torch.linalg.vecdot(q, sign)[:, None]).mul_(by_l1[:, None]).add_(by_entropy)
        grad = q.mul_(factor)
        if labels is None:
            grad.addcmul_(p, by_entropy, value=-1)
        else:
            grad.scatter_add_(1, labels[:, None], -by_entropy)
        return grad, None, None, None


def divergence_of(divergence: Divergence, logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence [C] of q = softmax(logits) from p, and q [C, V] without a gradient (`compare`).

    Raises:
        InputError: a user's loss is not one number for each token.
    """
    if not callable(divergence):
        entropy, l1, q = compare(logits, p, l1=divergence == "tvd")
        return entropy if divergence == "forward" else l1 / 2, q
    values = divergence(logits, p)
    if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
        found = f"{tuple(values.shape)} numbers" if isinstance(values, Tensor) else repr(values)
        remedy = "Return the loss of each token, without a mean."
        raise InputError("loss", f"{found} of {len(logits)} tokens", f"a tensor [{len(logits)}]", remedy)
    return values, logits.detach().softmax(-1)


# -- EAGLE, MTP, and draft models


class Measured(NamedTuple):
    """Predictions q of N tokens beside the target's distributions p: P of each token, or one.

    total: their weighted loss, with a gradient. accepted: [N, P] or [N], sum_v min(p_v, q_v), the probability that a
    drawn token is accepted at temperature 1. right: bool, alike: q's first choice is p's. known: [N] bool, p's first
    choice can be drafted. What is not measured is empty.
    """

    total: Tensor
    accepted: Tensor
    right: Tensor
    known: Tensor


def distances(
    target_lm_head: LmHead,
    vocab_size: int,
    wanted: Tensor,
    lm_head: Tensor | None,
    d2t: Tensor | None,
    hidden: Sequence[Tensor],
    weights: Tensor,
    drop_unknown: bool = True,
    measured: bool = True,
    divergence: Divergence = "forward",
) -> Measured:
    """Sum a divergence of P predictions of N tokens from the target's p renormalized over the draft vocabulary.

    target_lm_head: gives the target's logits [N, V] for the states `wanted` [N, H]; neither gets a gradient. lm_head:
    [draft vocabulary, H], with a gradient if it requires one; None: the target's. d2t: [draft vocabulary], the target's
    ids; None if the vocabulary is whole. hidden: [N, H] of each prediction, normed. weights: [N, P]. drop_unknown:
    ignore tokens where the target's first choice cannot be drafted: greedily none is accepted there. measured: compute
    more than `total`, which costs half as much again, without the matrix products.
    """
    measures = [(weights.new_empty(0), *torch.empty(2, 0, dtype=torch.bool, device=weights.device))]

    def loss(*given: Tensor) -> Iterator[Tensor]:
        states, (weights, wanted, *own) = given[: len(hidden)], given[len(hidden) :]
        with torch.no_grad():
            p, share, first, known = _draftable(wide(target_lm_head(wanted)), d2t, measured)
        counted = weights * known[:, None] if drop_unknown else weights  # [C, P]
        accepted, right = [], []
        for h, weight in zip(states, counted.unbind(-1), strict=True):
            logits = wide(F.linear(h, *own) if own else target_lm_head(h.to(wanted.dtype)))  # [C, draft vocabulary]
            choice = logits.argmax(-1) if measured else first
            distance, q = divergence_of(divergence, logits, p)
            if measured:
                accepted.append(torch.minimum(p if share is None else p * share, q).sum(-1))
                right.append(known & ((choice if d2t is None else d2t[choice]) == first))
            yield (distance * weight).sum()
        if measured:
            measures.append((torch.stack(accepted, -1), torch.stack(right, -1), known))

    total = chunked(loss, vocab_size, [*hidden, weights, wanted], [] if lm_head is None else [lm_head])
    accepted, right, known = (torch.cat(parts) for parts in zip(*measures, strict=True))
    return Measured(total, accepted, right, known)


def _draftable(
    target_logits: Tensor, d2t: Tensor | None, measured: bool, log_counts: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return p of the tokens that can be drafted, their share of the whole p if measured, its argmax, if it is of them.

    target_logits: [C, V], which are overwritten. log_counts: of `Columns`, added to them. Returns [C, draft
    vocabulary], [C, 1], [C] and [C] bool.
    """
    if d2t is None:
        known = torch.ones(len(target_logits), dtype=torch.bool, device=target_logits.device)
        first = target_logits.argmax(-1) if measured else known
        return softmax_(target_logits if log_counts is None else target_logits + log_counts), None, first, known
    first = target_logits.argmax(-1)
    # A look-up, because `isin` waits for the device.
    known = first.new_zeros(target_logits.shape[-1], dtype=torch.bool).index_fill_(0, d2t, True)[first]
    drafted, share = target_logits[:, d2t], None
    if measured:
        share = (drafted.logsumexp(-1, keepdim=True) - target_logits.logsumexp(-1, keepdim=True)).exp()
    return softmax_(drafted), share, first, known


# -- DFlash, DFlash2, DSpark


class Selection(NamedTuple):
    """Selector of a block drafter: z [N, r] of the predictions, a table [V, r], its candidates, its loss's weight."""

    z: Tensor
    successors: Tensor
    top_k: int
    weight: float


def compare_blocks(
    lm_head: LmHead,
    vocab_size: int,
    wanted: Tensor,
    hidden: Tensor,
    position: Tensor,
    labels: Tensor,
    weights: Tensor,
    markov: tuple[Tensor, Tensor] | None,
    ce: float,
    l1: float,
    log_counts: Tensor | None = None,
    own_loss: TokenLoss | None = None,
    selection: Selection | None = None,
    own_lm_head: LmHead | None = None,
    d2t: Tensor | None = None,
) -> Measured:
    """Sum w (ce * -log q(label) + l1 * sum_v |p_v - q_v|) over N predictions, with p at P positions of the text.

    lm_head: the target's, frozen; gives the target's logits for the states `wanted` [P, H] and the draft's for `hidden`
    [N, H]. position: [N] int64 on the host, the number of each prediction's position, ascending from 0 without gaps:
    blocks overlap, and p is computed once for a position. labels: [N], the text's tokens there. weights: [N]. markov:
    z [N, r] and W2 [V, r], which add W2 z to the draft's logits. ce, l1: weights of the two terms. log_counts: of
    `Columns`, if lm_head, W2 and labels cover these only. own_loss: takes the place of both terms. selection: adds the
    selector's loss; acceptance is then that of the selector's choices.

    own_lm_head, d2t: of a head with a reduced vocabulary; d2t [draft vocabulary] has the target's ids. The terms are
    over these tokens, with p renormalized. A label that is none of them becomes the target's likeliest one of them,
    which speculators takes for the label everywhere. Acceptance is that of the whole p.
    """
    measures: list[tuple[Tensor, Tensor]] = []

    def loss(hidden: Tensor, position: Tensor, labels: Tensor, weights: Tensor, *more: Tensor) -> Iterator[Tensor]:
        begin, end = int(position[0]), int(position[-1]) + 1
        own = to_device(position - begin, hidden.device)  # [C]
        with torch.no_grad():
            p, share, first, _ = _draftable(wide(lm_head(wanted[begin:end])), d2t, True, log_counts)
            p, first = p[own], first[own]  # [C, draft vocabulary], [C]
            if d2t is not None:
                places = torch.searchsorted(d2t, labels).clamp_max(len(d2t) - 1)
                labels = torch.where(d2t[places] == labels, places, p.argmax(-1))
        logits = wide(own_lm_head(hidden) if own_lm_head else lm_head(hidden.to(wanted.dtype)))  # [C, V]
        if markov:
            logits += F.linear(*more)
        selected = None if selection is None else select(logits, more[0], more[1], selection.top_k, p, first)
        choice = logits.argmax(-1)
        right = (choice if d2t is None else d2t[choice]) == first
        if log_counts is not None:
            logits = logits + log_counts
        if own_loss is None:
            entropy, apart, q = compare(logits, p, labels, l1=True)
            values = ce * entropy + l1 * apart
        else:
            values, q = divergence_of(own_loss, logits, p)
            apart = (q - p).abs().sum(-1)
        accepted = 1 - apart.detach() / 2 if share is None else torch.minimum(p * share[own], q).sum(-1)
        if selected is not None and selection is not None:
            entropy, accepted, right = selected
            values = values + selection.weight * entropy
        measures.append((accepted, right))
        yield (values * weights).sum()

    z, table = (markov or selection or (None, None))[:2]
    given = [] if z is None else [z]
    total = chunked(loss, vocab_size, [hidden, position, labels, weights, *given], [] if table is None else [table])
    accepted, right = (torch.cat(parts) for parts in zip(*measures, strict=True))
    return Measured(total, accepted, right, torch.empty(0))


def select(
    logits: Tensor, z: Tensor, successors: Tensor, top_k: int, p: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a selector's cross-entropy with the target's first choice, its overlap with p [C, V], and whether its
    first choice is the target's, [C] each.

    Where `first` [C] is not among the K likeliest tokens by logits [C, V] it takes the last one's place in the
    cross-entropy, and in nothing else. z: [C, r].
    """
    top_k = min(top_k, logits.shape[-1])
    with torch.no_grad():
        candidates = logits.topk(top_k).indices  # [C, K]
        last = torch.where((candidates == first[:, None]).any(1), candidates[:, -1], first)
        trained = torch.cat([candidates[:, :-1], last[:, None]], 1)
        place = (trained == first[:, None]).int().argmax(1)

    def scores(tokens: Tensor) -> Tensor:
        # The gradient of `gather` would want logits, whose memory `compare` takes.
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        return logits[rows, tokens] + (z[:, None] * successors[tokens]).sum(-1)

    entropy = F.cross_entropy(scores(trained), place, reduction="none")
    with torch.no_grad():
        served = scores(candidates)
        overlap = torch.minimum(served.softmax(-1), p.gather(1, candidates)).sum(-1)
        right = candidates.gather(1, served.argmax(-1, keepdim=True))[:, 0] == first
    return entropy, overlap, right


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


# -- the acceptance head


def acceptance_loss(logit: Tensor, accept_prob: Tensor, w_acc: float = 1.0, w_rej: float = 6.0) -> LossOutput:
    """Return the weighted binary cross-entropy with soft labels (SpecDec++ section 3.3).

    -w_acc P log P^ - w_rej (1-P) log(1-P^) over N drafted tokens, P^ = sigmoid(logit), logit, P [N]. `sums["kl"]` is
    the binary KL(P || P^), without w_acc and w_rej.
    """
    prob, z = accept_prob.float(), logit.float()
    accept, reject = F.logsigmoid(z), F.logsigmoid(-z)
    total = -(w_acc * prob * accept + w_rej * (1 - prob) * reject).sum()
    entropy = torch.special.entr(prob) + torch.special.entr(1 - prob)
    kl = (-(prob * accept + (1 - prob) * reject) - entropy).sum()
    count = torch.ones_like(prob).sum()
    sums = {"loss": total.detach(), "kl": kl.detach()}
    return LossOutput(total / count.clamp_min(1e-6), sums, dict.fromkeys(sums, count))
