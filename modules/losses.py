"""Training losses. Each returns its mean, and sums and counts from which a mean over ranks or batches is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from draftsmith.modules.transfer import true_places
from draftsmith.modules.types import AcceptanceBatch, LossOutput

# Logits that exist at once: 128 MiB in float32, few enough to be small beside a model, and at 128k tokens of vocabulary
# still 256 rows, so that reading lm_head's weight does not dominate.
CHUNK_ELEMENTS = 2**25
# Rows at once on a CPU: with few tokens of vocabulary a block then stays in its caches, and for many ones there are no
# fewer than these anyway (1.1 to 1.2 times as fast at 2,048 tokens, docs/performance.md).
CPU_ROWS = 256

LmHead = Callable[[Tensor], Tensor]


def acceptance_loss(logit: Tensor, batch: AcceptanceBatch, w_acc: float = 1.0, w_rej: float = 6.0) -> LossOutput:
    """Weighted binary cross-entropy with soft labels (SpecDec++ section 3.3).

    -w_acc P log P^ - w_rej (1-P) log(1-P^) over the tokens of `loss_mask`, P^ = sigmoid(logit), logit [B, T].
    Where the batch has weights, each token counts that much. `sums["kl"]` is the binary KL(P || P^) of the raw output,
    without w_acc and w_rej.
    """
    chosen = true_places(batch.loss_mask)
    prob, z = (values.flatten().index_select(0, chosen).float() for values in (batch.accept_prob, logit))
    accept, reject = F.logsigmoid(z), F.logsigmoid(-z)
    weight = torch.ones_like(prob) if batch.weight is None else batch.weight.flatten()[chosen].float()
    total = -(weight * (w_acc * prob * accept + w_rej * (1 - prob) * reject)).sum()
    entropy = torch.special.entr(prob) + torch.special.entr(1 - prob)
    kl = (weight * (-(prob * accept + (1 - prob) * reject) - entropy)).sum()
    count = weight.sum()
    sums = {"loss": total.detach(), "kl": kl.detach()}
    return LossOutput(total / count.clamp_min(1e-6), sums, dict.fromkeys(sums, count))


def soft_cross_entropy(
    lm_head: LmHead, wanted: Tensor, kept: Sequence[Tensor], hidden: Sequence[Tensor], ranked: bool = True
) -> tuple[Tensor, Tensor]:
    """Sums over tokens of -sum_v p_v log q_v, p = softmax(lm_head(wanted)), q = softmax(lm_head(h)), of several
    predictions h of the same N tokens; and how often p's argmax is the first, or among the three first, of the first
    prediction's logits: totals [P], hits [2].

    wanted: [N, H]. kept: [N] weights for each prediction. hidden: [N, H] each; the gradient flows to them alone, as
    lm_head is frozen. CHUNK_ELEMENTS logits are made at a time. ranked: count the hits, which are 0 else: finding the
    first ones takes as long as half of the rest beside the products.
    """
    return _SoftCrossEntropy.apply(lm_head, wanted, kept, ranked, *hidden)


class _SoftCrossEntropy(torch.autograd.Function):
    """`soft_cross_entropy` chunk by chunk, all predictions together, so that p is made once.

    The gradient is made with the value: as lm_head is frozen, backward needs no more of a chunk than its gradient with
    respect to `hidden`, [C, H] in the place of [C, V]. So nothing is computed twice, and about three blocks of
    CHUNK_ELEMENTS exist at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, lm_head: LmHead, wanted: Tensor, kept: Sequence[Tensor], ranked: bool, *hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        grads = [torch.empty_like(h) if ctx.needs_input_grad[4 + i] else None for i, h in enumerate(hidden)]
        totals = torch.zeros(len(hidden), device=wanted.device)
        hits = torch.zeros(2, dtype=torch.int64, device=wanted.device)
        vocabulary = lm_head(wanted[:1].to(hidden[0].dtype)).shape[-1] if len(wanted) else 1
        for part in row_chunks(len(wanted), vocabulary, wanted.device):
            target_logits = lm_head(wanted[part].to(hidden[0].dtype)).float()
            choice = target_logits.argmax(-1, keepdim=True) if ranked else None
            target_prob = _softmax_(target_logits)
            for i, (states, keep, grad) in enumerate(zip(hidden, kept, grads, strict=True)):
                logits, pull = _logits(lm_head, states[part], grad is not None)
                if i == 0 and choice is not None:
                    found = logits.topk(min(3, logits.shape[-1]), dim=-1).indices == choice
                    hits += torch.stack([found[:, 0].sum(), found.sum()])
                logits -= logits.amax(-1, keepdim=True)
                expected = torch.linalg.vecdot(target_prob, logits)
                norm = logits.exp_().sum(-1, keepdim=True)
                totals[i] += ((norm[:, 0].log() - expected) * keep[part]).sum()
                if grad is not None:
                    logits.div_(norm).sub_(target_prob)  # q - p
                    grad[part] = pull(logits) * keep[part, None].to(states.dtype)
        ctx.grads = grads
        ctx.mark_non_differentiable(hits)
        return totals, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> Any:
        grads = [None if grad is None else grad * outer[i].to(grad.dtype) for i, grad in enumerate(ctx.grads)]
        return None, None, None, None, *grads


def token_loss(
    hidden: Tensor, labels: Tensor, lm_head: LmHead, vocab_size: int, taught: tuple[Tensor, LmHead] | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of lm_head(hidden [N, H]) with labels [N], and how often the label is the argmax.
    taught: states [N, H'], and what makes logits of them whose softmax takes the labels' place in the first of these.
    Logits are made CHUNK_ELEMENTS at a time, and again for the gradient."""

    def wide(logits: Tensor) -> Tensor:
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def chunk(states: Tensor, label: Tensor, teaching: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = wide(lm_head(states))
        wanted = label
        if taught is not None and teaching is not None:
            with torch.no_grad():
                wanted = wide(taught[1](teaching)).softmax(-1)
        return F.cross_entropy(logits, wanted, reduction="sum"), (logits.argmax(-1) == label).sum()

    rows = max(1, CHUNK_ELEMENTS // vocab_size)
    entropies, hits = list[Tensor](), list[Tensor]()
    states = hidden.split(rows)
    teaching = [None] * len(states) if taught is None else taught[0].split(rows)
    for parts in zip(states, labels.split(rows), teaching, strict=True):
        entropy, right = checkpoint(chunk, *parts, use_reentrant=False, preserve_rng_state=False)
        entropies.append(entropy)
        hits.append(right)
    return torch.stack(entropies).sum(), torch.stack(hits).sum()


def row_chunks(count: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    """Of `count` rows, those whose logits are made at a time: CHUNK_ELEMENTS numbers at most, or one row."""
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    rows = min(rows, CPU_ROWS) if device.type == "cpu" else rows
    yield from (slice(start, start + rows) for start in range(0, count, rows))


def _softmax_(logits: Tensor) -> Tensor:
    """Softmax over the last dimension in place of the logits."""
    logits -= logits.amax(-1, keepdim=True)
    logits.exp_()
    logits /= logits.sum(-1, keepdim=True)
    return logits


def _logits(lm_head: LmHead, hidden: Tensor, needs_grad: bool) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """float32 logits [C, V] of hidden [C, H], free to be overwritten, and what takes their gradient [C, V] to that of
    hidden [C, H]."""
    if not needs_grad:
        return lm_head(hidden).float(), lambda grad: grad
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        made = lm_head(leaf)

    def pull(grad: Tensor) -> Tensor:
        return torch.autograd.grad(made, leaf, grad.to(made.dtype))[0]

    # A linear map's backward needs its weight only, so its output may be overwritten.
    return made.detach().float(), pull
