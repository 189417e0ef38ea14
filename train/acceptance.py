"""`draftsmith train acceptance`: train a head that predicts whether the target will accept a drafted token
(SpecDec++, Huang et al. 2024, section 3.3).

Labels of mixed text are read by the draft in every step (`MixedText`). Labels of real rounds are read once, before the
first step, and kept in memory (`RolloutReader`): tokens of one answer are alike, so every batch is drawn from all
answers, and a step costs no forward of the drafter.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.console import progress_bar
from draftsmith.data.store.datasets import (
    AcceptanceTokens,
    Item,
    RolloutTokens,
    collate_acceptance,
    collate_rollouts,
    open_dataset,
)
from draftsmith.data.store.manifest import Manifest
from draftsmith.modules.acceptance.head import FEATURES, AcceptanceHead, AcceptanceHeadConfig, acceptance_training
from draftsmith.modules.acceptance.metrics import (
    acceptance_metrics,
    expected_calibration_error,
    fit_logistic,
    fit_platt,
)
from draftsmith.modules.decoding.confidence import TokenConfidence
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.pretrained.heads import (
    FrozenDrafter,
    kind_at,
    load_drafter,
    starting_head,
    starting_settings,
    starting_weights,
)
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import AcceptanceBatch, InputError, LossOutput
from draftsmith.train.config import TrainAcceptanceConfig, TrainConfig
from draftsmith.train.data import HeadDataModule, MicroBatch, Samples, train_and_val
from draftsmith.train.metrics import gather_rows, say_on_rank_zero
from draftsmith.train.module import LitHead
from draftsmith.train.strategies import local_device, model_dtype
from draftsmith.train.tracking import features_flops

# Defaults for labels of mixed text: SpecDec++, section 4.
MIXED: dict[str, Any] = {"num_blocks": 3, "tied": False, "state": "after", "features": (), "width": 0}
MIXED |= {"w_rej": 6.0, "mix": 0.15}
# Defaults for labels of real rounds, chosen by measurement (docs/heads.md).
ROLLOUTS: dict[str, Any] = {"num_blocks": 0, "tied": False, "state": "before", "width": 128, "w_rej": 1.0}
ROLLOUTS |= {"features": ("log_q", "logit_q", "depth", "repeat")}
# Settings that a head given as --init brings along.
SHAPE = ("num_blocks", "tied", "state", "features", "width")
# Tokens of a training sample: enough that a batch is collated quickly, few enough that it is drawn from many answers.
BLOCK = 64
# Drop tokens reached with probability below this: most of the data, no measurable effect.
LEAST_WEIGHT = 1e-3
# Stored tokens that are read at once outside of training steps.
TOKENS_AT_ONCE = 2**14
# Scale of an input that never changes.
SMALLEST_SCALE = 1e-3
# In tokens: keeps the logistic finite if the labels are separable.
RIDGE = 1e-2


def with_defaults(config: TrainAcceptanceConfig) -> TrainAcceptanceConfig:
    """Fill in the defaults that depend on the labels, and the shape of the head given as --init.

    Raises:
        InputError: an option that has no meaning for these labels, no drafter, or no head of this shape at --init.
    """
    # Check the drafter first: its error is the one to read.
    _ = read_model(config)
    manifest = Manifest.read(config.data)
    defaults = dict(MIXED)
    if manifest.kind == "rollouts":
        defaults = dict(ROLLOUTS)
        if config.mix is not None:
            raise InputError("mix", config.mix, "labels of mixed text: rounds are not mixed", "Leave it out.")
        if config.max_length:
            expected = "0: the drafts of a response follow all of it"
            raise InputError("max_length", config.max_length, expected, "Leave it out, or label shorter responses.")
        if isinstance((manifest.sampling or {}).get("temperature"), list):
            defaults["features"] = (*defaults["features"], "temperature")
    if config.init is not None:
        settings = starting_settings(config.init, "acceptance")
        for name in SHAPE:
            asked, value = getattr(config, name), getattr(settings, name)
            if asked not in (None, value):
                found, expected = f"{name} {asked} asked of {config.init}", f"{name} {value}, as that head has"
                raise InputError("init", found, expected, "Leave the setting out, or train without --init.")
            defaults[name] = value
    return dataclasses.replace(
        config, **{name: value for name, value in defaults.items() if getattr(config, name) is None}
    )


def read_model(config: TrainAcceptanceConfig) -> str:
    """Return the path of the language model that is needed: the draft, or the model that a head drafts for.

    Raises:
        InputError: a head without its target.
    """
    if kind_at(config.draft) is None:
        return config.draft
    if config.target is None:
        raise InputError("target", "none", f"the model that {config.draft} drafts for", "Pass --target.")
    return config.target


def prepare(config: TrainAcceptanceConfig) -> tuple[LitAcceptance, HeadDataModule]:
    """Load models and data; return the module and data module of a training, the arguments of `fit`.

    Raises:
        InputError: as `command.run`.
    """
    config = with_defaults(config)
    rollouts = Manifest.read(config.data).kind == "rollouts"
    # The drafter, and labels of its drafts.
    dtype, device = model_dtype(config), local_device(config)
    how: dict[str, Any] = {"engine": config.engine, "trust_remote_code": config.trust_remote_code}
    load: Any = functools.partial(load_lm, dtype=dtype, device=device, **how)
    drafter = load_drafter(config.draft, lambda: load(read_model(config)), load)

    def open_labels(path: Path) -> Any:
        identity, vocab_size = {"draft": drafter.identity}, drafter.lm.info.vocab_size
        kind: Literal["acceptance", "rollouts"] = "rollouts" if rollouts else "acceptance"
        return open_dataset(path, kind, identity, vocab_size=vocab_size, mix=config.mix or 0.0, seed=config.seed)

    train = open_labels(config.data)
    val = open_labels(config.val) if config.val is not None else None
    manifest = train.manifest
    if val is not None and val.manifest.sampling != manifest.sampling:
        expected = f"labels made with {manifest.sampling}"
        raise InputError("val", val.manifest.sampling, expected, "Make both with one sampling.")

    # The head, and what it reads of the labels.
    head = make_head(config, drafter.lm.info.hidden_size)
    if not rollouts and not head.config.as_published:
        found = f"{manifest.kind} labels of mixed text, for a head that reads more than the state after the token"
        remedy = "Make them: draftsmith data acceptance --labels rollout"
        raise InputError("data", found, "labels of real rounds", remedy)
    context = drafter.lm.info.max_position
    # Not split: drafts follow all of a text, and were made within the context.
    if rollouts:
        context = max(int(dataset.lengths.max(initial=0)) for dataset in (train, val) if dataset is not None)
    train_samples, val_samples = train_and_val(config, train, val, context)
    greedy = (manifest.sampling or {}).get("temperature") == 0
    if rollouts:
        reader: Any = RolloutReader(drafter, head.config, int(manifest.config["depth"]))
        train_samples, val_samples = store_rollouts(config, head, reader, train_samples, val_samples)
    else:
        reader = MixedText(drafter, greedy)
    collate: Any = collate_stored if rollouts else collate_acceptance
    data = HeadDataModule(train_samples, val_samples, config, collate, num_loss_tokens)
    return LitAcceptance(head, reader, config), data


def store_rollouts(
    config: TrainAcceptanceConfig, head: AcceptanceHead, reader: RolloutReader, train: Samples, val: Samples
) -> tuple[Samples, Samples]:
    """Read the labeled answers into memory, and initialize a new head as a logistic.

    Returns training and validation samples of stored tokens.
    """
    tokens = {name: reader.store(samples, name) for name, samples in (("train", train), ("val", val))}
    size = sum(tensor.nbytes for part in tokens.values() for tensor in vars(part).values())
    counts = " and ".join(f"{len(part.ids):,} to {name}" for name, part in tokens.items())
    say_on_rank_zero(f"drafted tokens: {counts}; {size / 2**20:,.0f} MiB in memory")
    if config.init is None:
        initialize_head(head, reader.batches(tokens["train"]))
    # Training draws from all answers; validation reports samples by answer.
    blocks = StoredDataset(tokens["train"], train, config.seed)
    answers = StoredDataset(tokens["val"], val, None)
    return Samples(blocks, range(len(blocks.lengths))), Samples(answers, range(len(answers.lengths)))


def make_head(config: TrainAcceptanceConfig, hidden_size: int) -> AcceptanceHead:
    """Return the head of --init, uncalibrated, or one with random weights. These depend on the seed alone and leave
    torch's global generator unchanged.

    Raises:
        InputError: --init is no acceptance head, or an option contradicts its shape.
    """
    config = with_defaults(config)
    assert config.w_rej is not None
    if config.init is not None:
        head = starting_head(config.init, "acceptance", hidden_size)
        assert isinstance(head, AcceptanceHead)
        head.config = dataclasses.replace(head.config, w_acc=config.w_acc, w_rej=config.w_rej, calibration=(1.0, 0.0))
        return head
    shape = {name: getattr(config, name) for name in SHAPE}
    # The rectified form costs a drafted token least; it needs what is there before the token is read.
    lean = Manifest.read(config.data).kind == "rollouts" and config.state != "after"
    shape |= {"activation": "relu" if lean else "none", "standardize": lean}
    settings = AcceptanceHeadConfig(hidden_size, w_acc=config.w_acc, w_rej=config.w_rej, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return AcceptanceHead(settings)


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


def predicted(head: AcceptanceHead, batch: AcceptanceBatch) -> Tensor:
    """Return raw logits, in float32 also under bf16 autocast."""
    with torch.autocast(batch.hidden.device.type, enabled=False):
        return head(batch.hidden, batch.embeds, batch.features)


def num_loss_tokens(data: Any) -> float:
    """Return the drafted tokens of a collated batch that count in the loss, or the sum of their weights."""
    mask = data.loss_mask
    weight = getattr(data, "weight", None)
    return int(mask.sum()) if weight is None else float(weight[mask].double().sum())


@dataclass(frozen=True)
class DraftedTokens:
    """The N tokens of a batch that count.

    batch: their inputs and labels, [N] in place of [B, T]. row: [N] int64, the row of the batch that each belongs to.
    log_q: [N] log-probability of the token under the draft, if asked for.
    """

    batch: AcceptanceBatch
    row: Tensor
    log_q: Tensor | None = None


class MixedText:
    """Reader of labels of mixed text: the draft reads z, and the head reads its states after each token."""

    weighted = False

    def __init__(self, drafter: FrozenDrafter, greedy: bool):
        """drafter: a language model. greedy: the labels are those of greedy decoding."""
        self.drafter, self.lm, self.model, self.greedy = drafter, drafter.lm, drafter.name, greedy

    def read(self, data: AcceptanceTokens, with_log_q: bool = False) -> DraftedTokens:
        """Return states and labels of a collated batch."""
        with torch.no_grad():
            hidden = self.lm.features(data.z_ids)  # [B, T, H]
        mask, log_q = data.loss_mask, data.log_q
        if with_log_q and self.greedy:
            # The q of greedy labels is one-hot, so that log q says nothing: take q at temperature 1.
            log_q = torch.zeros(data.z_ids.shape, device=hidden.device)
            # One row at a time, so that [T, V] is in memory, not [B, T, V].
            for row in range(len(log_q)):
                log_prob = self.lm.lm_head(hidden[row, :-1]).float().log_softmax(-1)
                log_q[row, 1:] = log_prob.gather(-1, data.z_ids[row, 1:, None])[:, 0]
        batch = AcceptanceBatch(hidden[mask], data.accept_prob[mask], mask[mask])
        return DraftedTokens(batch, mask.nonzero()[:, 0], log_q[mask] if with_log_q else None)


@dataclass(frozen=True)
class StoredTokens:
    """N drafted tokens of real rounds, as the drafter reads them.

    weight: probability that a round verifies the token. owner: the answer that it belongs to; of a collated batch, the
    sample.
    """

    ids: Tensor  # [N] int64
    hidden: Tensor  # [N, H], of the drafter's type
    features: Tensor  # [N, F] float32; F is 0 for a head that reads none
    log_q: Tensor  # [N] float32, as all below
    accept_prob: Tensor
    weight: Tensor
    owner: Tensor  # [N] int64
    loss_mask: Tensor  # [N] bool

    def __getitem__(self, rows: Tensor | slice) -> StoredTokens:
        return StoredTokens(**{name: values[rows] for name, values in vars(self).items()})

    @staticmethod
    def joined(parts: Sequence[StoredTokens]) -> StoredTokens:
        """Concatenate parts."""
        names = [field.name for field in fields(StoredTokens)]
        return StoredTokens(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


class RolloutReader:
    """Reader of labels of real rounds: the drafter reads each text once, with all drafts that branch off it."""

    weighted = True

    def __init__(self, drafter: FrozenDrafter, head: AcceptanceHeadConfig, depth: int):
        """head: settings of the head that reads. depth: tokens of a draft."""
        self.drafter, self.head, self.model = drafter, head, drafter.name
        self.branches = drafter.branches(depth)

    def read_rollouts(self, data: RolloutTokens) -> StoredTokens:
        """Return states and labels of the labeled tokens, by the drafter's forward."""
        head, mask = self.head, data.loss_mask
        # [drafts, K] -> [N], labeled tokens only.
        known = TokenConfidence(*(None if values is None else values[mask] for values in data.confidences))
        ids = data.draft_ids[mask]
        read = [FEATURES[name](known) for name in head.features]
        return StoredTokens(
            ids=ids,
            hidden=self.states(data)[mask],
            features=torch.stack(read, -1) if read else torch.empty(len(ids), 0),
            log_q=known.log_q,
            accept_prob=data.accept_prob[mask],
            weight=data.weight[mask],
            owner=data.owner[:, None].expand(mask.shape)[mask],
            loss_mask=mask[mask],
        )

    def states(self, data: RolloutTokens) -> Tensor:
        """Return the drafter's states [drafts, K, H] before each token, or after it."""
        late, depth = self.head.state == "after", data.draft_ids.shape[1]
        states, first = [], 0
        for text, starts in zip(data.texts, data.starts, strict=True):
            drafted = data.draft_ids[first : first + len(starts)]  # [S, K]
            first += len(starts)
            self.branches.open(text[: starts[-1]], self.drafter.features(text, starts[-1]))
            # The last token need only be read for a head that reads states after the tokens.
            read = self.branches.states(starts, drafted if late or depth == 1 else drafted[:, :-1])
            states.append(read[:, 1:] if late else read[:, :depth])  # [S, K, H]
        # Behind a block drafter's state stands its Markov head's. A copy: tensors of inference mode cannot be inputs of
        # a graph.
        return torch.cat(states)[..., : self.head.hidden_size].to(data.draft_ids.device).clone()

    def store(self, samples: Samples, title: str) -> StoredTokens:
        """Read the tokens of labeled answers, answer after answer. title: of the progress bar.

        Raises:
            InputError: no round reaches any token.
        """
        parts: list[StoredTokens] = []
        with progress_bar(title, len(samples), "answers") as advance:
            for index in range(len(samples)):
                tokens = self.read_rollouts(collate_rollouts([samples.item(index, 0)]))
                tokens = dataclasses.replace(tokens, owner=torch.full_like(tokens.ids, index))
                parts.append(tokens[tokens.weight >= LEAST_WEIGHT])
                advance(1)
        tokens_of_all = StoredTokens.joined(parts)
        if not len(tokens_of_all.ids):
            raise InputError("data", "no drafted token that a round reaches", "labels of real rounds", "Make more.")
        return tokens_of_all

    def read(self, data: StoredTokens, with_log_q: bool = False) -> DraftedTokens:
        """Return stored tokens with the embeddings that the head reads."""
        embeds = None
        if self.head.reads_token:
            with torch.no_grad():
                embeds = self.branches.embed(data.ids).to(data.ids.device)  # [N, H]
        features = data.features if self.head.features else None
        batch = AcceptanceBatch(data.hidden, data.accept_prob, data.loss_mask, data.weight, embeds, features)
        return DraftedTokens(batch, data.owner, data.log_q if with_log_q else None)

    def batches(self, tokens: StoredTokens) -> Iterator[AcceptanceBatch]:
        """Yield stored tokens in their order, TOKENS_AT_ONCE at a time."""
        for start in range(0, len(tokens.ids), TOKENS_AT_ONCE):
            yield self.read(tokens[slice(start, start + TOKENS_AT_ONCE)]).batch


class StoredDataset:
    """Stored tokens as samples: blocks of tokens of all answers, shuffled once; or, for validation, whole answers."""

    def __init__(self, tokens: StoredTokens, answers: Samples, seed: int | None):
        """answers: that the tokens belong to. seed: of the blocks; None for whole answers."""
        self.answers, self.manifest = answers, answers.dataset.manifest
        if seed is None:
            self.tokens = tokens
            self.bounds = torch.bincount(tokens.owner, minlength=len(answers)).cumsum(0).tolist()
        else:
            # Shuffled once: the order of blocks changes every epoch.
            order = torch.randperm(len(tokens.ids), generator=torch.Generator().manual_seed(seed))
            self.tokens = tokens[order]
            self.bounds = [*range(BLOCK, len(order), BLOCK), len(order)]
        self.lengths = np.diff(self.bounds, prepend=0).tolist()
        self.by_answer = seed is None

    def item(self, index: int, epoch: int) -> Item:
        start = self.bounds[index] - self.lengths[index]
        return dict(vars(self.tokens[slice(start, self.bounds[index])]))

    def name(self, index: int) -> str:
        """Return the answer's name; of a block, that of its first token's answer."""
        start = self.bounds[index] - self.lengths[index]
        return self.answers.name(index if self.by_answer else int(self.tokens.owner[start]))

    def answer_lengths(self, indices: Sequence[int]) -> np.ndarray:
        """Return the tokens of every answer that drafts were made along."""
        return self.answers.dataset.answer_lengths(self.answers.indices)


def collate_stored(items: Sequence[Item]) -> StoredTokens:
    """Concatenate samples; the owner of each token becomes its sample's place among them."""
    counts = torch.tensor([len(item["ids"]) for item in items])
    owner = torch.arange(len(items)).repeat_interleave(counts)
    batch = StoredTokens.joined([StoredTokens(**item) for item in items])
    return dataclasses.replace(batch, owner=owner)


class LitAcceptance(LitHead):
    """An acceptance head in training: weighted BCE, and its calibration. Batches hold what `reader` reads."""

    head: AcceptanceHead
    monitor, larger_is_better = "kl", False

    def __init__(self, head: AcceptanceHead, reader: MixedText | RolloutReader, config: TrainConfig):
        super().__init__(head, config, frozen=reader.model)
        self.reader = reader
        # A head for real rounds starts as a logistic, which may stay the best.
        self.validates_first = reader.weighted
        self._rows: list[Tensor] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.head.config = dataclasses.replace(self.head.config, calibration=self.state.calibration)

    def provenance(self, data: HeadDataModule) -> dict[str, Any]:
        manifest, drafter, init = data.train.dataset.manifest, self.reader.drafter, getattr(self.config, "init", None)
        greedy = (manifest.sampling or {}).get("temperature") == 0
        return {
            "target": drafter.identity,
            "models": manifest.identity,
            "sampling": manifest.sampling,
            "inputs": self.digests(data) | (starting_weights(init) if init is not None else {}),
            "labels": "rollout" if self.reader.weighted else "mix",
            "mode": "greedy" if greedy else "sampling",
            "drafter": drafter.name,
        }

    def read(self, batch: MicroBatch, validating: bool = False) -> tuple[DraftedTokens, Tensor]:
        tokens = self.reader.read(batch.data, with_log_q=validating)
        return tokens, tokens.batch.hidden

    def loss(self, inputs: DraftedTokens, step: TrainStep | None) -> LossOutput:
        config = self.head.config
        return acceptance_loss(predicted(self.head, inputs.batch), inputs.batch, config.w_acc, config.w_rej)

    def flops(self, batch: MicroBatch) -> float:
        config, reader = self.head.config, self.reader
        if isinstance(reader, RolloutReader):
            # The drafter has read all texts before the first step.
            return acceptance_training(config, len(batch.data.ids))
        return features_flops(reader.lm, batch.real_lengths) + acceptance_training(config, int(batch.tokens))

    def on_validation_epoch_start(self) -> None:
        self._rows = [torch.empty(0, 4 + self.reader.weighted, device=next(self.head.parameters()).device)]

    def validation_step(self, micro_batch: MicroBatch, batch_idx: int) -> None:
        """Keep raw logit, accept_prob, log_q and sample of each token, [N, 4]; and weight for readers with weights."""
        with self.autocast():
            inputs = self.read_validation(micro_batch)
            batch, log_q = inputs.batch, inputs.log_q
            keys = torch.tensor([key.index for key in micro_batch.keys], device=batch.accept_prob.device)
            columns = [predicted(self.head, batch), batch.accept_prob, log_q, keys[inputs.row]]
            columns += [batch.weight] if batch.weight is not None else []
            # Of a filler none counts.
            self._rows.append(torch.stack([column.float() for column in columns], dim=1)[batch.loss_mask])

    @torch.no_grad()
    def validation_metrics(self) -> dict[str, float]:
        """Return kl, brier, ece, auc and auc_q over the drafted tokens, by the probability that the loss weights imply.

        loss is the weighted loss. Tokens of rollouts count by their weights. ece_platt is that of a
        calibration by 2-fold cross-fitting over samples; the head keeps the fit to all of them.
        """
        head = self.head
        rows, self._rows = self._rows, []
        gathered = gather_rows(torch.cat(rows))
        if not len(gathered):
            raise InputError("val", "no drafted token", "validation samples with a response", "Hold out more samples.")
        raw, accept_prob, log_q, sample, *weights = gathered.unbind(1)
        weight = weights[0] if weights else None

        # Metrics are those of the uncalibrated head.
        plain = dataclasses.replace(head.config, calibration=(1.0, 0.0))
        head.config = plain
        logit = head.corrected(raw)
        metrics = acceptance_metrics(logit, accept_prob, log_q, weight)
        # Every gathered token counts.
        everything = AcceptanceBatch(raw, accept_prob, torch.ones_like(raw, dtype=torch.bool), weight)
        metrics["loss"] = float(acceptance_loss(raw, everything, plain.w_acc, plain.w_rej).loss)
        metrics["ece_platt"] = cross_fitted_ece(head, raw, accept_prob, sample, weight)
        self.state.calibration = fit_platt(logit, accept_prob, weight=weight)
        head.config = dataclasses.replace(plain, calibration=self.state.calibration)
        return metrics


def cross_fitted_ece(
    trained: AcceptanceHead, raw: Tensor, accept_prob: Tensor, sample: Tensor, weight: Tensor | None
) -> float:
    """Return the ECE of the calibration, each half of the samples predicted by the fit to the other half."""
    # The same weights, under settings that may change.
    head = copy.copy(trained)
    logit, calibrated = head.corrected(raw), torch.empty_like(raw)
    for half in (0, 1):
        mine = sample % 2 == half
        # One sample: nothing to fit on.
        if mine.all() or not mine.any():
            return float("nan")
        others = None if weight is None else weight[~mine]
        fit = fit_platt(logit[~mine], accept_prob[~mine], weight=others)
        head.config = dataclasses.replace(trained.config, calibration=fit)
        calibrated[mine] = head.calibrated(raw[mine])
    return float(expected_calibration_error(torch.sigmoid(calibrated.double()), accept_prob, weight=weight))
