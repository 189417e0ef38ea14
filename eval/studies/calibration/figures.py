"""Tables and diagrams of the calibration study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.eval.report.figures import Axis, Chart, Column, Figure, Table, plain
from draftsmith.eval.studies.policies.predictors import (
    CALIBRATED,
    CORRECTED,
    ENTROPY,
    FITTED_ENTROPY,
    FITTED_Q,
    MAX_Q,
    ONLINE,
    RAW,
    WHAT,
    Judged,
    Prediction,
    Q,
    by_value,
    part,
)
from draftsmith.eval.studies.reliability import quality, reliability_bins

OVERALL = "calibration"
Predictions = Mapping[str, Prediction]
Row = dict[str, Any]
# By temperature, as in a panel's title: tokens, and what is said of them.
Said = Mapping[str, tuple[Judged, Predictions]]
DIAGRAMS = {"head": (RAW, CORRECTED, CALIBRATED), "draft": (Q, MAX_Q, FITTED_Q, FITTED_ENTROPY, ONLINE)}
# One of the head's three: they rank alike. The fitted ones rank as what they are fitted to.
RANKED = (CALIBRATED, Q, MAX_Q, ENTROPY, ONLINE)
HAVE_PROB = (RAW, CORRECTED, CALIBRATED, Q, MAX_Q, FITTED_Q, FITTED_ENTROPY, ONLINE)
NUMBERS = (
    Column("tokens", "tokens", ",d"),
    Column("accepted", "accepted", ".1%"),
    Column("auc", "AUC", ".3f"),
    Column("brier", "Brier", ".4f"),
    Column("ece", "ECE", ".4f"),
    Column("kl", "KL (nats)", ".4f"),
)
LABELS = (
    "Labels are min(1, p(y)/q(y)), greedy 1 or 0, of drafted tokens down to and with the first rejected one of rounds "
    "that begin at every position of the target's answers."
)


def calibration_figures(said: Said) -> list[Figure]:
    """All of them. said: by temperature."""
    return [
        overall_table(said),
        *(diagram(said, name, shown) for name, shown in DIAGRAMS.items()),
        *depth_charts(said),
        group_table(said, "depth", "Depth"),
        group_table(said, "task", "Task"),
    ]


def overall_rows(said: Said) -> list[Row]:
    """One row for each temperature and predictor."""
    return [
        {"temperature": temperature, "predictor": name, "what": WHAT[name], **measured(judged, prediction)}
        for temperature, (judged, predictions) in said.items()
        for name, prediction in predictions.items()
    ]


def measured(judged: Judged, prediction: Prediction) -> Row:
    """Numbers of one predictor over these tokens; accepted: their mean label."""
    numbers = quality(prediction.score, prediction.prob, judged.accept_prob)
    return plain({"accepted": float(judged.accept_prob.mean()), **numbers})


def overall_table(said: Said) -> Table:
    columns = [Column("temperature", "temperature"), Column("predictor", "predictor"), *NUMBERS, Column("what", "what")]
    note = (
        LABELS + " Soft labels: a perfect predictor has Brier 0 and KL 0. AUC ranks only: the head's three are one "
        "ranking. What is fitted is fitted on prompts that are not reported; the online fit starts at q's word and "
        "learns from the verdicts of the reported prompts as they come. ECE: 15 bins of equal mass."
    )
    return Table(OVERALL, "Acceptance head beside the draft's own confidence", columns, overall_rows(said), note)


def diagram(said: Said, name: str, shown: Sequence[str]) -> Chart:
    """Reliability: predicted against observed, a panel a temperature."""
    rows = [
        plain({"temperature": temperature, "predictor": predictor, **found})
        for temperature, (judged, predictions) in said.items()
        for predictor in shown
        for found in bins_of(predictions[predictor], judged)
    ]
    who = {"head": "acceptance head", "draft": "draft's confidence"}[name]
    return Chart(
        f"reliability-{name}", f"Reliability of the {who}", "line", rows,
        Axis("predicted", "predicted probability of acceptance", ".2f", zero=True),
        Axis("observed", "accepted", ".2f", zero=True),
        series="predictor", facet="temperature", size="count", diagonal=True,
        note="On the diagonal what is predicted is what happens; below it the predictor promises too much. 15 bins of "
        "equal mass.",
    )  # fmt: skip


def bins_of(prediction: Prediction, judged: Judged) -> list[dict[str, float]]:
    assert prediction.prob is not None, "a score has no diagram"
    return reliability_bins(prediction.prob, judged.accept_prob)


def group_rows(said: Said, key: str, shown: Sequence[str]) -> list[Row]:
    """One row for each temperature, value of `key` (depth or task) and predictor."""
    return [
        {"temperature": temperature, key: value, "predictor": name, **measured_part(judged, predictions[name], mask)}
        for temperature, (judged, predictions) in said.items()
        for value, mask in by_value(getattr(judged, key)).items()
        for name in shown
    ]


def measured_part(judged: Judged, prediction: Prediction, mask: Any) -> Row:
    """As `measured`, of the tokens in the mask [N]."""
    own, label = part(prediction, mask), part(Prediction(judged.accept_prob, None), mask).score
    return plain({"accepted": float(label.mean()), **quality(own.score, own.prob, label)})


def depth_charts(said: Said) -> list[Chart]:
    """AUC and ECE by place in the draft."""
    axis = Axis("depth", "place in the draft", "d")
    note = "Later places are reached only when all before were accepted: their tokens are a selection."
    return [
        Chart(
            f"{key}-by-depth", f"{key.upper()} by place in the draft", "line", group_rows(said, "depth", shown), axis,
            Axis(key, key.upper(), ".3f"), series="predictor", facet="temperature",
            hover=("tokens", "accepted"), note=note,
        )
        for key, shown in (("auc", RANKED), ("ece", HAVE_PROB))
    ]  # fmt: skip


def group_table(said: Said, key: str, title: str) -> Table:
    """Brier, ECE, AUC by depth or task, of the calibrated head and the fairest baselines."""
    columns = [Column("temperature", "temperature"), Column(key, key), Column("predictor", "predictor"), *NUMBERS]
    rows = group_rows(said, key, (CALIBRATED, Q, FITTED_Q, ONLINE))
    return Table(f"calibration-by-{key}", f"{title} by {title.lower()}", columns, rows, LABELS)


def summary_of(said: Said) -> dict[str, Any]:
    """Flat numbers: `TEMPERATURE, PREDICTOR: auc` and so on."""
    return {
        f"{row['temperature']}, {row['predictor']}: {key}": row[key]
        for row in overall_rows(said)
        for key in ("auc", "brier", "ece", "kl")
    }
