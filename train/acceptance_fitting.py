"""Start an acceptance head for real rounds as a logistic of its features."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.metrics import fit_logistic
from draftsmith.modules.types import AcceptanceBatch

# Scale of an input that never changes.
SMALLEST_SCALE = 1e-3
# In tokens: keeps the logistic finite if the labels are separable.
RIDGE = 1e-2


def predicted(head: AcceptanceHead, batch: AcceptanceBatch) -> Tensor:
    """Return raw logits, in float32 also under bf16 autocast."""
    with torch.autocast(batch.hidden.device.type, enabled=False):
        return head(batch.hidden, batch.embeds, batch.features)


@torch.no_grad()
def initialize_head(head: AcceptanceHead, batches: Iterable[AcceptanceBatch]) -> None:
    """Set the head's means and scales to those of its inputs, and its output to the logistic of its features that fits
    the weighted batches best, so that training never starts worse than that.

    The hidden layer's part of the output starts at 0.
    """
    config = head.config
    # Sums of x and x^2, in float64: states can be large.
    count, sums = 0, torch.zeros(2, config.input_size, dtype=torch.float64)
    labels = []
    for batch in batches:
        parts = (batch.hidden, batch.embeds, batch.features)
        inputs = torch.cat([part.double() for part in parts if part is not None], -1)  # [N, input_size]
        count, sums = count + len(inputs), sums + torch.stack([inputs.sum(0), inputs.square().sum(0)]).cpu()
        labels.append((batch.features, batch.accept_prob, batch.weight))
    if config.standardize:
        mean, square = sums / count
        head.mean.copy_(mean)
        head.scale.copy_((square - mean.square()).clamp_min(0).sqrt().clamp_min(SMALLEST_SCALE))
    # The output starts without the hidden layer.
    head.out.weight.zero_()
    if head.direct is None:
        return
    features, accept_prob, weight = (torch.cat(parts) for parts in zip(*labels, strict=True))
    if config.standardize:
        last = slice(config.input_size - len(config.features), None)
        features = (features - head.mean[last].to(features)) / head.scale[last].to(features)
    *weights, bias = fit_logistic(features, accept_prob, [0.0] * (len(config.features) + 1), RIDGE, weight).tolist()
    head.direct.weight.copy_(torch.tensor([weights]))
    # The bias is that of the probability; `AcceptanceHead.corrected` adds the loss weights' part.
    head.out.bias.fill_(bias - float(head.corrected(0.0)))
