"""The training of any head for Lightning: its optimiser, and a loss that is the mean over the whole step's tokens. What
it learns is an `Objective`: a drafter's (drafter_objective.py) or an acceptance head's (acceptance_data.py)."""

from __future__ import annotations

import dataclasses
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.types import LossOutput
from draftsmith.train.bad_steps import BadSteps, finite
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import Key, Part, Samples, move
from draftsmith.train.metrics import Means, num_ranks, rank, sum_over_ranks
from draftsmith.train.optimizers import MuonAdamW, lr_schedule

# What ends a run between steps; the first that any rank has received counts. SIGUSR1 is SLURM's warning before the time
# limit (train/signals.py).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Given:
    """What a part gives to its head. states: hidden states that a frozen model has made just now, if it has."""

    data: Any
    states: Tensor | None


class Objective(ABC):
    """What a head learns: the loss of a step's part, what validation measures, and what a step costs.

    It holds the frozen models, which so are no part of the LightningModule: they are neither optimised, nor broadcast
    by DDP, nor written into checkpoints. The head is handed in: under ZeRO-3 validation has a whole copy of it.

    monitor: name of the validation metric that picks best/. larger_is_better: its direction. model: flag of the model
    whose states `read` gives, for errors. validates_first: before the first step too: the head may begin as one of use.
    """

    monitor: str
    larger_is_better: bool
    model: str
    validates_first = False

    @abstractmethod
    def read(self, part: Part, validating: bool = False) -> Given:
        """What frozen models make of a part, without gradient."""

    @abstractmethod
    def loss(self, head: Any, given: Given, step: TrainStep) -> LossOutput:
        """Mean loss over the part's tokens."""

    @abstractmethod
    def validate(self, head: Any, given: Iterable[tuple[Part, Given]]) -> dict[str, float]:
        """Metrics over the validation samples of all ranks, the same on every rank.

        Raises:
            InputError: there is nothing to measure.
        """

    @abstractmethod
    def flops(self, head: Any, part: Part, step: TrainStep) -> float:
        """Model FLOPs (modules/flops.py) of a training part, forward and backward: the head's, the loss' and those of
        the frozen model's forward where it runs in the step. From shapes, without waiting for a device."""

    def state(self, head: Any) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {}

    def load(self, head: Any, checkpoint: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        return


class LitHead(pl.LightningModule):
    """A head in training."""

    def __init__(self, head: nn.Module, objective: Objective, config: TrainConfig, total_steps: int):
        super().__init__()
        self.head, self.objective, self.config, self.total_steps = head, objective, config, total_steps
        self.means = Means()
        self.bad_steps = BadSteps(config.max_bad_steps, objective.model)
        # The running step is left out on all ranks: something in it was not finite.
        self.skips_step = False
        # Set by this rank's signal handler; then agreed on by all ranks, so that all stop after the same step.
        self.signal_received = 0
        self.signal_agreed = 0
        self._step_tokens = 1.0
        # The part at hand is its step's last one.
        self.ends_step = True
        self._grad_norm = 0.0

    def training_step(self, part: Part, batch_idx: int) -> Tensor:
        if part.first:
            self._begin_step(part.step_tokens)
        with self.autocast():
            output = self.part_loss(part)
        self.bad_steps.add(output.loss, part.indices)
        self.means.add(finite(output))
        self.ends_step = part.last
        # DDP takes the mean over ranks and Lightning divides by the accumulated parts: undo both, for a sum.
        return output.loss * (part.tokens * num_ranks() * self.config.accumulate / self._step_tokens)

    def part_loss(self, part: Part) -> LossOutput:
        """Mean loss over the part's tokens, in training."""
        given = self.objective.read(part)
        if given.states is not None:
            self.bad_steps.given(given.states)
        step = dataclasses.replace(self._step(part.keys), chosen=part.chosen, loss_count=part.tokens)
        return self.objective.loss(self.head, given, step)

    def _step(self, keys: Sequence[Key]) -> TrainStep:
        """Where the training stands, for these samples."""
        seeds = [(self.config.seed * 1_000_003 + key.epoch) * 1_000_003 + key.index for key in keys]
        lengths = [int(self.samples.lengths[key.index]) for key in keys]
        done = self.trainer.global_step
        return TrainStep(done, self.total_steps, lengths, seeds, logged=self.logs(done + 1))

    def logs(self, step: int) -> bool:
        """True where losses are logged after so many steps."""
        return self.config.logs(step, self.total_steps)

    def _begin_step(self, own_tokens: float) -> None:
        """Agree with the other ranks on how many tokens the step counts, and on whether to stop after it."""
        self.bad_steps.begin()
        if num_ranks() == 1:
            tokens, self.signal_agreed = float(own_tokens), self.signal_received
        else:
            flags = [own_tokens, *(self.signal_received == number for number in SIGNALS)]
            tokens, *received = sum_over_ranks(torch.tensor(flags, dtype=torch.float64, device=self.device)).tolist()
            self.signal_agreed = next((int(n) for n, count in zip(SIGNALS, received, strict=True) if count), 0)
        self._step_tokens = tokens or 1.0  # no token counts: the loss is zero

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, or leave the step out."""
        if not self.ends_step:  # DeepSpeed counts the parts itself: Lightning takes each for a step
            return
        name = self.samples.name
        if self.trainer.strategy.handles_gradient_accumulation:  # DeepSpeed clips inside its step
            self.skips_step, _ = self.bad_steps.agree(None, name)
            return
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        self.skips_step, self._grad_norm = self.bad_steps.agree(norm, name)
        if self.skips_step:
            for param in params:
                param.grad = None
        elif self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(params, self.config.clip, norm)

    def autocast(self) -> AbstractContextManager:
        """bf16 where the config says so, under every strategy alike; weights and optimizer stay float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    @torch.no_grad()
    def validate(self, parts: Iterable[Part]) -> dict[str, float]:
        """The objective's metrics.

        Raises:
            NonFinite: the states of a frozen model. InputError: there is nothing to measure.
        """
        return self.objective.validate(self.head, self._validated(parts))

    def _validated(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Given]]:
        for part in parts:
            part = move(part, self.device)
            given = self.objective.read(part, validating=True)
            if given.states is not None and not bool(given.states.sum(dtype=torch.float32).isfinite()):
                samples = cast(Any, self.trainer).datamodule.val
                names = [samples.name(i) for i in part.indices]
                raise NonFinite("hidden states", self.objective.model, None).of(names)
            yield part, given

    def flops(self, part: Part) -> float:
        """FLOPs as of the objective; fillers aside."""
        return self.objective.flops(self.head, part, self._step([key for key in part.keys if not key.filler]))

    def on_train_start(self) -> None:
        self.bad_steps.watch(self.head)

    @property
    def samples(self) -> Samples:
        """What is trained on. Lightning declares no `datamodule` on its trainer, which has one all the same."""
        return cast(Any, self.trainer).datamodule.train

    def lengths_of(self, part: Part) -> list[int]:
        """Tokens of each document of a training part, padding and fillers aside."""
        return [int(self.samples.lengths[i]) for i in part.indices]

    def count_bad_step(self) -> None:
        """The step was left out by the strategy, on all ranks, though no rank saw anything but finite numbers."""
        self.bad_steps.add_step(self.samples.name, everything=True)

    @property
    def grad_norm(self) -> float:
        """L2 norm of the last step's gradient over all ranks, before clipping; the same under every strategy."""
        engine = getattr(self.trainer.strategy, "deepspeed_engine", None)
        return self._grad_norm if engine is None else float(engine.get_global_grad_norm())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the checkpoint with what is yet to be logged, so that a continued run logs the same numbers."""
        checkpoint["means"] = self.means.state()
        checkpoint["bad_steps"] = self.bad_steps.state()
        checkpoint |= self.objective.state(self.head)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if rank() == 0:  # the state is that of all ranks together
            self.means.load(checkpoint["means"])
        self.bad_steps.load(checkpoint["bad_steps"])
        self.objective.load(self.head, checkpoint)

    def configure_optimizers(self) -> Any:
        config = self.config
        matrices = [p for p in self.head.parameters() if p.requires_grad and p.ndim >= 2]
        vectors = [p for p in self.head.parameters() if p.requires_grad and p.ndim < 2]
        optimizer: torch.optim.Optimizer
        if config.optimizer == "muon":
            optimizer = MuonAdamW(matrices, vectors, config.lr, config.betas, weight_decay=config.weight_decay)
        else:
            groups = [(matrices, config.weight_decay), (vectors, 0.0)]
            optimizer = torch.optim.AdamW(
                [{"params": params, "weight_decay": decay} for params, decay in groups if params],
                lr=config.lr, betas=config.betas,
            )  # fmt: skip
        share = lr_schedule(config.schedule, self.total_steps, config.warmup_share, config.min_lr_share)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
