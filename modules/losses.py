"""Training losses. Each returns its mean, and sums and counts from which a mean over ranks or batches is exact."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.types import AcceptanceBatch, LossOutput


def acceptance_loss(logit: Tensor, batch: AcceptanceBatch, w_acc: float = 1.0, w_rej: float = 6.0) -> LossOutput:
    """Weighted binary cross-entropy with soft labels (SpecDec++ section 3.3).

    -w_acc P log P^ - w_rej (1-P) log(1-P^) over the tokens of `loss_mask`, P^ = sigmoid(logit), logit [B, T].
    `sums["kl"]` is the unweighted binary KL(P || P^), of the raw output.
    """
    prob = batch.accept_prob[batch.loss_mask].float()
    z = logit[batch.loss_mask].float()
    accept, reject = F.logsigmoid(z), F.logsigmoid(-z)
    total = -(w_acc * prob * accept + w_rej * (1 - prob) * reject).sum()
    entropy = torch.special.entr(prob) + torch.special.entr(1 - prob)
    kl = (-(prob * accept + (1 - prob) * reject) - entropy).sum()
    count = torch.tensor(prob.numel(), device=logit.device)
    sums = {"loss": total.detach(), "kl": kl.detach()}
    return LossOutput(total / count.clamp_min(1), sums, dict.fromkeys(sums, count))


def eagle_loss(
    hidden: Tensor,
    target_features: Tensor,
    loss_mask: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    feature_weight: float = 1.0,
    token_weight: float = 0.1,
) -> LossOutput:
    """EAGLE's loss (section 4.2): feature_weight * smooth-L1(h, f) + token_weight * soft cross-entropy.

    hidden and target_features: [B, T, H], aligned (h_t with the feature it predicts); loss_mask: [B, T] bool. Smooth-L1
    is the mean over H, the cross-entropy is against the target's distribution at temperature 1; both are averaged over
    the tokens of the mask. Logits are made for those tokens only.

    Sums beside the losses: top1 and top3, how often the target's argmax is the head's first or among its three first.
    """
    predicted, wanted = hidden[loss_mask], target_features[loss_mask]
    feature_total = F.smooth_l1_loss(predicted.float(), wanted.float(), reduction="none").mean(-1).sum()
    with torch.no_grad():
        target_logits = lm_head(wanted.to(predicted.dtype)).float()
        target_prob = target_logits.softmax(-1)
        target_choice = target_logits.argmax(-1, keepdim=True)
    logits = lm_head(predicted).float()
    token_total = F.cross_entropy(logits, target_prob, reduction="sum")
    with torch.no_grad():
        ranked = logits.topk(3, dim=-1).indices == target_choice
    count = torch.tensor(len(predicted), device=hidden.device)
    total = feature_weight * feature_total + token_weight * token_total
    sums = {
        "loss": total.detach(),
        "feature_loss": feature_total.detach(),
        "token_loss": token_total.detach(),
        "top1": ranked[:, 0].sum(),
        "top3": ranked.sum(),
    }
    return LossOutput(total / count.clamp_min(1), sums, dict.fromkeys(sums, count))
