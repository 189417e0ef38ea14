"""Training of any head under Lightning: the training step, validation and the optimizer; and that of draft heads.

A step's loss is the mean over all of its tokens, on all ranks and in all micro-batches. The kinds of heads differ in
what they read and learn: drafters (`LitDrafter`) and acceptance heads (acceptance.py).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import runpy
import signal
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from draftsmith.data.store.datasets import ArtifactDataset
from draftsmith.data.store.manifest import open_artifact
from draftsmith.modules.drafters.base import DraftHead, TrainStep
from draftsmith.modules.engine.cache import any_shape
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.losses import TokenLoss
from draftsmith.modules.pretrained.checkpoint import Checkpoint, checkpoint_of
from draftsmith.modules.pretrained.files import CannotWrite
from draftsmith.modules.pretrained.heads import weights_hash
from draftsmith.modules.pretrained.identity import captured
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput
from draftsmith.train.checkpoints import TrainState
from draftsmith.train.config import TrainConfig, TrainDrafterConfig, drafter_config
from draftsmith.train.data import HeadDataModule, MicroBatch
from draftsmith.train.deepspeed import whole_head
from draftsmith.train.features import FeatureSource, feature_std
from draftsmith.train.metrics import BadSteps, Means, num_ranks, rank, say_on_rank_zero, sum_over_ranks
from draftsmith.train.optimizers import lr_share, make_optimizer
from draftsmith.train.strategies import resolve_precision
from draftsmith.train.tracking import Telemetry

# Signals that stop training after the current step. If ranks received different ones, the first in this list wins.
# SIGUSR1 is SLURM's warning before the time limit (callbacks.py).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Value of path options that a script gives as Python objects instead.
IN_PYTHON = "given in Python"

Config = TypeVar("Config", bound=TrainDrafterConfig)


class LitHead(pl.LightningModule):
    """A head in training.

    Frozen models are not submodules: they are neither optimized, nor broadcast by DDP, nor written to checkpoints.

    monitor: validation metric that picks best/. larger_is_better: its direction. feature_std: standard deviation of the
    features' elements, the unit of noise; None until `setup` has measured it. state: what a resumed training continues
    with. total_steps: of the data module; 0 before `setup`.
    """

    head: Any
    monitor: str
    larger_is_better: bool
    feature_std: float | None = 1.0
    # Measures tau at validations, which then picks best/ (`tau.MeasureTau` sets it).
    probe: Any = None

    def __init__(self, head: nn.Module, config: TrainConfig, frozen: str):
        """frozen: option that names the frozen model, for errors."""
        super().__init__()
        self.automatic_optimization = False
        self.head, self.config, self.frozen, self.total_steps = head, resolve_precision(config), frozen, 0
        self.state = TrainState(BadSteps(frozen))
        self.telemetry = Telemetry()
        # Metrics that the last step with `logs` gave.
        self.logged: dict[str, float] = {}
        # All ranks skip the running step: something in it was not finite.
        self.skips_step = False
        # A training by the clock wants a validation after the running step.
        self.validates_next = False
        # Set by this rank's signal handler; then agreed on by all ranks, so that all stop after the same step.
        self.signal_received = 0
        self.signal_agreed = 0
        self._grad_norm = 0.0
        self._whole = ExitStack()

    @abstractmethod
    def provenance(self, data: HeadDataModule) -> dict[str, Any]:
        """Return what the head is made from, as its manifest has it; a run is resumed with the same only.

        target: identity of the model whose hidden states the head reads. models: identities of all models concerned.
        inputs: name -> digest of each artifact. sampling: of the answers, or that labels hold for, if it is known.
        """

    def digests(self, data: HeadDataModule) -> dict[str, str]:
        """Return the digests of the artifacts, or rows in memory, that the data module reads."""
        train, val = data.train.dataset, data.val.dataset
        sources = {"data": train} | ({"val": val} if val is not train else {})
        return {name: source.digest for name, source in sources.items() if hasattr(source, "digest")}

    @abstractmethod
    def read(self, batch: MicroBatch) -> tuple[Any, Tensor | None]:
        """Return the head's inputs and the frozen model's hidden states if this call computed them, else None."""

    @abstractmethod
    def loss(self, inputs: Any, step: TrainStep | None) -> LossOutput:
        """Return the mean loss over the tokens that count, with sums and counts to log. step: None in validation."""

    @abstractmethod
    def validation_metrics(self) -> dict[str, float]:
        """Return the metrics over the validation samples of all ranks, the same on every rank.

        Raises:
            InputError: there is nothing to measure.
        """

    def costs(self) -> dict[str, float]:
        """Return further costs of the steps since the last call; every rank calls it."""
        return {}

    # -- training

    def setup(self, stage: str) -> None:
        """Check the Trainer and take the number of steps from its data module.

        Raises:
            InputError: another data module, or a precision of Lightning's.
        """
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, HeadDataModule):
            remedy = "Pass draftsmith.HeadDataModule(train, val, settings): its batches are whole steps."
            raise InputError("data", type(data).__name__, "a HeadDataModule", remedy)
        if self.trainer.precision != "32-true":
            remedy = "Leave it out, and pass precision='bf16' to draftsmith.settings: weights stay float32."
            raise InputError("precision", self.trainer.precision, "no precision flag of the Trainer", remedy)
        self.total_steps = data.total_steps

    def on_train_start(self) -> None:
        self.state.bad_steps.watch(self.head)
        self.telemetry.start(self.device)
        if self.state.unvalidated:
            # As Lightning's own loop does after the step.
            trainer = self.trainer
            val_loop = trainer.fit_loop.epoch_loop.val_loop
            val_loop.restarting, trainer.validating = False, True
            val_loop.run()
            trainer.training = True

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a validation batch. A step moves its parts one by one, as each is computed."""
        return batch.to(device) if isinstance(batch, MicroBatch) else batch

    def training_step(self, parts: list[MicroBatch], batch_idx: int) -> None:
        """Take one optimizer step, and log."""
        with self.telemetry.step(parts):
            self.take_step(parts)
        if self.logs(self.trainer.global_step):
            self.log_step()

    def take_step(self, parts: list[MicroBatch]) -> None:
        """Take one optimizer step on the mean loss over all of its tokens, on all ranks and in all micro-batches."""
        optimizer, ranks, done = cast(Any, self.optimizers()), num_ranks(), self.trainer.global_step
        tokens = self.agree(float(sum(part.tokens for part in parts)))
        config = self.config
        share = lr_share(done, self.total_steps, config.schedule, config.warmup_share)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * share

        # Forward and backward of each span of each part, which is read once; gradients are exchanged once, with the
        # last of them.
        for number, part in enumerate(parts):
            # Autocast is ours under every strategy; weights and optimizer stay float32.
            with self.autocast():
                inputs, frozen_states = self.read(part.to(self.device))
            spans = self.spans(part)
            for place, span in enumerate(spans):
                last = number == len(parts) - 1 and place == len(spans) - 1
                with optimizer.toggle_model(sync_grad=last):
                    with self.autocast():
                        output = self.loss(inputs, self.train_step(part, span))
                    repeated = span in spans[:place]
                    # Sums on the device: nothing waits for it until the step ends.
                    if not repeated:
                        begins = number == place == 0
                        self.state.bad_steps.add(output.loss, part.samples, frozen_states, begins_step=begins)
                        self.state.means.add(output, only_finite=True)
                    # Every strategy takes the mean over ranks: undo it for a sum over ranks and parts.
                    self.manual_backward(output.loss * (0 if repeated else part.tokens * ranks / tokens))
                    del output
            # Else the next part is read while the features of this one are still there.
            del inputs, frozen_states

        # Clip, and drop the gradient unless everything in it is finite on all ranks. DeepSpeed clips inside its step.
        if self.trainer.strategy.handles_gradient_accumulation:
            self.skips_step, _ = self.state.bad_steps.agree(None, self.sample_name)
        else:
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([cast(Tensor, p.grad) for p in params])
            self.skips_step, self._grad_norm = self.state.bad_steps.agree(norm, self.sample_name)
            if self.skips_step:
                optimizer.zero_grad()
            elif config.clip:
                torch.nn.utils.clip_grads_with_norm_(params, config.clip, norm)

        optimizer.step()
        optimizer.zero_grad()

    def agree(self, tokens: float) -> float:
        """Return the step's number of tokens over all ranks, 1 for none; agree on the training's planned length."""
        limit = self.state.time_limit
        if limit is not None:
            self.total_steps, self.validates_next = limit.total_steps(self.trainer.global_step), limit.wants_trial()
        if num_ranks() > 1:
            # The clock of rank 0 counts.
            planned = (self.total_steps, self.validates_next) if rank() == 0 else (0, 0)
            counts = sum_over_ranks(torch.tensor([tokens, *planned], dtype=torch.float64, device=self.device))
            tokens, total, validates = counts.tolist()
            self.total_steps, self.validates_next = int(total), bool(validates)
        # Without a token that counts the loss is zero.
        return tokens or 1.0

    def agree_on_signal(self) -> int:
        """Return the signal that ends the training, the same on every rank; all of them must call it."""
        self.signal_agreed = self.signal_received
        if num_ranks() > 1:
            flags = [float(self.signal_received == number) for number in SIGNALS]
            received = sum_over_ranks(torch.tensor(flags, device=self.device)).tolist()
            self.signal_agreed = next((int(n) for n, count in zip(SIGNALS, received, strict=True) if count), 0)
        return self.signal_agreed

    def spans(self, batch: MicroBatch) -> tuple[tuple[int, int] | None, ...]:
        """Return the spans that a micro-batch is learned in."""
        return batch.spans

    def train_step(self, batch: MicroBatch, span: tuple[int, int] | None = None) -> TrainStep:
        """Return the position in the training, for a micro-batch or a span of it."""
        done = self.trainer.global_step
        return TrainStep(
            number=done,
            total=self.total_steps,
            lengths=batch.lengths,
            seeds=[(self.config.seed * 1_000_003 + key.epoch) * 1_000_003 + key.index for key in batch.keys],
            feature_std=1.0 if self.feature_std is None else self.feature_std,
            logged=self.logs(done + 1),
            logit_rows=batch.logit_rows if span is None else None,
            loss_count=batch.tokens,
            span=span,
        )

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in the training's precision, with attention kernels for batches of any shape."""
        bf16 = self.config.precision == "bf16"
        with any_shape(self.device), torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            yield

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.head, self.config)

    def sample_name(self, index: int) -> str:
        """Return the id that users know a training sample by."""
        return cast(Any, self.trainer).datamodule.train.name(index)

    @property
    def grad_norm(self) -> float:
        """L2 norm of the last step's gradient over all ranks, before clipping; the same under every strategy."""
        engine = getattr(self.trainer.strategy, "deepspeed_engine", None)
        return self._grad_norm if engine is None else float(engine.get_global_grad_norm())

    # -- logs

    def logs(self, step: int) -> bool:
        """Check whether losses are logged after so many steps."""
        return step % self.config.log_every == 0 or step == self.total_steps

    def log_step(self) -> None:
        """Log the losses and costs since the last call, for loggers and callbacks."""
        # Reading the losses back waits for the device, so the time that telemetry takes afterwards is right.
        metrics = {f"train/{name}": value for name, value in self.state.means.take().items()}
        metrics["bad_steps"] = self.state.bad_steps.count
        metrics["lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        metrics["grad_norm"] = self.grad_norm
        costs = self.telemetry.take(self.device) | self.costs()
        self.logged = metrics | {f"cost/{name}": value for name, value in costs.items()}
        self.log_all(self.logged)

    def log_all(self, metrics: dict[str, float]) -> None:
        """Log to every logger, and for callbacks. A full disk does not end the run."""
        step = self.trainer.global_step
        for logger in self.trainer.loggers:
            try:
                logger.log_metrics(metrics, step)
            except (OSError, CannotWrite) as error:
                say_on_rank_zero(f"warning: could not write the metrics of step {step} ({error})")
        self.log_dict(metrics, logger=False)

    # -- validation

    def on_validation_start(self) -> None:
        """Gather partitioned weights, so that ranks may call the head a different number of times."""
        self._whole.enter_context(whole_head(self.trainer, self))

    def leave_at_signal(self) -> None:
        """Leave the running validation if a signal has come to any rank; all of them must call it.

        Raises:
            StopIteration: it has. Lightning's loop over the batches then ends.
        """
        if self.agree_on_signal():
            # Callbacks such as EarlyStopping ignore a sanity check, and find no metrics here.
            self.trainer.sanity_checking = self.state.unvalidated = True
            raise StopIteration

    def on_validation_batch_start(self, batch: MicroBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.leave_at_signal()

    def read_validation(self, batch: MicroBatch) -> Any:
        """Return the head's inputs of a validation batch.

        Raises:
            NonFinite: a frozen model's states are not finite.
        """
        inputs, states = self.read(batch)
        if states is not None and not bool(states.sum(dtype=torch.float32).isfinite()):
            val = cast(Any, self.trainer).datamodule.val
            names = [val.name(key.index) for key in batch.keys]
            raise NonFinite("hidden states", self.frozen, None).of(names)
        return inputs

    def on_validation_epoch_end(self) -> None:
        """Measure over all ranks, tau too; log as val/..., for loggers and callbacks."""
        try:
            self.leave_at_signal()
            metrics = self.validation_metrics()
            if self.probe is not None:
                metrics |= self.probe(self.head, self.device, self.leave_at_signal)
        except StopIteration:
            return
        self.agree_on_signal()
        self.state.latest, self.state.unvalidated = metrics, False
        self.log_all({f"val/{name}": value for name, value in metrics.items()})

    def on_validation_end(self) -> None:
        self._whole.close()
        self.telemetry.resume()
        self.telemetry.count_again()

    # -- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["train_state"] = self.state.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.state.load_state_dict(checkpoint["train_state"])
        if self.state.unvalidated and checkpoint["global_step"] == self.total_steps:
            # Only the last validation is missing; else Lightning would not begin.
            self.trainer.fit_loop.epoch_loop.max_steps += 1


class LitDrafter(LitHead):
    """A draft head in training, by `draftsmith.fit` and `draftsmith train`.

    To learn something else, override `loss`, and `validation` for the metrics.
    """

    head: DraftHead
    config: TrainDrafterConfig

    def __init__(
        self,
        head: DraftHead,
        target: CausalLM,
        config: TrainDrafterConfig | None = None,
        *,
        source: FeatureSource | None = None,
    ):
        """config: options of `train KIND` (`draftsmith.settings`); None takes the defaults. source: of the features of
        batches that come without any."""
        if config is None:
            place = Path(IN_PYTHON)
            config = drafter_config(head.kind)(data=place, output=place, target=IN_PYTHON)
        if config.target == IN_PYTHON:
            config = dataclasses.replace(config, target=target.info.path or IN_PYTHON)
        config = config.by_start(head.trained)
        super().__init__(head, dataclasses.replace(config, **head.shape(head.config)), frozen="target")
        # Only noise needs it, and reading samples for it takes seconds.
        self.feature_std = None if getattr(config, "noise", 0.0) > 0 else 1.0
        self.target, self.settings = target, with_loss(self.config)
        self.source = source or FeatureSource(target, head.loss_layers(head.config, target.info.num_layers))
        self.monitor, self.larger_is_better = head.monitor, True
        self._validation = Means()

    def loss(self, inputs: FeatureBatch, step: TrainStep | None) -> LossOutput:
        """Return the mean over `DraftHead.loss_count`, with sums and counts to log.

        inputs: with features [B, T, L*H] of the target. step: None in validation.
        """
        return self.head.loss(inputs, self.target, self.settings, step)

    def spans(self, batch: MicroBatch) -> tuple[tuple[int, int] | None, ...]:
        # A loss of the user's own is that of the whole batch.
        return batch.spans if type(self).loss is LitDrafter.loss else (None,)

    def validation(self, inputs: FeatureBatch) -> LossOutput:
        """Return the sums and counts of what validation reports."""
        return self.head.loss(inputs, self.target, self.settings, None)

    def read(self, batch: MicroBatch) -> tuple[FeatureBatch, Tensor | None]:
        return self.source.read(batch.data)

    def setup(self, stage: str) -> None:
        """Compare the samples with the target, and measure the unit of noise from the first ones."""
        super().setup(stage)
        data, info = cast(Any, self.trainer).datamodule, self.target.info
        context = min(info.max_position, self.head.config.max_position)
        for samples in (data.train, data.val):
            for manifest in getattr(samples.dataset, "manifests", ()) if info.files else ():
                made_with: dict[str, Any] = checkpoint_of(self.target).text_identity(manifest.identity)
                if manifest.kind != "prompts":
                    layers = self.source.aux_layers if manifest.kind == "features" else ()
                    made_with["target"] = captured(info.identity, layers)
                open_artifact(manifest.directory, manifest.kind, made_with, check="size")
            if (longest := int(samples.lengths.max())) > context:
                expected = f"at most {context:,}, the context"
                raise InputError("data", f"a sample of {longest:,} tokens", expected, "Split or drop longer ones.")
            smallest, largest = getattr(samples.dataset, "id_range", (0, 0))
            if smallest < 0 or largest >= info.vocab_size:
                found, expected = f"token ids {smallest} to {largest}", f"0 to {info.vocab_size - 1}, the vocabulary"
                raise InputError("data", found, expected, "Use the tokenizer of the target.")
        if self.feature_std is None:
            self.feature_std = feature_std(cast(Any, self.trainer).datamodule.train, self.source)
        if self.source.stream is not None:
            self.source.stream.signal_received = lambda: self.signal_received

    def on_validation_epoch_start(self) -> None:
        self._validation = Means()

    def validation_step(self, batch: MicroBatch, batch_idx: int) -> None:
        with self.autocast():
            output = self.validation(self.read_validation(batch))
        self._validation.add(output)

    def validation_metrics(self) -> dict[str, float]:
        metrics = self._validation.take()
        if not metrics:
            found, remedy = "no token for the drafter to draft", "Hold out more samples, or longer answers."
            raise InputError("val", found, "some in the validation samples", remedy)
        return metrics

    def costs(self) -> dict[str, float]:
        return {} if self.source.stream is None else self.source.stream.costs(self.device)

    def provenance(self, data: HeadDataModule) -> dict[str, Any]:
        config, manifest = self.config, getattr(data.train.dataset, "manifest", None)
        inputs = self.digests(data)
        if (file := loss_file(config)) is not None:
            inputs["loss"] = file_sha256(file)[:16]
        if config.init != "random" and config.drafter.saved_as_model:
            inputs["init"] = Checkpoint(config.init).identity["weights"]
        elif config.starting_head is not None:
            inputs["init"] = weights_hash(config.init)
        target, dataset = self.target.info.identity, data.train.dataset
        joined = dataset.recorded if isinstance(dataset, ArtifactDataset) else []
        return {
            "target": target,
            "models": {"target": target} if manifest is None else manifest.identity,
            "sampling": None if manifest is None else manifest.sampling,
            # Stored features bring the proof of their states.
            "teacher": self.source.teacher or (None if manifest is None else manifest.teacher),
            "inputs": inputs,
            **({"joined": joined} if joined else {}),
            "tied_to_target": list(self.head.tied_to_target),
        }


# -- a loss of the user's own, `--loss FILE.py:FUNCTION`: draft logits and target probabilities [N, V] -> losses [N]


def loss_file(config: TrainDrafterConfig) -> Path | None:
    """Return the file of the user's own loss; None if it is a built-in one, or there is none."""
    name, default = getattr(config, "loss", None), getattr(config.drafter.Settings, "loss", None)
    # Where the default is none, there are no built-in losses to name.
    return Path(name.rpartition(":")[0]) if isinstance(name, str) and (":" in name or default is None) else None


def with_loss(config: Config) -> Config:
    """Return the config with the function in place of its name."""
    if loss_file(config) is None:
        return config
    config = copy.copy(config)
    object.__setattr__(config, "loss", load_loss(cast(Any, config).loss))
    return config


@functools.cache
def load_loss(name: str) -> TokenLoss:
    """Load FILE.py:FUNCTION.

    Raises:
        InputError: no such file or function, or a file that fails.
    """
    path, _, function = name.rpartition(":")
    expected = "FILE.py:FUNCTION, of draft logits [N, V] and target probabilities [N, V]"
    if not Path(path).is_file():
        raise InputError("loss", repr(name), expected, "Name a Python file that exists.")
    try:
        loss = runpy.run_path(path).get(function)
    except Exception as error:
        raise InputError("loss", f"{path}: {error!r}", "a Python file that runs", "Mend the file.") from error
    if not callable(loss):
        raise InputError("loss", f"{path} without a function {function!r}", expected, "Check the name.")
    return loss
