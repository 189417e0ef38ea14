"""The report as one HTML file that loads nothing: scripts, styles, charts and traces are inside.

A content security policy allows the page's own scripts only, by their hashes, and no request: text of a model or a
prompt stays text even if an escape were forgotten.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import altair
import jinja2
import vl_convert
from markupsafe import Markup

from draftsmith.data.console import Table, merged
from draftsmith.eval.report import tables
from draftsmith.eval.report.drawing import Chart
from draftsmith.eval.report.themes import css_variables, page_themes

# The version of Vega-Lite that Altair writes, as vl-convert counts them: 6.1.0 -> 6.1.
VEGA_LITE = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


@dataclass(frozen=True)
class Section:
    """A run on the page.

    Attributes:
        name: for anchors and files.
        about: one sentence on what was measured.
        verdicts: what came out, a sentence each.
        facts: details as (heading, [(key, value)]).
        command: it measures again; empty if unknown.
        viewer: result of `viewer_data`.
    """

    name: str
    title: str
    about: str
    figures: Sequence[Table | Chart]
    facts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    command: str = ""
    viewer: Mapping[str, Any] | None = None
    warnings: Sequence[str] = ()
    verdicts: Sequence[str] = ()


def render(title: str, date: str, sections: Sequence[Section]) -> str:
    """Render the page; everything except this project's own assets is escaped."""
    charts = {
        f"{section.name}-{figure.name}": figure.specification
        for section in sections
        for figure in section.figures
        if isinstance(figure, Chart) and figure.specification is not None
    }
    # Vega, Vega-Lite and vega-embed as one script.
    vega = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    assert "</script" not in vega.lower() and "<!--" not in vega, "would end its element"
    scripts = [vega, asset("report.js")]
    # The policy allows these scripts, inline styles and inline images; Vega needs unsafe-eval.
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(asset("template.html.jinja")).render(
        title=title,
        date=date,
        sections=sections,
        policy=f"default-src 'none'; script-src 'unsafe-eval' {allowed}; {rest}",
        css=Markup(f"{css_variables()}\n{asset('report.css')}"),
        scripts=[Markup(script) for script in scripts],
        charts=json_text(charts),
        themes=json_text(page_themes()),
        tree=Markup(asset("tree.vega.json")),
        tables=tables,
        merged=merged,
        json_text=json_text,
        breakable=breakable,
    )


def asset(name: str) -> str:
    return (files("draftsmith.eval.report") / "assets" / name).read_text("utf-8")


def json_text(content: Any) -> Markup:
    """Return JSON for a script element of type application/json, which it can never end."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped too
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def breakable(name: str) -> Markup:
    """Return a name that may be wrapped after its own separators, if more than two characters follow."""
    return Markup("<wbr>").join(re.split(r"(?<=[:/_,=+])(?=\w{3})", name))
