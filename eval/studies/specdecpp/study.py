"""SpecDec++'s experiments on one pair of models (Huang et al. 2024): settings, rollouts, choice, results. The heads are
trained by the command, launch/specdecpp.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.settings import Sampling
from draftsmith.data.store.manifest import volatile
from draftsmith.data.text.sources import named_split
from draftsmith.eval.bench.load import warn_about_sampling
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.replay.record import Recording
from draftsmith.eval.replay.rollouts import ChainRollouts
from draftsmith.eval.settings import Decoding
from draftsmith.eval.studies.common import head_directories, load_heads, load_study_models, recorded_chains
from draftsmith.eval.studies.forward_times import ForwardTimes
from draftsmith.eval.studies.specdecpp.sweep import (
    PUBLISHED_H,
    LengthRule,
    Setting,
    published_head,
    rejection_bound,
    replayed,
    rules,
)
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.trace import DecodeTrace, pool
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.types import InputError, at_least, between

# What --quick makes of the settings: fewer heads, prompts and tokens.
QUICK: dict[str, Any] = {
    "depths": (0, 3),
    "weights": (1.0, 6.0),
    "train_prompts": 56,
    "label_prompts": 21,
    "dev_prompts": 7,
    "test_prompts": 7,
    "epochs": 2,
    "batch_size": 4,
    "lr": 3e-3,
    "max_new_tokens": 64,
    "max_drafted": 14,
}


@dataclass(frozen=True)
class SpecDecPPConfig(Sampling, Decoding):
    """Trains acceptance heads of several depths and loss weights, and measures what SpecDec++ gains by them: the
    paper's sweep, Pareto fronts, KL table, cost model and throughput. Run again, it goes on from what is there.

    Attributes:
        target: model directory, hub id or embedded:target.
        draft: the draft model.
        prompts: chats with splits for training, choosing and reporting: a JSONL, JSON or Parquet file, a data set, or
            embedded:prompts.
        heads: folder of acceptance heads to use instead of training some; their labels' temperature should be this one.
        keep_tasks: keep prompts whose own task is one of these, separated by commas.
        train_split: prompts that heads are trained on.
        dev_split: prompts that settings are chosen on, and whose labels the eval KL is of.
        split: prompts that are reported.
        temperature: of target and draft; 0 is greedy. The paper samples at 1.
        depths: residual blocks of the heads, D in the paper.
        weights: loss weights of rejected tokens, w_rej in the paper.
        ks: fixed draft lengths.
        thresholds: values of h.
        min_drafted: shortest draft under a threshold.
        max_drafted: longest draft under a threshold.
        train_prompts: prompts to train on; 0 takes all.
        label_prompts: dev prompts whose labels the heads are compared on.
        dev_prompts: dev prompts to choose settings on.
        test_prompts: prompts to report.
        epochs: passes over the training labels.
        batch_size: answers in one step of training.
        lr: peak learning rate; for a draft of 4096 units the paper's is 5e-5.
        max_new_tokens: longest answer.
        repeats: timed runs of every method on every prompt; the median counts.
        quick: under two minutes: two depths, two weights, fewer and shorter answers, instead of what is set here.
        num_threads: CPU threads of making data and training; what is timed takes one.
        seed: of sampling, training and the bootstrap.
        output: directory of everything: data, heads, rollouts, bench runs and results.json.
    """

    target: str
    draft: str
    prompts: str
    heads: Path | None = None
    keep_tasks: str | None = None
    train_split: str = "train"
    dev_split: str = "dev"
    split: str = "test"
    temperature: float = dataclasses.field(default=1.0, kw_only=True)
    depths: tuple[int, ...] = (0, 1, 2, 3, 4)
    weights: tuple[float, ...] = (1.0, 3.0, 6.0, 12.0)
    ks: tuple[int, ...] = tuple(range(2, 15))
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    min_drafted: int = 2
    max_drafted: int = 20
    train_prompts: int = 480
    label_prompts: int = 60
    dev_prompts: int = 24
    test_prompts: int = 48
    epochs: int = 4
    batch_size: int = 8
    lr: float = 1e-3
    max_new_tokens: int = 256
    repeats: int = 1
    quick: bool = False
    num_threads: int = volatile(2)
    seed: int = 0
    output: Path = volatile(kw_only=True)

    def __post_init__(self) -> None:
        for name in ("depths", "weights", "ks", "thresholds"):
            if not getattr(self, name):
                raise InputError(name, "nothing", "one value or more", "Name some.")
        for h in self.thresholds:
            between("thresholds", h, 0, 1)
        at_least("depths", min(self.depths), 0)
        at_least("ks", min(self.ks), 1)
        at_least("min_drafted", self.min_drafted, 1)
        at_least("max_drafted", self.max_drafted, self.min_drafted)
        for name in ("label_prompts", "dev_prompts", "test_prompts", "max_new_tokens", "repeats"):
            at_least(name, getattr(self, name), 1)
        at_least("train_prompts", self.train_prompts, 0)
        splits = [named_split(split) for split in (self.train_split, self.dev_split, self.split)]
        if None in splits or len(set(splits)) < len(splits):
            found = f"{self.split}, with dev_split {self.dev_split} and train_split {self.train_split}"
            raise InputError("split", found, "three splits that share no prompts", "Name three.")
        _ = self.sampling

    def sized(self) -> SpecDecPPConfig:
        """The settings, with what --quick changes."""
        return dataclasses.replace(self, **QUICK) if self.quick else self

    @property
    def recorded_depth(self) -> int:
        """Drafted tokens that a rollout needs."""
        return max(self.max_drafted, *self.ks)


@dataclass(frozen=True)
class LoadedStudy:
    """What is loaded: the pair, heads by name with the directory of each, prompts by split (those that `eval bench`
    measures with the same limit)."""

    config: SpecDecPPConfig
    models: Models
    heads: dict[str, AcceptanceHead]
    places: dict[str, Path]
    prompts: dict[str, list[BenchPrompt]]

    def replayed(self, rollouts: ChainRollouts, rule: LengthRule) -> list[DecodeTrace]:
        """What decoding with one rule would have done: a trace an answer."""
        return replayed(rollouts, rule, (self.config.min_drafted, self.config.max_drafted), self.heads)

    def sweep(self, rollouts: ChainRollouts) -> list[Setting]:
        """Every fixed K, and every threshold of every head."""
        found = rules(self.config.ks, self.config.thresholds, self.heads)
        return [Setting(rule, pool(self.replayed(rollouts, rule))) for rule in found]


BEST_K, BEST_T, BEST_HEAD, PUBLISHED, PUBLISHED_CALIBRATED = (
    "best fixed K",
    "best threshold on q",
    "best head and h",
    "published: w_rej 6, D 3, h 0.7",
    "the same head, calibrated, best h",
)
BOUND = "best calibrated head, h by theorem 3.1"


def load_study(config: SpecDecPPConfig, heads: Path) -> LoadedStudy:
    """The pair, the heads in this folder, and the prompts to choose on and to report. One torch thread from here on:
    what follows is timed, or tiny.

    Raises:
        InputError: no head, no prompts, or models that do not fit each other.
    """
    torch.set_num_threads(1)
    limits = {config.dev_split: config.dev_prompts, config.split: config.test_prompts}
    prompts = {
        split: read_prompts(config.prompts, config.target, split, config.keep_tasks, limit)
        for split, limit in limits.items()
    }
    everything = [prompt for own in prompts.values() for prompt in own]
    paths = {"target": config.target, "draft": config.draft}
    models = load_study_models(config, paths, ["spec"], config.sampling, everything)
    assert models.draft is not None
    places = head_directories(heads)
    for place in places.values():
        warn_about_sampling(str(place), config.sampling)
    return LoadedStudy(config, models, load_heads(places, models.draft), places, prompts)


def rollouts_of(study: LoadedStudy, split: str) -> ChainRollouts:
    """Recorded in output/rollouts/SPLIT, or read from there."""
    config = study.config
    models = study.models
    how = Recording(config.sampling, config.recorded_depth, config.max_new_tokens, config.seed, models.ends)
    directory = config.output / "rollouts" / split
    return recorded_chains(directory, models, "draft", study.prompts[split], how, study.heads, "along")


def dev_methods(config: SpecDecPPConfig) -> list[str]:
    """What the times of the cost model are fitted to: fixed lengths over the whole range, and the published rule."""
    ks, count = sorted(config.ks), 3 if config.quick else 5
    spread = sorted({ks[round(i * (len(ks) - 1) / (count - 1))] for i in range(count)})
    timed = [
        *(LengthRule(k=k) for k in spread),
        LengthRule(head="any", h=PUBLISHED_H),
        LengthRule(head="any", h=0.5, calibrated=True),
    ]
    return [rule.method(config.min_drafted, config.max_drafted) for rule in timed]


def choose_fastest(study: LoadedStudy, settings: Sequence[Setting], times: ForwardTimes) -> dict[str, LengthRule]:
    """The fastest settings by the cost model, the first of equals, by what they are called in tables."""

    def fastest(kind: Callable[[LengthRule], object]) -> LengthRule:
        return max((one for one in settings if kind(one.rule)), key=lambda one: times.tokens_per_s(one.totals)).rule

    found = {
        BEST_K: fastest(lambda rule: rule.k),
        BEST_T: fastest(lambda rule: rule.t),
        BEST_HEAD: fastest(lambda rule: rule.head is not None),
    }
    published = published_head(study.heads)
    if published is not None:
        found[PUBLISHED] = LengthRule(head=published, h=PUBLISHED_H)
        found[PUBLISHED_CALIBRATED] = fastest(lambda rule: rule.head == published and rule.calibrated)
    h = theorem_h(times)
    if h is not None:
        found[BOUND] = LengthRule(head=fastest(lambda rule: rule.calibrated).head, h=h, calibrated=True)
    return found


def methods_by_head(chosen: Iterable[LengthRule], config: SpecDecPPConfig) -> dict[str, list[str]]:
    """Head -> methods of the bench run that loads it, those without a head among them; a method is in it once."""
    named = [(rule.head, rule.method(config.min_drafted, config.max_drafted)) for rule in chosen]
    heads = dict.fromkeys(head for head, _ in named if head is not None)
    return {head: list(dict.fromkeys(method for own, method in named if own in (None, head))) for head in heads}


def theorem_h(times: ForwardTimes) -> float | None:
    """`rejection_bound` at these times, with delta = 0; None where it is no threshold: a draft step takes as long as a
    target call, or a regression has lost its way."""
    if not 0 < times.t_draft < times.t_target:
        return None
    h = round(rejection_bound(times.t_draft, times.t_target), 3)
    return h if 0 < h < 1 else None
