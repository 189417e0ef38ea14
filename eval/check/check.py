"""`draftsmith check`: compare what another system computes from a directory with the head that was trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor, nn

from draftsmith.data.console import print_table, print_text, table_from_cells
from draftsmith.data.text.answers import spans
from draftsmith.eval.check.record import against_model, differences, hashes_of
from draftsmith.eval.check.states import StateSource, answered_prompts, state_source
from draftsmith.eval.diagnose.drafts import (
    COMPARED,
    STRONG,
    Drafts,
    HeadVariant,
    better_variants,
    head_variants,
    known_rope,
    longest_draft,
)
from draftsmith.eval.diagnose.drafts import measure as measure_texts
from draftsmith.eval.settings import SYSTEMS, CheckConfig
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.along import Answer, TargetText, along_head, read, rounds_by_place, tau_of
from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.formats import GGUF, MTP, formats
from draftsmith.modules.formats.base import HeadFormat, ImportedHead, NotReadHere, Package, Problem, largest
from draftsmith.modules.formats.foreign import builders, detect, head_kind, named_format, not_read_here
from draftsmith.modules.formats.readings import TRAINER
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.directory import RECORD
from draftsmith.modules.pretrained.heads import build_head, load_head
from draftsmith.modules.pretrained.stitch import head_package, ships_mtp
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.types import InputError, SamplingParams

# Two float32 implementations of one layer; another rope, order or bias changes logits by tenths at least.
LARGEST_DIFFERENCE = 1e-4
LARGEST_SHARE = 1e-5  # of the largest logit, if that is more: a draft reads its own rounded states
ROUNDED_SHARE = 0.1  # beside a head that was not rounded to the 8 bits of the directory
PLACES = 5  # tokens of a draft whose acceptance is compared
KEPT = 0.9  # least share of the accepted tokens that rounding to 8 bits may leave; sound heads keep all but 1 %


@dataclass(frozen=True)
class Measure:
    """A measured value of a check, with its bar, and whether it is met; None if the texts cannot tell."""

    name: str
    value: str
    passed: bool | None

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


@dataclass
class CheckReport:
    """Result of a check.

    problems: tensors and settings that differ. notes: what was left out or assumed. read: the head; None if it was not.
    lacking: what our drafters lack to read it, empty if nothing; it says nothing about the files.
    """

    read: ImportedHead | None = None
    lacking: str = ""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Everything that differs, a line each."""
        lines = [f"{problem.where}: {problem.text}" for problem in self.problems]
        return lines + [str(measure) for measure in self.measures if measure.passed is False]

    def verdict(self, own: CheckReport) -> str:
        """Say what this system computes. own: of the system that the directory was written for."""
        if self.lacking:
            return f"not read here ({self.lacking})"
        # A system that reads the files as their own one does computes the same wrong head.
        if lines := self.failures or [str(measure) for measure in own.measures if measure.passed is False]:
            return f"another head, or none ({lines[0]}{f', and {len(lines) - 1} more' if len(lines) > 1 else ''})"
        return "computes this head"

    @property
    def unclear(self) -> list[Measure]:
        """Inconclusive measures: those of a weak head, and of other readings that draft as well."""
        return [measure for measure in self.measures if measure.passed is None]

    @property
    def exit_code(self) -> int:
        """0 if nothing differs, 1 if something does, 3 if neither is proven."""
        return 1 if self.failures else 3 if self.lacking or self.unclear else 0


def run(config: CheckConfig) -> int:
    """Check a directory by a system's rules, or in its engine.

    Returns 0 if it computes what was trained, 1 if it does not, 3 if that cannot be told.

    Raises:
        InputError: no such directory, one of our own heads, or no model.
    """
    if config.engine in SYSTEMS:
        from draftsmith.eval.check.engine import run as serve

        return serve(config)
    wanted: str = config.format
    # A checkpoint with a module is read for that alone: its other files may be links to the target's.
    if wanted == "auto" and (config.directory / "config.json").is_file() and ships_mtp(Checkpoint(config.directory)):
        wanted = MTP
    # All formats of a name read the same model: a missing --target is reported before the directory is read.
    source = state_source(False, config.target, None, config.loading) if wanted != "auto" else None
    package = head_package(config.directory, wanted)
    if wanted != MTP:
        if (error := not_read_here(package)) is not None:
            report = CheckReport(lacking=str(error))
            print_report(report, str(config.directory), wanted)
            return report.exit_code
        # A format that is named is not guessed.
        of_acceptance = (wanted, AcceptanceHead.kind) in formats()
        if of_acceptance or (wanted == "auto" and head_kind(package) == AcceptanceHead.kind):
            found, remedy = f"{config.directory} as an acceptance head", "Import it, and measure it: eval bench."
            raise InputError("directory", found, "a head that drafts, which servers load", remedy)
    source = source or state_source(False, config.target, None, config.loading)
    if wanted == MTP:
        format = formats()[MTP, MTP]
    else:
        format = detect(package, source.facts) if wanted == "auto" else named_format(wanted, package)
    head = original(config.head, format.kind, source) if config.head is not None else None
    report = check_head(package, format, source, head)
    print_report(report, str(config.directory), format.name)
    if wanted == "auto" and not report.lacking:
        print_text("\nFrom these files, by the rules of each system:")
        for other in formats().values():
            # A trainer's own reading matters for its own directories: others are loaded by servers, GGUF by llama.cpp.
            server = other.writes and GGUF not in (other.name, format.name)
            if other.kind == format.kind and (server or other is format):
                # Only beside the head itself a forward shows more than names and settings.
                read = check_head(package, other, source, head, head is not None, report.read)
                print_text(f"  {other.name}: {(report if other is format else read).verdict(report)}")
    return report.exit_code


def original(directory: str | Path, kind: str, source: StateSource, config: dict[str, Any] | None = None) -> nn.Module:
    """Load a head as it was trained, in the type of its file. config: of `head_config`, where it was read already.

    Raises:
        InputError: no head of this kind, or one that reads another model's states.
    """
    reader = source.drafter
    return load_head(directory, reader.lm, kind=kind, identity=reader.identity, as_stored=True, config=config)


def check_head(
    package: Package,
    format: HeadFormat,
    source: StateSource,
    head: nn.Module | None,
    forward: bool = True,
    like: ImportedHead | None = None,
    trained: nn.Module | None = None,
) -> CheckReport:
    """Read a head's files by a system's rules; compare them with their record and with the head, if there are such.

    package: what the format reads of a directory (`head_package`). forward: run the head on real text. like: the head
    as its own system reads it, to compare with where there is no record.
    trained: the head before its weights were rounded to 8 bits, whose drafts are compared as well.
    """
    report = CheckReport()
    try:
        theirs = format.read(package, source.facts)
        net = build_head(format.kind, theirs.config, theirs.state)
    except NotReadHere as error:
        report.lacking = str(error)
        systems = builders(package, format.kind)
        report.notes.append(f"{systems or 'no system that was read'}: builds heads of its class")
        return report
    except InputError as error:
        report.problems.append(Problem(error.field, str(error).partition(": ")[2]))
        return report
    report.read = theirs
    report.problems += theirs.problems
    report.notes += theirs.notes
    if (record := package.exported) is not None:
        if record["kind"] != format.kind:
            report.problems.append(Problem(RECORD, f"this was exported as {record['format']}"))
        else:
            report.problems += differences(record["config"], record["tensors"], theirs, types=record["types"])
        other = "is another than the model that the head was trained for"
        differing = against_model(record, source.drafter.identity)
        report.problems += [Problem(f"the model's {key}", other) for key in differing]
    elif like is not None:
        report.problems[:0] = differences(dataclasses.asdict(like.config), hashes_of(like.state), theirs, "trained")
    share = ROUNDED_SHARE if package.quantized and trained is None else LARGEST_SHARE
    report.measures += measure(net, head, source, record is not None, trained, share) if forward else []
    return report


@torch.inference_mode()
def measure(
    theirs: Any,
    ours: Any | None,
    source: StateSource,
    known: bool,
    trained: Any | None = None,
    share: float = LARGEST_SHARE,
) -> list[Measure]:
    """Run the head as a system reads it on text of the model, and compare its outputs with those of ours.

    known: a record says how the head was trained, so that readings which draft as well do not count. trained: as of
    `check_head`. share: of the largest logit, by which outputs may differ.
    """
    lm, heads = source.drafter.lm, [head for head in (theirs, ours) if head is not None]
    longest = min([lm.info.max_position, *(getattr(head.config, "max_position", 2**62) for head in heads)])
    texts = answered_prompts(lm, longest)
    heads = [head.to(lm.device, lm.dtype).eval() for head in heads]
    final = (final_state(lm.info.num_layers),)
    variants = [HeadVariant("", "as it is", head, head.aux_layers or final) for head in heads]
    if ours is None:
        variants = head_variants(theirs, known_rope(lm), lm, in_files=True)
    depth = longest_draft(COMPARED, variants)
    try:
        as_it_is, *others = measure_texts(lm, texts, variants, depth).drafts
    except NonFinite as error:
        return [Measure("accepted by place", str(error), False)]
    text, strong = f"{shares(as_it_is)} of {len(as_it_is.accepted)} drafts", as_it_is.share() >= STRONG
    text += "" if strong else f", a weak head (below {STRONG:.0%})"
    # Where a record or the head says what was trained, a weak one is still the right one.
    measures = [Measure("accepted by place", text, strong or known or ours is not None or None)]
    if ours is not None:
        pairs = [pair for text in texts for pair in outputs_along(lm, text, heads, depth)]
        measures.append(difference(f"logits of {sum(len(one) for one, _ in pairs)} rows", pairs, share))
        return measures if trained is None else [*measures, acceptance(lm, texts, trained, heads[0])]
    drafts = {variant.label: own for variant, own in zip(variants[1:], others, strict=True)}
    # No file means what a trainer does otherwise than all servers: that counts only where it drafts better.
    settled = {variant.label for variant in variants if known or variant.factor == TRAINER}
    whole = isinstance(theirs.config, BlockConfig)
    better = better_variants(as_it_is, drafts, whole)
    for label in sorted(drafts, key=lambda label: label not in better):
        # The same test the other way round, by as many comparisons: does it draft worse for certain?
        ruled_out = label in settled or better_variants(drafts[label], dict.fromkeys(drafts, as_it_is), whole)
        text = shares(drafts[label])
        measures.append(Measure(f"read with {label}", text, False if label in better else bool(ruled_out) or None))
    return measures


def shares(drafts: Drafts) -> str:
    """Return the text of the shares of drafts that are accepted up to each place."""
    return " ".join(f"{drafts.share(place):.1%}" for place in range(1, COMPARED + 1))


def outputs_along(
    lm: CausalLM, row: Mapping[str, Any], heads: Sequence[Any], depth: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [N, V], and log-odds [N] of confidence heads, of two heads along drafts of `depth` tokens.

    A draft is followed as long as both heads read the same tokens.
    """
    text, sides = text_of(lm, row, heads), list[tuple[Tensor, list[list[Tensor]]]]()
    for head in heads:
        branches = text.open(BranchDrafter(head.net(lm), depth), len(text.ids))
        starts = torch.arange(max(text.answers[0].begin + 1, branches.min_start), len(text.ids) + 1)
        drafted = branches.draft(starts.tolist(), depth)
        read = torch.cat([torch.tensor(text.ids)[starts - 1][:, None], drafted.tokens[:, :-1].cpu()], 1)  # [S, K]
        outputs = []
        for level, hidden in enumerate(drafted.hidden.unbind(1)):
            outputs.append([branches.lm_head(hidden).float()])
            if getattr(head.config, "confidence", False):
                states = hidden[:, : head.config.hidden_size]
                outputs[-1].append(head.confidence(states, read[:, level].to(lm.device)).float())
        sides.append((read, outputs))
    (read, ours), (other_read, theirs) = sides
    same = (read == other_read).cumprod(1).bool()  # [S, K]
    for level, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        rows = same[:, level].to(lm.device)
        yield from ((a[rows], b[rows]) for a, b in zip(one, two, strict=False))


def text_of(lm: CausalLM, row: Mapping[str, Any], heads: Sequence[Any]) -> TargetText:
    """Let the model read a text of its own, greedily answered, for some heads."""
    answers = [Answer(begin, end, end) for begin, end in spans(row["loss_mask"])]
    return read(lm, row["input_ids"], answers, SamplingParams(), [layer for head in heads for layer in head.aux_layers])


def acceptance(lm: CausalLM, rows: Sequence[Mapping[str, Any]], trained: Any, exported: Any) -> Measure:
    """Compare what of a head's drafts the model accepts before and after its weights are rounded."""
    heads = [trained.to(lm.device, lm.dtype).eval(), exported]
    depth = longest_draft(PLACES, [HeadVariant("", "as it is", head, ()) for head in heads])
    drafters = [along_head(depth, head.net(lm), head.config.max_position, shorter=False) for head in heads]
    texts, shown, taus = [text_of(lm, row, heads) for row in rows], [], []
    for drafter in drafters:
        walks = [walk for text in texts for (walk,) in drafter.walk(text, [depth])]
        taus.append(tau_of(walks))
        accepted, drafted = rounds_by_place(walks)
        shown.append(f"tau {taus[-1]:.2f} ({' '.join(f'{share:.0%}' for share in accepted / drafted)})")
    enough = taus[1] - 1 >= KEPT * (taus[0] - 1)
    return Measure("acceptance before and after", f"{shown[0]}, {shown[1]}; accepted by place", enough)


def difference(name: str, pairs: Sequence[tuple[Tensor, Tensor]], share: float = LARGEST_SHARE) -> Measure:
    """Compare two heads' outputs."""
    # Tokens that a head cannot draft have -inf.
    worst = max((largest(torch.where(one == two, 0.0, one - two)) for one, two in pairs), default=0.0)
    size = max((largest(two[two.isfinite()]) for _, two in pairs), default=0.0)
    bar = max(LARGEST_DIFFERENCE, share * size)
    return Measure(name, f"differ by {worst:.1e} (at most {bar:.2g})", worst <= bar)


def print_report(report: CheckReport, directory: str, format: str) -> None:
    """Print what differs, what was measured, and the notes."""
    print_text(Text(f"{directory}{'' if format == 'auto' else f' as {format} reads it'}", "bold"))
    if report.problems:
        rows = [(Text(problem.where, "red"), problem.text) for problem in report.problems]
        print_table(table_from_cells("error", ("differs", "as"), rows))
    if report.measures:
        marks = {True: Text("ok", "green"), False: Text("DIFFERS", "bold red"), None: Text("cannot tell", "yellow")}
        measured = [(m.name, m.value, marks[m.passed]) for m in report.measures]
        print_table(table_from_cells("measured", ("measured", "value", "verdict"), measured))
    for note in report.notes:
        print_text(f"  note: {note}")
    count, unclear = len(report.failures), report.unclear
    if report.lacking:
        print_text(Text(f"not read here: {report.lacking}", "bold yellow"))
        print_text("Draftsmith has no drafter for it; its trainer and servers may. That says nothing about the files.")
    elif count:
        print_text(Text(f"{count} difference{'s' if count > 1 else ''}", "bold red"))
    elif unclear:
        others = len(unclear) - (report.measures[0] in unclear)
        few = f"{others} other reading{'s draft' if others > 1 else ' drafts'} as well" if others else "a weak head"
        print_text(Text(f"no difference found, but cannot tell: {few} ({report.measures[0]})", "yellow"))
    else:
        print_text(Text("nothing differs", "green"))
