"""`draftsmith eval report`: show runs as one HTML file."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path

from draftsmith.data.console import print_text
from draftsmith.eval.settings import ReportConfig
from draftsmith.modules.pretrained.files import make_directory, write_text
from draftsmith.modules.types import InputError

PACKAGES = ("altair", "vl_convert", "jinja2")  # of the extra `report`
TRACE_BYTES = 2_600_000  # for all traces together, so that the page stays under 5 MB


def run(config: ReportConfig) -> Path:
    """Write the page and return its path.

    Raises:
        InputError: the extra is not installed, or a directory is not a run.
    """
    if missing := missing_packages():
        found = f"{', '.join(missing)} not installed"
        raise InputError("report", found, "the packages of reports", "Run: pip install 'draftsmith[report]'")
    from draftsmith.eval.report.page import render
    from draftsmith.eval.report.runs import read_runs
    from draftsmith.eval.report.sections import make_sections

    sections = make_sections(read_runs(config.runs), TRACE_BYTES)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    output = config.output or config.runs[0] / "report.html"
    make_directory(output.parent)
    write_text(output, render("Draftsmith report", date, sections))
    print_text(f"Written to {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return output


def missing_packages() -> list[str]:
    """Return the packages that reports need and that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]
