"""Options of `train KIND` beside those of every training, and the table of trained drafters; torch is not imported.

`Attributes` of a docstring become help.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from draftsmith.modules.types import InputError, check_range, check_ranges

Rope = Literal["target", "plain"]
Mask = Literal["input", "previous", "next"]
Normalizer = Literal["sequence", "tokens", "padded"]
Options = dict[str, Any]  # of a settings class, by name


@dataclass(frozen=True)
class TrainStep:
    """Position in a training, for a loss.

    number: optimizer steps done, of `total`. lengths: tokens of each sequence of the batch, without padding. seeds: a
    number for each sequence, from (seed, epoch, sample): random numbers drawn by it do not depend on what else is in
    the batch. feature_std: standard deviation of the features' elements, the unit of noise. logged: this step's numbers
    are logged; others may skip costly metrics. logit_rows, loss_count: the head's counts of the batch, if the host has
    made them, so that no device is waited for. span: first place in a flat batch whose predictions count in this loss,
    and the one behind the last; whole texts, or a part of one (`DraftHead.takes_spans`). None: all. The losses of spans
    that cover a batch add up to that of the batch.
    """

    number: int
    total: int
    lengths: Sequence[int]
    seeds: Sequence[int]
    feature_std: float = 1.0
    logged: bool = True
    logit_rows: int | None = None
    loss_count: float | None = None
    span: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """Options of `train KIND`: a class for each kind, whose fields have defaults and whose docstring is the help.

    A field with metadata {"volatile": True} has no effect on the weights. An option that shapes the head
    (`DraftHead.shape`) defaults to None.

    defaults: values of the common options in place of their own. help_rarely: fields that only --help-all lists.
    """

    defaults: ClassVar[Options] = {}
    help_rarely: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Raise InputError for a value that is not possible."""

    def defaults_by_start(self, trained: bool) -> Options:
        """Return the options whose default depends on whether the head was trained before."""
        return {}


def check_window(window: int | None, drafted: int | None) -> None:
    """Raise InputError unless a window, if there is one, is longer than drafts of so many tokens."""
    check_range("window", window, 0)
    if window and window <= (drafted or 0):
        expected = f"0 for none, or more than the {drafted} tokens of a draft"
        raise InputError("window", window, expected, "Pass --window 2048, or as long as the texts to train on.")


@dataclass(frozen=True, kw_only=True)
class UnrolledSettings(HeadSettings):
    """Train a head on drafts that begin at every token, each behind the head's own states.

    Attributes:
        ttt_steps: Tokens of the drafts that it is trained on, each read behind its own states (training-time test).
            More cost as many passes, and keep later tokens of a draft good.
        ttt_steps_after: Share of the steps after which there is more than one.
        ttt_step_decay: Loss weight of a pass, relative to the one before.
        ttt_step_weights: mean divides by the sum of the steps' weights, so that the learning rate does not depend on
            their number; sum does not.
        token_mask: Which tokens count: those whose input is of an answer, which is what drafting meets; previous takes
            the mask one token earlier (SafeAILab, SpecForge); next, those that predict a token of an answer (EAGLE-1).
        normalizer: The loss is a mean over sequences, each of its own tokens' mean; over tokens; or over all tokens,
            those that do not count and padding too.
        loss: FILE.py:FUNCTION takes the place of the cross-entropy: (draft logits [N, V], target
            probabilities [N, V]) -> losses of N tokens.
    """

    help_rarely: ClassVar[tuple[str, ...]] = (
        "ttt_steps_after",
        "ttt_step_decay",
        "ttt_step_weights",
        "token_mask",
        "normalizer",
    )

    ttt_steps: int = 7
    ttt_steps_after: float = 0.0
    ttt_step_decay: float = 0.8
    ttt_step_weights: Literal["mean", "sum"] = "mean"
    token_mask: Mask = "input"
    normalizer: Normalizer = "sequence"
    loss: str | None = None  # in training the function itself (train/module.py)

    def __post_init__(self) -> None:
        check_ranges(self, ttt_steps=1, ttt_steps_after=(0.0, 1.0, "[)"), ttt_step_decay=(0.0, 1.0, "(]"))

    def num_ttt_steps(self, step: TrainStep | None) -> int:
        """Return the passes that a training step learns from; validation measures all."""
        late = step is None or step.number >= round(self.ttt_steps_after * step.total)
        return self.ttt_steps if late else 1


@dataclass(frozen=True, kw_only=True)
class EagleSettings(UnrolledSettings):
    """Train an EAGLE head. The defaults are the paper's, for 7B targets; small targets want a higher lr and more weight
    on tokens (configs/train/eagle-embedded.yaml).

    Attributes:
        num_layers: Decoder layers of the head. Default: 1, or those of the head it starts from.
        rope: Rotary positions of the head: the target's, or plain, without the target's scaling: SafeAILab's code knows
            none but linear and dynamic. vLLM and SGLang hold both. Default: target, or those of the head it starts
            from.
        feature_weight: Loss weight of the smooth-L1 distance between features.
        token_weight: Loss weight of the soft cross-entropy against the target's distribution.
        noise: Uniform noise on the features that the head reads, up to this share of their standard deviation.
    """

    defaults = {"epochs": 10, "lr": 3e-5, "betas": (0.9, 0.95), "clip": 0.5}

    num_layers: int | None = None
    rope: Rope | None = None
    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.1
    ttt_steps: int = 1
    ttt_step_decay: float = 1.0
    token_mask: Mask = "next"
    normalizer: Normalizer = "tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_weight < 0 or self.token_weight < 0 or self.feature_weight + self.token_weight == 0:
            weights = f"{self.feature_weight}, {self.token_weight}"
            raise InputError("feature_weight, token_weight", weights, "not negative, not both 0", "Change them.")
        check_ranges(self, noise=0.0, num_layers=1)


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings(UnrolledSettings):
    """Train an EAGLE-3 head. Where the published trainers differ, each of their ways is a value here:
    configs/recipes/ has them by name.

    Attributes:
        layers: Layers of the target whose inputs it reads, distinct ones, ascending. Default: 2, L/2 and L-3, or those
            of the head it starts from. Of other than three, vLLM, SGLang and speculators can serve the head. L is the
            state after the last layer, before the final norm, for vLLM and speculators.
        num_layers: Decoder layers of the head. Default: 1, or those of the head it starts from. With more, vLLM, SGLang
            and speculators can serve it.
        draft_vocab: Tokens that it can draft: the most frequent ones of the answers that it is trained on, and those
            that end them. 0, or no less than the target has: all. Default: 32000, or those of the head it starts from.
        rope: Rotary positions of the head: the target's, or plain, without the target's scaling. Default: target, or
            those of the head it starts from.
        rope_theta: Rotary base of the head. Default: the target's, or that of the head it starts from.
        window: Most tokens that the head attends to, itself included: memory and time of a draft stay the same in long
            contexts. It has to be longer than a draft. 0: all. Default: all, or that of the head it starts from.
        version: 3, as in the paper; 3-norm, with a norm of the states side by side before they are joined (servers'
            norm_before_fc); or 3.1: every state is normed by itself, and so is what the head reads of itself. vLLM,
            SGLang and speculators serve all, llama.cpp 3 and 3-norm, SafeAILab's code only 3. Default: 3-norm, or that
            of the head it starts from.
        train_lm_head: Train the lm_head too, which begins as the target's. That of a head to fine-tune is the new
            target's where it was never trained, and else the head's own.
        unknown: Tokens where the target's first choice cannot be drafted: drop them from the loss, or keep them, for
            which a step needs the target's logits of the draft vocabulary only.
    """

    defaults = {"epochs": 10, "lr": 1e-4, "betas": (0.9, 0.95), "clip": 0.5}

    help_rarely: ClassVar[tuple[str, ...]] = ("num_layers", "rope_theta", *UnrolledSettings.help_rarely, "unknown")

    layers: tuple[int, ...] = ()
    num_layers: int | None = None
    draft_vocab: int | None = None
    rope: Rope | None = None
    rope_theta: float | None = None
    window: int | None = None
    version: Literal["3", "3-norm", "3.1"] | None = None
    train_lm_head: bool = False
    unknown: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, draft_vocab=0, num_layers=1, rope_theta=(0.0, math.inf, "()"))
        check_window(self.window, self.ttt_steps)


@dataclass(frozen=True, kw_only=True)
class MtpSettings(UnrolledSettings):
    """Train the MTP module of a target: the one that its files hold, or a new one if they hold none. Without --lr a
    trained module begins at 2e-5, a new one at 1e-4; small targets want more."""

    defaults = {"epochs": 2, "lr": None, "clip": 0.5}

    ttt_steps: int = 3

    def defaults_by_start(self, trained: bool) -> Options:
        return {"lr": 2e-5 if trained else 1e-4} if getattr(self, "lr", None) is None else {}


@dataclass(frozen=True, kw_only=True)
class DraftModelSettings(HeadSettings):
    """Distil a draft model from the target's answers: some of its layers, or the model of --init. The result is a plain
    transformers model.

    Attributes:
        keep_layers: Layers of the target that it begins as, from 0, ascending. Default: one of six, evenly spaced, with
            the first and the last. With --init: layers of that model, by default all.
        loss: Distance between the distributions of target p and draft q: forward KL(p|q), or tvd, total variation,
            whose complement is the probability that a drawn token is accepted; or FILE.py:FUNCTION, of (draft logits
            [N, V], target probabilities [N, V]).
        train_embeddings: Train embedding and lm_head too, which begin as the target's.
    """

    defaults = {"lr": 1e-3}

    keep_layers: tuple[int, ...] = ()
    loss: str = "forward"  # in training also a function (train/module.py)
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.loss, str) and ":" not in self.loss and self.loss not in ("forward", "tvd"):
            raise InputError("loss", repr(self.loss), "forward, tvd or FILE.py:FUNCTION", "Change it.")


@dataclass(frozen=True, kw_only=True)
class BlockSettings(HeadSettings):
    """Train a block drafter.

    ce_weight, l1_weight: weights in the loss of the cross-entropy with the text's tokens, and of the distance between
        the distributions, twice their total variation.
    new: shape of a new head.

    Attributes:
        layers: Layers of the target whose inputs it reads, distinct ones, ascending. Default: five, evenly spaced, or
            those of the head it starts from. The number of all layers is the state after the last one, before the final
            norm, for vLLM and speculators.
        num_layers: Decoder layers of the head. Default: 2, or those of the head it starts from.
        block: Tokens that it drafts in a block. Default: 7, or as the head it starts from.
        vary_block: Train on blocks of 2 to `block` tokens, a length drawn for every step. Servers lay a block of as
            many slots as they draft tokens, and a head draws other tokens in a block of another length.
        window: Most tokens that the head attends to, itself included: memory and time of a draft stay the same in long
            contexts. It has to be longer than a draft. In a new head slots then see no later ones, as in published
            DFlash and DSpark heads; DFlash2's do. 0: all. Default: all, or that of the head it starts from.
        mask_token: Token that stands in the slots to fill, one that texts do not have. Default: the target's last one.
        markov_rank: Width of the Markov head, which adds to a token's logits what the token before it says; 0 for none.
            A new one begins with what the training answers' pairs of tokens say. Default: 64, for DFlash 0, or as the
            head it starts from.
        confidence: Train a confidence head, by which servers cut drafts short. Default: on, for DFlash off, or as the
            head it starts from.
        anchors: Most blocks of a text in a step, at places drawn anew in every epoch.
        loss_vocab: Tokens over which a step computes its loss: half of them the likeliest by the target, half drawn
            from the others, which they stand for. 0: the whole vocabulary, as published; validation always takes that,
            and heads with a reduced vocabulary theirs.
        decay: A token that stands s places behind a block's first counts exp(-s / decay).
        loss: FILE.py:FUNCTION takes the place of both distances: (draft logits [N, V], target
            probabilities [N, V]) -> losses of N tokens.
    """

    defaults = {"epochs": 10, "lr": 6e-4, "warmup_share": 0.04}

    help_rarely: ClassVar[tuple[str, ...]] = ("vary_block", "mask_token", "decay")

    ce_weight: ClassVar[float] = 0.1
    l1_weight: ClassVar[float] = 0.9
    new: ClassVar[Options] = {"num_layers": 2, "block": 7, "layout": "anchor-first", "markov_rank": 64}
    new |= {"confidence": True}

    layers: tuple[int, ...] = ()
    num_layers: int | None = None
    block: int | None = None
    window: int | None = None
    vary_block: bool = False
    mask_token: int | None = None
    markov_rank: int | None = None
    confidence: bool | None = None
    anchors: int = 512
    loss_vocab: int = 0
    decay: float = 4.0
    loss: str | None = None  # in training the function itself (train/module.py)

    def __post_init__(self) -> None:
        check_ranges(self, block=1 + self.vary_block, anchors=1, markov_rank=0, loss_vocab=0, num_layers=1)
        check_ranges(self, decay=(0.0, math.inf, "()"))
        check_window(self.window, self.block)


@dataclass(frozen=True, kw_only=True)
class DSparkSettings(BlockSettings):
    """Train a DSpark head: a block drafter with a Markov head and a confidence head."""


@dataclass(frozen=True, kw_only=True)
class DFlashSettings(BlockSettings):
    """Train a DFlash head: a block drafter that fills in its slots, without further heads, on the text's tokens."""

    new = BlockSettings.new | {"layout": "fill-in", "markov_rank": 0, "confidence": False}
    ce_weight: ClassVar[float] = 1.0
    l1_weight: ClassVar[float] = 0.0


@dataclass(frozen=True, kw_only=True)
class DFlash2Settings(DFlashSettings):
    """Train a DFlash2 head: DFlash with convolutions over a block's slots, and a selector that chooses each token among
    its slot's likeliest, by the token before.

    Attributes:
        selector_rank: Width of the selector's two tables, of a row for each token. Default: 64, or as the head it
            starts from.
        selector_top_k: Tokens that it chooses among; no other is drafted. Default: 16, or as the head it starts from.
        selector_weight: Loss weight of its cross-entropy with the target's first choice, which takes the last
            candidate's place where it is none.
        conv_kernel: Slots that a convolution reads. Default: 2, or as the head it starts from.
        conv_group: Channels that share a kernel's part that depends on the slot. Default: 16, or as the head it starts
            from.
    """

    new = DFlashSettings.new | {"selector_rank": 64, "selector_top_k": 16}
    new |= {"conv_kernel": 2, "conv_group": 16}
    help_rarely: ClassVar[tuple[str, ...]] = (*BlockSettings.help_rarely, "markov_rank", "conv_kernel", "conv_group")

    selector_rank: int | None = None
    selector_top_k: int | None = None
    selector_weight: float = 1.0
    conv_kernel: int | None = None
    conv_group: int | None = None
    ce_weight: ClassVar[float] = 0.1
    l1_weight: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, selector_rank=1, selector_top_k=1, selector_weight=0.0, conv_kernel=1, conv_group=1)


@dataclass(frozen=True)
class Kind:
    """A trained drafter: `module:class` of its head in this package, the class of its options, and its line of help."""

    head: str
    settings: type[HeadSettings]
    help: str


HEADS = {
    "dflash": Kind(
        "block.head:DFlashHead",
        DFlashSettings,
        "DFlash: drafts a whole block in one pass, each token from its slot (Chen et al. 2026).",
    ),
    "dflash2": Kind(
        "block.head:DFlash2Head",
        DFlash2Settings,
        "DFlash2: drafts a block in one pass, its tokens chosen in order among the likeliest (z-lab/dflash 2026).",
    ),
    "draft": Kind(
        "draft_model:DraftModelHead",
        DraftModelSettings,
        "Draft model: some of the target's layers, distilled on its answers (DistillSpec, Zhou et al. 2023).",
    ),
    "dspark": Kind(
        "block.head:DSparkHead",
        DSparkSettings,
        "DSpark: drafts a block in one pass, its tokens in order, with a confidence head (deepseek-ai/DeepSpec 2026).",
    ),
    "eagle": Kind(
        "eagle:EagleHead",
        EagleSettings,
        "EAGLE head: drafts from the target's own features (Li et al. 2024, both papers).",
    ),
    "eagle3": Kind(
        "eagle3:Eagle3Head",
        Eagle3Settings,
        "EAGLE-3: drafts from several layers of the target, trained on its own states (Li et al. 2025).",
    ),
    "mtp": Kind(
        "mtp:MtpHead",
        MtpSettings,
        "MTP: the multi-token-prediction layer that ships with the target (DeepSeek-V3; Qwen3-Next).",
    ),
}
