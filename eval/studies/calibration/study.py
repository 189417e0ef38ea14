"""`draftsmith eval calibration`: are acceptance probabilities right, and do they say more than the draft's own q?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.console import Column, Table
from draftsmith.data.settings import DraftSettings
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import warn_about_sampling
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.replay.record import Recording
from draftsmith.eval.report.tables import drawn_data
from draftsmith.eval.settings import Decoding
from draftsmith.eval.studies.common import StudyContext, load_study_models, mode, recorded_chains, write_results
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
    it goes on from the rollouts that are there. It warns of every temperature that the head's labels were not made
    at."""
    if config.quick:
        config = dataclasses.replace(config, **QUICK)
    torch.set_num_threads(1)
    prompts, to_fit = (
        read_prompts(config.prompts, config.target, split, config.keep_tasks, limit)
        for split, limit in ((config.split, config.limit), (config.fit_split, config.fit_limit))
    )
    first, *others = config.temperatures
    methods = [f"specdec++:drafter={config.drafter}"]
    models = load_study_models(config, config.paths, methods, config.sampling(first), [*prompts, *to_fit])
    for temperature in others:
        warn_about_sampling(config.acceptance, config.sampling(temperature))
    head = models.acceptance
    assert isinstance(head, AcceptanceHead)
    found: dict[str, tuple[LabelledTokens, dict[str, Prediction]]] = {}
    for temperature in config.temperatures:
        how = Recording(config.sampling(temperature), config.depth, config.max_new_tokens, config.seed, models.ends)
        fit, tokens = (
            labelled_tokens(recorded_chains(directory, models, config.drafter, own, how, {HEAD: head}))
            for own, use in ((to_fit, "fit"), (prompts, "reported"))
            for directory in [config.output / "rollouts" / f"{mode(temperature)}-{use}"]
        )
        found[mode(temperature)] = tokens, predictions(tokens, fit, head)
    tables, context = tables_of(found), StudyContext(models, prompts)
    return write_results("calibration", config, context, tables, summary_of(tables[0]), [tables[0].name])


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


def tables_of(found: Findings) -> list[Table]:
    """The table of all tokens first; diagrams, and tables by place in the draft and by task."""

    def by(key: str, shown: Sequence[str]) -> list[dict[str, Any]]:
        return [{"temperature": at, **row} for at, own in found.items() for row in quality_by(*own, key, shown)]

    overall = [
        {"temperature": at, **row, "what": WHAT[row["predictor"]]}
        for at, own in found.items()
        for row in quality_rows(*own)
    ]
    temperature, predictor = Column("temperature", "temperature"), Column("predictor", "predictor")
    note = (
        LABELS + " AUC ranks only: the head's three are one ranking. What is fitted is fitted on prompts that are not "
        "reported; the online fit starts at q's word and learns from the verdicts of the reported prompts as they come."
    )
    title = "Acceptance head beside the draft's own confidence"
    columns = [temperature, predictor, *QUALITY, Column("what", "what")]
    tables = [Table("calibration", title, columns, overall, note)]
    for name, shown in DIAGRAMS.items():
        rows = [{"temperature": at, **row} for at, own in found.items() for row in reliability_rows(*own, shown)]
        tables.append(drawn_data(f"reliability-{name}", rows))
    tables += [drawn_data(f"{key}-by-depth", by("depth", shown)) for key, shown in BY_DEPTH.items()]
    for key in ("depth", "task"):
        columns = [temperature, Column(key, key), predictor, *QUALITY]
        rows = by(key, (CALIBRATED, Q, FITTED_Q, ONLINE))
        tables.append(Table(f"calibration-by-{key}", f"{key.title()} by {key}", columns, rows, LABELS))
    return tables


def summary_of(overall: Table) -> dict[str, Any]:
    """Flat numbers: `TEMPERATURE, PREDICTOR: auc` and so on."""
    return {
        f"{row['temperature']}, {row['predictor']}: {key}": row[key]
        for row in overall.rows
        for key in ("auc", "brier", "ece", "kl")
    }
