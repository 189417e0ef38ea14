"""`draftsmith eval calibration`: are acceptance probabilities right, and do they say more than the draft's own q?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.heads.draft_settings import DraftSettings
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import load_models, warn_about_sampling
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence, read_prompts
from draftsmith.eval.replay.record import Recording
from draftsmith.eval.replay.rollouts import ChainRollouts
from draftsmith.eval.settings import Decoding
from draftsmith.eval.studies.calibration.figures import OVERALL, calibration_figures, summary_of
from draftsmith.eval.studies.keeping import keep
from draftsmith.eval.studies.policies.predictors import HEAD, judge, predictions
from draftsmith.eval.studies.recording import recorded_chains
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters.methods import Models, parse_methods
from draftsmith.modules.types import InputError, SamplingParams, at_least

# What --quick makes of the settings.
QUICK: dict[str, Any] = {"limit": 14, "fit_limit": 10, "depth": 6, "max_new_tokens": 96}


@dataclass(frozen=True)
class CalibrationConfig(DraftSettings, Decoding):
    """Judges an acceptance head's probabilities, raw, corrected and calibrated, beside the draft's confidence, on the
    tokens of real rounds down to and with the first rejected one.

    Attributes:
        target: model directory, hub id or embedded:target.
        draft: the draft model, or with another drafter its head.
        acceptance: acceptance head directory, for this drafter.
        prompts: chats with the two splits below, or a file whose prompts serve as both when neither is named.
        drafter: draft for a draft model, or the kind of a trained drafter.
        split: prompts that are reported.
        fit_split: prompts that the logistic fits of entropy and of q(y) are made on.
        keep_tasks: keep prompts whose own task is one of these, separated by commas.
        limit: report on the first so many prompts; 0 takes all.
        fit_limit: fit on the first so many prompts; 0 takes all.
        temperatures: of target and draft; 0 is greedy. A head warns at temperatures other than that of its labels.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens of this mass; 1 keeps all.
        depth: drafted tokens of a round.
        max_new_tokens: longest answer.
        quick: fewer prompts, shorter answers and drafts, instead of what is set here.
        seed: of sampling.
        output: directory of the rollouts and of results.json.
    """

    target: str
    acceptance: str
    prompts: str
    drafter: str = "draft"
    split: str | None = "test"
    fit_split: str | None = "dev"
    keep_tasks: str | None = None
    limit: int = 60
    fit_limit: int = 30
    temperatures: tuple[float, ...] = (0.0, 1.0)
    top_k: int = 0
    top_p: float = 1.0
    depth: int = 10
    max_new_tokens: int = 256
    quick: bool = False
    seed: int = 0
    output: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperatures:
            raise InputError("temperatures", "nothing", "one or more", "Name some.")
        for name in ("limit", "fit_limit"):
            at_least(name, getattr(self, name), 0)
        for name in ("depth", "max_new_tokens"):
            at_least(name, getattr(self, name), 1)
        for temperature in self.temperatures:
            _ = self.sampling(temperature)

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature, self.top_k, self.top_p)


@sole_writer()
def run(config: CalibrationConfig) -> Path:
    """Record rollouts at every temperature, judge them, write output/results.json. Run again, it goes on from the
    rollouts that are there."""
    if config.quick:
        config = dataclasses.replace(config, **QUICK)
    torch.set_num_threads(1)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    to_fit = read_prompts(config.prompts, config.target, config.fit_split, config.keep_tasks, config.fit_limit)
    models = load(config, [*prompts, *to_fit])
    said = {}
    for temperature in config.temperatures:
        name = f"T={temperature:g}"
        fit, judged = (
            judge(rollouts_of(config, models, own, temperature, f"{name}-{use}"))
            for own, use in ((to_fit, "fit"), (prompts, "reported"))
        )
        said[name] = judged, predictions(judged, fit, head_of(models))
    keep("calibration", config, models, prompts, calibration_figures(said), summary_of(said), [OVERALL])
    return config.output


def load(config: CalibrationConfig, prompts: Sequence[BenchPrompt]) -> Models:
    """The pair and the head. It warns of every temperature that the head's labels were not made at.

    Raises:
        InputError: a missing or unfitting model or head, or a prompt that does not fit.
    """
    target = load_lm(config.target, **config.loading)
    longest = longest_sequence(prompts, config.max_new_tokens, target.info.max_position)
    named = parse_methods(f"specdec++:drafter={config.drafter}")
    first, *others = config.temperatures
    models = load_models(named, config.paths, longest, config.sampling(first), target, **config.loading)
    for temperature in others:
        warn_about_sampling(config.acceptance, config.sampling(temperature))
    return models


def head_of(models: Models) -> AcceptanceHead:
    assert isinstance(models.acceptance, AcceptanceHead)
    return models.acceptance


def rollouts_of(
    config: CalibrationConfig, models: Models, prompts: Sequence[BenchPrompt], temperature: float, name: str
) -> ChainRollouts:
    """Recorded in output/rollouts/NAME, or read from there."""
    how = Recording(
        config.sampling(temperature), config.depth, config.max_new_tokens, config.seed, models.target.info.eos_ids
    )
    heads = {HEAD: head_of(models)}
    return recorded_chains(config.output / "rollouts" / name, models, config.drafter, prompts, how, heads)
