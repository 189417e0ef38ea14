"""`draftsmith train acceptance`: train a head that predicts whether the target will accept a drafted token."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from draftsmith.data.store.datasets import collate_acceptance, open_dataset
from draftsmith.data.store.manifest import Manifest, volatile
from draftsmith.data.store.stored_target import load_stored
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, Feature, State
from draftsmith.modules.pretrained.heads import (
    kind_at,
    load_drafter,
    starting_head,
    starting_settings,
    starting_weights,
)
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError
from draftsmith.train.acceptance_fitting import initialize_head
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import say_on_rank_zero
from draftsmith.train.strategies import local_device, model_dtype

if TYPE_CHECKING:
    from draftsmith.train.acceptance_data import RolloutReader
    from draftsmith.train.data_module import Samples
    from draftsmith.train.fit import PreparedTraining

# Defaults for labels of mixed text: SpecDec++, section 4.
MIXED: dict[str, Any] = {
    "num_blocks": 3,
    "tied": False,
    "state": "after",
    "features": (),
    "width": 0,
    "w_rej": 6.0,
    "mix": 0.15,
}
# Defaults for labels of real rounds, chosen by measurement (docs/acceptance.md).
ROLLOUTS: dict[str, Any] = {
    "num_blocks": 0,
    "tied": False,
    "state": "before",
    "features": ("log_q", "logit_q", "depth", "repeat"),
    "width": 128,
    "w_rej": 1.0,
}
# Settings that a head given as --init brings along.
SHAPE = ("num_blocks", "tied", "state", "features", "width")


@dataclass(frozen=True, kw_only=True)
class TrainAcceptanceConfig(TrainConfig):
    """Train an acceptance head on the labels of `data acceptance`. On labels of mixed text (--labels mix) it is
    SpecDec++'s head with the paper's settings for 7B drafts. On labels of real rounds (--labels rollout) it reads the
    state before the token, the token and the draft's confidence, is initialised as the logistic of its features, and
    batch_size counts blocks of 64 tokens. A 128-wide draft wants lr 1e-3.

    Attributes:
        draft: The draft model, or the trained drafter's head, whose drafts were labelled; frozen.
        target: The target model, if the draft is a head: it makes what the head reads.
        target_features: Directory that `data features` wrote of the labelled responses, if the draft is a head: then
            only the target's embeddings are loaded.
        init: Directory of an acceptance head to fine-tune, in place of random weights. It keeps its blocks and inputs;
            the loss weights are those given here.
        num_blocks: Residual blocks of the head. Default: 3, for rollouts 0, or those of init.
        tied: Apply one block num_blocks times, as the paper's published code does. Default: off, or as in init.
        state: Hidden state that the head reads: after the token (SpecDec++); or before it, with the token's embedding.
            Default: after, for rollouts before.
        features: Numbers of the draft's distribution and of repetitions that it reads too; [] for none. Default: none,
            for rollouts log_q, logit_q, depth and repeat, and temperature if the labels have several.
        width: Width of the hidden layers, 0 for the drafter's. Default: 0, for rollouts 128, or as in init.
        w_acc: Loss weight of accepted tokens.
        w_rej: Loss weight of rejected tokens. Default: 6, for rollouts 1.
        mix: Labels of mixed text: probability that the draft reads the target's token instead of its own. Default 0.15.
    """

    draft: str
    target: str | None = None
    target_features: Path | None = volatile(None)
    init: Path | None = volatile(None)
    num_blocks: int | None = None
    tied: bool | None = None
    state: State | None = None
    features: tuple[Feature, ...] | None = None
    width: int | None = None
    w_acc: float = 1.0
    w_rej: float | None = None
    mix: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.w_acc > 0 and (self.w_rej is None or self.w_rej > 0)):
            raise InputError("w_acc, w_rej", f"{self.w_acc}, {self.w_rej}", "positive weights", "Change them.")
        if self.mix is not None and not 0 <= self.mix < 1:
            raise InputError("mix", self.mix, "a probability below 1", "With 1 no drafted token would be left.")
        self.check_least(0, "num_blocks", "width")

    @property
    def read_model(self) -> str:
        """Path of the language model that is needed: the draft, or the model that a head drafts for.

        Raises:
            InputError: a head without its target.
        """
        if kind_at(self.draft) is None:
            return self.draft
        if self.target is None:
            raise InputError("target", "none", f"the model that {self.draft} drafts for", "Pass --target.")
        return self.target


def with_defaults(config: TrainAcceptanceConfig) -> TrainAcceptanceConfig:
    """Fill in the defaults that depend on the labels, and the shape of the head given as --init.

    Raises:
        InputError: an option that has no meaning for these labels, no drafter, or no head of this shape at --init.
    """
    # Check the drafter first: its error is the one to read.
    _ = config.read_model
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


def prepare(config: TrainAcceptanceConfig) -> PreparedTraining:
    """Load the models and data of a training, as arguments of `fit`.

    Raises:
        InputError: as `run`.
    """
    # These load Lightning, which --help does not need.
    from draftsmith.train.acceptance_data import LitAcceptance, MixedText, RolloutReader, collate_stored
    from draftsmith.train.data_module import HeadDataModule, train_and_val
    from draftsmith.train.fit import PreparedTraining, Provenance

    config = with_defaults(config)
    rollouts = Manifest.read(config.data).kind == "rollouts"
    # The drafter, and labels of its drafts.
    load = functools.partial(
        load_lm,
        dtype=model_dtype(config),
        device=local_device(config),
        engine=config.engine,
        trust_remote_code=config.trust_remote_code,
    )

    def target() -> CausalLM:
        if config.target_features is None:
            return load(config.read_model)
        return load_stored(config.read_model, config.target_features, model_dtype(config), local_device(config))

    drafter = load_drafter(config.draft, target, load)

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
    # Batches, and the module that trains on them.
    collate: Any = collate_stored if rollouts else collate_acceptance
    data = HeadDataModule(train_samples, val_samples, collate, num_loss_tokens, config)
    module = LitAcceptance(head, reader, config, data.total_steps)

    # Recorded in the head's manifest, and compared when a run is resumed.
    inputs = {name: part.manifest.digest for name, part in (("data", train), ("val", val)) if part is not None}
    inputs |= starting_weights(config.init) if config.init is not None else {}
    labels = {"labels": "rollout" if rollouts else "mix", "mode": "greedy" if greedy else "sampling"}
    labels |= {"drafter": drafter.name}
    provenance = Provenance("acceptance", inputs, drafter.identity, manifest.identity, manifest.sampling, labels)
    return PreparedTraining(module, data, config, provenance)


def store_rollouts(
    config: TrainAcceptanceConfig, head: AcceptanceHead, reader: RolloutReader, train: Samples, val: Samples
) -> tuple[Samples, Samples]:
    """Read the labelled answers into memory, and initialise a new head as a logistic.

    Returns training and validation samples of stored tokens.
    """
    from draftsmith.train.acceptance_data import StoredDataset
    from draftsmith.train.data_module import Samples

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


def num_loss_tokens(data: Any) -> float:
    """Return the drafted tokens of a collated batch that count in the loss, or the sum of their weights."""
    mask = data.loss_mask
    weight = getattr(data, "weight", None)
    return int(mask.sum()) if weight is None else float(weight[mask].double().sum())
