"""Training of any head under Lightning: the training step, the optimizer, and what happens around a step.

A step's loss is the mean over all of its tokens, on all ranks and in all micro-batches. The kinds of heads differ in
what they read and learn: drafters (lit_drafter.py) and acceptance heads (acceptance_data.py).
"""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.engine.cache import any_shape
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.types import LossOutput
from draftsmith.train.bad_steps import BadSteps
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import MicroBatch
from draftsmith.train.metrics import Means, rank, sum_over_ranks
from draftsmith.train.optimizers import MuonAdamW, hidden_matrices, lr_schedule
from draftsmith.train.time_limit import TimeLimit

# Signals that end a run between steps; the first that any rank received counts. SIGUSR1 is SLURM's warning before the
# time limit (train/signals.py).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class LitHead(pl.LightningModule):
    """A head in training.

    Frozen models are not submodules: they are neither optimized, nor broadcast by DDP, nor written to checkpoints.

    monitor: validation metric that picks best/. larger_is_better: its direction. validates_first: validate before the
    first step too. feature_std: standard deviation of the features' elements, the unit of noise; None until a drafter
    in a plain Trainer has measured it.
    """

    monitor: str
    larger_is_better: bool
    validates_first = False
    feature_std: float | None = 1.0

    def __init__(self, head: nn.Module, config: TrainConfig, total_steps: int, frozen: str):
        """frozen: option that names the frozen model, for errors."""
        super().__init__()
        self.head, self.config, self.total_steps, self.frozen = head, config, total_steps, frozen
        self.log_every = config.log_every
        self.means = Means()
        self.bad_steps = BadSteps(config.max_bad_steps, frozen)
        # All ranks skip the running step: something in it was not finite.
        self.skips_step = False
        # Of a training by the clock; and whether that wants the running step to be validated.
        self.time_limit: TimeLimit | None = None
        self.validates_next = False
        # Set by this rank's signal handler; then agreed on by all ranks, so that all stop after the same step.
        self.signal_received = 0
        self.signal_agreed = 0
        self._step_tokens = 1.0
        self._uncounted: float | None = None
        self.ends_step = True
        self._grad_norm = 0.0

    @abstractmethod
    def read(self, batch: MicroBatch, validating: bool = False) -> tuple[Any, Tensor | None]:
        """Return the head's inputs, and the hidden states that a frozen model computed for them here, if it did."""

    @abstractmethod
    def loss(self, inputs: Any, step: TrainStep | None) -> LossOutput:
        """Return the mean loss over the tokens that count, with sums and counts to log. step: None in validation."""

    @abstractmethod
    def validate(self, batches: Iterable[MicroBatch]) -> dict[str, float]:
        """Return the metrics over the validation samples of all ranks, the same on every rank.

        Raises:
            NonFinite: a frozen model's states are not finite. InputError: there is nothing to measure.
        """

    @abstractmethod
    def flops(self, batch: MicroBatch) -> float:
        """Return the model FLOPs (modules/flops.py) of a training micro-batch, or 0 if nobody counts them.

        They are those of forward and backward, and of the frozen model where it runs in the step. They come from
        shapes, without waiting for a device.
        """

    def costs(self) -> dict[str, float]:
        """Return further costs of the steps since the last call; every rank calls it."""
        return {}

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """Compute the loss of a micro-batch, scaled so that the step's gradient is that of the mean over its tokens."""
        ranks = self.trainer.world_size
        if batch.first:
            # Agree with the other ranks on the step's number of tokens, and on whether to stop after it.
            tokens, self.signal_agreed = float(batch.step_tokens or 0.0), self.signal_received
            if self.time_limit is not None:
                self.total_steps = self.time_limit.total_steps(self.trainer.global_step)
                self.validates_next = self.time_limit.wants_trial()
            if ranks > 1:
                planned = (self.total_steps, self.validates_next) if self.trainer.is_global_zero else (0, 0)
                flags = [tokens, *planned, *(self.signal_received == number for number in SIGNALS)]
                counts = sum_over_ranks(torch.tensor(flags, dtype=torch.float64, device=self.device))
                tokens, total, validates, *received = counts.tolist()
                self.total_steps, self.validates_next = int(total), bool(validates)
                self.signal_agreed = next((int(n) for n, count in zip(SIGNALS, received, strict=True) if count), 0)
            # Without a token that counts the loss is zero.
            self._step_tokens = tokens or 1.0
        self.ends_step = batch.last

        # Autocast is ours under every strategy; weights and optimizer stay float32.
        with self.autocast():
            inputs, frozen_states = self.read(batch)
            output = self.loss(inputs, self.train_step(batch))

        # Sums on the device: nothing waits for it until the step ends.
        self.bad_steps.add(output.loss, batch.keys, frozen_states, begins_step=batch.first)
        self.means.add(output, only_finite=True)

        # DDP takes the mean over ranks and Lightning divides by the micro-batches: undo both for a sum over all of
        # them, divided by the step's tokens. A loader that has not counted these has the gradient divided instead.
        if batch.step_tokens is None:
            self._uncounted = (self._uncounted or 0.0) + batch.tokens
            return output.loss * (batch.tokens * ranks * self.trainer.accumulate_grad_batches)
        return output.loss * (batch.tokens * ranks * self.config.accumulate / self._step_tokens)

    def train_step(self, batch: MicroBatch) -> TrainStep:
        """Return the position in the training, for a micro-batch."""
        done = self.trainer.global_step
        return TrainStep(
            number=done,
            total=self.total_steps,
            lengths=batch.lengths,
            seeds=[(self.config.seed * 1_000_003 + key.epoch) * 1_000_003 + key.index for key in batch.keys],
            feature_std=1.0 if self.feature_std is None else self.feature_std,
            logged=self.logs(done + 1),
            logit_rows=batch.logit_rows,
            loss_count=batch.tokens,
        )

    def logs(self, step: int) -> bool:
        """Check whether losses are logged after so many steps."""
        return step % self.log_every == 0 or step == self.total_steps

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in the training's precision, with attention kernels for batches of any shape."""
        with ExitStack() as stack:
            stack.enter_context(any_shape(self.device))
            # `fit` has settled it; in a plain Trainer it is the Trainer's own, which is on already.
            if self.config.precision != "auto":
                bf16 = self.config.precision == "bf16"
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16, enabled=bf16))
            yield

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient, or skip the step if something in it was not finite."""
        # DeepSpeed accumulates by itself, so Lightning takes each micro-batch for a step.
        if not self.ends_step:
            return
        # DeepSpeed clips inside its own step.
        if self.trainer.strategy.handles_gradient_accumulation:
            self.skips_step, _ = self.bad_steps.agree(None, self.sample_name)
            return

        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._uncounted is not None:
            tokens = sum_over_ranks(torch.tensor(self._uncounted, dtype=torch.float64, device=self.device))
            torch._foreach_mul_([p.grad for p in params], 1 / (float(tokens) or 1.0))
            self._uncounted = None
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        self.skips_step, self._grad_norm = self.bad_steps.agree(norm, self.sample_name)
        if self.skips_step:
            for param in params:
                param.grad = None
        elif self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(params, self.config.clip, norm)

    def on_train_start(self) -> None:
        self.bad_steps.watch(self.head)

    def transfer_batch_to_device(self, batch: MicroBatch, device: torch.device, dataloader_idx: int) -> MicroBatch:
        """Move a batch; Lightning does not move frozen dataclasses."""
        return batch.to(device)

    def sample_name(self, index: int) -> str:
        """Return the id that users know a training sample by."""
        return cast(Any, self.trainer).datamodule.train.name(index)

    def validated(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield validation batches with the head's inputs.

        Raises:
            NonFinite: a frozen model's states are not finite.
        """
        for batch in batches:
            batch = batch.to(self.device)
            inputs, states = self.read(batch, validating=True)
            if states is not None and not bool(states.sum(dtype=torch.float32).isfinite()):
                val = cast(Any, self.trainer).datamodule.val
                names = [val.name(key.index) for key in batch.keys]
                raise NonFinite("hidden states", self.frozen, None).of(names)
            yield batch, inputs

    @property
    def grad_norm(self) -> float:
        """L2 norm of the last step's gradient over all ranks, before clipping; the same under every strategy."""
        engine = getattr(self.trainer.strategy, "deepspeed_engine", None)
        return self._grad_norm if engine is None else float(engine.get_global_grad_norm())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what is yet to be logged too, so that a resumed run logs the same numbers."""
        checkpoint["means"] = self.means.state()
        checkpoint["bad_steps"] = self.bad_steps.state()
        if self.time_limit is not None:
            checkpoint["time_limit"] = self.time_limit.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The state is that of all ranks together.
        if rank() == 0:
            self.means.load(checkpoint["means"])
        self.bad_steps.load(checkpoint["bad_steps"])
        if self.time_limit is not None:
            self.time_limit.load(checkpoint["time_limit"])

    def configure_optimizers(self) -> Any:
        config = self.config
        trained = [weight for weight in self.head.parameters() if weight.requires_grad]
        optimizer: torch.optim.Optimizer
        if config.optimizer == "muon":
            chosen = hidden_matrices(self.head, getattr(self.head.config, "vocab_size", None))
            optimizer = MuonAdamW(
                [weight for weight in trained if weight in chosen],
                [weight for weight in trained if weight not in chosen],
                config.lr, config.betas, weight_decay=config.weight_decay,
                iterate_in=torch.bfloat16 if config.precision == "bf16" else None,
            )  # fmt: skip
        else:
            matrices, vectors = ([p for p in trained if (p.ndim >= 2) == many] for many in (True, False))
            groups = [(matrices, config.weight_decay), (vectors, 0.0)]
            optimizer = torch.optim.AdamW(
                [{"params": params, "weight_decay": decay} for params, decay in groups if params],
                lr=config.lr, betas=config.betas,
            )  # fmt: skip

        def share(step: int) -> float:
            return lr_schedule(config.schedule, self.total_steps, config.warmup_share, config.min_lr_share)(step)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
