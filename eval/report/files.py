"""Charts as PNG and SVG, tables as Markdown and CSV: one file per figure and format."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vl_convert

from draftsmith.data.console import Table
from draftsmith.data.store.files import make_directory, write_bytes
from draftsmith.eval.report import tables
from draftsmith.eval.report.drawing import Chart
from draftsmith.eval.report.page import VEGA_LITE, Section
from draftsmith.eval.report.themes import COLOURS, chart_config

WIDTH = 600  # pixels of a single panel; PNG has three for each, for print
SCALE = 3


def write_figures(sections: Sequence[Section], directory: Path) -> list[Path]:
    """Write `directory`/SECTION-FIGURE.FORMAT for all figures; charts without rows are skipped."""
    make_directory(directory)
    written = []
    for section in sections:
        for figure in section.figures:
            for form, content in contents(figure).items():
                path = directory / f"{section.name}-{figure.name}.{form}"
                write_bytes(path, content)
                written.append(path)
    return written


def contents(figure: Table | Chart) -> dict[str, bytes]:
    """Return format -> file content."""
    if isinstance(figure, Table):
        return {"md": tables.markdown(figure).encode(), "csv": tables.comma_separated(figure).encode()}
    if figure.specification is None:
        return {}
    specification = copy.deepcopy(dict(figure.specification))
    if "facet" not in specification:
        specification.setdefault("width", WIDTH)
    # Light colours on white. A system's own font need not be where the image is made or shown.
    specification["config"] = {**chart_config("light"), "background": COLOURS["paper"][0], "font": "sans-serif"}
    options: dict[str, Any] = {"vl_version": VEGA_LITE, "allowed_base_urls": []}
    return {
        "png": vl_convert.vegalite_to_png(specification, scale=SCALE, **options),
        "svg": vl_convert.vegalite_to_svg(specification, **options).encode(),
    }
