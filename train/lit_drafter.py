"""The training of a draft head in a script of one's own: another loss in a subclass, a plain Trainer and DataLoader."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.data.store.feature_codec import decoded
from draftsmith.modules.drafters.base import DraftHead, TrainStep
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput
from draftsmith.train.callbacks import log_metrics
from draftsmith.train.config import TrainDrafterConfig, drafter_config
from draftsmith.train.data_module import HeadDataModule, Key, Part, move
from draftsmith.train.drafter_objective import DrafterObjective, FeatureSource
from draftsmith.train.lit_head import LitHead
from draftsmith.train.metrics import Means, num_ranks, sum_over_ranks

# Where a setting says what a script of one's own gives in another way.
IN_PYTHON = "given in Python"
ROWS = 2**20  # more than a batch has


def script_settings(head: DraftHead, target: CausalLM) -> TrainDrafterConfig:
    """The settings of `train KIND` for a training whose data and output are a script's own."""
    place = Path(IN_PYTHON)
    return drafter_config(head.kind)(data=place, output=place, target=target.info.path or IN_PYTHON)


class StepRows:
    """What a step's rows are called where they come from a DataLoader that knows no names (as `Samples`)."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}

    def add(self, batch: FeatureBatch, number: int) -> tuple[Key, ...]:
        """Keys of the rows of a batch of this number."""
        mask = batch.attention_mask
        ids = batch.input_ids
        lengths = batch.lengths or ([ids.shape[1]] * len(ids) if mask is None else mask.sum(-1).tolist())
        first = number * ROWS
        self.lengths |= {first + row: length for row, length in enumerate(lengths)}
        return tuple(Key(0, first + row) for row in range(len(lengths)))

    def name(self, index: int) -> str:
        return "row {1} of batch {0}".format(*divmod(index, ROWS))


class LitDrafter(LitHead):
    """A draft head in training.

    `fit` trains with it as `draftsmith train` does: exact resumption, checkpoints, best/, tau. It also runs in a plain
    `lightning.Trainer` with any DataLoader whose batches are a `FeatureBatch` (`collate`), or a dictionary of its
    fields, of which input_ids [B, T] and loss_mask [B, T] must be there; the target reads those without features. There
    it logs train/..., val/..., lr and grad_norm, clips as the config says, and counts every token of an
    accumulated step alike, whatever part it is in.

    To learn something else, override `loss` (and `validation`, for what picks the best head).
    """

    head: DraftHead
    objective: DrafterObjective

    def __init__(
        self,
        head: DraftHead,
        target: CausalLM,
        config: TrainDrafterConfig | None = None,
        *,
        total_steps: int = 0,
        feature_std: float | None = None,
        source: FeatureSource | None = None,
    ):
        """config: the settings of `train KIND` (`draftsmith.settings`); None takes their defaults. total_steps: 0 asks
        the Trainer. feature_std: of the features' elements, which noise is scaled by; None measures it in the first
        batch. source: of the features of batches without."""
        config = config or script_settings(head, target)
        if source is None:
            source = FeatureSource(target, head.learns_from(head.config, target.info.num_layers))
        objective = DrafterObjective(type(head), config, target, feature_std or 0.0, source)
        super().__init__(head, objective, config, total_steps)
        objective.learn(self.loss, self.validation)
        self.target, self.settings = target, config
        self._rows: StepRows | None = None  # of the step at hand, in a plain Trainer
        self._tokens = 0.0
        self._val = Means()

    def loss(self, batch: FeatureBatch, step: TrainStep | None) -> LossOutput:
        """Mean over `DraftHead.loss_count` tokens, with sums and counts of what is logged.

        batch: with features [B, T, L*H] of the target where the head reads any. step: None in validation.
        """
        return self.head.loss(batch, self.target, self.settings, step)

    def validation(self, batch: FeatureBatch) -> LossOutput:
        """What validation reports, in sums and counts."""
        return self.head.validation(batch, self.target, self.settings)

    # -- in a plain Trainer

    def setup(self, stage: str) -> None:
        trainer = self.trainer
        if stage != "fit" or isinstance(getattr(trainer, "datamodule", None), HeadDataModule):
            return
        if trainer.strategy.handles_gradient_accumulation:
            found = f"{type(trainer.strategy).__name__} in a Trainer of your own"
            raise InputError(
                "strategy", found, "one without DeepSpeed", "Train with draftsmith.fit(..., strategy=...)."
            )
        if not self.total_steps:
            steps = trainer.estimated_stepping_batches
            if steps == float("inf"):
                remedy = "Pass max_steps or max_epochs to the Trainer, or total_steps here."
                raise InputError("total_steps", "a Trainer without an end", "a number of steps", remedy)
            self.total_steps = int(steps)

    def on_fit_start(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        theirs = self.trainer.accumulate_grad_batches
        if isinstance(data, HeadDataModule) and theirs != self.config.accumulate:
            remedy = "Give both the same number: the loss is scaled by it."
            raise InputError("accumulate", self.config.accumulate, f"{theirs}, as the Trainer has", remedy)

    @property
    def samples(self) -> Any:
        return super().samples if self._rows is None else self._rows

    def logs(self, step: int) -> bool:
        if self._rows is None:
            return super().logs(step)
        return step % cast(Any, self.trainer).log_every_n_steps == 0 or step == self.total_steps

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Lightning moves no frozen dataclasses."""
        if isinstance(batch, Part):
            return move(batch, device)
        batch = as_batch(batch)
        return move(Part(batch, (), 0, 0, True, True), device).data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, Part):
            return super().training_step(batch, batch_idx)
        batch = as_batch(batch)
        if self._rows is None or not self._rows.lengths:  # a step begins
            self._rows, self._tokens = StepRows(), 0.0
            self.bad_steps.begin()
        keys = self._rows.add(batch, batch_idx)
        tokens = type(self.head).loss_count(batch, self.settings)
        part = Part(batch, keys, tokens, tokens, True, True)
        if not self.objective.feature_std and self.objective.reads:
            self._measure_features(batch)
        with self.autocast():
            output = self.part_loss(part)
        self.bad_steps.add(output.loss, part.indices)
        self.means.add(output)
        self._tokens += tokens
        self.log("loss", output.loss.detach(), prog_bar=True, logger=False, batch_size=len(batch.input_ids))
        # A sum over tokens, which Lightning divides by the parts: the step is divided by all of its tokens once they
        # are known.
        return output.loss * (tokens * self.trainer.accumulate_grad_batches)

    def _measure_features(self, batch: FeatureBatch) -> None:
        features = self.objective.features_of(batch).features
        assert features is not None
        own = features if batch.attention_mask is None else features[batch.attention_mask]
        own = own.double()
        count = torch.tensor(float(own.numel()), dtype=torch.float64, device=own.device)
        total, first, second = sum_over_ranks(torch.stack([count, own.sum(), own.square().sum()])).tolist()
        self.objective.feature_std = max(second / total - (first / total) ** 2, 0.0) ** 0.5

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._rows is not None:
            tokens = float(sum_over_ranks(torch.tensor(self._tokens, dtype=torch.float64, device=self.device)))
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(gradients, num_ranks() / (tokens or 1.0))  # DDP has divided by the ranks
            self._rows = StepRows()  # none: the step is over
        super().on_before_optimizer_step(optimizer)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer, done = self.trainer, self.trainer.global_step
        if self._rows is not None and not self._rows.lengths and self.logs(done):
            metrics = {f"train/{name}": value for name, value in self.means.take().items()}
            metrics |= {"lr": trainer.optimizers[0].param_groups[0]["lr"], "grad_norm": self.grad_norm}
            log_metrics(trainer, metrics | {"bad_steps": self.bad_steps.count}, done)

    def on_validation_epoch_start(self) -> None:
        self._val = Means()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        part = batch if isinstance(batch, Part) else Part(as_batch(batch), (), 0, 0, True, True)
        given = self.objective.read(part, validating=True)
        with self.autocast():
            self._val.add(self.objective.measure(self.head, given.data))

    def on_validation_epoch_end(self) -> None:
        """The means over all batches and ranks; `val/top1` and the others, for loggers and callbacks."""
        metrics = self._val.take()
        if not metrics:
            raise InputError("val", "no response token", "validation samples with a response", "Hold out more samples.")
        self.log_dict({f"val/{name}": value for name, value in metrics.items()})


def as_batch(batch: Any) -> FeatureBatch:
    """A batch of any DataLoader: a `FeatureBatch`, or its fields by name, right-padded.

    Raises:
        InputError: another thing, or fields that are missing, unknown or of another shape.
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
        found = f"input_ids {list(ids.shape)} and loss_mask {list(mask.shape)}"
        raise InputError("batch", found, "both [B, T], padded at the right", "Pass collate_fn=draftsmith.collate.")
    attended = batch.get("attention_mask")
    attended = torch.ones_like(mask) if attended is None else attended.bool()
    positions = torch.arange(ids.shape[1], device=ids.device) * attended
    given = {"features": None, "position_ids": positions, **batch, "loss_mask": mask, "attention_mask": attended}
    features, scale = given["features"], given.pop("scale", None)
    if scale is not None:
        given["features"] = decoded(features, scale)
    return FeatureBatch(**given)
