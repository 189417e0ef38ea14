"""`draftsmith check`: what another system would make of a directory, and whether that is the head that was trained."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from draftsmith.data.exchange.assistant import check_assistant
from draftsmith.data.exchange.compare import DRAFT_STEPS, Measure, compare_acceptance, compare_eagle
from draftsmith.data.exchange.directory import read_package
from draftsmith.data.exchange.facts import facts_of
from draftsmith.data.exchange.probe import judged_tokens, make_probes
from draftsmith.data.exchange.record import against_record, read_record
from draftsmith.data.heads.directory import build_head, drafter_identity, kinds, load_head
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.manifest import compare_identity
from draftsmith.modules.interop import FORMATS
from draftsmith.modules.interop.base import Finding, Package, Reading, TargetFacts
from draftsmith.modules.interop.hf_assisted import FIELDS
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

Format = Literal["eagle", "vllm", "sglang", "specdec_pp", "acceptance", "hf-assisted"]


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Read a directory as another system would and compare it with what this project makes of it: names, settings,
    and logits on hidden states of the real model. Exits with 1 when anything differs.

    Attributes:
        directory: The directory to check.
        format: The system that is to read it.
        target: The target model; for hf-assisted too.
        draft: The draft model whose hidden states an acceptance head reads (specdec_pp, acceptance).
        eagle: The EAGLE head whose hidden states an acceptance head reads, where it is not a draft model; then with its
            --target.
        head: The head that the directory was exported from, if it is at hand; else the directory itself, imported, is
            what logits are compared with.
        dtype: Type of the model that gives hidden states; auto takes what its checkpoint holds.
        device: Where that model runs.
        engine: How it runs; lean for Llama-family weights, hf for any transformers model.
        trust_remote_code: Let the model's repository run its own code.
    """

    directory: Path
    format: Format
    target: str | None = None
    draft: str | None = None
    eagle: Path | None = None
    head: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    engine: Literal["auto", "lean", "hf"] = "auto"
    trust_remote_code: bool = False


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
    if config.format == "hf-assisted":
        if config.target is None:
            raise InputError("target", "none", "the target that the draft assists", "Pass --target.")
        report = report_of_assistant(config.directory, config.target)
    else:
        paths = {flag: getattr(config, flag) for flag in ("target", "draft", "eagle")}
        drafter = drafter_for(config.format, paths, config)
        head = original(config.head, FORMATS[config.format], drafter) if config.head is not None else None
        report = check_head(config.directory, config.format, drafter, head)
    print_report(report, str(config.directory), config.format)
    return 1 if report.failures else 0


def report_of_assistant(directory: Path, target: str) -> Report:
    """Of a draft for transformers' assisted generation: what transformers itself does with it."""
    findings, seen = check_assistant(directory, target)
    report = Report(findings)
    if "rounds" in seen:
        k = seen["num_assistant_tokens"]
        value = f"at most {seen['longest_round']} in {seen['rounds']} rounds"
        report.measures.append(Measure("tokens drafted", value, f"at most {k}", seen["longest_round"] <= k))
        equal = not any(finding.where == "generate" for finding in findings)
        text = "as the target alone" if equal else "another"
        report.measures.append(Measure("greedy answers to two prompts", text, "the target's own", equal))
    report.findings += [Finding("note", name, str(seen[name])) for name in FIELDS if name in seen]
    return report


@dataclass(frozen=True)
class Drafter:
    """What gives the hidden states that a head reads: a model by its path, with an EAGLE head on it where an acceptance
    head reads that one's. identity: of the two."""

    path: str
    lm: CausalLM
    identity: Mapping[str, str]
    eagle: nn.Module | None = None


def drafter_for(format: str, paths: Mapping[str, Any], how: Any) -> Drafter:
    """What a head of this format reads. paths: by flag: target, draft, eagle. how: says how models are loaded.

    Raises:
        InputError: a model that is needed was not given.
    """
    by_eagle = FORMATS[format] == "acceptance" and paths["eagle"] is not None and paths["draft"] is None
    flag = "target" if FORMATS[format] == "eagle" or by_eagle else "draft"
    if paths[flag] is None:
        whose = "the target" if flag == "target" else "the draft model whose hidden states the head reads"
        raise InputError(flag, "none", whose, f"Pass --{flag}.")
    lm = load_lm(paths[flag], how.dtype, how.device, how.engine, how.trust_remote_code)
    if not by_eagle:
        return Drafter(paths[flag], lm, lm.info.identity)
    return Drafter(paths[flag], lm, drafter_identity(paths["eagle"], lm), load_head(paths["eagle"], lm, kind="eagle"))


def original(directory: Path, kind: str, drafter: Drafter) -> nn.Module:
    """A head as it was trained, in the type of its file.

    Raises:
        InputError: no head of this kind, or one for another drafter.
    """
    # Compares identities; the copy is in the model's type, which rounds.
    load_head(directory, drafter.lm, kind=kind, identity=drafter.identity)
    return load_head(directory)


def check_head(directory: Path, format: str, drafter: Drafter, head: nn.Module | None) -> Report:
    """Everything that is known of a head's directory.

    head: the original, if there is one; else the directory is imported.
    """
    module = importlib.import_module(f"draftsmith.modules.interop.{format}")
    package = read_package(str(directory))
    if package.config.get("kind") in kinds():
        remedy = f"Write it for others: draftsmith export --format {format} --head {directory}"
        raise InputError("directory", f"{directory}, one of draftsmith's own heads", "another system's", remedy)
    facts = facts_of(drafter.path, drafter.lm)
    reading: Reading = module.read(package, facts)
    report = Report(list(reading.findings), used=f"{len(reading.used)} of {len(package.tensors)} tensors used")
    record = read_record(directory)
    if record is not None:
        report.findings += against_record(record, reading, FORMATS[format])
        report.findings += other_model(record, drafter.identity)
    ours = head
    if ours is None:
        try:
            parsed = module.parse(package, facts)
            ours = build_head(FORMATS[format], parsed.config, parsed.state)
        except InputError as error:
            report.findings.append(Finding("error", "import", str(error)))
            return report
    report.measures += measures_of(format, module, reading, ours.float(), drafter, facts, package)
    return report


def other_model(record: dict[str, Any], identity: Mapping[str, str]) -> list[Finding]:
    recorded = record["head"].get("target") or {}
    if not recorded:
        return []
    differing, unrecorded = compare_identity({"model": identity}, {"model": recorded})
    text = "is another than the model that the head was trained for"
    found = [Finding("error", f"the model's {key.removeprefix('model.')}", text) for key, _, _ in differing]
    text = "not recorded with the head, so not compared"
    return found + [Finding("note", f"the model's {key.removeprefix('model.')}", text) for key in unrecorded]


@torch.no_grad()
def measures_of(
    format: str, module: Any, reading: Reading, head: Any, drafter: Drafter, facts: TargetFacts, package: Package
) -> list[Measure]:
    path, lm = drafter.path, drafter.lm
    if FORMATS[format] == "eagle":
        # A draft goes on behind a probe's end, and has to have positions there.
        probes = make_probes(path, lm, min(head.config.llama.max_position, lm.info.max_position) - DRAFT_STEPS)
        return compare_eagle(reading, head, facts, probes, package)
    tokens = judged_tokens(make_probes(path, lm, lm.info.max_position), lm, drafter.eagle)
    if format == "specdec_pp":
        return compare_acceptance(module.accept_prob(reading, tokens.after), torch.sigmoid(head(tokens.after)))
    hidden = tokens.after if head.config.state == "after" else tokens.before
    numbers = head.feature_values(tokens.known) if head.config.features else None
    ours = torch.sigmoid(
        head.calibrated(head(hidden, tokens.embeds if head.config.state == "before" else None, numbers))
    )
    return compare_acceptance(module.accept_prob(reading, tokens.by_name()), ours)


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
