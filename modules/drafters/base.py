"""Interface of a trained draft head: network, loss, and how it drafts.

A head is a file of this folder with a `DraftHead` that HEADS (settings.py) lists, or a file of any
folder with a HEADS of its own (plug_ins.py). Commands find it there: `train KIND` takes the options of its
`Settings`, `data features` stores the states it reads, and decoding and `data acceptance` draft with its `net`.
docs/examples/drafters/bigram.py is a small one.

Training passes whole sequences, unshifted. The head alone decides which token goes with which feature: its alignment is
drawn at its loss.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from torch import Tensor, nn

from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.drafters.settings import HeadSettings, Options, TrainStep
from draftsmith.modules.engine.lean import swap_modules
from draftsmith.modules.llama_config import MOST_POSITIONS, LlamaConfig
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput


def documents_of(batch: FeatureBatch, span: tuple[int, int]) -> tuple[int, tuple[int, ...] | None]:
    """Return the place where the first document of a span of a flat batch begins, and the lengths of its documents.

    There are no lengths if the span is a part of that document.
    """
    begin, (start, stop), lengths = 0, span, list(batch.lengths or ())
    while begin + lengths[0] <= start:
        begin += lengths.pop(0)
    if begin < start or begin + lengths[0] > stop:
        return begin, None
    ends = list(itertools.accumulate(lengths, initial=begin))
    return begin, tuple(lengths[: ends.index(stop)])


# Of each document of a span: the first place, the one behind the last, and the document's length.
DocumentParts = Sequence[tuple[int, int, int]]


class TargetWeights(Protocol):
    """Weights and statistics of the target that a head may start from, on the CPU."""

    @property
    def path(self) -> str:
        """Its directory."""

    def tensors(self, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
        """Read its tensors whose names, as in its files but without `model.`, begin with one of these."""

    def mtp(self) -> dict[str, Tensor]:
        """Read the MTP module that its files hold, under the names of `MtpHead`; empty if they hold none."""

    def lm_head(self) -> Tensor:
        """Return its output embedding [V, H]."""

    @property
    def logit_scale(self) -> float:
        """Factor on the products with it."""

    def token_counts(self) -> Tensor:
        """Return how often each token occurs in the training answers, [V] int64."""

    @property
    def pair_counts(self) -> Callable[[], Tensor] | None:
        """Returns how often each token of the training answers follows each other one: [V, V], sparse, a row for the
        token before. None without such answers."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""


class HeadConfig(Protocol):
    """Sizes that every head's config has: a frozen dataclass of JSON values."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position(self) -> int:
        """Longest text that head and target can read."""


ConfigT = TypeVar("ConfigT", bound=HeadConfig)
SettingsT = TypeVar("SettingsT", bound=HeadSettings)


class DraftHead(nn.Module, ABC, Generic[ConfigT, SettingsT]):
    """A trained drafter: its network, its loss, and how it drafts. `__init__` takes its config and random weights.

    A new head defines `kind`, `Config`, `Settings`, `new_config`, `loss_count`, `loss` and `net`.

    kind: its name in config.json and on the command line. title: its name in model cards; empty for `KIND head`.
    Config: class of `config` (`HeadConfig`).
    Settings: class of the options of `train KIND` beside those of every training (train/config.py).
    drafts: shapes of its drafts, each a method (`methods.OF_HEADS`).
    default_k: drafted tokens of its chains, if the user says nothing, at most `longest_draft`.
    num_lost_rows: tokens at the end of a sequence that give no training row; pieces of a long one overlap by so many.
    depth_option: the option that says how long the drafts are that it learns from; empty if the head has none.
    takes_spans: its loss can be that of a span of the batch alone, for long texts.
    own_layer: its decoder layer is of the target's own kind, not the one that servers run for any target.
    recurs: its forward launches the same kernels for the same shapes, so that CUDA graphs can replay it.
    saved_as_model: it is a language model, saved as transformers loads it; commands take its directory as that of any
        draft model.
    monitor: validation metric that picks best/, its largest value.
    output: lm_head that it drafts with in place of the target's, if any.
    tied_to_target: names of weights that are the target's and never trained; the manifest records them.
    trained: its weights come from a training: from a head's file, or a module that its target ships.
    """

    kind: ClassVar[str]
    title: ClassVar[str] = ""
    Config: ClassVar[type]
    Settings: ClassVar[type[HeadSettings]]
    drafts: ClassVar[tuple[str, ...]] = ("chain",)
    default_k: ClassVar[int] = 5
    num_lost_rows: ClassVar[int] = 1
    depth_option: ClassVar[str] = ""
    takes_spans: ClassVar[bool] = False
    own_layer: ClassVar[bool] = False
    recurs: ClassVar[bool] = True
    saved_as_model: ClassVar[bool] = False
    monitor: ClassVar[str] = "top1"

    config: ConfigT
    tied_to_target: tuple[str, ...] = ()
    trained: bool = False
    output: Callable[[Tensor], Tensor] | None = None

    # -- a new head

    @classmethod
    def needs_gathered_weights(cls, settings: SettingsT) -> bool:
        """Return whether the loss reads weights outside of their modules, so that ZeRO-3 cannot split them."""
        return False

    @classmethod
    @abstractmethod
    def new_config(cls, settings: SettingsT, target: LlamaConfig) -> ConfigT:
        """Return the `Config` of a new head for this target."""

    @classmethod
    def shape(cls, config: ConfigT) -> Options:
        """Return the options that shape a head, with the values that this head has: those that `Settings` and `Config`
        have in common."""
        names = (field.name for field in dataclasses.fields(cls.Settings))
        return {name: getattr(config, name) for name in names if hasattr(config, name)}

    @classmethod
    def check_init(cls, settings: SettingsT, config: ConfigT, target: LlamaConfig) -> None:
        """Raise InputError if an option that shapes the head is given, and the head to fine-tune has another value."""
        own, defaults = cls.shape(config), {field.name: field.default for field in dataclasses.fields(cls.Settings)}
        kept = dataclasses.replace(settings, **own)
        for name, value in own.items():
            asked = getattr(settings, name)
            if asked in (None, defaults[name], value):
                continue
            # Two values may name one shape: a draft vocabulary of 0, or of all tokens.
            alike = dataclasses.replace(kept, **{name: asked})
            if value is None or cls.new_config(alike, target) != cls.new_config(kept, target):
                remedy = f"Leave --{name.replace('_', '-')} out, or start from another head."
                raise InputError(name, asked, f"{value}, as the head of --init has", remedy)

    def start(self, weights: TargetWeights) -> None:
        """Initialize the weights of a new head that come from the target; all are random before."""

    def update_from_target(self, weights: TargetWeights) -> None:
        """Copy the weights named in `tied_to_target` from the target that a fine-tuned head is trained for now."""

    def freeze(self, settings: SettingsT) -> None:
        """Freeze the weights that are not to be trained; those named in `tied_to_target` are always frozen."""

    # -- loss

    @classmethod
    def loss_layers(cls, config: ConfigT, num_layers: int) -> tuple[int, ...]:
        """Return the states that `loss` reads of a target with so many layers, in the terms of `aux_layers`."""
        return ()

    @classmethod
    @abstractmethod
    def loss_count(cls, batch: FeatureBatch, settings: SettingsT) -> float:
        """Return the number of tokens (or of what else) that `loss` is a mean over; features may be missing."""

    @abstractmethod
    def loss(self, batch: FeatureBatch, target: CausalLM, settings: SettingsT, step: TrainStep | None) -> LossOutput:
        """Return the mean over `loss_count`, with sums and counts to log.

        batch: with features [B, T, L*H]. target: frozen; gradients flow through its `embed` and
        `lm_head`. step: None in validation, which has no noise and no schedule, and may report more.
        """

    @classmethod
    def logit_rows(cls, batch: FeatureBatch, settings: SettingsT) -> int:
        """Return the number of positions that `loss` makes logits for."""
        return int(cls.loss_count(batch, settings))

    def loss_memory(self, settings: SettingsT, parts: DocumentParts, share: float, width: int) -> tuple[float, float]:
        """Estimate the bytes that autograd keeps of a span's loss, its logits apart, and its number of predictions.

        share: of the tokens that count. width: bytes of a product's numbers, 2 under autocast.
        """
        # Autograd keeps the input of every linear layer and what the next operator reads of its output; norms keep
        # their input and normalized output in float32.
        kept = 0
        for module in self.modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Linear) and module.out_features <= 8 * module.in_features:
                kept += width * (module.in_features + module.out_features)
            elif isinstance(weight, nn.Parameter) and weight.ndim == 1:
                kept += 8 * weight.numel()
        passes = getattr(settings, "ttt_steps", 1)
        rows = sum(stop - start for start, stop, _ in parts)
        return kept * passes * rows, share * rows

    # -- drafter

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """States of the target that it reads to draft (`CausalLM.session`).

        () is the state after the final norm, [.., H]; (2, 5) are the residual states after the first 2 and 5 layers,
        side by side [.., 2*H], neither normed.
        """
        return ()

    @property
    def longest_draft(self) -> int:
        """Most tokens of a draft."""
        return MOST_POSITIONS

    def like(self, target: CausalLM) -> Self:
        """Return a copy in the target's type and on its device, which may be others than the head's.

        Tensors that need no conversion are shared.
        """
        tensors: list[Tensor] = [*self.parameters(), *self.buffers()]
        same: dict[int, object] = {id(self.output): self.output}
        for tensor in tensors:
            dtype = target.dtype if tensor.is_floating_point() else tensor.dtype
            same[id(tensor)] = tensor.detach().to(target.device, dtype)
        return copy.deepcopy(self, same)

    def lean(self, target: CausalLM) -> Self:
        """Return a copy for decoding, with the linears, norms and layers of the engine."""
        return swap_modules(self.like(target), target.packed)

    @abstractmethod
    def net(self, target: CausalLM) -> DraftNet:
        """Return the network that drafts, in the target's type and on its device."""
