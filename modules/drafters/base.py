"""What every stage asks of a trained drafter, and so all that a new one has to answer.

A learned drafter is one file of this folder, NAME.py, or a folder NAME/ with a head.py. It holds a `DraftHead` whose
`kind` is NAME. Commands find it by that name (modules/drafters/__init__.py): `train NAME` and `plan NAME` take the
settings of its `Settings`, `data features` stores what `capture` names, `data acceptance` and `train acceptance` draft
with `branches`, decoding drafts with `drafter`, and a head's directory holds its `Config` and weights.

Training calls `loss` with whole sequences, unshifted. Which token stands beside which feature is the drafter's own
business (its alignment): nothing outside pairs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from draftsmith.modules.acceptance.tree_rule import TreeRule
from draftsmith.modules.decoding.branches import BranchDrafter
from draftsmith.modules.decoding.protocols import Drafter, StopPolicy
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters.growth import DynamicTree
from draftsmith.modules.drafters.row_drafter import RowDrafter
from draftsmith.modules.engine.lean import Linear
from draftsmith.modules.engine.low_precision import Precision, copy_of
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, LossOutput


@dataclass(frozen=True)
class TrainStep:
    """Where a training stands when it asks for a loss.

    number: optimizer steps that are done, of `total`.
    lengths: tokens of each sequence of the batch, padding aside.
    seeds: a number for each sequence, by (seed, epoch, sample): what is random is drawn by it, and so does not depend
        on what shares the sequence's batch.
    feature_std: standard deviation of the features' elements, the unit of noise.
    logged: its numbers are: what is counted for them alone, and takes time, may be left out of the others.
    chosen, loss_count: what the head's `num_chosen` and `loss_count` said of the batch while the host had it, if so.
    """

    number: int
    total: int
    lengths: Sequence[int]
    seeds: Sequence[int]
    feature_std: float = 1.0
    logged: bool = True
    chosen: int | None = None
    loss_count: float | None = None


class TargetWeights(Protocol):
    """What a head may start from: weights of the target, on the CPU, and how often it is to draft which token."""

    def last_layer(self) -> dict[str, Tensor]:
        """State dict of its last decoder layer, by the names of `modules.layers.DecoderLayer`."""

    def lm_head(self) -> Tensor:
        """[V, H]."""

    def token_counts(self) -> Tensor:
        """[V] int64, how often each token occurs in the answers that are trained on."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""


@dataclass(frozen=True)
class HeadCard:
    """What a model card says of a head beside what every head's card says.

    title, what: a name for it, and what it is in a sentence or two. tags: for the model hub. method: to try it with, as
    `decode` is told it. shape: lines on its sizes. metrics: what its own numbers of a validation mean.
    """

    title: str
    what: str
    tags: tuple[str, ...]
    method: str
    shape: tuple[str, ...] = ()
    metrics: Mapping[str, str] = field(default_factory=dict)


class DraftHead(nn.Module, ABC):
    """A trained drafter: its net, how it learns and how it drafts. It is built of its config, with random weights.

    kind: its name, that of its file or folder; config.json and the command line say it.
    Config: class of `config`, the shape of its net: a frozen dataclass of JSON values and of such dataclasses, `head`
        of config.json. It has hidden_size and vocab_size, of the target it drafts for, and max_position, the longest
        text that it and its target can read.
    Settings: class of what `train KIND` asks beside what all trainings of drafters ask (train/config.py): a
        frozen dataclass with keyword fields that all have defaults. Its docstring's `Attributes` become help,
        `__post_init__` checks; a field with metadata {"volatile": True} decides nothing of the weights.
    defaults: of settings that all trainings ask, what this drafter has in their place.
    starts: what --init may name beside a head's directory; `random` are the weights it is built with.
    lookahead: rows fewer than tokens that its alignment leaves of a sequence. Pieces of a long one share so many.
    needs_features: it reads hidden states of the target.
    whole_weights: its loss reads weights outside of their modules, so that no rank may hold parts of them (ZeRO-3).
    passes: the setting that says how many tokens of its own drafts it is trained on; none where it has no such.
    monitor, larger_is_better: the validation metric that picks best/.
    precision, output: what it drafts in, and its own copy of the target's lm_head where that is not the target's (see
        `draft_in`).
    of_target: names of its weights that are its target's as they are, never trained; its manifest has them.
    """

    kind: ClassVar[str]
    Config: ClassVar[type]
    Settings: ClassVar[type]
    defaults: ClassVar[dict[str, Any]] = {}
    starts: ClassVar[tuple[str, ...]] = ("random",)
    lookahead: ClassVar[int] = 1
    needs_features: ClassVar[bool] = True
    whole_weights: ClassVar[bool] = False
    passes: ClassVar[str] = ""
    monitor: ClassVar[str] = "top1"
    larger_is_better: ClassVar[bool] = True

    config: Any
    of_target: tuple[str, ...] = ()
    precision: Precision = "dtype"
    output: Linear | None = None

    @property
    def capture(self) -> tuple[int, ...]:
        """What it reads of its target to draft: () is the state after the final norm, [.., H]; else the residual states
        after the first so many layers, side by side [.., L*H] (`CausalLM.session`)."""
        return ()

    def draft_in(self, precision: Precision, target: CausalLM) -> None:
        """Draft with weights of this precision, the target's lm_head among them, which the target keeps as it is:
        whatever a draft is computed in, what is drawn from it is verified."""
        self.precision, self.output = precision, None
        if precision != "dtype" and not hasattr(self, "lm_head"):
            like = torch.empty(target.info.hidden_size, dtype=target.dtype, device=target.device)
            self.output = copy_of(target.lm_head, like, precision)

    @classmethod
    def learns_from(cls, config: Any, num_layers: int) -> tuple[int, ...]:
        """What `loss` reads of a target of so many layers, in the same way. config: of the head."""
        return ()

    @classmethod
    def card(cls, head: Mapping[str, Any]) -> HeadCard:
        """What its model card says of it. head: its `Config` as JSON values; empty where that is not known."""
        what = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        return HeadCard(f"{cls.kind} head", what, (cls.kind,), f"{cls.kind}:k=5")

    # -- training

    @classmethod
    @abstractmethod
    def shape(cls, settings: Any, target: LlamaConfig) -> Any:
        """The `Config` of a new head for this target."""

    @classmethod
    def check_start(cls, settings: Any, config: Any) -> None:
        """Raises InputError where the settings contradict the shape of the head that is to be trained on."""

    def start(self, name: str, weights: TargetWeights) -> None:
        """Begin as `starts` names it; it has random weights."""
        if name != "random":
            raise NotImplementedError(f"{self.kind} has no start {name}")

    def go_on(self, weights: TargetWeights) -> None:
        """Take what is `of_target` from the target that it is trained on for, which may be another one."""

    def freeze(self, settings: Any) -> None:
        """Mark the weights that are not to be trained. Of those that are, none is `of_target`."""

    @classmethod
    @abstractmethod
    def num_loss_tokens(cls, batch: FeatureBatch) -> int:
        """Tokens that count in the loss of a batch, whose features need not be there yet."""

    @classmethod
    def num_chosen(cls, batch: FeatureBatch, settings: Any) -> int:
        """Positions that `loss` makes logits for: a device has to be waited for where the host does not know it."""
        return cls.num_loss_tokens(batch)

    @classmethod
    def loss_count(cls, batch: FeatureBatch, settings: Any) -> float:
        """What `loss` is a mean over in a batch: by it the parts of a step are weighted. Its tokens, as a rule."""
        return cls.num_loss_tokens(batch)

    @abstractmethod
    def loss(self, batch: FeatureBatch, target: CausalLM, settings: Any, step: TrainStep | None) -> LossOutput:
        """Mean over `loss_count`, with sums and counts of what is reported.

        batch: with features where the drafter needs them. target: frozen; its `embed` and `lm_head` pass gradients on.
        step: None in validation, which is the same whenever it is asked: no noise, no schedule.
        """

    def validation(self, batch: FeatureBatch, target: CausalLM, settings: Any) -> LossOutput:
        """`loss` without a step, and what else validation reports."""
        return self.loss(batch, target, settings, None)

    @classmethod
    @abstractmethod
    def flops(cls, config: Any, settings: Any, step: TrainStep, loss_tokens: int) -> float:
        """Model FLOPs (modules/flops.py) of the loss and its gradient, from features that are there.

        step: with the lengths of the sequences. loss_tokens: of their tokens those that count.
        """

    # -- decoding

    @abstractmethod
    def drafter(self, target: CausalLM, stops: Sequence[StopPolicy], capacity: int) -> RowDrafter:
        """What drafts chains with it, a stop policy a row. capacity: most tokens of a text, drafts included."""

    def tree_drafter(
        self,
        target: CausalLM,
        shape: StaticTree | DynamicTree,
        capacity: int,
        rows: int = 1,
        rules: Sequence[TreeRule] | None = None,
    ) -> Drafter:
        """What drafts trees with it, for its methods of trees (trees.py). rules: of dynamic ones, what
        decides each row's size."""
        raise NotImplementedError(f"{self.kind} drafts no trees")

    @abstractmethod
    def branches(self, target: CausalLM, depth: int) -> BranchDrafter:
        """What drafts from many places of one text, at most `depth` tokens each: labels, and training on them."""
