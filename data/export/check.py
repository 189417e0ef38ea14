"""`draftsmith check`: what another system would make of a directory, and whether that is the head that was trained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from rich.text import Text
from torch import nn

from draftsmith.data.console import print_table, print_text, table_from_cells
from draftsmith.data.export.assistant import check_assistant
from draftsmith.data.export.directory import read_package
from draftsmith.data.export.record import against_model, against_record, read_record
from draftsmith.data.export.states import StateSource, make_trial, state_source
from draftsmith.data.heads.directory import build_head, kind_at, load_head
from draftsmith.data.settings import Dtype, Loading
from draftsmith.modules.formats import format_names, formats, formats_of, hf_assisted
from draftsmith.modules.formats.alternatives import STRONG
from draftsmith.modules.formats.base import Finding, ForeignHead, HeadFormat, Measure, Package
from draftsmith.modules.formats.detect import detect, named_format
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    FormatName = str
    Checked = str
else:
    FormatName = Literal[(*format_names(), hf_assisted.NAME)]
    Checked = Literal[("auto", *format_names(), hf_assisted.NAME)]


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Loading):
    """Read a directory as another system would and compare it with what this project makes of it: names, settings,
    and logits on hidden states of the real model. Exits with 1 when anything differs.

    Attributes:
        directory: The directory to check.
        format: The system that is to read it; auto finds out whose directory it is, checks it for that one and says in
            a line what every other makes of it.
        target: The target model; for hf-assisted too.
        draft: The draft whose hidden states an acceptance head reads (specdec_pp, acceptance): a model, or the
            directory of a drafting head, then with its --target.
        eagle: The old name of --draft for a head.
        head: The head that the directory was exported from, if it is at hand; else the directory itself, imported, is
            what logits are compared with.
    """

    directory: Path
    format: Checked = "auto"
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
        print_report(report, str(config.directory), config.format)
        return 1 if report.failures else 0
    models = (config.target, config.draft, config.loading)
    # A server's formats all read the same model's states: what is missing of it is said before the directory is read.
    named = [format for (name, _), format in formats().items() if name == config.format]
    source = state_source(named[0], *models) if named else None
    package = foreign_package(config.directory)
    found = (package.config, {name: tuple(tensor.shape) for name, tensor in package.tensors.items()})
    format = named_format(config.format, *found) if named else detect(*found)
    source = source or state_source(format, *models)
    head = original(config.head, format.kind, source) if config.head is not None else None
    report = check_head(config.directory, format, source, head)
    print_report(report, str(config.directory), format.name)
    if config.format == "auto":
        print_verdicts(config.directory, format, source, report, head)
    return 1 if report.failures else 0


def foreign_package(directory: Path) -> Package:
    """What another system wrote.

    Raises:
        InputError: no such directory, or one of our own heads.
    """
    package = read_package(str(directory))
    if kind_at(directory) is not None:
        remedy = f"Write it for others: draftsmith export --head {directory} --format FORMAT --output DIR"
        raise InputError("directory", f"{directory}, one of draftsmith's own heads", "another system's", remedy)
    return package


def print_verdicts(
    directory: Path, written: HeadFormat, source: StateSource, own: Report, head: nn.Module | None
) -> None:
    """Whose directory it is, and in a line each what the systems make of it, beside the head as its own would have it.

    written: whose it is; own: the report by that one.
    """
    package = read_package(str(directory))
    shapes = {name: tuple(tensor.shape) for name, tensor in package.tensors.items()}
    said = written.dialect(ForeignHead(package.config, shapes))
    print_text(f"\nWritten as {said} does.")
    if head is None:
        try:
            parsed = written.parse(package, source.facts)
        except InputError:  # the report has said so
            return
        head = build_head(written.kind, parsed.config, parsed.state)
    for format in formats_of(written.kind):
        report = own if format is written else check_head(directory, format, source, head)
        wrong = [f"{f.where}: {f.text}" for f in report.findings if f.level == "error"]
        wrong += [f"{m.name}: {m.value} ({m.bar})" for m in report.measures if not m.passed]
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        verdict = f"another head, or none ({wrong[0]}{more})" if wrong else "computes this head"
        print_text(f"  {format.name}: {verdict}")


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
    package = foreign_package(directory)
    reading = format.read(package, source.facts)
    report = Report(list(reading.findings), used=f"{len(reading.used)} of {len(package.tensors)} tensors used")
    record = read_record(directory)
    if record is not None:
        report.findings += against_record(record, reading, format)
        differing, unrecorded = against_model(record, source.drafter.identity)
        other, unknown = "is another than the model that the head was trained for", "not recorded with the head"
        report.findings += [Finding("error", f"the model's {key}", other) for key in differing]
        report.findings += [Finding("note", f"the model's {key}", f"{unknown}, so not compared") for key in unrecorded]
    ours = head
    if ours is None:
        try:
            parsed = format.parse(package, source.facts)
            ours = build_head(format.kind, parsed.config, parsed.state)
        except InputError as error:
            report.findings.append(Finding("error", "import", str(error)))
            return report
    ours = ours.float()
    trial = make_trial(format, source, ours, reading)
    known = dataclasses.replace(trial, known=record is not None or head is not None)
    report.measures += format.compare(reading, ours, package, known)
    return report


def print_report(report: Report, directory: str, format: str) -> None:
    """What differs first, then what was measured, then what is worth knowing."""
    said = f": {report.used}" if report.used else ""
    print_text(Text.assemble((f"{directory} as {format} reads it", "bold"), said))

    def mark(measure: Measure) -> Text:
        return Text("cannot tell", "yellow") if measure.weak else marks[measure.passed]

    marks = {True: Text("ok", "green"), False: Text("DIFFERS", "bold red")}
    levels = {"error": ("differs", "red"), "note": ("read as", "dim")}
    found = {level: [f for f in report.findings if f.level == level] for level in levels}
    for level, (name, style) in levels.items():
        if level == "note" and report.measures:
            rows = [(m.name, m.value, m.bar, mark(m)) for m in report.measures]
            print_table(table_from_cells("measured", ("measured", "value", "bar", "verdict"), rows))
        if found[level]:
            print_table(table_from_cells(level, (name, "as"), [(Text(f.where, style), f.text) for f in found[level]]))
    count = report.failures
    good = Text("nothing differs", "green")
    alike = ", ".join(label for m in report.measures for label in m.alike)
    if alike:
        others = f"; these few answers do not tell it from a head made for {alike}: import and `diagnose` it on more"
        good = Text.assemble(good, (others, "yellow"))
    if any(m.weak for m in report.measures):
        why = f"it drafts too little (first tokens right below {STRONG:.0%}, or few) to show how it was made"
        good = Text(f"too weak to tell: {why}. No name, setting or logit differs.", "yellow")
    print_text(Text(f"{count} difference{'s' if count > 1 else ''}", "bold red") if count else good)
