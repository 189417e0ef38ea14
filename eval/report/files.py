"""Charts as PNG and SVG, tables as Markdown and CSV: one file per figure and format."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
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


def write_figures(sections: Sequence[Section], directory: Path, formats: Collection[str]) -> list[Path]:
    """Write `directory`/SECTION-FIGURE.FORMAT for all figures; charts without rows are skipped."""
    make_directory(directory)
    written = []
    for section in sections:
        for figure in section.figures:
            for form, content in contents(figure, formats).items():
                path = directory / f"{section.name}-{figure.name}.{form}"
                write_bytes(path, content)
                written.append(path)
    return written


def contents(figure: Table | Chart, formats: Collection[str]) -> dict[str, bytes]:
    """Return format -> file content, for the formats that suit the figure."""
    if isinstance(figure, Table):
        writers = {"md": tables.markdown, "csv": tables.comma_separated}
        return {form: write(figure).encode() for form, write in writers.items() if form in formats}
    if figure.specification is None:
        return {}
    specification = on_paper(figure.specification)
    options: dict[str, Any] = {"vl_version": VEGA_LITE, "allowed_base_urls": []}
    found = {}
    if "png" in formats:
        found["png"] = vl_convert.vegalite_to_png(specification, scale=SCALE, **options)
    if "svg" in formats:
        found["svg"] = vl_convert.vegalite_to_svg(specification, **options).encode()
    return found


def on_paper(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Give a specification a width and light colours on white."""
    sized = copy.deepcopy(dict(specification))
    if "facet" not in sized:
        sized.setdefault("width", WIDTH)
    # A system's own font need not be where the image is made or shown.
    return {**sized, "config": {**chart_config("light"), "background": COLOURS["paper"][0], "font": "sans-serif"}}
