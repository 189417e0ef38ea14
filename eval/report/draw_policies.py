"""Charts of `draftsmith eval policies`."""

from __future__ import annotations

from functools import partial
from typing import Any

import altair as alt

from draftsmith.eval.report.draw_calibration import SELECTION
from draftsmith.eval.report.drawing import (
    Drawing,
    Rows,
    by_depth,
    colour,
    lines,
    panels,
    quantitative,
    reliability,
    tips,
)


def draw_gain(rows: Rows) -> Any:
    x, y = (
        alt.X("c:Q", **quantitative("c of a drafted token", ".2f")),
        alt.Y("gain:Q", **quantitative("gain in tokens by time", "+.0%")),
    )
    tooltip = tips("policy", "scene", "setting", c=".3g", gain="+.1%", low="+.1%", high="+.1%")
    return panels(lines(x, y, colour("policy"), tooltip, band=True), rows, "scene")


DRAWINGS = {
    "policies-gain": Drawing(
        "Gain over the best fixed K by the cost of a drafted token", draw_gain,
        "Time is counted in rounds without a draft: 1 a round and c a drafted token, the prefill counting 1. The best "
        "of every kind on dev prompts at each c, beside the best fixed K. Intervals are 95 %, by bootstrap over "
        "prompts in pairs.",
    ),
    "policies-reliability": Drawing(
        "Reliability of the probabilities", partial(reliability, panel="scene"),
        "On the diagonal what is predicted is what happens; below it the predictor promises too much.",
    ),
    "policies-auc-by-depth": Drawing(
        "AUC by place in the draft", partial(by_depth, key="auc", panel="scene"), SELECTION
    ),
    "policies-ece-by-depth": Drawing(
        "ECE by place in the draft", partial(by_depth, key="ece", panel="scene"), SELECTION
    ),
}  # fmt: skip
