"""What a comparison with an engine found, as a table and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from draftsmith.data import console
from draftsmith.data.console import print_text, table_from_cells
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
    rows = verdict.rows
    theirs, ours = total(row.theirs for row in rows), total(row.ours for row in rows)
    print_text(Text(f"{verdict.directory} in {verdict.engine}, beside our chain of {len(ours.by_place)}", "bold"))
    spoken = (sum(len(row.theirs.tokens) for row in rows), sum(len(row.ours.tokens) for row in rows))
    sums = [
        ("prompts, greedy", str(len(rows)), f"{len(rows)}, {verdict.dtype}"),
        ("tokens", *(f"{count:,}" for count in spoken)),
        ("drafts", f"{theirs.drafts:,}", f"{ours.drafts:,}"),
        ("accepted tokens", f"{theirs.accepted:,}", f"{ours.accepted:,}"),
    ]
    for place, (one, other) in enumerate(zip(theirs.shares, ours.shares, strict=True), 1):
        sums.append((f"  drafts kept up to place {place}", f"{one:.1%}", f"{other:.1%}"))
    sums.append(("tokens a round", f"{theirs.length:.3f}", f"{ours.length:.3f}"))
    console.print_table(table_from_cells("sums", ("count", verdict.engine, "here"), sums, (verdict.engine, "here")))
    differing = [row for row in rows if not (row.same_text and row.same_counts)]
    if differing:
        cells = []
        for row in differing[:SHOWN]:
            engine, here, said = row.theirs.counts, row.ours.counts, "same" if row.same_text else "DIFFERS"
            cells.append((row.id, said, engine.drafts, here.drafts, engine.accepted, here.accepted))
        right = ("drafts", "here", "accepted", "accepted here")
        console.print_table(table_from_cells("differing", ("prompt", "text", *right), cells, right))
        if len(differing) > SHOWN:
            print_text(f"and {len(differing) - SHOWN} more")
    for found in verdict.located:
        print_text(Text.assemble((found.where, "bold"), f" {found.text}"))
    print_text(line(verdict, theirs.length, ours.length))


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
