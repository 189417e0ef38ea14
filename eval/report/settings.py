"""Settings of `draftsmith eval report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from draftsmith.modules.types import InputError

FORMATS = ("png", "svg", "md", "csv", "tex")


@dataclass(frozen=True)
class ReportConfig:
    """Shows finished runs as one HTML file that needs no network: tables, charts, and traces round by round.

    Attributes:
        runs: directories of `eval bench`, of studies and of `eval tune`; each holds results.json. Benchmarks of the
            same target, prompts, sampling and machine share their tables, others are sections of their own.
        output: the HTML file.
        title: its title.
        figures: directory that receives the charts and tables as files of their own.
        formats: of these files: charts as png and svg, tables as md (Markdown), csv and tex (LaTeX, booktabs).
        track: wandb logs tables, charts and the page to Weights & Biases.
        wandb: auto goes online when a key is found and offline without one.
        project: Weights & Biases project.
        run_name: of the Weights & Biases run; without it the output's name.
    """

    runs: tuple[Path, ...]
    output: Path = field(kw_only=True)
    title: str = "Draftsmith report"
    figures: Path | None = None
    formats: tuple[str, ...] = FORMATS
    track: tuple[str, ...] = ()
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    project: str = "draftsmith"
    run_name: str = ""

    def __post_init__(self) -> None:
        for name, known in (("formats", FORMATS), ("track", ("wandb",))):
            unknown = sorted(set(getattr(self, name)) - set(known))
            if unknown:
                raise InputError(name, ", ".join(unknown), f"some of {', '.join(known)}", "Change it.")
        if not self.runs:
            raise InputError("runs", "none", "one or more directories of runs", "Name them: eval report RUN ...")
