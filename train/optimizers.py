"""Muon with AdamW as one optimizer, learning rate schedules, and the length of a training by the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from draftsmith.train.config import TrainConfig

# Coefficients of x, x^3 and x^5 in each iteration, which bring singular values of 0.009 to 1 within 0.35 of 1. Each is
# the polynomial nearest to 1 where the values are then (Amsel et al. 2025, "Polar Express"), on an interval 2 % wider
# for the rounding of bfloat16. Heads learn as much as with five of Jordan's (2024): benchmarks/README.md.
NEWTON_SCHULZ = ((7.9962, -22.4913, 15.9798), (3.6671, -2.6426, 0.4966), (2.8061, -2.0345, 0.4356))
# The share of the time after which a first validation is timed, if there was none; and how many times the longest
# validation with its saves is kept for the last one, before that a share of the time.
TRIAL_SHARE, RESERVED_TIMES, RESERVED_SHARE = 0.1, 1.25, 0.15


def lr_share(step: int, total_steps: int, schedule: str, warmup_share: float) -> float:
    """Return the share of the peak learning rate that a step, 0 to total_steps - 1, takes.

    Warm-up rises linearly and reaches 1 at the step after its last. Then `cosine` and `linear` fall to 0, reached
    right after the last step; `hold` stays for half of the rest before it falls linearly; `constant` stays.
    """
    # Step 0 already learns: the rise starts above 0.
    warmup = round(total_steps * warmup_share)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shapes = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "hold": min(1.0, 2 * (1 - progress)),
        "constant": 1.0,
    }
    return shapes[schedule]


def orthogonalise(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return about the closest semi-orthogonal matrix to one of [rows, columns], or to each in [N, rows, columns].

    dtype: of the Newton-Schulz iteration; None: the matrix's.
    """
    # The iteration multiplies by the smaller Gram matrix, [.., r, r].
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = (matrix if wide else matrix.mT).to(dtype or matrix.dtype)
    gram = x @ x.mT
    # Its root bounds the singular values more closely than the norm of X.
    size = gram.norm(dim=(-2, -1), keepdim=True) + 1e-14
    x, gram, factor = x / size.sqrt(), gram / size, None
    # p(G) X of a long X costs less as (p(G) ..) X, all of whose factors are functions of the first G; in half precision
    # they lose their symmetry.
    long = 2 * x.shape[-1] > 3 * x.shape[-2] and x.dtype.itemsize >= 4
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for left, (a, b, c) in zip(reversed(range(len(NEWTON_SCHULZ))), NEWTON_SCHULZ, strict=True):
        p = add_product(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        if long:
            factor, gram = p if factor is None else p @ factor, p @ gram @ p if left else gram
        else:
            x = p @ x
            gram = x @ x.mT if left else gram
    x = x if factor is None else factor @ x
    return x if wide else x.mT


def hidden_matrices(head: nn.Module) -> set[nn.Parameter]:
    """Return the weights that Muon is made for: matrices from states to states.

    Tables with a row for each token (embeddings, lm_heads, of a draft's vocabulary too) and single rows are AdamW's, as
    in nanochat and speculators: a row without a gradient would move, and a vector has no spectrum.
    """
    vocab_size = getattr(head.config, "vocab_size", None)
    tables = {module.weight for module in head.modules() if isinstance(module, nn.Embedding)}
    tables |= {weight for name, weight in head.named_parameters() if "lm_head" in name.split(".")}
    matrices = {weight for weight in head.parameters() if weight.ndim == 2 and min(weight.shape) > 1}
    return {weight for weight in matrices - tables if weight.shape[0] != vocab_size}


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest: one optimizer, one schedule, one state to checkpoint.

    Matrices move by orthogonalised momentum times 0.2 sqrt(max(rows, columns)), the size of AdamW's updates, so both
    share a learning rate (Jordan 2024, "Muon"; the scale is of Liu et al. 2025, section 2.2). weight_decay is decoupled
    and acts on matrices only. `torch.optim.Muon` runs Newton-Schulz in bf16, one matrix at a time; on a CPU without
    bf16 instructions that costs more than the model's own step. Here equal shapes are orthogonalised together on a
    GPU, in `iterate_in`: bf16 where the training computes in it, else the weights' own type.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        others: Iterable[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.98),
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iterate_in: torch.dtype | None = None,
    ):
        self._iterate_in = iterate_in
        groups = [
            {"params": list(matrices), "orthogonal": True, "weight_decay": weight_decay},
            {"params": list(others), "orthogonal": False, "weight_decay": 0.0},
        ]
        # `fused` keeps the count of steps beside the weights when a state is loaded.
        defaults = {"lr": lr, "betas": betas, "momentum": momentum, "fused": True}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]  # torch declares two
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["orthogonal"]:
                for shape in dict.fromkeys(param.shape for param in params):
                    self._step_muon([param for param in params if param.shape == shape], group)
            elif params:
                self._step_adam(params, group)
        return loss

    def _step_muon(self, params: list[torch.nn.Parameter], group: dict) -> None:
        """Update matrices of one shape."""
        directions, dtype = [], self._iterate_in
        for param in params:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
            momentum.lerp_(cast(Tensor, param.grad), 1 - group["momentum"])
            # Nesterov momentum.
            directions.append(torch.lerp(cast(Tensor, param.grad), momentum, group["momentum"]))
        if params[0].device.type == "cpu":
            # There the product of a batch takes longer than its matrices' products.
            updates: Iterable[Tensor] = [orthogonalise(own, dtype) for own in directions]
        else:
            updates = orthogonalise(torch.stack(directions), dtype)
        scale = group["lr"] * 0.2 * max(params[0].shape) ** 0.5
        for param, update in zip(params, updates, strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(update, alpha=-scale)

    def _step_adam(self, params: list[torch.nn.Parameter], group: dict) -> None:
        """Update tensors by AdamW without a decay, each in one pass over its memory."""
        for param in params:
            if not self.state[param]:
                zeros = {name: torch.zeros_like(param) for name in ("mean", "square")}
                self.state[param] |= {"step": torch.zeros((), device=param.device), **zeros}
        mean, square, step = ([self.state[param][name] for param in params] for name in ("mean", "square", "step"))
        grads, (beta1, beta2) = [cast(Tensor, param.grad) for param in params], group["betas"]
        adamw(
            list[Tensor](params), grads, mean, square, [], step, fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip


def make_optimizer(head: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the config's optimizer of a head's trained weights: matrices decay, vectors (norms, biases) do not."""
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    if config.optimizer == "muon":
        chosen = hidden_matrices(head)
        others = [weight for weight in trained if weight not in chosen]
        dtype, more = torch.bfloat16 if config.precision == "bf16" else None, {"weight_decay": config.weight_decay}
        matrices = [weight for weight in trained if weight in chosen]
        return MuonAdamW(matrices, others, config.lr, config.betas, iterate_in=dtype, **more)
    matrices, vectors = ([weight for weight in trained if (weight.ndim >= 2) == many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=config.betas)


class TimeLimit:
    """Plans a training's steps by the clock: rank 0's plan counts for all ranks.

    The learning rate and whatever else depends on the share of the training that is done follow the planned number of
    steps, which is corrected after every step.
    """

    def __init__(self, minutes: float, since: float | None = None, clock: Callable[[], float] = time.monotonic):
        """since: when the clock started to run; None: now."""
        self._clock, self._limit = clock, 60 * minutes
        self._since = clock() if since is None else since
        # Seconds that earlier runs took; when this one's steps began; longest validation and saves.
        self._earlier, self._began, self._pause = 0.0, self._since, 0.0
        # The longest step; how many were done at the last look, and when that was.
        self._step_s = 0.0
        self._mark: tuple[int, float] | None = None

    def begin(self) -> float:
        """Start with the steps: what came before them is no part of the schedule. Returns the seconds spent so far."""
        self._began = self._clock()
        return self._earlier + self._began - self._since

    def state(self) -> dict[str, float]:
        return {"spent": self._earlier + self._clock() - self._since, "pause": self._pause}

    def load(self, state: dict[str, Any]) -> None:
        self._earlier, self._pause = state["spent"], state["pause"]

    def pause(self, seconds: float) -> None:
        """Take in what a validation or a save took."""
        self._pause = max(self._pause, seconds)
        if self._mark is not None:
            self._mark = self._mark[0], self._mark[1] + seconds
        else:
            # Before the first step: no part of the schedule, whose warm-up would be over at once.
            self._began += seconds

    def wants_trial(self) -> bool:
        """Return whether it is time to validate, so that the length of the last validation is known."""
        return not self._pause and self._earlier + self._clock() - self._since > TRIAL_SHARE * self._limit

    def total_steps(self, done: int) -> int:
        """Return how many steps the training has, if `done` are done: one more than these if time is for one only."""
        now = self._clock()
        if self._mark is not None and done > self._mark[0]:
            # The longest step so far: the last one must not outrun the limit.
            self._step_s = max(self._step_s, (now - self._mark[1]) / (done - self._mark[0]))
        self._mark = done, now
        reserved = RESERVED_TIMES * self._pause or RESERVED_SHARE * self._limit
        spent, left = self._earlier + now - self._began, self._limit - reserved - self._earlier - (now - self._since)
        if left < 2 * self._step_s:
            return done + 1
        # Before the first step nothing is known of their speed.
        return max(done + 2, round(done * (1 + left / spent))) if done and spent > 0 else 2**31 - 1
