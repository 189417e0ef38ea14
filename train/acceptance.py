"""`draftsmith train acceptance`: a head that predicts whether the target will keep a drafted token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.batched import set_threads
from draftsmith.data.datasets import AcceptanceDataset, collate_acceptance
from draftsmith.data.heads import starting_head, starting_settings, starting_weights
from draftsmith.data.manifest import volatile
from draftsmith.data.models import load_lm
from draftsmith.modules.heads.acceptance import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.strategies import local_device, model_dtype

# SpecDec++ section 4.
NUM_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class TrainAcceptanceConfig(TrainConfig):
    """Train an acceptance head (SpecDec++) on an acceptance artefact. The defaults are the paper's, for 7B drafts;
    a 128-wide draft wants lr 1e-3.

    Attributes:
        draft: The draft model, frozen: the one the labels were made with.
        init: Head directory to go on from, in the place of random weights: to fine-tune a head, also one that was
            imported or made for another draft of this width. num_blocks and tied are then the head's; the loss weights
            are those given here.
        num_blocks: Residual blocks of the head, 0 for a linear one; by default 3, or those of init.
        w_acc: Loss weight of accepted tokens.
        w_rej: Loss weight of rejected tokens.
        tied: Apply one block num_blocks times, as the paper's published code does; by default off, or as in init.
        mix: Probability that the draft reads the target's token instead of its own.
        platt: Fit scale and shift of the calibrated logit on the validation tokens; decoding by threshold on the raw
            output does not use them.
    """

    draft: str
    init: Path | None = volatile(None)
    num_blocks: int | None = None
    w_acc: float = 1.0
    w_rej: float = 6.0
    tied: bool | None = None
    mix: float = 0.15
    platt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.w_acc > 0 and self.w_rej > 0):
            raise InputError("w_acc, w_rej", f"{self.w_acc}, {self.w_rej}", "positive weights", "Change them.")
        if not 0 <= self.mix < 1:
            raise InputError("mix", self.mix, "a probability below 1", "With 1 no drafted token would be left.")
        if self.num_blocks is not None and self.num_blocks < 0:
            raise InputError("num_blocks", self.num_blocks, "0 (a linear head) or more", "Change it.")


def run(config: TrainAcceptanceConfig) -> Path:
    """Train the head; returns its directory, output/best.

    Raises:
        InputError: the artefact was made with another draft, is damaged or empty, or the output is taken.
    """
    # Lightning takes seconds to import, and --help needs none of it.
    from draftsmith.train.fit import finished, fit
    from draftsmith.train.planning.plan import announce

    set_threads(config.num_threads)
    done = finished(config)
    if done is not None:
        return done
    announce(config)
    return fit(*prepare(config))


def prepare(config: TrainAcceptanceConfig) -> tuple[Any, ...]:
    """What `fit` is given: the models and data of a training that has not begun.

    Raises:
        InputError: as `run`.
    """
    from draftsmith.train.data_module import HeadDataModule
    from draftsmith.train.fit import Provenance, digests, split
    from draftsmith.train.lit_acceptance import LitAcceptance

    draft = load_lm(config.draft, model_dtype(config), local_device(config), config.engine, config.trust_remote_code)
    identity = {"draft": draft.info.identity}
    train = AcceptanceDataset(config.data, config.mix, config.seed, identity)
    val = AcceptanceDataset(config.val, config.mix, config.seed, identity) if config.val is not None else None
    manifest = train.manifest
    if val is not None and val.manifest.sampling != manifest.sampling:
        expected = f"labels made with {manifest.sampling}"
        raise InputError("val", val.manifest.sampling, expected, "Make both with one sampling.")
    train_samples, val_samples = split(config, train, val, draft.info.max_position)
    data = HeadDataModule(train_samples, val_samples, collate_acceptance, num_loss_tokens, config)
    greedy = (manifest.sampling or {}).get("temperature") == 0
    head = make_head(config, draft.info.hidden_size)
    module = LitAcceptance(head, draft, config, data.total_steps, platt=config.platt, greedy=greedy)
    inputs = digests(train, val)
    if config.init is not None:
        inputs |= starting_weights(config.init)
    provenance = Provenance("acceptance", inputs, draft.info.identity, manifest.identity, manifest.sampling)
    return module, data, config, provenance


def acceptance_settings(config: TrainAcceptanceConfig, hidden_size: int) -> AcceptanceHeadConfig:
    """Settings of the head to train: its blocks from --init where there is one, and uncalibrated.

    Raises:
        InputError: --init is no acceptance head, or a flag asks for other blocks than it has.
    """
    blocks: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "tied": False}
    given = {name: getattr(config, name) for name in blocks if getattr(config, name) is not None}
    if config.init is not None:
        settings = starting_settings(config.init, "acceptance", hidden_size)
        blocks = {name: getattr(settings, name) for name in blocks}
        differing = [name for name, value in given.items() if blocks[name] != value]
        if differing:
            found = ", ".join(f"{name} {given[name]}" for name in differing)
            expected = ", ".join(f"{name} {blocks[name]}" for name in differing)
            remedy = "Leave the setting out, or train without --init."
            raise InputError("init", f"{found} asked of {config.init}", f"{expected}, as that head has", remedy)
    return AcceptanceHeadConfig(hidden_size, w_acc=config.w_acc, w_rej=config.w_rej, **{**blocks, **given})


def make_head(config: TrainAcceptanceConfig, hidden_size: int) -> AcceptanceHead:
    """The head before the first step: that of --init, or weights that depend on the seed alone; torch's global
    generator is left as it was.

    Raises:
        InputError: --init is no acceptance head, of another width, or contradicts a flag.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        settings = acceptance_settings(config, hidden_size)
        if config.init is None:
            return AcceptanceHead(settings)
        head = starting_head(config.init, "acceptance", hidden_size)
    assert isinstance(head, AcceptanceHead)
    head.config = settings
    return head


def num_loss_tokens(data: Any) -> int:
    """Drafted tokens of a collated batch."""
    return int(data.loss_mask.sum())
