"""`draftsmith eval calibration`: are acceptance probabilities right, and do they say more than the draft's own q?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.heads.draft_settings import DraftSettings
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import warn_about_sampling
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.replay.record import Recording
from draftsmith.eval.report.tables import Column, Table, drawn_data
from draftsmith.eval.settings import Decoding
from draftsmith.eval.studies.common import StudyContext, load_study_models, recorded_chains, write_results
from draftsmith.eval.studies.predictors import (
    ENTROPY,
    LABELS,
    MAX_Q,
    QUALITY,
    LabelledTokens,
    Prediction,
    Q,
    confidences,
    labelled_tokens,
    online_probs,
    probabilities_of,
    quality_by,
    quality_rows,
    reliability_rows,
)
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.confidence import log_odds_of
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.metrics import fit_platt
from draftsmith.modules.types import InputError, SamplingParams, at_least

HEAD = "head"  # its label in rollouts
RAW, CORRECTED, CALIBRATED = "head, raw", "head, corrected", "head, calibrated"
FITTED_Q, FITTED_ENTROPY, ONLINE = "q(y), fitted", "entropy, fitted", "online logistic"
WHAT = {
    RAW: "the head's output, as SpecDec++'s threshold reads it",
    CORRECTED: "log(w_rej/w_acc) added to its logit",
    CALIBRATED: "and the scale and shift that training fitted on held-out labels",
    Q: "the draft's probability of the token",
    MAX_Q: "the draft's probability of its best token",
    ENTROPY: "entropy of the draft's distribution, negated: a score without a probability",
    FITTED_Q: "logistic fit to logit q(y) on the fit prompts",
    FITTED_ENTROPY: "logistic fit to the entropy on the fit prompts",
    ONLINE: "logistic fit to logit max q, learned while decoding: no training",
}
# What diagrams show. Of the head's three one is ranked: they rank alike. Fitted ones rank as what they are fitted to.
DIAGRAMS = {"head": (RAW, CORRECTED, CALIBRATED), "draft": (Q, MAX_Q, FITTED_Q, FITTED_ENTROPY, ONLINE)}
BY_DEPTH = {"auc": (CALIBRATED, Q, MAX_Q, ENTROPY, ONLINE), "ece": (*DIAGRAMS["head"], *DIAGRAMS["draft"])}
# Mode, as tables name it -> reported tokens, and what every predictor says of them.
Findings = Mapping[str, tuple[LabelledTokens, Mapping[str, Prediction]]]
# What --quick makes of the settings.
QUICK: dict[str, Any] = {"limit": 14, "fit_limit": 10, "depth": 6, "max_new_tokens": 96}


@dataclass(frozen=True)
class CalibrationConfig(DraftSettings, Decoding):
    """Holds an acceptance head's probabilities, raw, corrected and calibrated, against the draft's confidence, on the
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
    """Record rollouts at every temperature, look at what predictors say of them, write output/results.json. Run again,
    it goes on from the rollouts that are there."""
    if config.quick:
        config = dataclasses.replace(config, **QUICK)
    torch.set_num_threads(1)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    to_fit = read_prompts(config.prompts, config.target, config.fit_split, config.keep_tasks, config.fit_limit)
    models = load_all(config, [*prompts, *to_fit])
    found: dict[str, tuple[LabelledTokens, dict[str, Prediction]]] = {}
    for temperature in config.temperatures:
        name = f"T={temperature:g}"
        fit, tokens = (
            recorded_tokens(config, models, own, temperature, f"{name}-{use}")
            for own, use in ((to_fit, "fit"), (prompts, "reported"))
        )
        found[name] = tokens, predictions(tokens, fit, head_of(models))
    context = StudyContext(models, prompts)
    return write_results("calibration", config, context, tables_of(found), summary_of(found), ["calibration"])


def load_all(config: CalibrationConfig, prompts: Sequence[BenchPrompt]) -> Models:
    """The pair and the head. It warns of every temperature that the head's labels were not made at."""
    first, *others = config.temperatures
    models = load_study_models(
        config, config.paths, [f"specdec++:drafter={config.drafter}"], config.sampling(first), prompts
    )
    for temperature in others:
        warn_about_sampling(config.acceptance, config.sampling(temperature))
    return models


def head_of(models: Models) -> AcceptanceHead:
    assert isinstance(models.acceptance, AcceptanceHead)
    return models.acceptance


def recorded_tokens(
    config: CalibrationConfig, models: Models, prompts: Sequence[BenchPrompt], temperature: float, name: str
) -> LabelledTokens:
    """Tokens of rollouts that are recorded in output/rollouts/NAME, or read from there."""
    how = Recording(config.sampling(temperature), config.depth, config.max_new_tokens, config.seed, models.ends)
    directory = config.output / "rollouts" / name
    return labelled_tokens(recorded_chains(directory, models, config.drafter, prompts, how, {HEAD: head_of(models)}))


def predictions(tokens: LabelledTokens, fit: LabelledTokens, head: AcceptanceHead) -> dict[str, Prediction]:
    """Name -> what each predictor says of `tokens`; logistic fits are made on `fit`."""
    raw = tokens.of(tokens.rollouts.heads[HEAD])
    logits = {RAW: raw, CORRECTED: head.corrected(raw), CALIBRATED: head.calibrated(raw)}
    found = {name: Prediction(logit, torch.sigmoid(logit)) for name, logit in logits.items()}
    own, others = confidences(tokens), confidences(fit)
    found |= own
    for name, score, other in (
        (FITTED_Q, log_odds_of(own[Q].score), log_odds_of(others[Q].score)),
        (FITTED_ENTROPY, own[ENTROPY].score, others[ENTROPY].score),
    ):
        scale, bias = fit_platt(other, fit.accept_prob)
        found[name] = Prediction(score, torch.sigmoid(scale * score + bias))
    found[ONLINE] = probabilities_of(tokens, online_probs(tokens.rollouts))
    return found


def overall_rows(found: Findings) -> list[dict[str, Any]]:
    """One row for each temperature and predictor."""
    return [
        {"temperature": temperature, **row, "what": WHAT[row["predictor"]]}
        for temperature, own in found.items()
        for row in quality_rows(*own)
    ]


def rows_by(found: Findings, key: str, shown: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each temperature, value of `key` (depth or task) and predictor."""
    return [{"temperature": name, **row} for name, own in found.items() for row in quality_by(*own, key, shown)]


def tables_of(found: Findings) -> list[Table]:
    named = (Column("temperature", "temperature"), Column("predictor", "predictor"))
    note = (
        LABELS + " AUC ranks only: the head's three are one ranking. What is fitted is fitted on prompts that are not "
        "reported; the online fit starts at q's word and learns from the verdicts of the reported prompts as they come."
    )
    title, columns = "Acceptance head beside the draft's own confidence", [*named, *QUALITY, Column("what", "what")]
    tables = [Table("calibration", title, columns, overall_rows(found), note)]
    for name, shown in DIAGRAMS.items():
        rows = [{"temperature": mode, **row} for mode, own in found.items() for row in reliability_rows(*own, shown)]
        tables.append(drawn_data(f"reliability-{name}", rows))
    tables += [drawn_data(f"{key}-by-depth", rows_by(found, "depth", shown)) for key, shown in BY_DEPTH.items()]
    for key in ("depth", "task"):
        rows = rows_by(found, key, (CALIBRATED, Q, FITTED_Q, ONLINE))
        columns = [named[0], Column(key, key), named[1], *QUALITY]
        tables.append(Table(f"calibration-by-{key}", f"{key.title()} by {key}", columns, rows, LABELS))
    return tables


def summary_of(found: Findings) -> dict[str, Any]:
    """Flat numbers: `TEMPERATURE, PREDICTOR: auc` and so on."""
    return {
        f"{row['temperature']}, {row['predictor']}: {key}": row[key]
        for row in overall_rows(found)
        for key in ("auc", "brier", "ece", "kl")
    }
