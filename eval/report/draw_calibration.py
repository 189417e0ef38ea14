"""Charts of `draftsmith eval calibration`."""

from __future__ import annotations

from functools import partial

from draftsmith.eval.report.drawing import Drawing, by_depth, reliability

ON_DIAGONAL = (
    "On the diagonal what is predicted is what happens; below it the predictor promises too much. 15 bins of equal "
    "mass."
)
SELECTION = "Later places are reached only when all before were accepted: their tokens are a selection."

DRAWINGS = {
    "reliability-head": Drawing(
        "Reliability of the acceptance head", partial(reliability, panel="temperature"), ON_DIAGONAL
    ),
    "reliability-draft": Drawing(
        "Reliability of the draft's confidence", partial(reliability, panel="temperature"), ON_DIAGONAL
    ),
    "auc-by-depth": Drawing("AUC by place in the draft", partial(by_depth, key="auc", panel="temperature"), SELECTION),
    "ece-by-depth": Drawing("ECE by place in the draft", partial(by_depth, key="ece", panel="temperature"), SELECTION),
}
