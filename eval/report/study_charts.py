"""Charts of studies and of tuning: by the kind of a run its title, and by the names of its tables how those are drawn
that only a chart shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from draftsmith.eval.report.drawing import (
    BAR_HEIGHT,
    SQUARE,
    Draw,
    Drawing,
    Rows,
    cell_sizes,
    colour,
    count,
    counted,
    diagonal,
    drawn,
    heatmap,
    interval_marks,
    lines,
    names,
    points,
    tips,
    unexplained,
    x_number,
    y_number,
)
from draftsmith.eval.report.training import DRAWINGS as TRAINING

DISCARDED = x_number("discard_rate", "discarded tokens per token", ".2f", zero=True)
VERIFIED = y_number("verification_rate", "target calls per token", ".2f")
RATES = tips("series", "setting", "head", discard_rate=".2f", verification_rate=".2f", tau=".2f", theory=".1f")
# Of every series they would cover each other.
SETTINGS = alt.Chart().transform_filter("datum.series === 'fixed K'").mark_text(align="left", dx=9, dy=-5, fontSize=11)
SETTINGS = SETTINGS.encode(DISCARDED, VERIFIED, text="setting:N")
SPECDECPP = {
    "specdecpp-rates": Drawing(
        "Verification against discard rate (SpecDec++, figure 4)",
        lines(DISCARDED, VERIFIED, colour("series"), RATES, over=[SETTINGS]),
        "Lower left is better: a curve below that of fixed K drafts as much and verifies less. Replayed from rollouts "
        "on the reported prompts; counts equal those of decoding. The front takes the best of many settings in "
        "hindsight, on these very prompts: it flatters the heads.",
    ),
    "specdecpp-all-heads": Drawing(
        "The same for every head and threshold, raw and calibrated",
        lambda rows: drawn([points(DISCARDED, VERIFIED, "series", RATES, "heads with")], rows),
        "A point is one head at one h. Where the points of two weights lie on one curve, the weight moves a head along "
        "the front and not to a better one.",
    ),
    "specdecpp-kl-depth": Drawing(
        "Eval KL by depth",
        lines(
            alt.X("depth:O", title="residual blocks D", axis=alt.Axis(labelAngle=0, grid=False)),
            y_number("kl", "eval KL, nats", ".2f"), colour("series"), tips("series", "depth", kl=".3f"),
        ),
        "Lower is better; a falling line says that depth pays.",
    ),
    "specdecpp-time-fit": Drawing(
        "Seconds of single prompts, predicted and measured",
        lambda rows: drawn([points(
            x_number("predicted", "predicted (s)", ".2f", zero=True),
            y_number("measured", "measured (s)", ".2f", zero=True),
            "method", tips("method", "id", predicted=".3f", measured=".3f"),
        )], rows),
        "Test prompts, times fitted on dev prompts; on a line where the cost model holds.",
    ),
}  # fmt: skip

ACCEPTED = "accepted, once the parent is"


def acceptance_by_position(rows: Rows) -> Any:
    """EAGLE-2's figure 5."""
    x, y = x_number("accepted", ACCEPTED, ".0%", zero=True), names("position")
    shown = tips("mode", "position", "depth", "reached", accepted=".0%", low=".0%", high=".0%")
    intervals = interval_marks(alt.Chart().encode(y, unexplained("mode")), x, along="x")
    return drawn([intervals, points(x, y, "mode", shown)], rows, height=BAR_HEIGHT * count(rows, "position"))


def acceptance_by_task(rows: Rows) -> Any:
    """Figure 5, context by context."""
    x = alt.X("position:N", title="position", sort=None, axis=alt.Axis(labelAngle=-45, grid=False, labelOverlap=False))
    shown = tips("mode", "task", "position", "reached", accepted=".0%")
    layers = heatmap(rows, x, names("task"), ("accepted", ACCEPTED, ".0%"), shown)
    return drawn(layers, rows, "mode", **cell_sizes(rows, "position", "task", width=36))


def acceptance_by_confidence(rows: Rows) -> Any:
    """Figure 6."""
    x = x_number("confidence", "confidence: the head's probability of the token", ".1f", unit=True)
    y = y_number("accepted", ACCEPTED, ".0%", unit=True)
    shown = tips("mode", "nodes", confidence=".2f", accepted=".0%", low=".0%", high=".0%")
    intervals = interval_marks(alt.Chart().encode(x, unexplained("mode")), y)
    layers = [diagonal(), intervals, points(x, y, "mode", shown, size=counted("nodes"))]
    return drawn(layers, rows, width=SQUARE, height=SQUARE)


def by_tree_size(key: str, title: str) -> Draw:
    """Cells of nodes and depth."""
    x = alt.X("nodes:O", title="nodes that the target scores", axis=alt.Axis(labelAngle=0, grid=False))
    y = alt.Y("depth:O", title="depth", sort="descending", axis=alt.Axis(grid=False))
    shown = tips("mode", "nodes", "depth", **{key: ".2f"})

    def draw(rows: Rows) -> Any:
        layers = heatmap(rows, x, y, (key, title, ".2f"), shown)
        return drawn(layers, rows, "mode", **cell_sizes(rows, "nodes", "depth"))

    return draw


EAGLE2 = {
    "eagle2-acceptance-by-position": Drawing(
        "Acceptance by position in the static tree ({tree})", acceptance_by_position,
        "A position is the ranks on the path from the root, 0 the most probable. Bars span the middle half of the "
        "prompts: where they are long, acceptance depends on context, which a static tree cannot follow (figure 5 of "
        "the paper).",
    ),
    "eagle2-acceptance-by-task": Drawing(
        "Acceptance by position and task ({tree})", acceptance_by_task,
        "Down a column the position is the same and the context is not. Positions that a task reached fewer than 5 "
        "times are left out.",
    ),
    "eagle2-acceptance-by-confidence": Drawing(
        "Acceptance against the head's confidence", acceptance_by_confidence,
        "On the diagonal confidence is acceptance, which EAGLE-2 builds its trees on (figure 6 of the paper).",
    ),
    "eagle2-tau-by-size": Drawing(
        "Tokens per target call by nodes and depth", by_tree_size("tau", "tau"),
        "From one recording of the largest trees: every size's rounds are read off it, without decoding again.",
    ),
    "eagle2-speed-by-size": Drawing(
        "Measured speed-up by nodes and depth",
        lines(
            x_number("nodes", "nodes that the target scores", log=True),
            y_number("speedup", "speed-up over ar", ".2f"), colour("depth"),
            tips("mode", "depth", "nodes", speedup=".2f", low=".2f", high=".2f", tau=".2f"), "mode", band=True,
        ),
        "More nodes accept more and cost more: the best number is where the target still scores another row for "
        "little.",
    ),
    "eagle2-predicted-speed": Drawing(
        "Predicted speed-up by nodes and depth", by_tree_size("speedup", "speed-up"),
        "Replayed counts, priced by a regression over the measured sizes (seconds a target call, a drafted token, a "
        "forward of the head); the table says how far it is off where it was not fitted.",
    ),
}  # fmt: skip


WINDOW = x_number("k", "window k")
ROUND = tips("method", "panel", "round", "start", "drafted", "accepted", threshold=".2f")


def over_answer(key: str, title: str, form: str) -> Draw:
    x, y = x_number("position", "place in the answer", ".0%"), y_number(key, title, form, zero=True)
    shown = tips("method", "mode", "rounds", position=".0%", **{key: form}, low=form, high=form)
    return lines(x, y, colour("method"), shown, "mode", band=True)


HSDDW = {
    "hsddw-window-sensitivity": Drawing(
        "Speed-up by window size",
        lines(
            WINDOW, y_number("speedup", "speed-up over ar", ".2f"), colour("method"),
            tips("method", "mode", "k", speedup=".2f", low=".2f", high=".2f", tokens_per_s=".1f"), "mode", band=True,
        ),
        "The window k is the tokens drafted at most by the first model. A flat line needs no tuning: figure 7 of the "
        "paper shows it for entropy's windows, and a fall for SD.",
    ),
    "hsddw-tau-by-window": Drawing(
        "Tokens per target call by window size",
        lines(WINDOW, y_number("tau", "tau", ".2f"), colour("method"), tips("method", "mode", "k", tau=".2f"), "mode"),
        "What the target saves; the chart of speed-ups also counts what drafting costs.",
    ),
    "hsddw-entropy-density": Drawing(
        "Entropy of accepted and rejected tokens",
        lines(
            x_number("entropy", "entropy [nats]", ".1f", zero=True),
            y_number("share", "share of tokens in 0.25 nats", ".0%", zero=True), colour("verdict"),
            tips("verdict", "panel", "tokens", entropy=".2f", share=".1%"), "panel", many=True,
        ),
        "Entropy of the distribution that a token was drawn from. The further apart the two curves of a panel are, the "
        "better it knows what will be rejected.",
    ),
    "hsddw-windows": Drawing(
        "Windows over single answers",
        lines(
            x_number("round", "round"), y_number("drafted", "tokens handed to the target", zero=True),
            colour("method"), ROUND, "panel", many=True,
        ),
        "Each point is a round: its window, with the entropy threshold it was drafted under on hover.",
    ),
    "hsddw-window-by-position": Drawing(
        "Windows over an answer", over_answer("drafted", "mean window [tokens]", ".1f"),
        "Means over prompts by tenths of the answer: the threshold is 0 before the first rejection, so answers begin "
        "with windows of one token of M1, or one verification by M2.",
    ),
    "hsddw-threshold-by-position": Drawing(
        "Entropy threshold over an answer", over_answer("threshold", "mean entropy threshold [nats]", ".2f"),
        "The running mean of entropies at rejected tokens: self-verify's of M1, HSDDW's of M2.",
    ),
}  # fmt: skip


def reliability(panel: str, title: str, note: str = "") -> Drawing:
    """Predicted against observed probabilities of `predictor`s, a point a bin."""
    x = x_number("predicted", "predicted probability of acceptance", ".2f", unit=True)
    base = alt.Chart().encode(x, y_number("observed", "accepted", ".2f", unit=True), colour("predictor"))
    shown = tips("predictor", panel, "count", predicted=".2f", observed=".2f")
    layers = [diagonal(), base.mark_line(), base.mark_point().encode(counted("count"), tooltip=shown)]
    how = "On the diagonal what is predicted is what happens; below it the predictor promises too much."
    return Drawing(title, lambda rows: drawn(layers, rows, panel), how + note)


def by_depth(panel: str, key: str) -> Drawing:
    """A measure of `predictor`s by place in the draft."""
    x, y = x_number("depth", "place in the draft", "d"), y_number(key, key.upper(), ".3f")
    shown = tips("predictor", panel, "depth", "tokens", **{key: ".3f"})
    note = "Later places are reached only when all before were accepted: their tokens are a selection."
    return Drawing(f"{key.upper()} by place in the draft", lines(x, y, colour("predictor"), shown, panel), note)


BINS = " 15 bins of equal mass."
CALIBRATION = {
    "reliability-head": reliability("temperature", "Reliability of the acceptance head", BINS),
    "reliability-draft": reliability("temperature", "Reliability of the draft's confidence", BINS),
    "auc-by-depth": by_depth("temperature", "auc"),
    "ece-by-depth": by_depth("temperature", "ece"),
}


POLICIES = {
    "policies-gain": Drawing(
        "Gain over the best fixed K by the cost of a drafted token",
        lines(
            x_number("c", "c of a drafted token", ".2f"), y_number("gain", "gain in tokens by time", "+.0%"),
            colour("policy"), tips("policy", "scene", "setting", c=".3g", gain="+.1%", low="+.1%", high="+.1%"),
            "scene", band=True,
        ),
        "Time is counted in rounds without a draft: 1 a round and c a drafted token, the prefill counting 1. The best "
        "of every kind on dev prompts at each c, beside the best fixed K. Intervals are 95 %, by bootstrap over "
        "prompts in pairs.",
    ),
    "policies-reliability": reliability("scene", "Reliability of the probabilities"),
    "policies-auc-by-depth": by_depth("scene", "auc"),
    "policies-ece-by-depth": by_depth("scene", "ece"),
}  # fmt: skip


# Kind of a run -> what the page calls it, and how its tables without columns are drawn.
STUDIES: dict[str, tuple[str, Mapping[str, Drawing]]] = {
    "specdecpp": ("SpecDec++: when to stop drafting", SPECDECPP),
    "eagle2": ("EAGLE-2: draft trees", EAGLE2),
    "hsddw": ("HSDDW: entropy and draft windows", HSDDW),
    "calibration": ("Calibration of acceptance", CALIBRATION),
    "policies": ("Stop policies: what an acceptance head is worth", POLICIES),
    "tune": ("Tuning for this machine", {}),
    "tree": ("A draft tree for a head", {}),
    "schedule": ("How long a server should draft", {}),
    "training": ("Training", TRAINING),
    "under way": ("Under way", {}),
}
