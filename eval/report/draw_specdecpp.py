"""Charts of `draftsmith eval specdecpp`."""

from __future__ import annotations

from typing import Any

import altair as alt

from draftsmith.eval.report.drawing import Drawing, Rows, colour, lines, quantitative, single, tips

DISCARDED = alt.X("discard_rate:Q", **quantitative("discarded tokens per token", ".2f", zero=True))
VERIFIED = alt.Y("verification_rate:Q", **quantitative("target calls per token", ".2f"))
TIPS = tips("series", "setting", "head", discard_rate=".2f", verification_rate=".2f", tau=".2f", theory=".1f")


def rates(rows: Rows) -> Any:
    """Figure 4, each point named."""
    text = alt.Chart().mark_text(align="left", dx=9, fontSize=11).encode(DISCARDED, VERIFIED, text="setting:N")
    return single([*lines(DISCARDED, VERIFIED, colour("series"), TIPS), text], rows)


def all_heads(rows: Rows) -> Any:
    series = colour("series", "heads with"), colour("series", "heads with", alt.Shape)
    return single([alt.Chart().mark_point().encode(DISCARDED, VERIFIED, *series, tooltip=TIPS)], rows)


def kl_by_depth(rows: Rows) -> Any:
    x = alt.X("depth:O", title="residual blocks D", axis=alt.Axis(labelAngle=0, grid=False))
    y = alt.Y("kl:Q", **quantitative("eval KL, nats", ".2f"))
    return single(lines(x, y, colour("series"), tips("series", "depth", kl=".3f")), rows)


def time_fit(rows: Rows) -> Any:
    x = alt.X("predicted:Q", **quantitative("predicted (s)", ".2f", zero=True))
    y = alt.Y("measured:Q", **quantitative("measured (s)", ".2f", zero=True))
    tooltip = tips("method", "id", predicted=".3f", measured=".3f")
    shape = colour("method", channel=alt.Shape)
    return single([alt.Chart().mark_point().encode(x, y, colour("method"), shape, tooltip=tooltip)], rows)


DRAWINGS = {
    "specdecpp-rates": Drawing(
        "Verification against discard rate (SpecDec++, figure 4)", rates,
        "Lower left is better: a curve below that of fixed K drafts as much and verifies less. Replayed from rollouts "
        "on the reported prompts; counts equal those of decoding. The front takes the best of many settings in "
        "hindsight, on these very prompts: it flatters the heads.",
    ),
    "specdecpp-all-heads": Drawing(
        "The same for every head and threshold, raw and calibrated", all_heads,
        "A point is one head at one h. Where the points of two weights lie on one curve, the weight moves a head along "
        "the front and not to a better one.",
    ),
    "specdecpp-kl-depth": Drawing(
        "Eval KL by depth", kl_by_depth, "Lower is better; a falling line says that depth pays."
    ),
    "specdecpp-time-fit": Drawing(
        "Seconds of single prompts, predicted and measured", time_fit,
        "Test prompts, times fitted on dev prompts; on a line where the cost model holds.",
    ),
}  # fmt: skip
