"""What a comparison with an engine found, as a table and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.eval.engines.counts import Answer, total

SHOWN = 8  # prompts that differ
TEMPLATE, DIRECTORY = "the server's chat template", "the directory"


@dataclass(frozen=True)
class Compared:
    """One prompt in the engine and here."""

    id: str
    theirs: Answer
    ours: Answer

    @property
    def same_text(self) -> bool:
        return self.theirs.tokens == self.ours.tokens

    @property
    def same_counts(self) -> bool:
        return self.theirs.counts == self.ours.counts


@dataclass(frozen=True)
class Located:
    """A difference: what differs, and where or why."""

    where: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """directory: what was served. engine: by what. dtype: of our models."""

    directory: str
    engine: str
    dtype: str
    rows: Sequence[Compared]
    located: Sequence[Located]

    @property
    def equal(self) -> bool:
        return not self.located and all(row.same_text and row.same_counts for row in self.rows)


def show(verdict: Verdict) -> None:
    """The sums, prompts that differ, what was found out, and a line."""
    console, rows = Console(highlight=False, soft_wrap=True), verdict.rows
    theirs, ours = total(row.theirs for row in rows), total(row.ours for row in rows)
    console.print(Text(f"{verdict.directory} in {verdict.engine}, beside our chain of {len(ours.by_place)}", "bold"))
    table = Table("", verdict.engine, "here", box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("prompts, greedy", str(len(rows)), f"{len(rows)}, {verdict.dtype}")
    spoken = (sum(len(row.theirs.tokens) for row in rows), sum(len(row.ours.tokens) for row in rows))
    table.add_row("tokens", *(f"{count:,}" for count in spoken))
    table.add_row("drafts", f"{theirs.drafts:,}", f"{ours.drafts:,}")
    table.add_row("accepted tokens", f"{theirs.accepted:,}", f"{ours.accepted:,}")
    for place, (one, other) in enumerate(zip(theirs.shares, ours.shares, strict=True), 1):
        table.add_row(f"  drafts kept up to place {place}", f"{one:.1%}", f"{other:.1%}")
    table.add_row("tokens a round", f"{theirs.length:.3f}", f"{ours.length:.3f}")
    console.print(table)
    differing = [row for row in rows if not (row.same_text and row.same_counts)]
    if differing:
        table = Table(
            "prompt", "text", "drafts", "here", "accepted", "here", box=None, pad_edge=False, header_style="bold"
        )
        for row in differing[:SHOWN]:
            engine, here, said = row.theirs.counts, row.ours.counts, "same" if row.same_text else "DIFFERS"
            table.add_row(Text(row.id), said, *map(str, (engine.drafts, here.drafts, engine.accepted, here.accepted)))
        console.print(table)
        if len(differing) > SHOWN:
            console.print(f"and {len(differing) - SHOWN} more")
    for found in verdict.located:
        console.print(Text.assemble((found.where, "bold"), f" {found.text}"))
    console.print(line(verdict, theirs.length, ours.length))


def line(verdict: Verdict, theirs: float, ours: float) -> Text:
    """One line, whatever was found."""
    rows = verdict.rows
    if verdict.equal:
        return Text(
            f"equal: text, drafts and accepted tokens of all {len(rows)} prompts, {theirs:.3f} tokens a round", "green"
        )
    texts, counts = sum(not row.same_text for row in rows), sum(not row.same_counts for row in rows)
    more = "".join(f", {found.where}" for found in verdict.located if found.where in (TEMPLATE, DIRECTORY))
    said = f"differs: text of {texts} and drafts of {counts} of {len(rows)} prompts{more}, {theirs:.3f} tokens a round"
    return Text(f"{said}, {ours:.3f} here", "bold red")
