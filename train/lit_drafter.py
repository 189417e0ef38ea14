"""Training of a draft head: its loss on features of the target, stored with the data or computed in the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.data.store.feature_codec import decoded
from draftsmith.modules.drafters.base import DraftHead, TrainStep
from draftsmith.modules.packing import Documents
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput
from draftsmith.train.callbacks import log_metrics
from draftsmith.train.config import TrainDrafterConfig, drafter_config
from draftsmith.train.data_module import HeadDataModule, MicroBatch, SampleKey
from draftsmith.train.feature_cache import FeatureCache
from draftsmith.train.feature_stream import FeatureStream
from draftsmith.train.lit_head import LitHead
from draftsmith.train.metrics import Means, sum_over_ranks
from draftsmith.train.own_loss import with_loss
from draftsmith.train.telemetry import features_flops

# Value of path options that a script gives as Python objects instead.
IN_PYTHON = "given in Python"
# Tokens that the target reads at once on a CPU. In bfloat16 four rows of 200 tokens take 0.64 of the time of one by
# one, in float32 0.92 (one thread, an Intel Xeon with AMX); more of them no less.
TOKENS_READ = 1024
# Rows of a plain Trainer are numbered over all batches; no batch has more.
ROWS = 2**20


class LitDrafter(LitHead):
    """A draft head in training.

    `fit` trains with it as `draftsmith train` does: exact resumption, checkpoints, best/, tau.

    It also runs in a plain `lightning.Trainer` with any DataLoader, whose batches `draftsmith.collate` makes. They
    become micro-batches when they are moved to the device: every token of an accumulated step counts the same, in
    whichever batch it is. Lightning's own hooks log losses as train/..., with lr and grad_norm, and validation as
    val/.... To learn something else there, override `loss`, and `validation` for the metrics.
    """

    head: DraftHead
    # Batches of a plain Trainer so far, and its running validation.
    _num_batches = 0
    _val: Means

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
        """config: options of `train KIND` (`draftsmith.settings`); None takes the defaults. total_steps: 0 asks the
        Trainer. feature_std: of the features' elements, the unit of noise; None measures the first batch. source: of
        the features of batches that come without any."""
        if config is None:
            place = Path(IN_PYTHON)
            config = drafter_config(head.kind)(data=place, output=place, target=target.info.path or IN_PYTHON)
        config = dataclasses.replace(config, **head.shape(head.config))
        super().__init__(head, config, total_steps, frozen="target")
        self.target, self.settings, self.feature_std = target, with_loss(config), feature_std
        self.source = source or FeatureSource(target, head.learns_from(head.config, target.info.num_layers))
        self.monitor, self.larger_is_better = head.monitor, True

    def loss(self, inputs: FeatureBatch, step: TrainStep | None) -> LossOutput:
        """Return the mean over `DraftHead.loss_count`, with sums and counts to log.

        inputs: with features [B, T, L*H] of the target. step: None in validation.
        """
        return self.head.loss(inputs, self.target, self.settings, step)

    def validation(self, inputs: FeatureBatch) -> LossOutput:
        """Return the sums and counts of what validation reports."""
        return self.head.loss(inputs, self.target, self.settings, None)

    def read(self, batch: MicroBatch, validating: bool = False) -> tuple[FeatureBatch, Tensor | None]:
        """Return the batch with its features: stored ones decoded, or the target's, in the target's dtype."""
        data: FeatureBatch = batch.data
        if data.features is not None:
            # Stored features were checked when they were written.
            if data.scale is not None:
                data = dataclasses.replace(data, features=decoded(data.features, data.scale), scale=None)
            states = None
        elif data.lengths is None:
            assert data.attention_mask is not None
            # Only a cache needs the lengths, for which a device is waited for.
            lengths = [] if self.source.cache is None else data.attention_mask.sum(-1).tolist()
            states = self.source(data.input_ids, lengths)  # [B, T, L*H]
            data = dataclasses.replace(data, features=states)
        else:
            # The target reads documents side by side, padded; everything else has them end to end.
            documents = Documents.of(data.lengths, data.input_ids.device)
            states = self.source(documents.side_by_side(data.input_ids), documents.lengths)  # [D, L, L*H]
            states = documents.end_to_end(states)  # [1, N, L*H]
            data = dataclasses.replace(data, features=states)
        if self.feature_std is None:
            # The first batch of a plain Trainer.
            features = data.features
            assert features is not None
            values = (features if data.attention_mask is None else features[data.attention_mask]).double()
            count = torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
            total, first, second = sum_over_ranks(torch.stack([count, values.sum(), values.square().sum()])).tolist()
            self.feature_std = max(second / total - (first / total) ** 2, 0.0) ** 0.5
        return data, states

    @torch.no_grad()
    def validate(self, batches: Iterable[MicroBatch]) -> dict[str, float]:
        means = Means()
        for _, inputs in self.validated(batches):
            means.add(self.validation(inputs))
        if self.source.cache is not None:
            self.source.cache.flush()
        return _metrics_of(means)

    def flops(self, batch: MicroBatch) -> float:
        head = self.head
        step = dataclasses.replace(self.train_step(batch), lengths=batch.real_lengths)
        target_flops = features_flops(self.target, step.lengths) if batch.data.features is None else 0.0
        rows = head.logit_rows(batch.data, self.settings) if batch.logit_rows is None else batch.logit_rows
        own = head.flops(head.config, self.settings, step, rows)
        return own and target_flops + own

    def costs(self) -> dict[str, float]:
        return {} if self.source.stream is None else self.source.stream.costs(self.device)

    def setup(self, stage: str) -> None:
        """Check the Trainer and take the number of steps from it."""
        trainer = self.trainer
        if stage != "fit" or isinstance(getattr(trainer, "datamodule", None), HeadDataModule):
            return
        if trainer.strategy.handles_gradient_accumulation:
            found = f"{type(trainer.strategy).__name__} in a Trainer of your own"
            remedy = "Train with draftsmith.fit(..., strategy=...)."
            raise InputError("strategy", found, "one without DeepSpeed", remedy)
        if trainer.precision not in ("32-true", "16-mixed", "bf16-mixed"):
            remedy = "Weights keep their type, as small updates vanish in bfloat16: pass bf16-mixed, or head.double()."
            raise InputError("precision", trainer.precision, "32-true, 16-mixed or bf16-mixed", remedy)
        self.log_every = cast(Any, trainer).log_every_n_steps
        if not self.total_steps:
            steps = trainer.estimated_stepping_batches
            if steps == float("inf"):
                remedy = "Pass max_steps or max_epochs to the Trainer, or total_steps here."
                raise InputError("total_steps", "a Trainer without an end", "a number of steps", remedy)
            self.total_steps = int(steps)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> MicroBatch:
        """Move a batch to the device, as a micro-batch."""
        if not isinstance(batch, MicroBatch):
            if not isinstance(batch, FeatureBatch):
                remedy = "Pass collate_fn=draftsmith.collate to the DataLoader."
                raise InputError("batch", type(batch).__name__, "a FeatureBatch", remedy)
            data, mask = batch, batch.attention_mask
            rows = [data.input_ids.shape[1]] * len(data.input_ids) if mask is None else mask.sum(-1).tolist()
            lengths = data.lengths or tuple(rows)
            keys = tuple(SampleKey(0, self._num_batches * ROWS + row) for row in range(len(lengths)))
            tokens = cast(Any, self.head).loss_count(data, self.config)
            batch = MicroBatch(data, keys, lengths, tokens, None, first=self._uncounted is None)
            self._num_batches += self.trainer.training
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the noise of a plain Trainer depends on, too."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["noise"] = self.feature_std, self._num_batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.feature_std, self._num_batches = checkpoint["noise"]

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
        self.log_dict({f"val/{name}": value for name, value in _metrics_of(self._val).items()})


def _metrics_of(means: Means) -> dict[str, float]:
    """Return the means of a validation. Raises InputError if no token counts."""
    metrics = means.take()
    if not metrics:
        raise InputError("val", "no response token", "validation samples with a response", "Hold out more samples.")
    return metrics


class FeatureSource:
    """Computes the target's features of batches, in its own dtype or as a cache stores them."""

    def __init__(
        self,
        target: CausalLM,
        capture: tuple[int, ...] = (),
        cache: FeatureCache | None = None,
        stream: FeatureStream | None = None,
    ):
        """capture: the states to read (`DraftHead.capture`). stream: where batches come from that have theirs."""
        self._target, self._capture, self.cache, self.stream = target, capture, cache, stream

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute states [B, T, L*H] of right-padded ids [B, T]; those of padding are arbitrary.

        lengths: tokens of each row, which a cache needs. With a cache the states are written to it, and rounded as it
        stores them.
        """
        target, capture, ids = self._target, self._capture, input_ids.to(self._target.device)
        if lengths and ids.device.type == "cpu":
            features = self._read_by_length(ids, lengths)
        else:
            features = target.features(ids, capture=capture)
        features = features.to(input_ids.device)
        if self.cache is None:
            return features
        stored = torch.zeros_like(features, dtype=torch.bfloat16)
        for ids, length, row, rounded in zip(input_ids.cpu(), lengths, features, stored, strict=True):
            rounded[:length] = self.cache.put(ids[:length], row[:length])
        return stored

    def _read_by_length(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Read rows of similar length together, TOKENS_READ at a time: a CPU would compute what padding there is."""
        features = torch.zeros(0)
        order, begun = sorted(range(len(lengths)), key=lengths.__getitem__), 0
        while begun < len(order):
            # The last row of a part is its longest.
            end = begun + 1
            while end < len(order) and (end + 1 - begun) * lengths[order[end]] <= TOKENS_READ:
                end += 1
            rows, width = order[begun:end], lengths[order[end - 1]]
            part = self._target.features(ids[rows, :width], capture=self._capture)
            if not begun:
                features = part.new_zeros(*ids.shape, part.shape[-1])
            features[rows, :width] = part
            begun = end
        return features
