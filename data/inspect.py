"""`data inspect`: what an artefact holds, and rows of it with their masks and labels in colour."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from draftsmith.data.console import print_facts, print_table, print_text, table_from_cells
from draftsmith.data.models.loading import load_tokenizer, tokenizer_identity
from draftsmith.data.settings import check_not_negative
from draftsmith.data.store.datasets import feature_key
from draftsmith.data.store.feature_codec import decode, stored_features
from draftsmith.data.store.manifest import Manifest, open_artefact, volatile
from draftsmith.data.store.reading import open_tensors
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.answers import answers_of, spans
from draftsmith.data.text.repetition import Repetition, distinct_4grams
from draftsmith.data.text.turns import later_turns
from draftsmith.modules.types import InputError

KINDS = ("prompts", "responses", "acceptance", "rollouts", "features")
PROMPT, COUNTED = "dim", "bold green"
# Lowest acceptance probability of each colour.
BANDS = ((0.8, "green"), (0.4, "yellow"), (0.0, "red"))
LEGEND = Text.assemble("P of the drafted token: ", *((f">= {lowest} ", style) for lowest, style in BANDS))
LABELS_SHOWN, DRAFTS_SHOWN = 24, 8


@dataclass(frozen=True)
class InspectConfig:
    """Which rows to show.

    Attributes:
        artefact: Directory of prompts, responses, acceptance labels, rollouts or features.
        row: Number of the first row to show.
        rows: How many rows to show; 0 shows the summary only.
        tokenizer: Model whose tokenizer turns ids into text; without it, the target that the artefact was made with.
    """

    artefact: Path = volatile()
    row: int = 0
    rows: int = 1
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        check_not_negative(self, "row", "rows")


def run(config: InspectConfig) -> None:
    """Print the summary and the rows; every file's hash is checked on the way."""
    manifest = open_artefact(config.artefact, KINDS)
    tokenizer = open_tokenizer(manifest, config.tokenizer)
    rows = Rows(config.artefact, manifest)
    if config.rows and config.row >= len(rows):
        raise InputError("row", config.row, f"less than {len(rows)}, the number of rows", "Pass a smaller number.")
    facts = manifest_summary(manifest, rows, tokenizer)
    print_facts(facts, f"{manifest.kind} in {config.artefact}")
    for number in range(config.row, min(config.row + config.rows, len(rows))):
        show_row(number, rows.read(number, number + 1)[0], manifest, config.artefact, tokenizer)


def open_tokenizer(manifest: Manifest, name: str | None) -> Any:
    """The tokenizer the artefact was made with.

    Raises:
        InputError: it cannot be found, or is another one.
    """
    name = name or manifest.config.get("target")
    if not name:
        raise InputError("tokenizer", "none recorded", "a model's directory or hub id", "Pass --tokenizer MODEL.")
    found, expected = tokenizer_identity(name)["tokenizer"], manifest.identity.get("tokenizer")
    if found != expected:
        raise InputError("tokenizer", f"{found} of {name}", f"{expected}, as recorded", "Pass --tokenizer MODEL.")
    return load_tokenizer(name)


def manifest_summary(manifest: Manifest, rows: Rows, tokenizer: Any) -> dict[str, str]:
    """What the manifest says; for responses how the text relates to the tokens; and how much of the answers copies."""
    entries = {name.replace("_", " "): f"{value:,}" for name, value in manifest.counts.items()}
    if manifest.kind == "responses":
        entries |= round_trips(rows, tokenizer)
    if manifest.kind in ("responses", "features"):
        entries |= repetitions(rows)
    entries["bytes"] = f"{sum(entry.bytes for entry in manifest.files):,}, every hash right"
    nested = {"sampling": manifest.sampling or {}, **manifest.identity}
    for name, value in nested.items():
        several = [f"{key} {_plain(one)}" for key, one in value.items()] if isinstance(value, dict) else [str(value)]
        entries |= {name: ", ".join(several)} if several else {}
    return {**entries, "made by": manifest.command}


def _plain(value: Any) -> str:
    several = value if isinstance(value, list) else [value]
    return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in several)


def round_trips(rows: Rows, tokenizer: Any) -> dict[str, str]:
    """How many answers survive the way through text exactly: sampled ids -> text -> ids for rows whose ids are the
    model's own; the server's text -> ids -> text, with as many tokens as it counted, for re-tokenised ones."""
    checks = {"token ids as sampled": sampled_exactly, "re-tokenised text": retokenised_exactly}
    exact: dict[str, list[bool]] = {name: [] for name in checks}
    for row in rows.iterate():
        name = "re-tokenised text" if row["retokenised"] else "token ids as sampled"
        exact[name].append(checks[name](row, tokenizer))
    return {name: f"{len(own):,} rows, {sum(own):,} round-trip exactly" for name, own in exact.items() if own}


def repetitions(rows: Rows) -> dict[str, str]:
    """How much of the answers copies their prompts, or themselves."""
    sequences = [(row["input_ids"], row["loss_mask"]) for row in rows.iterate()]
    grams = distinct_4grams(ids[start:end] for ids, mask in sequences for start, end in spans(mask))
    distinct = {} if grams is None else {"distinct 4-grams": f"{grams:.2f}, each answer for itself"}
    return {"answers' tokens": Repetition.of(sequences).text(), **distinct}


def sampled_exactly(row: dict[str, Any], tokenizer: Any) -> bool:
    """True where tokenising the answers' texts gives the sampled ids back."""
    answers = answers_of(row)
    return all(tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids for ids in answers)


def retokenised_exactly(row: dict[str, Any], tokenizer: Any) -> bool:
    """True where nothing speaks against the ids being those that the server sampled: they give its text back, and they
    are as many as it counted (where it counted)."""
    answers = answers_of(row)
    said = "".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in answers)
    return said == row["text"] and row["server_tokens"] in (None, sum(map(len, answers)))


def show_row(number: int, row: dict[str, Any], manifest: Manifest, directory: Path, tokenizer: Any) -> None:
    """One row: its text, coloured by what the loss counts or by how likely a drafted token is kept."""
    task = f", task {row['task']}" if row.get("task") else ""
    print_text(Text(f"\nrow {number}, id {row['id']}{task}", "bold"))
    if manifest.kind == "acceptance":
        show_labels(row, tokenizer)
        return
    if manifest.kind == "rollouts":
        show_drafts(row, manifest.config["depth"], tokenizer)
        return
    ids = row.get("input_ids") or row["prompt_ids"]
    unanswered = manifest.kind == "prompts" and not row.get("loss_mask")
    mask = [False] * len(ids) if unanswered else row["loss_mask"]
    print_text(masked_text(ids, mask, tokenizer, marked=not Console().is_terminal))
    notes = [f"{len(ids)} tokens", f"{sum(mask)} counted by the loss"]
    if manifest.kind == "responses":
        notes.append("ended" if row["ended"] else "cut off")
        notes += ["re-tokenised"] if row["retokenised"] else []
    if manifest.kind == "features":
        with open_tensors(Path(directory) / row["shard"]) as file:
            features = decode(stored_features(file, feature_key(row["row"]))).float()
        finite = "all finite" if bool(features.isfinite().all()) else "NOT all finite"
        notes.append(f"features {list(features.shape)}, standard deviation {features.std():.3f}, {finite}")
    print_text(Text(", ".join(notes), style="cyan"))
    if manifest.kind == "prompts":
        for turn, said in enumerate([json.loads(row["messages"]), *later_turns(row)], 1):
            if turn > 1:
                print_text(Text(f"(the target's answer, then turn {turn})", style=COUNTED))
            for message in said:
                print_text(Text(f"{message['role']}: {message['content']}", style=PROMPT))


def masked_text(ids: Sequence[int], mask: Sequence[bool], tokenizer: Any, marked: bool) -> Text:
    """The text, what the mask covers in COUNTED. marked: brackets around it too, for where colour does not show."""
    text = Text()
    # Whole runs: a character may be several tokens.
    for counted, run in itertools.groupby(range(len(ids)), lambda at: bool(mask[at])):
        piece = tokenizer.decode([ids[at] for at in run])
        text.append(f"⟦{piece}⟧" if counted and marked else piece, style=COUNTED if counted else PROMPT)
    return text


def show_labels(row: dict[str, Any], tokenizer: Any) -> None:
    """The target's answers, each token coloured by how likely it is that the draft's proposal there is kept, and a
    table of the first positions."""
    ids, probs, text, known = row["input_ids"], row["accept_prob"], Text(), 0
    places = [at for start, end in spans(row["loss_mask"]) for at in range(start, end)]
    for at, prob in zip(places, probs, strict=True):
        text.append(tokenizer.decode(ids[known:at]), style=PROMPT)
        text.append(tokenizer.decode([ids[at]]), style=band(prob))
        known = at + 1
    print_text(text)
    means = f"mean {sum(probs) / len(probs):.3f}, mean overlap {sum(row['overlap']) / len(probs):.3f}"
    print_text(LEGEND.copy().append(means))
    cells = []
    for j, at in enumerate(places[:LABELS_SHOWN]):
        words = (repr(tokenizer.decode([token])) for token in (ids[at], row["draft_ids"][j]))
        numbers = (f"{row[name][j]:.3f}" for name in ("accept_prob", "overlap", "log_p", "log_q"))
        cells.append([Text(cell, band(probs[j])) for cell in (str(at), *words, *numbers)])
    right = ("P", "overlap", "log p(Y)", "log q(Y)")
    print_table(table_from_cells("labels", ("position", "target X", "draft Y", *right), cells, right))


def show_drafts(row: dict[str, Any], depth: int, tokenizer: Any) -> None:
    """The text with the places where drafts begin; the first drafts beside what the target says there, each token by
    how likely it is kept once it is verified; and how likely that is by depth, on the average."""
    ids, starts = row["input_ids"], row["starts"]
    print_text(masked_text(ids, [at in starts for at in range(len(ids))], tokenizer, marked=not Console().is_terminal))
    cells = []
    for number, start in enumerate(starts[:DRAFTS_SHOWN]):
        own = slice(number * depth, (number + 1) * depth)
        probs, drafted = row["accept_prob"][own], Text()
        for token, prob in zip(row["draft_ids"][own], probs, strict=True):
            drafted.append(repr(tokenizer.decode([token]))[1:-1], style=band(prob))
        said = Text(repr(tokenizer.decode(ids[start : start + depth]))[1:-1])
        at = f"{row['temperature'][number]:g}"
        cells.append((start, at, said, drafted, " ".join(f"{prob:.2f}" for prob in probs)))
    print_table(table_from_cells("drafts", ("start", "temperature", "target X", "draft Y", "P of each"), cells))
    weights, probs = (np.array(row[name]).reshape(-1, depth) for name in ("reached", "accept_prob"))
    kept, verified = (weights * probs).sum(0), weights.sum(0)
    by_depth = (f"{one / all_:.3f}" if all_ else "-" for one, all_ in zip(kept, verified, strict=True))
    print_text(LEGEND.copy().append(f"mean of those that are verified, by depth: {' '.join(by_depth)}"))


def band(prob: float) -> str:
    """Colour of an acceptance probability."""
    return next(style for lowest, style in BANDS if prob >= lowest)
