"""Colors of the report, light and dark, for charts and kinds of tokens.

Series also have shapes and tokens underlines, so nothing depends on color alone.
"""

from __future__ import annotations

from typing import Any, Literal

Theme = Literal["light", "dark"]

# Okabe and Ito's colors, darkened and lightened until each has a contrast of 3 to its paper.
SERIES = {
    "light": ["#0b62a8", "#c8560a", "#08805f", "#a8377c", "#7a6a00", "#2d8fb8", "#6a51a3", "#7b4a2d"],
    "dark": ["#6db3f2", "#ff9d57", "#4fcf9f", "#f08fc5", "#e6d158", "#8fdcf0", "#b8a2f0", "#d7a585"],
}
# Light, dark. The last ten say how a token came, its ink and what lies behind it; `viewer.py` has the kinds.
COLORS = {
    "ink": ("#1d2530", "#e4e8ee"),
    "quiet": ("#5b6673", "#9aa5b3"),
    "line": ("#dfe3e8", "#343c47"),
    "paper": ("#ffffff", "#171b21"),
    "accent": (SERIES["light"][0], SERIES["dark"][0]),
    "accepted-ink": ("#0a5c36", "#a5ecc6"),
    "accepted-behind": ("#d3f2e0", "#12432c"),
    "bonus-ink": ("#0b4f91", "#a9d3ff"),
    "bonus-behind": ("#d6e8fb", "#123a63"),
    "correction-ink": ("#8f3b00", "#ffc597"),
    "correction-behind": ("#ffe3cc", "#5a2a08"),
    "alone-ink": ("#4a5563", "#c3ccd6"),
    "alone-behind": ("#eceff3", "#2b323c"),
    "discarded-ink": ("#9b1c3a", "#ffb0c0"),
    "discarded-behind": ("#fbe3e8", "#55182a"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"


def chart_config(theme: Theme) -> dict[str, Any]:
    """Return Vega-Lite's `config`: everything about a chart except its data."""
    ink, quiet, line, first = (colors(theme)[name] for name in ("ink", "quiet", "line", "accent"))
    words = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    return {
        "background": None,
        "font": FONT,
        "padding": 6,
        "view": {"stroke": None, "continuousWidth": 600, "continuousHeight": 300},
        "axis": {
            **words,
            "labelColor": quiet,
            "gridColor": line,
            "domainColor": quiet,
            "tickColor": quiet,
            "titleFontWeight": 600,
            "titlePadding": 10,
            "labelLimit": 340,
            "labelFlush": False,
            "labelOverlap": "greedy",
            "labelSeparation": 6,
        },
        "legend": {
            **words,
            "symbolBaseFillColor": quiet,
            "symbolBaseStrokeColor": quiet,
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
        "range": {"category": SERIES[theme]},
        "bar": {"color": first},
        "line": {"color": first, "strokeWidth": 2},
        "point": {"color": first, "filled": True, "size": 55, "opacity": 0.9},
        "style": {
            "reference": {"color": quiet, "stroke": quiet, "strokeDash": [5, 4], "strokeWidth": 1.2, "opacity": 0.9},
            "interval": {"color": ink, "stroke": ink, "strokeWidth": 1.6},
            "guide-label": {"font": FONT},
        },
    }


def colors(theme: Theme) -> dict[str, str]:
    return {name: pair[theme == "dark"] for name, pair in COLORS.items()}


def page_themes() -> dict[str, Any]:
    """Return the charts' config and the colors for the page's script."""
    themes: tuple[Theme, Theme] = ("light", "dark")
    return {theme: {"config": chart_config(theme), "colors": colors(theme)} for theme in themes}


def css_variables() -> str:
    """Return the colors as CSS variables, each for both themes."""
    lines = (f"  --{name}: light-dark({light}, {dark});" for name, (light, dark) in COLORS.items())
    return ":root {\n  color-scheme: light dark;\n" + "\n".join(lines) + "\n}"
