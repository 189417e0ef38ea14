"""`draftsmith check`: what another system would make of a directory, and whether that is the head that was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from draftsmith.data.exchange.assistant import check_assistant
from draftsmith.data.exchange.directory import read_package
from draftsmith.data.exchange.record import against_record, read_record
from draftsmith.data.exchange.states import StateSource, make_trial, state_source
from draftsmith.data.heads.directory import build_head, kind_at, load_head
from draftsmith.data.settings import Dtype, Loading
from draftsmith.data.store.manifest import compare_identity
from draftsmith.modules.interop import formats, hf_assisted
from draftsmith.modules.interop.base import Finding, HeadFormat, Measure
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[(*formats(), hf_assisted.NAME)]


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Loading):
    """Read a directory as another system would and compare it with what this project makes of it: names, settings,
    and logits on hidden states of the real model. Exits with 1 when anything differs.

    Attributes:
        directory: The directory to check.
        format: The system that is to read it.
        target: The target model; for hf-assisted too.
        draft: The draft whose hidden states an acceptance head reads (specdec_pp, acceptance): a model, or the
            directory of a drafting head, then with its --target.
        eagle: The old name of --draft for a head.
        head: The head that the directory was exported from, if it is at hand; else the directory itself, imported, is
            what logits are compared with.
    """

    directory: Path
    format: FormatName
    target: str | None = None
    draft: str | None = None
    eagle: Path | None = None
    head: Path | None = None
    dtype: Dtype = "auto"


@dataclass
class Report:
    """Findings about tensors and settings, and numbers."""

    findings: list[Finding] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    used: str = ""

    @property
    def failures(self) -> int:
        return sum(finding.level == "error" for finding in self.findings) + sum(not m.passed for m in self.measures)


def run(config: CheckConfig) -> int:
    """0 when the system would compute with this directory what was trained, else 1.

    Raises:
        InputError: no such directory, one of our own heads, or no model.
    """
    if config.format == hf_assisted.NAME:
        if config.target is None:
            raise InputError("target", "none", "the target that the draft assists", "Pass --target.")
        report = report_of_assistant(config.directory, config.target)
    else:
        format = formats()[config.format]
        source = state_source(format, config.target, config.draft or config.eagle, config.loading)
        head = original(config.head, format.kind, source) if config.head is not None else None
        report = check_head(config.directory, format, source, head)
    print_report(report, str(config.directory), config.format)
    return 1 if report.failures else 0


def report_of_assistant(directory: Path, target: str) -> Report:
    """What transformers itself does with a draft for its assisted generation."""
    findings, seen = check_assistant(directory, target)
    report = Report(findings)
    if "rounds" in seen:
        k = seen["num_assistant_tokens"]
        value = f"at most {seen['longest_round']} in {seen['rounds']} rounds"
        report.measures.append(Measure("tokens drafted", value, f"at most {k}", seen["longest_round"] <= k))
        equal = not any(finding.where == "generate" for finding in findings)
        text = "as the target alone" if equal else "another"
        report.measures.append(Measure("greedy answers to two prompts", text, "the target's own", equal))
    report.findings += [Finding("note", name, str(seen[name])) for name in hf_assisted.FIELDS if name in seen]
    return report


def original(directory: Path, kind: str, source: StateSource) -> nn.Module:
    """A head as it was trained, in the type of its file.

    Raises:
        InputError: no head of this kind, or one that reads another model's states.
    """
    # Compares identities; the copy is in the model's type, which rounds.
    load_head(directory, source.drafter.lm, kind=kind, identity=source.drafter.identity)
    return load_head(directory)


@torch.no_grad()
def check_head(directory: Path, format: HeadFormat, source: StateSource, head: nn.Module | None) -> Report:
    """Everything that is known of a head's directory.

    head: the original, if there is one; else the directory is imported.
    """
    package = read_package(str(directory))
    if kind_at(directory) is not None:
        remedy = f"Write it for others: draftsmith export --format {format.name} --head {directory}"
        raise InputError("directory", f"{directory}, one of draftsmith's own heads", "another system's", remedy)
    reading = format.read(package, source.facts)
    report = Report(list(reading.findings), used=f"{len(reading.used)} of {len(package.tensors)} tensors used")
    record = read_record(directory)
    if record is not None:
        report.findings += against_record(record, reading, format)
        report.findings += other_model(record, source.drafter.identity)
    ours = head
    if ours is None:
        try:
            parsed = format.parse(package, source.facts)
            ours = build_head(format.kind, parsed.config, parsed.state)
        except InputError as error:
            report.findings.append(Finding("error", "import", str(error)))
            return report
    ours = ours.float()
    report.measures += format.compare(reading, ours, package, make_trial(format, source, ours))
    return report


def other_model(record: Mapping[str, Any], identity: Mapping[str, str]) -> list[Finding]:
    """A line for an export that says that its head was trained for another model than the one that is given."""
    recorded = record["head"].get("target") or {}
    if not recorded:
        return []
    differing, unrecorded = compare_identity({"model": identity}, {"model": recorded})
    text = "is another than the model that the head was trained for"
    found = [Finding("error", f"the model's {key.removeprefix('model.')}", text) for key, _, _ in differing]
    text = "not recorded with the head, so not compared"
    return found + [Finding("note", f"the model's {key.removeprefix('model.')}", text) for key in unrecorded]


def print_report(report: Report, directory: str, format: str) -> None:
    """What differs first, then what was measured, then what is worth knowing."""
    console = Console(highlight=False)
    errors = [finding for finding in report.findings if finding.level == "error"]
    said = f": {report.used}" if report.used else ""
    console.print(Text.assemble((f"{directory} as {format} reads it", "bold"), said))
    if errors:
        console.print(findings_table("differs", errors, "red"))
    if report.measures:
        console.print(measures_table(report.measures))
    notes = [finding for finding in report.findings if finding.level == "note"]
    if notes:
        console.print(findings_table("read as", notes, "dim"))
    good = report.failures == 0
    said = "nothing differs" if good else f"{report.failures} difference{'s' if report.failures > 1 else ''}"
    console.print(Text(said, "green" if good else "bold red"))


def findings_table(heading: str, findings: Sequence[Finding], style: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(heading, style=style, overflow="fold")
    table.add_column("")
    for finding in findings:
        table.add_row(Text(finding.where), Text(finding.text))
    return table


def measures_table(measures: Sequence[Measure]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("measured", "", "bar", ""):
        table.add_column(name)
    for measure in measures:
        mark = Text("ok", "green") if measure.passed else Text("DIFFERS", "bold red")
        table.add_row(Text(measure.name), Text(measure.value), Text(measure.bar), mark)
    return table
