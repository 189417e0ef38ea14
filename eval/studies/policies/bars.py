"""What an acceptance head has to gain to be worth its training, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.eval.report.tables import plain
from draftsmith.eval.studies.policies.comparison import AtCost, PolicyComparison
from draftsmith.eval.studies.policies.measured import HEAD
from draftsmith.eval.studies.policies.replayed import Gain

OVER_FIXED = {False: 0.035, True: 0.08}  # sampling, greedy
OVER_FREE = {False: 0.01, True: 0.03}
MEASURED_GREEDY = 0.05
CEILING_SHARE = 1 / 3


def bar_rows(found: Sequence[PolicyComparison], measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a bar: value, interval, bar, whether it was reached; none of scenes without a head, nor of temperatures
    between, for which nothing was asked."""
    rows = []
    for compared in found:
        scene = compared.scene
        if not scene.heads or scene.params.temperature not in (0.0, 1.0):
            continue
        for at in compared.at:
            rows += [{"scene": scene.title, "c": at.name, **row} for row in bars_at(compared, at)]
        real = [row for row in measured if (row["scene"], row["role"]) == (scene.title, HEAD)]
        if scene.params.greedy:
            for row in real:
                low, high = (np.nan if row[key] is None else row[key] for key in ("low", "high"))
                made = Gain(row["gain"], low, high)
                what = "head over the fastest fixed K, tokens/s measured"
                rows.append({"scene": scene.title, "c": "", **gain_bar(what, row["method"], made, MEASURED_GREEDY)})
    return [plain(row) for row in rows]


def bars_at(compared: PolicyComparison, at: AtCost) -> list[dict[str, Any]]:
    greedy, head, free = compared.scene.params.greedy, at.best("head"), at.best("free")
    assert head is not None and free is not None
    name = head.family.name
    over_fixed = compared.gain(at, head)
    rows = [
        gain_bar("head over the best fixed K", name, over_fixed, OVER_FIXED[greedy]),
        gain_bar(
            "head over the best training-free that goes by confidence", f"{name} / {free.family.name}",
            compared.gain(at, head, free), OVER_FREE[greedy], above_zero=True,
        ),
    ]  # fmt: skip
    looking = at.best("looking")
    if looking is not None:
        what, over = "head over the training-free that looks for repetitions", compared.gain(at, head, looking)
        rows.append(gain_bar(what, f"{name} / {looking.family.name}", over, OVER_FREE[greedy], above_zero=True))
    ceiling = at.best("ceiling")
    most = 0.0 if ceiling is None else compared.gain(at, ceiling).value
    if most > 0:  # else there is nothing to have a share of
        share = over_fixed.value / most
        rows.append(gain_bar("share of the gain with true p/q known", name, Gain(share, np.nan, np.nan), CEILING_SHARE))
    return rows


def gain_bar(what: str, who: str, made: Gain, least: float, above_zero: bool = False) -> dict[str, Any]:
    """above_zero: the interval's lower end has to be, too."""
    reached = made.value >= least and not (above_zero and not made.low > 0)
    return {
        "what": what, "who": who, "value": made.value, "interval": made.ends, "bar": least,
        "reached": "yes" if reached else "no",
    }  # fmt: skip
