"""The same EAGLE training step written in four ways, to be measured beside each other (throughput.py).

ours: the real path, `fit` with its data module, callbacks and loggers. bare: a plain loop over the same batches, head
and loss. by hand: that with a loss which does nothing that the step needs not. padded: the straightforward form, as in
the trainer of SafeAILab/EAGLE, written anew: batches of random documents padded to the longest, logits of target and
head for the whole batch in float32, softmax and log-softmax over the vocabulary, both losses over [B, T, ...] under a
mask.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from draftsmith.benchmarks.training_data import SyntheticFeatures, dialogue_lengths, random_target, raw_config
from draftsmith.data.store.datasets import collate_features, pack_features
from draftsmith.modules.drafters.eagle.head import EagleConfig, EagleHead, EagleInputs, eagle_loss, shift
from draftsmith.modules.losses import row_chunks
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import FeatureBatch
from draftsmith.train.config import drafter_config
from draftsmith.train.data_module import HeadDataModule, Order, Part, Samples
from draftsmith.train.drafter_objective import DrafterObjective
from draftsmith.train.fit import Provenance, fit
from draftsmith.train.lit_head import LitHead
from draftsmith.train.schedules import lr_schedule

Clock = Callable[[], float]


@dataclass(frozen=True)
class Shape:
    """Sizes of a measured training. hidden, vocab: the target's; layers: the head's. tokens: in a batch; documents: in
    all, with the lengths of dialogues times `scale`."""

    hidden: int = 512
    vocab: int = 32_000
    layers: int = 1
    tokens: int = 2048
    documents: int = 48
    scale: float = 1.0
    dtype: str = "float32"
    seed: int = 0


@dataclass
class Work:
    """What the variants share: target, documents, settings and the head's first weights."""

    shape: Shape
    target: LlamaLM = field(init=False)
    samples: Samples = field(init=False)
    head: EagleHead = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[shape.dtype]
        self.target = random_target(raw_config(shape.hidden, 1, shape.vocab), dtype)
        lengths = dialogue_lengths(shape.documents, shape.seed, shape.scale)
        documents = SyntheticFeatures(lengths, shape.hidden, shape.vocab, shape.seed)
        self.samples = Samples(documents, range(len(documents)))
        torch.manual_seed(shape.seed)
        self.head = EagleHead(EagleConfig.for_target(self.target.config, shape.layers))

    def settings(self, output: Path, steps: int, noise: float = 0.1) -> Any:
        config: Any = drafter_config("eagle")  # which has the settings of EAGLE too
        return config(
            target="synthetic",
            data=Path("synthetic"),
            output=output,
            tokens_per_batch=self.shape.tokens,
            max_steps=steps,
            val_every=steps,  # at the end, off the clock
            precision="bf16" if self.shape.dtype == "bfloat16" else "32",
            seed=self.shape.seed,
            noise=noise,
            num_threads=1,
            accelerator="cpu",
            tau_prompts=0,
            track=("csv",),
        )


@dataclass(frozen=True)
class TakenStep:
    """One step that was taken: documents' own tokens, without padding; the loss; CPU seconds."""

    tokens: int
    loss: float
    seconds: float


def adamw(head: EagleHead, config: Any, steps: int) -> tuple[Any, Any]:
    """Optimizer and schedule as a training has them."""
    groups = [
        {"params": [p for p in head.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in head.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
    share = lr_schedule(config.schedule, steps, config.warmup_share, config.min_lr_share)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


class PlainLoop(ABC):
    """A plain loop. A subclass says what a batch is and what its loss is."""

    def __init__(self, work: Work, config: Any, compiled: bool = False):
        self.work, self.config = work, config
        self.head = copy.deepcopy(work.head)
        self.unroll: Any = torch.compile(self.head.unroll, dynamic=True) if compiled else self.head.unroll
        self.optimizer, self.schedule = adamw(self.head, config, config.max_steps)
        self._batches = self.batches()

    @abstractmethod
    def batches(self) -> Iterator[FeatureBatch]:
        """The batches of the training, in order; each variant has its own."""

    @abstractmethod
    def loss(self, pair: EagleInputs, hidden: Tensor) -> Tensor:
        """The mean over the loss tokens; each variant writes it in its own way."""

    def step(self, clock: Clock = time.process_time) -> TakenStep:
        """Forward, backward, clipping and update of the next batch."""
        started = clock()
        batch = next(self._batches)
        loss = self.loss_of(batch)
        loss.backward()
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        assert batch.attention_mask is not None
        return TakenStep(int(batch.attention_mask.sum()), float(loss.detach()), clock() - started)

    def loss_of(self, batch: FeatureBatch) -> Tensor:
        pair = shift(batch)
        features = pair.features.float()
        if self.config.noise:
            features = features + torch.empty_like(features).uniform_(-self.config.noise, self.config.noise)
        embeds = self.work.target.embed(pair.next_ids).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.precision == "bf16"):
            (hidden,) = self.unroll(embeds, features, 1, pair.position_ids, pair.documents)
            return self.loss(pair, hidden)

    def _loader(self, order: Order, collate: Callable[..., FeatureBatch]) -> Iterator[FeatureBatch]:
        steps = [order.step(step)[1] for step in range(self.config.max_steps)]
        dataset: Any = self.work.samples.dataset
        return iter(DataLoader(dataset, batch_sampler=steps, collate_fn=collate))


class Bare(PlainLoop):
    """The same batches, head and loss as ours, without Lightning."""

    def batches(self) -> Iterator[FeatureBatch]:
        config = self.config
        order = Order(self.work.samples.lengths, config.seed, 1, config.tokens_per_batch, config.group_by_length)
        return self._loader(order, pack_features)

    def loss(self, pair: EagleInputs, hidden: Tensor) -> Tensor:
        config, lm_head = self.config, self.work.target.lm_head
        return eagle_loss(
            [hidden], pair.target_features, [pair.loss_mask], lm_head, config.feature_weight, config.token_weight
        ).loss


class ByHand(Bare):
    """The same batches and head, and nothing that a loop needs not: no metrics, one exponential of each logit, and the
    gradient of the logits' loss written down, as it is softmax minus target."""

    def __init__(self, work: Work, config: Any):
        super().__init__(work, config)
        eye = torch.eye(work.shape.hidden, dtype=work.target.dtype)
        self._weight = work.target.lm_head(eye).T.contiguous()  # [V, H]

    def loss(self, pair: EagleInputs, hidden: Tensor) -> Tensor:
        config, lm_head, dtype = self.config, self.work.target.lm_head, self.work.target.dtype
        chosen = pair.loss_mask.flatten().nonzero()[:, 0]
        wanted, states = (part.flatten(0, 1)[chosen] for part in (pair.target_features, hidden))
        token, pull = torch.zeros(()), torch.empty_like(states)
        with torch.no_grad():
            for part in row_chunks(len(chosen), self.work.shape.vocab, states.device):
                own, prob = states[part].to(dtype), lm_head(wanted[part].to(dtype)).float()
                prob.sub_(prob.amax(-1, keepdim=True)).exp_()
                prob /= prob.sum(-1, keepdim=True)
                logits = lm_head(own).float()
                logits -= logits.amax(-1, keepdim=True)
                expected = torch.linalg.vecdot(prob, logits)
                norm = logits.exp_().sum(-1, keepdim=True)
                token += (norm[:, 0].log() - expected).sum()
                logits.div_(norm).sub_(prob)
                pull[part] = logits.to(own.dtype) @ self._weight
        feature = F.smooth_l1_loss(states.float(), wanted.float(), reduction="sum") / states.shape[-1]
        through = (states * pull).sum()
        token_loss = through + (token - through.detach())
        return (config.feature_weight * feature + config.token_weight * token_loss) / len(chosen)


class Padded(PlainLoop):
    """Batches of as many documents as ours has on average, at random, padded to the longest."""

    @property
    def batch_size(self) -> int:
        lengths = self.work.samples.lengths
        return max(1, round(self.config.tokens_per_batch * len(lengths) / sum(lengths)))

    def batches(self) -> Iterator[FeatureBatch]:
        order = Order(self.work.samples.lengths, self.config.seed, self.batch_size, group_by_length=False)
        return self._loader(order, collate_features)

    def loss(self, pair: EagleInputs, hidden: Tensor) -> Tensor:
        return padded_loss(
            hidden,
            pair.target_features.float(),
            pair.loss_mask,
            self.work.target.lm_head,
            self.config.feature_weight,
            self.config.token_weight,
        )


def padded_loss(
    hidden: Tensor,
    target_features: Tensor,
    loss_mask: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    feature_weight: float,
    token_weight: float,
) -> Tensor:
    """`eagle_loss` over everything at once: [B, T, H] and [B, T, V], and the mask last."""
    with torch.no_grad():
        target_prob = lm_head(target_features.to(hidden.dtype)).float().softmax(-1)
    log_prob = lm_head(hidden).float().log_softmax(-1)
    mask = loss_mask[..., None]
    count = loss_mask.sum()
    token_loss = -(mask * (target_prob * log_prob)).sum(-1).sum() / count
    distance = F.smooth_l1_loss(hidden.float(), target_features, reduction="none")
    feature_loss = (mask * distance).mean(-1).sum() / count
    return feature_weight * feature_loss + token_weight * token_loss


class PairedEagle(LitHead):
    """Our training step; at the beginning of each, the clock stops and the other variants take theirs."""

    def __init__(self, *args: Any, others: Callable[[], None], clock: Clock = time.process_time, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.steps_taken: list[TakenStep] = []
        self._others, self._clock, self._resumed = others, clock, 0.0
        self._before: tuple[int, Tensor] | None = None

    def training_step(self, part: Part, batch_idx: int) -> Tensor:
        arrived = self._clock()
        if self._before is not None:
            tokens, loss = self._before
            self.steps_taken.append(TakenStep(tokens, float(loss), arrived - self._resumed))
        self._others()
        self._resumed = self._clock()
        loss = super().training_step(part, batch_idx)
        self._before = sum(self.lengths_of(part)), loss.detach()
        return loss


def train_ours(work: Work, config: Any, others: Callable[[], None] = lambda: None) -> list[TakenStep]:
    """Our training by `fit`, all of it; its steps but the last, from the beginning of one to that of the next.

    others: called before each step, off the clock.
    """
    shortest = min(range(len(work.samples)), key=work.samples.lengths.__getitem__)  # validation is off the clock
    val = Samples(work.samples.dataset, [shortest])
    data = HeadDataModule(work.samples, val, pack_features, EagleHead.num_loss_tokens, config)
    module = PairedEagle(
        copy.deepcopy(work.head),
        DrafterObjective(EagleHead, config, work.target),
        config,
        data.total_steps,
        others=others,
    )
    fit(module, data, config, Provenance("eagle", {}, {}, {}))
    return module.steps_taken
