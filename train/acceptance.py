"""`draftsmith train acceptance`: train a head that predicts whether the target will accept a drafted token
(SpecDec++, Huang et al. 2024, section 3.3).

A draft model reads the text with its own tokens mixed in; a trained drafter reads the text and the drafts that branch
off it. The acceptance head learns from its states after the drafted tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.data.store.datasets import (
    AcceptanceTokens,
    ArtifactDataset,
    RolloutTokens,
    collate_acceptance,
    collate_rollouts,
    open_dataset,
)
from draftsmith.data.store.parts import Data
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.acceptance.metrics import acceptance_metrics, expected_calibration_error, fit_platt
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.pretrained.heads import (
    FrozenDrafter,
    kind_at,
    load_drafter,
    starting_head,
    starting_settings,
    weights_hash,
)
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError, LossOutput
from draftsmith.train.config import TrainAcceptanceConfig
from draftsmith.train.data import HeadDataModule, MicroBatch, train_and_val
from draftsmith.train.metrics import gather_rows
from draftsmith.train.module import LitHead
from draftsmith.train.strategies import local_device


def with_shape(config: TrainAcceptanceConfig) -> TrainAcceptanceConfig:
    """Fill in the shape of the head, that of --init if there is one, and the share of the target's tokens in labels of
    mixed text.

    Raises:
        InputError: no drafter, no head at --init, another shape asked for, or a share for drafts of a head.
    """
    # Check the drafter first: its error is the one to read.
    _ = read_model(config)
    if kind_at(config.head) is None:
        config = dataclasses.replace(config, mix=0.15 if config.mix is None else config.mix)
    elif config.mix is not None:
        raise InputError("mix", config.mix, "labels of mixed text: a head's drafts are not mixed", "Leave it out.")
    num_blocks = 3 if config.num_blocks is None else config.num_blocks
    own: dict[str, Any] = {"num_blocks": num_blocks, "tied": bool(config.tied)}
    if config.init is None:
        return dataclasses.replace(config, **own)
    settings = starting_settings(config.init, "acceptance")
    own = {name: getattr(settings, name) for name in own}
    for name, value in own.items():
        asked = getattr(config, name)
        if asked not in (None, value):
            found, expected = f"{name} {asked} asked of {config.init}", f"{name} {value}, as that head has"
            raise InputError("init", found, expected, "Leave the setting out, or train without --init.")
    return dataclasses.replace(config, **own)


def read_model(config: TrainAcceptanceConfig) -> str:
    """Return the path of the language model that is needed: the draft, or the model that a head drafts for.

    Raises:
        InputError: a head without its target.
    """
    if kind_at(config.head) is None:
        return config.head
    if config.target is None:
        raise InputError("target", "none", f"the model that {config.head} drafts for", "Pass --target.")
    return config.target


def prepare(config: TrainAcceptanceConfig) -> tuple[LitAcceptance, HeadDataModule]:
    """Load models and data; return the module and data module of a training, the arguments of `fit`.

    Raises:
        InputError: as `command.run`.
    """
    config = with_shape(config)
    # The drafter, and labels of its drafts.
    load = functools.partial(
        load_lm,
        dtype=config.dtype,
        device=local_device(config),
        loader=config.loader,
        trust_remote_code=config.trust_remote_code,
    )
    drafter = load_drafter(config.head, lambda: load(read_model(config)), load)
    rollouts = drafter.head is not None

    def open_labels(data: Data) -> ArtifactDataset:
        identity, vocab_size = {"draft": drafter.identity}, drafter.lm.info.vocab_size
        kind = "rollouts" if rollouts else "acceptance"
        return open_dataset(data, kind, identity, vocab_size=vocab_size, mix=config.mix or 0.0, seed=config.seed)

    train = open_labels(config.data)
    val = open_labels(config.val) if config.val is not None else None
    manifest = train.manifest
    if val is not None and val.manifest.sampling != manifest.sampling:
        expected = f"labels made with {manifest.sampling}"
        raise InputError("val", val.manifest.sampling, expected, "Make both with one sampling.")

    context = drafter.lm.info.max_position
    if rollouts:
        if config.max_length:
            expected = "0: the drafts of a response follow all of it"
            raise InputError("max_length", config.max_length, expected, "Leave it out, or label shorter responses.")
        # Not split: drafts were made within the context.
        context = max(int(dataset.lengths.max(initial=0)) for dataset in (train, val) if dataset is not None)
    train_samples, val_samples = train_and_val(config, train, val, context)
    reader = Reader(drafter, drafter.branches(int(manifest.config["depth"])) if rollouts else None)
    collate = collate_rollouts if rollouts else collate_acceptance
    data = HeadDataModule(train_samples, val_samples, config, collate, num_loss_tokens)
    return LitAcceptance(make_head(config, drafter.lm.info.hidden_size), reader, config), data


def make_head(config: TrainAcceptanceConfig, hidden_size: int) -> AcceptanceHead:
    """Return the head of --init, uncalibrated, or one with random weights. These depend on the seed alone and leave
    torch's global generator unchanged.

    Raises:
        InputError: --init is no acceptance head, or an option contradicts its shape.
    """
    config = with_shape(config)
    settings = AcceptanceHeadConfig(hidden_size, config.num_blocks or 0, config.w_acc, config.w_rej, bool(config.tied))
    if config.init is not None:
        head = cast(AcceptanceHead, starting_head(config.init, "acceptance", hidden_size))
        head.config = settings
        return head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return AcceptanceHead(settings)


def predicted(head: AcceptanceHead, hidden: Tensor) -> Tensor:
    """Return raw logits [N], in float32 also under bf16 autocast."""
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden)


def num_loss_tokens(data: AcceptanceTokens | RolloutTokens) -> int:
    """Return the drafted tokens of a collated batch that count in the loss."""
    return int(data.loss_mask.sum())


@dataclass(frozen=True)
class DraftedTokens:
    """The N tokens of a batch that count.

    hidden: [N, H] the drafter's states once it has read each. accept_prob, log_q: [N] labels. row: [N] int64, the row
    of the batch that each belongs to.
    """

    hidden: Tensor
    accept_prob: Tensor
    log_q: Tensor
    row: Tensor


@dataclass(frozen=True)
class Reader:
    """Reader of labeled batches with a frozen drafter.

    branches: of labels of real rounds, the drafter of drafts that branch off a text.
    """

    drafter: FrozenDrafter
    branches: BranchDrafter | None = None

    def read(self, data: AcceptanceTokens | RolloutTokens) -> DraftedTokens:
        """Return states and labels of a collated batch."""
        mask, row = data.loss_mask, data.loss_mask.nonzero()[:, 0]  # [N]
        if isinstance(data, AcceptanceTokens):
            with torch.no_grad():
                hidden = self.drafter.lm.features(data.z_ids)  # [B, T, H]
        else:
            counts = torch.tensor([len(starts) for starts in data.starts])
            row = torch.arange(len(counts)).repeat_interleave(counts).to(row.device)[row]
            hidden = self.states(data)
        return DraftedTokens(hidden[mask], data.accept_prob[mask], data.log_q[mask], row)

    def states(self, data: RolloutTokens) -> Tensor:
        """Return the drafter's states [drafts, K, H] after each token."""
        assert self.branches is not None, "labels of real rounds need a drafter of branches"
        states, drafted = [], data.draft_ids.split([len(starts) for starts in data.starts])  # [S, K] each
        for ids, starts, own in zip(data.input_ids.split(data.lengths), data.starts, drafted, strict=True):
            opened = self.drafter.read(ids.tolist()).open(self.branches, starts[-1])
            states.append(opened.states(starts, own)[:, 1:])
        # Behind a block drafter's state stands its Markov head's. A copy: tensors of inference mode cannot be inputs of
        # a graph.
        return torch.cat(states)[..., : self.drafter.lm.info.hidden_size].to(data.draft_ids.device).clone()


class LitAcceptance(LitHead):
    """An acceptance head in training: weighted BCE, and its calibration. Batches hold what `reader` reads."""

    head: AcceptanceHead
    config: TrainAcceptanceConfig
    monitor, larger_is_better = "kl", False

    def __init__(self, head: AcceptanceHead, reader: Reader, config: TrainAcceptanceConfig):
        super().__init__(head, config, frozen=reader.drafter.name)
        self.reader = reader
        self._rows: list[Tensor] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.head.config = dataclasses.replace(self.head.config, calibration=self.state.calibration)

    def provenance(self, data: HeadDataModule) -> dict[str, Any]:
        manifest, drafter, init = data.train.dataset.manifest, self.reader.drafter, self.config.init
        greedy = (manifest.sampling or {}).get("temperature") == 0
        return {
            "target": drafter.identity,
            "models": manifest.identity,
            "sampling": manifest.sampling,
            "inputs": self.digests(data) | ({} if init is None else {"init": weights_hash(init)}),
            "mode": "greedy" if greedy else "sampling",
            "drafter": drafter.name,
        }

    def read(self, batch: MicroBatch) -> tuple[DraftedTokens, Tensor]:
        tokens = self.reader.read(batch.data)
        return tokens, tokens.hidden

    def loss(self, inputs: DraftedTokens, step: TrainStep | None) -> LossOutput:
        config = self.head.config
        return acceptance_loss(predicted(self.head, inputs.hidden), inputs.accept_prob, config.w_acc, config.w_rej)

    def on_validation_epoch_start(self) -> None:
        self._rows = [torch.empty(0, 4, device=next(self.head.parameters()).device)]

    def validation_step(self, micro_batch: MicroBatch, batch_idx: int) -> None:
        """Keep raw logit, accept_prob, log_q and sample of each token, [N, 4]."""
        with self.autocast():
            inputs = self.read_validation(micro_batch)
            keys = torch.tensor([key.index for key in micro_batch.keys], device=inputs.row.device)
            columns = [predicted(self.head, inputs.hidden), inputs.accept_prob, inputs.log_q, keys[inputs.row]]
            self._rows.append(torch.stack([column.float() for column in columns], dim=1))

    @torch.no_grad()
    def validation_metrics(self) -> dict[str, float]:
        """Return kl, brier, ece, auc and auc_q over the drafted tokens, by the probability that the loss weights imply.

        loss is the weighted loss. ece_platt is that of a calibration by 2-fold cross-fitting over samples; the head
        keeps the fit to all of them.
        """
        head = self.head
        rows, self._rows = self._rows, []
        gathered = gather_rows(torch.cat(rows))
        if not len(gathered):
            raise InputError("val", "no drafted token", "validation samples with a response", "Hold out more samples.")
        raw, accept_prob, log_q, sample = gathered.unbind(1)

        # Metrics are those of the uncalibrated head.
        plain = dataclasses.replace(head.config, calibration=(1.0, 0.0))
        head.config = plain
        logit = head.corrected(raw)
        metrics = acceptance_metrics(logit, accept_prob, log_q)
        metrics["loss"] = float(acceptance_loss(raw, accept_prob, plain.w_acc, plain.w_rej).loss)
        metrics["ece_platt"] = cross_fitted_ece(head, raw, accept_prob, sample)
        self.state.calibration = fit_platt(logit, accept_prob)
        head.config = dataclasses.replace(plain, calibration=self.state.calibration)
        return metrics


def cross_fitted_ece(trained: AcceptanceHead, raw: Tensor, accept_prob: Tensor, sample: Tensor) -> float:
    """Return the ECE of the calibration, each half of the samples predicted by the fit to the other half."""
    # The same weights, under settings that may change.
    head = copy.copy(trained)
    logit, calibrated = head.corrected(raw), torch.empty_like(raw)
    for half in (0, 1):
        mine = sample % 2 == half
        # One sample: nothing to fit on.
        if mine.all() or not mine.any():
            return float("nan")
        head.config = dataclasses.replace(trained.config, calibration=fit_platt(logit[~mine], accept_prob[~mine]))
        calibrated[mine] = head.calibrated(raw[mine])
    return float(expected_calibration_error(torch.sigmoid(calibrated.double()), accept_prob))
