"""Training losses, computed a chunk of logits at a time.

Each returns its mean, and sums and counts that make a mean over ranks or batches exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from draftsmith.modules.transfer import true_places
from draftsmith.modules.types import AcceptanceBatch, InputError, LossOutput

# Logits that exist at once: 128 MiB in float32, which is small beside a model. At a vocabulary of 128k these are 256
# rows, enough that reading lm_head's weight does not dominate.
CHUNK_ELEMENTS = 2**25
# Rows at once on a CPU, so that a chunk of a small vocabulary stays in its caches (1.1 to 1.2 times as fast at 2,048
# tokens, docs/performance.md).
CPU_ROWS = 256

LmHead = Callable[[Tensor], Tensor]
# Draft logits [N, V] and the target's probabilities [N, V] -> the loss of each token, [N].
TokenLoss = Callable[[Tensor, Tensor], Tensor]


def acceptance_loss(logit: Tensor, batch: AcceptanceBatch, w_acc: float = 1.0, w_rej: float = 6.0) -> LossOutput:
    """Return the weighted binary cross-entropy with soft labels (SpecDec++ section 3.3).

    -w_acc P log P^ - w_rej (1-P) log(1-P^) over the tokens of `loss_mask`, P^ = sigmoid(logit), logit [B, T]. Tokens
    count by their weights, if the batch has any. `sums["kl"]` is the binary KL(P || P^), without w_acc and w_rej.
    """
    chosen = true_places(batch.loss_mask)  # [N]
    prob, z = (values.flatten().index_select(0, chosen).float() for values in (batch.accept_prob, logit))
    accept, reject = F.logsigmoid(z), F.logsigmoid(-z)
    weight = torch.ones_like(prob) if batch.weight is None else batch.weight.flatten()[chosen].float()
    total = -(weight * (w_acc * prob * accept + w_rej * (1 - prob) * reject)).sum()
    entropy = torch.special.entr(prob) + torch.special.entr(1 - prob)
    kl = (weight * (-(prob * accept + (1 - prob) * reject) - entropy)).sum()
    count = weight.sum()
    sums = {"loss": total.detach(), "kl": kl.detach()}
    return LossOutput(total / count.clamp_min(1e-6), sums, dict.fromkeys(sums, count))


def with_gradient(loss: TokenLoss, logits: Tensor, target_prob: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss of tokens [N] and the gradient of its sum with respect to the logits [N, V].

    Raises:
        InputError: the loss is not one number for each token.
    """
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        values = loss(leaf, target_prob)
        if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
            found = f"{tuple(values.shape)} numbers" if isinstance(values, Tensor) else repr(values)
            remedy = "Return the loss of each token, without a mean."
            raise InputError("loss", f"{found} of {len(logits)} tokens", f"a tensor [{len(logits)}]", remedy)
        (grad,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), grad


def soft_cross_entropy(
    lm_head: LmHead,
    wanted: Tensor,
    kept: Sequence[Tensor],
    hidden: Sequence[Tensor],
    ranked: bool = True,
    loss: TokenLoss | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum -sum_v p_v log q_v over N tokens, for each of P predictions h of them: totals [P], hits [2].

    p = softmax(lm_head(wanted)), q = softmax(lm_head(h)). hits count how often p's argmax is the first, or among the
    first three, of the first prediction's logits.

    wanted: [N, H]. kept: [N] weights for each prediction. hidden: [N, H] each; only they get a gradient, because
    lm_head is frozen. ranked: count the hits, which takes as long as half of the rest beside the products; else 0.
    loss: takes the cross-entropy's place.
    """
    return _SoftCrossEntropy.apply(lm_head, wanted, kept, ranked, loss, *hidden)


class _SoftCrossEntropy(torch.autograd.Function):
    """`soft_cross_entropy` chunk by chunk, all predictions together, so that p is computed once.

    The gradient is computed with the value: with a frozen lm_head, backward needs no more of a chunk than its gradient
    with respect to `hidden`, [C, H] in place of [C, V]. Nothing is computed twice, and about three chunks of
    CHUNK_ELEMENTS exist at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        lm_head: LmHead,
        wanted: Tensor,
        kept: Sequence[Tensor],
        ranked: bool,
        loss: TokenLoss | None,
        *hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        grads = [torch.empty_like(h) if ctx.needs_input_grad[5 + i] else None for i, h in enumerate(hidden)]
        totals = torch.zeros(len(hidden), device=wanted.device)
        hits = torch.zeros(2, dtype=torch.int64, device=wanted.device)
        vocabulary = lm_head(wanted[:1].to(hidden[0].dtype)).shape[-1] if len(wanted) else 1
        for part in row_chunks(len(wanted), vocabulary, wanted.device):
            target_logits = _wide(lm_head(wanted[part].to(hidden[0].dtype)))  # [C, V]
            choice = target_logits.argmax(-1, keepdim=True) if ranked else None
            # The softmax, in place of the logits.
            target_prob = target_logits.sub_(target_logits.amax(-1, keepdim=True)).exp_()
            target_prob /= target_prob.sum(-1, keepdim=True)
            for i, (states, keep, grad) in enumerate(zip(hidden, kept, grads, strict=True)):
                logits, pull = with_pull(lm_head, states[part], grad is not None)
                if i == 0 and choice is not None:
                    is_choice = logits.topk(min(3, logits.shape[-1]), dim=-1).indices == choice  # [C, 3]
                    hits += torch.stack([is_choice[:, 0].sum(), is_choice.sum()])
                if loss is not None:
                    distance, by_logits = with_gradient(loss, logits, target_prob)
                else:
                    logits -= logits.amax(-1, keepdim=True)
                    expected = torch.linalg.vecdot(target_prob, logits)
                    norm = logits.exp_().sum(-1, keepdim=True)
                    # The gradient is q - p, in place of the logits.
                    distance, by_logits = norm[:, 0].log() - expected, logits.div_(norm).sub_(target_prob)
                totals[i] += (distance * keep[part]).sum()
                if grad is not None:
                    grad[part] = pull(by_logits) * keep[part, None].to(states.dtype)
        ctx.grads = grads
        ctx.mark_non_differentiable(hits)
        return totals, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> Any:
        grads = [None if grad is None else grad * outer[i].to(grad.dtype) for i, grad in enumerate(ctx.grads)]
        return None, None, None, None, None, *grads


def token_loss(
    hidden: Tensor, labels: Tensor, lm_head: LmHead, vocab_size: int, teacher: tuple[Tensor, LmHead] | None = None
) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropies of lm_head(hidden [N, H]) with labels [N], and count how often the label is the argmax.

    teacher: states [N, H'] and their lm_head, whose distribution takes the labels' place in the cross-entropy. Logits
    are computed a chunk at a time, and again for the gradient.
    """

    def chunk(states: Tensor, label: Tensor, teacher_states: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = _wide(lm_head(states))  # [C, V]
        wanted = label
        if teacher is not None and teacher_states is not None:
            with torch.no_grad():
                wanted = _wide(teacher[1](teacher_states)).softmax(-1)  # [C, V]
        return F.cross_entropy(logits, wanted, reduction="sum"), (logits.argmax(-1) == label).sum()

    rows = max(1, CHUNK_ELEMENTS // vocab_size)
    entropies, hits = list[Tensor](), list[Tensor]()
    states = hidden.split(rows)
    teacher_states = [None] * len(states) if teacher is None else teacher[0].split(rows)
    for parts in zip(states, labels.split(rows), teacher_states, strict=True):
        entropy, right = checkpoint(chunk, *parts, use_reentrant=False, preserve_rng_state=False)
        entropies.append(entropy)
        hits.append(right)
    return torch.stack(entropies).sum(), torch.stack(hits).sum()


def row_chunks(count: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of `count` rows whose logits are made together: at most CHUNK_ELEMENTS numbers, at least a row."""
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    rows = min(rows, CPU_ROWS) if device.type == "cpu" else rows
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def with_pull(lm_head: LmHead, hidden: Tensor, needs_grad: bool) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return logits [C, V] of hidden [C, H] in float32 or wider, and the map of their gradient to hidden's [C, H].

    The logits may be overwritten.
    """
    if not needs_grad:
        return _wide(lm_head(hidden)), lambda grad: grad
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        logits = lm_head(leaf)

    def pull(grad: Tensor) -> Tensor:
        return torch.autograd.grad(logits, leaf, grad.to(logits.dtype))[0]

    # A linear map's backward needs its weight only, so its output may be overwritten.
    return _wide(logits.detach()), pull


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
