"""`draftsmith train acceptance`: a head that predicts whether the target will keep a drafted token."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from draftsmith.data.heads.directory import (
    FrozenDrafter,
    kind_at,
    load_drafter,
    starting_head,
    starting_settings,
    starting_weights,
)
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.datasets import collate_acceptance, open_dataset
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.manifest import MANIFEST, Manifest, volatile
from draftsmith.data.store.reading import read_object
from draftsmith.modules.acceptance.fitting import begin
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, Feature, State
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.strategies import local_device, model_dtype, world_size

if TYPE_CHECKING:
    from draftsmith.train.data_module import Samples
    from draftsmith.train.drafted_tokens import RolloutDrafts
    from draftsmith.train.stored_tokens import StateReader

# What a head starts with where nothing is said, by the labels it learns from: SpecDec++ section 4; and for labels of
# real rounds what pays more (docs/acceptance.md).
MIXED: dict[str, Any] = {
    "num_blocks": 3,
    "tied": False,
    "state": "after",
    "features": (),
    "width": 0,
    "w_rej": 6.0,
    "mix": 0.15,
}
ROLLOUTS: dict[str, Any] = {
    "num_blocks": 0,
    "tied": False,
    "state": "before",
    "features": ("log_q", "logit_q", "depth", "repeat"),
    "w_rej": 1.0,
}
# What is there before a token is drawn; max q and entropy say most only together.
UNDRAWN: tuple[Feature, ...] = ("logit_max_q", "entropy", "depth", "repeat_mean")
# The width that such a head has where nothing is said and none was tried out.
WIDTH = 128
SWEEP = "sweep.json"
# Of these, what a head to go on from brings along.
SHAPE = ("num_blocks", "tied", "state", "features", "width")
Labels = Literal["acceptance", "rollouts"]


@dataclass(frozen=True, kw_only=True)
class TrainAcceptanceConfig(TrainConfig):
    """Train an acceptance head on the labels of `data acceptance`. On those of mixed text (--labels mix) it is
    SpecDec++'s, with the paper's settings for 7B drafts. On those of real rounds (--labels rollout) it reads the state
    before the token, the token and the draft's confidence: those are made once and kept in memory, so that batches
    are drawn from all answers' tokens (batch_size then counts blocks of 64). Such a head begins as the logistic of its
    features. A 128-wide draft wants lr 1e-3.

    Attributes:
        draft: The draft model, or the trained drafter's head, whose drafts were labelled; frozen.
        target: The target model, for a head: it gives what the head reads.
        init: Head directory to go on from, in the place of random weights: to fine-tune a head, also one that was
            imported or made for another draft of this width. Its blocks and inputs are then the head's; the loss
            weights are those given here.
        num_blocks: Residual blocks of the head. Default: 3, for rollouts 0, or those of init.
        tied: Apply one block num_blocks times, as the paper's published code does. Default: off, or as in init.
        state: What the head reads of the drafter: after, its hidden state once it has read the token (SpecDec++); or
            before, the state that predicted it, and the token's embedding; or undrawn, that state without the token,
            for servers that drop tokens once they are drawn: it learns the overlap of p and q, the probability that
            whatever is drawn there is accepted. Default: after, for rollouts before.
        features: Numbers of the draft's distribution that it reads too, and how the token goes on with a repetition of
            the text; [] for none. Default: none, for rollouts log_q, logit_q, depth and repeat (undrawn: logit_max_q,
            entropy, depth and repeat_mean), and temperature where labels have several.
        width: Of the hidden layers, 0 for that of the drafter. Default: 0, for rollouts what the sweep finds, or 128.
        sweep: Rollouts: where one process trains a new head, and neither width nor max_steps is given, heads of three
            widths are trained for few and for more epochs first, and the width and epochs with the lowest held-out KL
            are taken.
        w_acc: Loss weight of accepted tokens.
        w_rej: Loss weight of rejected tokens. Default: 6, for rollouts 1.
        mix: Labels of mixed text: probability that the draft reads the target's token instead of its own. Default 0.15.
        calibrate: Fit the output to the validation tokens: scale and shift of the logit (platt), or not at all.
            Decoding by threshold on the raw output does not use it.
    """

    draft: str | None = None
    target: str | None = None
    init: Path | None = volatile(None)
    num_blocks: int | None = None
    tied: bool | None = None
    state: State | None = None
    features: tuple[Feature, ...] | None = None
    width: int | None = None
    sweep: bool = True
    w_acc: float = 1.0
    w_rej: float | None = None
    mix: float | None = None
    calibrate: Literal["platt", "none"] = "platt"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.w_acc > 0 and (self.w_rej is None or self.w_rej > 0)):
            raise InputError("w_acc, w_rej", f"{self.w_acc}, {self.w_rej}", "positive weights", "Change them.")
        if self.mix is not None and not 0 <= self.mix < 1:
            raise InputError("mix", self.mix, "a probability below 1", "With 1 no drafted token would be left.")
        self.check_least(0, "num_blocks", "width")
        if self.features is not None and len(set(self.features)) != len(self.features):
            raise InputError("features", ", ".join(self.features), "each once", "Leave one out.")

    @property
    def sweeps(self) -> bool:
        """Of rollouts: whether a size is to be tried out. One process decides it, so that all have the same."""
        free = self.width is None and self.max_steps == 0 and self.init is None
        return self.sweep and free and world_size(self) == 1

    @property
    def drafter(self) -> str:
        """Path of what drafts: a language model, or a head.

        Raises:
            InputError: there is none.
        """
        if self.draft is None:
            raise InputError("draft", "none", "one drafter", "Pass --draft, and for a head its --target.")
        return str(self.draft)

    @property
    def read_model(self) -> str:
        """Path of the language model that has to be there: the draft, or the model that a head drafts for.

        Raises:
            InputError: no drafter, or a head without its target.
        """
        drafter = self.drafter
        if kind_at(drafter) is None:
            return drafter
        if self.target is None:
            raise InputError("target", "none", f"the model that {drafter} drafts for", "Pass --target.")
        return self.target


def labels_of(config: TrainAcceptanceConfig) -> tuple[Labels, Manifest | None]:
    """What it is trained on, and its manifest; where there is no such artefact yet, what the settings ask for."""
    manifest = Manifest.read(config.data) if (config.data / MANIFEST).exists() else None
    if manifest is not None:
        return ("rollouts" if manifest.kind == "rollouts" else "acceptance"), manifest
    by_head = config.read_model != config.drafter
    asked = by_head or config.state not in (None, "after") or config.features
    return ("rollouts" if asked else "acceptance"), None


def filled(config: TrainAcceptanceConfig) -> TrainAcceptanceConfig:
    """The settings with the defaults that depend on the labels, and with the shape of the head to go on from.

    Raises:
        InputError: a setting that has no meaning for these labels, not exactly one drafter, or no head to go on from.
    """
    _ = config.read_model
    labels, manifest = labels_of(config)
    if labels == "rollouts" and config.mix is not None:
        raise InputError("mix", config.mix, "labels of mixed text: rounds are not mixed", "Leave it out.")
    if labels == "rollouts" and config.max_length:
        expected = "0: the drafts of a response follow all of it"
        raise InputError("max_length", config.max_length, expected, "Leave it out, or label shorter responses.")
    defaults = dict(ROLLOUTS if labels == "rollouts" else MIXED)
    if config.state == "undrawn":
        defaults["features"] = UNDRAWN
    if labels == "rollouts" and manifest is not None and isinstance(label_temperature(manifest), list):
        defaults["features"] = (*defaults["features"], "temperature")
    if config.init is not None:
        settings = starting_settings(config.init, "acceptance")
        defaults |= {name: getattr(settings, name) for name in SHAPE}
    new = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **new)


def label_temperature(manifest: Manifest) -> Any:
    """A number, or a list of several."""
    return (manifest.sampling or {}).get("temperature")


def prepare(config: TrainAcceptanceConfig) -> tuple[Any, ...]:
    """What `fit` is given: the models and data of a training that has not begun.

    Raises:
        InputError: as `run`.
    """
    from draftsmith.train.acceptance_objective import AcceptanceObjective
    from draftsmith.train.data_module import HeadDataModule, train_and_val
    from draftsmith.train.drafted_tokens import MixedText, RolloutDrafts
    from draftsmith.train.fit import Provenance, digests
    from draftsmith.train.lit_head import LitHead
    from draftsmith.train.stored_tokens import StoredDrafts, collate_stored

    config = filled(config)
    labels, _ = labels_of(config)
    load = functools.partial(
        load_lm,
        dtype=model_dtype(config),
        device=local_device(config),
        engine=config.engine,
        trust_remote_code=config.trust_remote_code,
    )
    drafter = load_drafter(config.drafter, lambda: load(config.read_model), load)
    train = open_labels(config, config.data, labels, drafter)
    val = open_labels(config, config.val, labels, drafter) if config.val is not None else None
    manifest = train.manifest
    if val is not None and val.manifest.sampling != manifest.sampling:
        expected = f"labels made with {manifest.sampling}"
        raise InputError("val", val.manifest.sampling, expected, "Make both with one sampling.")
    hidden_size = drafter.lm.info.hidden_size
    head = make_head(config, hidden_size)
    check_labels(head.config, labels, manifest)
    context = drafter.lm.info.max_position
    if labels == "rollouts":  # not to be split: its drafts follow all of a text, and were made within the context
        context = max(int(own.lengths.max(initial=0)) for own in (train, val) if own is not None)
    train_samples, val_samples = train_and_val(config, train, val, context)
    greedy = label_temperature(manifest) == 0
    collate: Any = collate_acceptance
    reader: StateReader = MixedText(drafter, greedy)
    if labels == "rollouts":
        drafts = RolloutDrafts(drafter, head.config, int(manifest.config["depth"]))
        config, head, train_samples, val_samples = stored_rounds(config, head, drafts, train_samples, val_samples)
        collate, reader = collate_stored, StoredDrafts(drafts)
    data = HeadDataModule(train_samples, val_samples, collate, num_loss_tokens, config)
    module = LitHead(head, AcceptanceObjective(reader, config.calibrate), config, data.total_steps)
    inputs = digests(train, val) | (starting_weights(config.init) if config.init is not None else {})
    made = {"labels": "rollout" if labels == "rollouts" else "mix", "mode": "greedy" if greedy else "sampling"}
    made |= {"drafter": drafter.name}
    provenance = Provenance("acceptance", inputs, drafter.identity, manifest.identity, manifest.sampling, made)
    return module, data, config, provenance


def stored_rounds(
    config: TrainAcceptanceConfig, head: AcceptanceHead, drafts: RolloutDrafts, train: Samples, val: Samples
) -> tuple[TrainAcceptanceConfig, AcceptanceHead, Samples, Samples]:
    """The tokens of labelled answers with the states that a head reads, as samples of a training; and the head where it
    begins, of the size that was found best if none was asked for, with the settings that say so."""
    from draftsmith.train.acceptance_start import batches, tried_sizes
    from draftsmith.train.data_module import Samples
    from draftsmith.train.metrics import say_on_rank_zero
    from draftsmith.train.stored_tokens import StoredDataset, StoredDrafts, stored

    tokens = {name: stored(samples, drafts, name) for name, samples in (("train", train), ("val", val))}
    size = sum(part.size for part in tokens.values())
    counts = " and ".join(f"{len(part.ids):,} to {name}" for name, part in tokens.items())
    say_on_rank_zero(f"drafted tokens: {counts}; {size / 2**20:,.0f} MiB in memory")
    reader = StoredDrafts(drafts)
    if config.init is None:
        hidden_size = head.config.hidden_size
        if config.sweeps:
            tried = tried_sizes(
                lambda width: make_head(dataclasses.replace(config, width=width), hidden_size),
                tokens["train"], tokens["val"], reader, config,
            )  # fmt: skip
            make_directory(config.output)
            write_json(config.output / SWEEP, {"tried": [dataclasses.asdict(size) for size in tried]})
            config = with_size(config)
            head = make_head(config, hidden_size)
        begin(head, batches(tokens["train"], reader))
    blocks = StoredDataset(tokens["train"], train, config.seed)
    answers = StoredDataset(tokens["val"], val, None)
    return config, head, Samples(blocks, range(len(blocks.lengths))), Samples(answers, range(len(answers.lengths)))


def with_size(config: TrainAcceptanceConfig) -> TrainAcceptanceConfig:
    """The settings with the size that was found best, where one was tried out in this output."""
    if not (config.sweeps and (config.output / SWEEP).exists()):
        return config
    best = read_object(config.output / SWEEP, {"tried": list}, "Delete it: sizes are tried again.")["tried"][0]
    return dataclasses.replace(config, width=best["width"], epochs=best["epochs"])


def open_labels(config: TrainAcceptanceConfig, path: Path, labels: Labels, drafter: FrozenDrafter) -> Any:
    """A data set of labels that this drafter was given."""
    identity, vocab_size = {"draft": drafter.identity}, drafter.lm.info.vocab_size
    mix = 0.0 if config.mix is None else config.mix  # of rollouts nothing is mixed
    return open_dataset(path, labels, identity, vocab_size=vocab_size, mix=mix, seed=config.seed)


def check_labels(head: AcceptanceHeadConfig, labels: Labels, manifest: Manifest) -> None:
    """Raises InputError where the labels lack what the head is to read."""
    if labels == "acceptance" and not head.as_published:
        found = f"{manifest.kind} labels of mixed text, for a head that reads more than the state after the token"
        raise InputError(
            "data", found, "labels of real rounds", "Make them: draftsmith data acceptance --labels rollout"
        )


def acceptance_settings(config: TrainAcceptanceConfig, hidden_size: int) -> AcceptanceHeadConfig:
    """Settings of the head to train: its shape from --init where there is one, and uncalibrated.

    Raises:
        InputError: --init is no acceptance head, or a flag asks for another shape than it has.
    """
    config = filled(config)
    shape = {name: getattr(config, name) for name in SHAPE}
    if shape["width"] is None:
        shape["width"] = WIDTH
    # Of real rounds, not after the token: the form that costs a drafted token least (AcceptanceHeadConfig.activation).
    lean = labels_of(config)[0] == "rollouts" and shape["state"] != "after"
    form: dict[str, Any] = {"activation": "relu" if lean else "none", "standardize": lean}
    if config.init is not None:
        settings = starting_settings(config.init, "acceptance", hidden_size)
        form = {name: getattr(settings, name) for name in form}
        differing = [name for name in SHAPE if shape[name] != getattr(settings, name)]
        if differing:
            found = ", ".join(f"{name} {shape[name]}" for name in differing)
            expected = ", ".join(f"{name} {getattr(settings, name)}" for name in differing)
            remedy = "Leave the setting out, or train without --init."
            raise InputError("init", f"{found} asked of {config.init}", f"{expected}, as that head has", remedy)
    assert config.w_rej is not None
    return AcceptanceHeadConfig(hidden_size, w_acc=config.w_acc, w_rej=config.w_rej, **shape, **form)


def make_head(config: TrainAcceptanceConfig, hidden_size: int) -> AcceptanceHead:
    """The head before the first step: that of --init, or weights that depend on the seed alone; torch's global
    generator is left as it was.

    Raises:
        InputError: as of `acceptance_settings`.
    """
    settings = acceptance_settings(config, hidden_size)
    if config.init is not None:
        head = starting_head(config.init, "acceptance", hidden_size)
        assert isinstance(head, AcceptanceHead)
        head.config = settings
        return head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return AcceptanceHead(settings)


def num_loss_tokens(data: Any) -> float:
    """Drafted tokens of a collated batch that count in the loss, by their weights where they have some."""
    mask = data.loss_mask
    weight = getattr(data, "weight", None)
    return int(mask.sum()) if weight is None else float(weight[mask].double().sum())
