"""`draftsmith eval report`: show runs as one HTML file, and write their charts and tables as files."""

from __future__ import annotations

import datetime
import importlib.util
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from draftsmith.data.console import log_note, print_text
from draftsmith.data.store.files import make_directory, write_text
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.eval.report.page import Section

PACKAGES = ("altair", "vl_convert", "jinja2")  # of the extra `report`
Format = Literal["png", "svg", "md", "csv"]
FORMATS = get_args(Format)
EVERY_S = 60  # between pages of --watch
TRACE_BYTES = 2_600_000  # for all traces together, so that the page stays under 5 MB


@dataclass(frozen=True)
class ReportConfig:
    """Show runs as one HTML file that needs no network: tables, charts, and traces round by round.

    Attributes:
        runs: directories with results.json (`eval bench`, `eval tune`, ...), and of trainings. Benchmarks with the same
            target, prompts, sampling and machine share their tables; others get sections of their own.
        output: the HTML file; by default report.html in the first run's directory.
        watch: rewrite the page every minute until all trainings among the runs have finished.
        title: title of the page.
        figures: directory that receives charts and tables as files of their own.
        formats: formats of these files: png and svg for charts, md (Markdown) and csv for tables.
    """

    runs: tuple[Path, ...]
    output: Path | None = field(default=None, kw_only=True)
    watch: bool = False
    title: str = "Draftsmith report"
    figures: Path | None = None
    formats: tuple[Format, ...] = FORMATS

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.formats) - set(FORMATS)):
            raise InputError("formats", ", ".join(unknown), f"some of {', '.join(FORMATS)}", "Change it.")
        if not self.runs:
            raise InputError("runs", "none", "one or more directories of runs", "Name them: eval report RUN ...")


def run(config: ReportConfig) -> Path:
    """Write the page and the files, and return the page's path.

    Raises:
        InputError: the extra is not installed, or a directory is not a run.
    """
    if missing := missing_packages():
        found = f"{', '.join(missing)} not installed"
        raise InputError("report", found, "the packages of reports", "Run: pip install 'draftsmith[report]'")
    output = config.output or config.runs[0] / "report.html"
    while config.watch and any(map(unfinished_training, config.runs)):
        write_page(config, output, EVERY_S)
        log_note(
            f"{output}: written at {datetime.datetime.now():%H:%M:%S}, and again every {EVERY_S} s; Ctrl-C ends it"
        )
        time.sleep(EVERY_S)
    sections = write_page(config, output)
    print_text(f"Written to {output} ({output.stat().st_size / 1e6:.1f} MB)")
    if config.figures is not None:
        from draftsmith.eval.report.files import write_figures

        written = write_figures(sections, config.figures, config.formats)
        print_text(f"{len(written)} files of charts and tables in {config.figures}")
    return output


def unfinished_training(path: Path) -> bool:
    from draftsmith.eval.report.training import is_going_on, is_training

    return is_training(path) and is_going_on(path)


def write_page(config: ReportConfig, output: Path, every_s: int = 0) -> list[Section]:
    """Write the page of the runs as they are now; browsers reload it every `every_s` seconds, if not 0."""
    from draftsmith.eval.report.page import render
    from draftsmith.eval.report.runs import comparable, read_runs
    from draftsmith.eval.report.sections import make_sections

    sections = make_sections(comparable(read_runs(config.runs)), TRACE_BYTES)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    make_directory(output.parent)
    write_text(output, render(config.title, date, sections, every_s))
    return sections


def missing_packages() -> list[str]:
    """Return the packages that reports need and that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]
