"""Muon in float32, with equally shaped matrices orthogonalised together.

`torch.optim.Muon` runs Newton-Schulz in bf16, one matrix at a time; on a CPU without bf16 instructions that costs more
than the model's own step. Same update rule (Jordan 2024, "Muon"; learning rate scale of Liu et al. 2025, section 2.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(batch: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of batch [N, rows, columns], by a quintic Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    wide = batch.shape[1] <= batch.shape[2]
    x = batch if wide else batch.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class BatchedMuon(torch.optim.Optimizer):
    """Momentum, orthogonalised. The scale 0.2 sqrt(max(rows, columns)) gives updates the size of AdamW's.

    params: 2-D weights. weight_decay is decoupled, as in AdamW.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for params in by_shape.values():
                self._step_shape(params, group)

    def _step_shape(self, params: list[torch.nn.Parameter], group: dict) -> None:
        directions = []
        for param in params:
            assert param.grad is not None
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
            momentum.lerp_(param.grad, 1 - group["momentum"])
            directions.append(torch.lerp(param.grad, momentum, group["momentum"]))  # Nesterov
        rows, columns = params[0].shape
        scale = group["lr"] * 0.2 * max(rows, columns) ** 0.5
        for param, update in zip(params, orthogonalise(torch.stack(directions)), strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(update, alpha=-scale)
