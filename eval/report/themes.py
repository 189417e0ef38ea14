"""Colours of the report, light and dark: of its charts, and of how a token came. Told apart without colour too: series
have shapes, tokens have underlines."""

from __future__ import annotations

from typing import Any, Literal

Theme = Literal["light", "dark"]

INK = {"light": "#1d2530", "dark": "#e4e8ee"}
QUIET = {"light": "#5b6673", "dark": "#9aa5b3"}
LINE = {"light": "#dfe3e8", "dark": "#343c47"}
PAPER = {"light": "#ffffff", "dark": "#171b21"}
# Okabe and Ito's colours, darkened and lightened until each has a contrast of 3 to its paper.
SERIES = {
    "light": ["#0b62a8", "#c8560a", "#08805f", "#a8377c", "#7a6a00", "#2d8fb8", "#6a51a3", "#7b4a2d"],
    "dark": ["#6db3f2", "#ff9d57", "#4fcf9f", "#f08fc5", "#e6d158", "#8fdcf0", "#b8a2f0", "#d7a585"],
}
# How a token came -> (its ink, what lies behind it). `eval/report/viewer.py` says what the kinds are.
KINDS: dict[str, dict[str, tuple[str, str]]] = {
    "accepted": {"light": ("#0a5c36", "#d3f2e0"), "dark": ("#a5ecc6", "#12432c")},
    "bonus": {"light": ("#0b4f91", "#d6e8fb"), "dark": ("#a9d3ff", "#123a63")},
    "correction": {"light": ("#8f3b00", "#ffe3cc"), "dark": ("#ffc597", "#5a2a08")},
    "alone": {"light": ("#4a5563", "#eceff3"), "dark": ("#c3ccd6", "#2b323c")},
    "discarded": {"light": ("#9b1c3a", "#fbe3e8"), "dark": ("#ffb0c0", "#55182a")},
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"


def chart_config(theme: Theme) -> dict[str, Any]:
    """Vega-Lite's `config`: everything about a chart that is not its data."""
    ink, quiet, line = INK[theme], QUIET[theme], LINE[theme]
    first = SERIES[theme][0]
    # The ends of viridis that would vanish on the paper are left out.
    ramp = {"scheme": "viridis", "extent": [0.0, 0.88] if theme == "light" else [0.25, 1.0]}
    return {
        "background": None,
        "font": FONT,
        "padding": 6,
        "view": {"stroke": None, "continuousWidth": 600, "continuousHeight": 300},
        "axis": {
            "labelColor": quiet,
            "titleColor": ink,
            "gridColor": line,
            "domainColor": quiet,
            "tickColor": quiet,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 600,
            "titlePadding": 10,
            "labelLimit": 340,
            "labelFlush": False,
            "labelOverlap": "greedy",
            "labelSeparation": 6,
        },
        "legend": {
            "symbolBaseFillColor": quiet,
            "symbolBaseStrokeColor": quiet,
            "labelColor": ink,
            "titleColor": ink,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "labelLimit": 420,
            "symbolLimit": 40,
            "orient": "bottom",
            "direction": "horizontal",
            "gradientLength": 180,
            "offset": 14,
        },
        "facet": {"spacing": 26},
        "header": {"labelColor": ink, "titleColor": ink, "labelFontSize": 13, "labelFontWeight": 600},
        "title": {"color": ink, "fontSize": 13, "anchor": "start"},
        "range": {"category": SERIES[theme], "ordinal": ramp, "heatmap": {"scheme": "viridis"}, "ramp": ramp},
        "bar": {"color": first},
        "line": {"color": first, "strokeWidth": 2},
        "point": {"color": first, "filled": True, "size": 55, "opacity": 0.9},
        "rect": {"stroke": PAPER[theme], "strokeWidth": 1},
        "text": {"color": ink, "fontSize": 12},
        "style": {
            "reference": {"color": quiet, "stroke": quiet, "strokeDash": [5, 4], "strokeWidth": 1.2, "opacity": 0.9},
            "interval": {"color": ink, "stroke": ink, "strokeWidth": 1.6},
            "band": {"opacity": 0.18},
            "guide-label": {"font": FONT},
        },
    }


def page_themes() -> dict[str, Any]:
    """What the page's script needs: the charts' config, and the colours of trees."""
    themes: tuple[Theme, Theme] = ("light", "dark")
    return {
        theme: {
            "config": chart_config(theme),
            "ink": INK[theme],
            "quiet": QUIET[theme],
            "kinds": {
                kind: dict(zip(("ink", "behind"), colours[theme], strict=True)) for kind, colours in KINDS.items()
            },
        }
        for theme in themes
    }
