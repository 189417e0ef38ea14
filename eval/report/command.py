"""`draftsmith eval report`: finished runs as one HTML file, and as figures and tables for papers."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.data.progress import say
from draftsmith.data.store.files import make_directory, write_text
from draftsmith.data.tracking import switched_off
from draftsmith.eval.report.settings import ReportConfig
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.eval.report.page import Section

PACKAGES = ("altair", "vl_convert", "jinja2")  # of the extra `report`
TRACE_BYTES = 2_600_000  # of all traces together: the page stays under 5 MB


def run(config: ReportConfig) -> Path:
    """Write the page and whatever else is asked for; returns the page's path."""
    require_packages()
    from draftsmith.eval.report.files import write_figures
    from draftsmith.eval.report.page import render
    from draftsmith.eval.report.runs import comparable, read_runs
    from draftsmith.eval.report.sections import make_sections

    runs = read_runs(config.runs)
    sections = make_sections(comparable(runs), TRACE_BYTES)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    write_page(config.output, render(config.title, date, sections))
    say(f"Written to {config.output} ({config.output.stat().st_size / 1e6:.1f} MB)")
    if config.figures is not None:
        written = write_figures(sections, config.figures, config.formats)
        say(f"{len(written)} files of charts and tables in {config.figures}")
    log(config, sections)
    return config.output


def missing_packages() -> list[str]:
    """Packages that reports need and that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def require_packages() -> None:
    """Raises:
    InputError: the extra is not installed.
    """
    missing = missing_packages()
    if missing:
        found = f"{', '.join(missing)} not installed"
        raise InputError("report", found, "the packages of reports", "Run: pip install 'draftsmith[report]'")


def write_page(path: Path, page: str) -> None:
    """Whole or not at all."""
    make_directory(path.parent)
    write_text(path, page)


def log(config: ReportConfig, sections: list[Section]) -> None:
    """Log the page to Weights & Biases, where that is asked for."""
    if "wandb" not in config.track or switched_off(config.wandb):
        return
    from draftsmith.eval.report.tracking import log_report

    log_report(config, sections)
