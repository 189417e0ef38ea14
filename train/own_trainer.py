"""Hooks for a plain `lightning.Trainer`, whose DataLoader knows nothing of steps and their tokens.

Batches are turned into micro-batches when they are moved to the device; from there on there is one training step. What
`draftsmith train` does between steps is done here by Lightning's own hooks: losses are logged as train/..., with lr and
grad_norm, and validation as val/....
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch

from draftsmith.modules.types import FeatureBatch, InputError, LossOutput
from draftsmith.train.callbacks import log_metrics
from draftsmith.train.data_module import HeadDataModule, MicroBatch, SampleKey
from draftsmith.train.lit_head import LitHead
from draftsmith.train.metrics import Means

# More rows than any batch has: rows are numbered over all batches.
ROWS = 2**20


class OwnTrainer(LitHead):
    """A head that also trains in a plain Trainer, on batches of any DataLoader.

    Batches are a `FeatureBatch` (`draftsmith.collate`) or a dictionary of its fields, of which input_ids [B, T] and
    loss_mask [B, T] are required. Every token of an accumulated step counts the same, in whichever batch it is.
    """

    _num_batches = 0
    _val: Means

    def setup(self, stage: str) -> None:
        """Check the Trainer and take the number of steps from it."""
        trainer, accumulate = self.trainer, self.config.accumulate
        if stage != "fit":
            return
        if isinstance(getattr(trainer, "datamodule", None), HeadDataModule):
            # The loss is scaled by the number of micro-batches.
            if trainer.accumulate_grad_batches != accumulate:
                expected = f"{trainer.accumulate_grad_batches}, as the Trainer has"
                raise InputError("accumulate", accumulate, expected, "Give both the same number.")
            return
        if trainer.strategy.handles_gradient_accumulation:
            found = f"{type(trainer.strategy).__name__} in a Trainer of your own"
            remedy = "Train with draftsmith.fit(..., strategy=...)."
            raise InputError("strategy", found, "one without DeepSpeed", remedy)
        self.log_every = cast(Any, trainer).log_every_n_steps
        if not self.total_steps:
            steps = trainer.estimated_stepping_batches
            if steps == float("inf"):
                remedy = "Pass max_steps or max_epochs to the Trainer, or total_steps here."
                raise InputError("total_steps", "a Trainer without an end", "a number of steps", remedy)
            self.total_steps = int(steps)

    @abstractmethod
    def validation(self, inputs: FeatureBatch) -> LossOutput:
        """Return the sums and counts of what validation reports."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> MicroBatch:
        """Move a batch to the device, as a micro-batch."""
        if not isinstance(batch, MicroBatch):
            data = as_batch(batch)
            mask = data.attention_mask
            rows = [data.input_ids.shape[1]] * len(data.input_ids) if mask is None else mask.sum(-1).tolist()
            lengths = data.lengths or tuple(rows)
            keys = tuple(SampleKey(0, self._num_batches * ROWS + row) for row in range(len(lengths)))
            tokens = cast(Any, self.head).loss_count(data, self.config)
            batch = MicroBatch(data, keys, lengths, tokens, None, first=self._uncounted is None)
            self._num_batches += self.trainer.training
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def sample_name(self, index: int) -> str:
        if self._num_batches:
            return "row {1} of batch {0}".format(*divmod(index, ROWS))
        return super().sample_name(index)

    def on_train_batch_end(self, outputs: Any, batch: MicroBatch, batch_idx: int) -> None:
        """Log the losses, if a step of a plain Trainer has ended."""
        trainer, done = self.trainer, self.trainer.global_step
        if batch.step_tokens is None and self._uncounted is None and self.logs(done):
            metrics = {f"train/{name}": value for name, value in self.means.take().items()}
            metrics |= {"lr": trainer.optimizers[0].param_groups[0]["lr"], "grad_norm": self.grad_norm}
            log_metrics(trainer, metrics | {"bad_steps": self.bad_steps.count}, done)
            self.log("loss", metrics.get("train/loss", float("nan")), prog_bar=True, logger=False)

    def on_validation_epoch_start(self) -> None:
        self._val = Means()

    def validation_step(self, batch: MicroBatch, batch_idx: int) -> None:
        inputs, _ = self.read(batch, validating=True)
        with self.autocast():
            self._val.add(self.validation(inputs))

    def on_validation_epoch_end(self) -> None:
        """Log the means over all batches and ranks as val/..., for loggers and callbacks."""
        self.log_dict({f"val/{name}": value for name, value in self.metrics_of(self._val).items()})

    def metrics_of(self, means: Means) -> dict[str, float]:
        """Return the means of a validation.

        Raises:
            InputError: no token counts.
        """
        metrics = means.take()
        if not metrics:
            raise InputError("val", "no response token", "validation samples with a response", "Hold out more samples.")
        return metrics


def as_batch(batch: Any) -> FeatureBatch:
    """Check a batch of any DataLoader: a `FeatureBatch`, or its fields by name, right-padded.

    Raises:
        InputError: another type, or fields that are missing, unknown or of another shape.
    """
    if isinstance(batch, FeatureBatch):
        return batch
    names = {field.name for field in dataclasses.fields(FeatureBatch)}
    if not isinstance(batch, Mapping):
        remedy = "Pass collate_fn=draftsmith.collate to the DataLoader."
        raise InputError("batch", type(batch).__name__, f"a FeatureBatch or a dictionary of {sorted(names)}", remedy)
    wrong = sorted(set(batch) - names) + sorted({"input_ids", "loss_mask"} - set(batch))
    if wrong:
        expected = f"input_ids and loss_mask, and no other than {', '.join(sorted(names))}"
        raise InputError("batch", f"the fields {', '.join(map(str, batch))}", expected, f"Look at {', '.join(wrong)}.")
    ids, mask = batch["input_ids"], batch["loss_mask"].bool()
    if ids.ndim != 2 or ids.shape != mask.shape:
        shapes = f"input_ids {list(ids.shape)} and loss_mask {list(mask.shape)}"
        raise InputError("batch", shapes, "both [B, T], padded at the right", "Pass collate_fn=draftsmith.collate.")
    attended = batch.get("attention_mask")
    attended = torch.ones_like(mask) if attended is None else attended.bool()  # [B, T]
    positions = torch.arange(ids.shape[1], device=ids.device) * attended  # [B, T]
    defaults = {"features": None, "position_ids": positions}
    return FeatureBatch(**{**defaults, **batch, "loss_mask": mask, "attention_mask": attended})
