"""Charts of `draftsmith eval hsddw`."""

from __future__ import annotations

from functools import partial
from typing import Any

import altair as alt

from draftsmith.eval.report.drawing import Drawing, Rows, colour, known, lines, panels, quantitative, tips


def by_window(rows: Rows, key: str, title: str) -> Any:
    x, y = alt.X("k:Q", **quantitative("window k")), alt.Y(f"{key}:Q", **quantitative(title, ".2f"))
    band = "low" in rows[0]
    more = {"low": ".2f", "high": ".2f", "tokens_per_s": ".1f"} if band else {}
    tooltip = tips("method", "mode", "k", **{key: ".2f"}, **more)
    return panels(lines(x, y, colour("method"), tooltip, band=band), rows, "mode")


def entropy_density(rows: Rows) -> Any:
    """Figure 6."""
    x = alt.X("entropy:Q", **quantitative("entropy [nats]", ".1f", zero=True))
    y = alt.Y("share:Q", **quantitative("share of tokens in 0.25 nats", ".0%", zero=True))
    tooltip = tips("verdict", "panel", "tokens", entropy=".2f", share=".1%")
    return panels(lines(x, y, colour("verdict"), tooltip, many=True), rows, "panel")


def windows(rows: Rows) -> Any:
    """Figure 8: a point a round."""
    x, y = (
        alt.X("round:Q", **quantitative("round")),
        alt.Y("drafted:Q", **quantitative("tokens handed to the target", zero=True)),
    )
    tooltip = tips("method", "panel", "round", "start", "drafted", "accepted", threshold=".2f")
    return panels(lines(x, y, colour("method"), tooltip, many=True), rows, "panel")


def over_answer(rows: Rows, key: str, title: str, form: str) -> Any:
    shown = known(rows, key)
    x, y = (
        alt.X("position:Q", **quantitative("place in the answer", ".0%")),
        alt.Y(f"{key}:Q", **quantitative(title, form, zero=True)),
    )
    tooltip = tips("method", "mode", "rounds", position=".0%", **{key: form}, low=form, high=form)
    return panels(lines(x, y, colour("method"), tooltip, band=True), shown, "mode")


DRAWINGS = {
    "hsddw-window-sensitivity": Drawing(
        "Speed-up by window size",
        partial(by_window, key="speedup", title="speed-up over autoregressive decoding"),
        "The window k is the tokens drafted at most by the first model. A flat line needs no tuning: figure 7 of the "
        "paper shows it for entropy's windows, and a fall for SD.",
    ),
    "hsddw-tau-by-window": Drawing(
        "Tokens per target call by window size", partial(by_window, key="tau", title="tau"),
        "What the target saves; the chart of speed-ups also counts what drafting costs.",
    ),
    "hsddw-entropy-density": Drawing(
        "Entropy of accepted and rejected tokens", entropy_density,
        "Entropy of the distribution that a token was drawn from. The further apart the two curves of a panel are, the "
        "better it knows what will be rejected.",
    ),
    "hsddw-windows": Drawing(
        "Windows over single answers", windows,
        "Each point is a round: its window, with the entropy threshold it was drafted under on hover.",
    ),
    "hsddw-window-by-position": Drawing(
        "Windows over an answer",
        partial(over_answer, key="drafted", title="mean window [tokens]", form=".1f"),
        "Means over prompts by tenths of the answer: the threshold is 0 before the first rejection, so answers begin "
        "with windows of one token of M1, or one verification by M2.",
    ),
    "hsddw-threshold-by-position": Drawing(
        "Entropy threshold over an answer",
        partial(over_answer, key="threshold", title="mean entropy threshold [nats]", form=".2f"),
        "The running mean of entropies at rejected tokens: self-verify's of M1, HSDDW's of M2.",
    ),
}  # fmt: skip
