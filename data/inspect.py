"""`data inspect`: print the summary of an artifact, and rows with their masks and labels in color."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from draftsmith.data.console import print_facts, print_table, print_text, table_from_cells
from draftsmith.data.settings import InspectConfig
from draftsmith.data.store.datasets import feature_key
from draftsmith.data.store.feature_codec import FeatureFiles, decode
from draftsmith.data.store.manifest import Manifest, check_files, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.answers import Repetition, distinct_4grams, spans
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.types import InputError, without_controls

# Kinds whose summary reads every table.
SUMMARIZED = ("responses", "features")
KINDS = ("prompts", "responses", "acceptance", "rollouts", "features")
PROMPT, COUNTED = "dim", "bold green"
# Lowest acceptance probability of each color.
BANDS = ((0.8, "green"), (0.4, "yellow"), (0.0, "red"))
LEGEND = Text.assemble("P of the drafted token: ", *((f">= {lowest} ", style) for lowest, style in BANDS))
LABELS_SHOWN, DRAFTS_SHOWN = 24, 8


def run(config: InspectConfig) -> None:
    """Print the summary and the rows; the hashes of the files that are read for them are checked."""
    manifest = open_artifact(config.artifact, KINDS, check="size")
    name = config.tokenizer or manifest.config.get("target")
    if not name:
        raise InputError("tokenizer", "none recorded", "a model's directory or hub id", "Pass --tokenizer MODEL.")
    # Another tokenizer would show other text without an error.
    model = Checkpoint(name)
    found, expected = model.tokenizer_identity["tokenizer"], manifest.identity.get("tokenizer")
    if found != expected:
        raise InputError("tokenizer", f"{found} of {name}", f"{expected}, as recorded", "Pass --tokenizer MODEL.")
    tokenizer = model.tokenizer

    # Print the facts, then the rows.
    rows = Rows(manifest.directory, manifest)
    if config.rows and config.row >= len(rows):
        raise InputError("row", config.row, f"less than {len(rows)}, the number of rows", "Pass a smaller number.")
    read = files_read(manifest, config.row, config.row + config.rows)
    check_files(manifest, read.__contains__)
    print_facts(summary(manifest, rows, tokenizer), f"{manifest.kind} in {config.artifact}")
    for number in range(config.row, min(config.row + config.rows, len(rows))):
        (row,) = rows.read(number, number + 1)
        task = f", task {row['task']}" if row.get("task") else ""
        print_text(Text(without_controls(f"\nrow {number}, id {row['id']}{task}"), "bold"))
        if manifest.kind == "acceptance":
            print_labels(row, tokenizer)
        elif manifest.kind == "rollouts":
            print_drafts(row, manifest.config["depth"], tokenizer)
        else:
            print_row(row, manifest.kind, manifest.directory, tokenizer)


def files_read(manifest: Manifest, first: int, stop: int) -> set[str]:
    """Return the names of the files that the summary and rows [first, stop) are read from."""
    names, end = set[str](), 0
    for entry in manifest.files:
        if entry.name.endswith(".parquet"):
            start, end = end, end + entry.rows
            is_shown = start < stop and first < end
            names |= {entry.name, entry.name.replace(".parquet", ".safetensors")} if is_shown else set()
            names |= {entry.name} if manifest.kind in SUMMARIZED else set()
    return names


def summary(manifest: Manifest, rows: Rows, tokenizer: Any) -> dict[str, str]:
    """Return the manifest's facts, how many answers survive tokenization, and how much of them is repetition."""
    facts = {name.replace("_", " "): f"{value:,}" for name, value in manifest.counts.items()}
    if manifest.kind == "responses":
        exact: dict[str, list[bool]] = {}
        for row in rows.iterate():
            name = "re-tokenized text" if row["retokenized"] else "token ids as sampled"
            exact.setdefault(name, []).append(round_trips(row, tokenizer))
        facts |= {name: f"{len(ok):,} rows, {sum(ok):,} round-trip exactly" for name, ok in exact.items()}
    if manifest.kind in SUMMARIZED:
        sequences = [(row["input_ids"], row["loss_mask"]) for row in rows.iterate()]
        grams = distinct_4grams(ids[start:end] for ids, mask in sequences for start, end in spans(mask))
        facts["answers' tokens"] = Repetition.of(sequences).text()
        facts |= {} if grams is None else {"distinct 4-grams": f"{grams:.2f}, each answer for itself"}
    facts["bytes"] = f"{sum(entry.bytes for entry in manifest.files):,}, sizes right, and hashes of what is read"

    for name, value in {"sampling": manifest.sampling or {}, **manifest.identity}.items():
        items = value.items() if isinstance(value, dict) else [("", value)]
        parts = [f"{key} {one:g}" if isinstance(one, float) else f"{key} {one}".strip() for key, one in items]
        facts |= {name: ", ".join(parts)} if parts else {}
    return {**facts, "made by": manifest.command}


def round_trips(row: dict[str, Any], tokenizer: Any) -> bool:
    """Return whether tokenization loses nothing: sampled ids -> text -> ids, or a server's text -> ids -> text."""
    answers = [row["input_ids"][start:end] for start, end in spans(row["loss_mask"])]
    if row["retokenized"]:
        # The ids may be those that the server sampled: they give its text and its count of tokens.
        text = "".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in answers)
        return text == row["text"] and row["server_tokens"] in (None, sum(map(len, answers)))
    return all(tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids for ids in answers)


def print_row(row: dict[str, Any], kind: str, directory: Path, tokenizer: Any) -> None:
    """Print the text with its answers in color, and for prompts the messages of all turns."""
    ids = row.get("input_ids") or row["prompt_ids"]
    mask = row.get("loss_mask") or [False] * len(ids)
    print_text(masked_text(ids, mask, tokenizer, bracketed=not Console().is_terminal))
    notes = [f"{len(ids)} tokens", f"{sum(mask)} counted by the loss"]
    if kind == "responses":
        notes.append("ended" if row["ended"] else "cut off")
        notes += ["re-tokenized"] if row["retokenized"] else []
    if kind == "features":
        stored = FeatureFiles(directory).read(row["shard"], feature_key(row["row"]), f"row {row['id']}")
        features = decode(stored).float()
        notes.append(f"features {list(features.shape)}, standard deviation {features.std():.3f}, all finite")
    print_text(Text(", ".join(notes), style="cyan"))
    if kind == "prompts":
        for turn, messages in enumerate([json.loads(row["messages"]), *json.loads(row["later"])], 1):
            if turn > 1:
                print_text(Text(f"(the target's answer, then turn {turn})", style=COUNTED))
            for message in messages:
                said = [message["content"]] if message["content"] else []
                beside = {key: value for key, value in message.items() if key not in ("role", "content")}
                said += [json.dumps(beside, ensure_ascii=False)] if beside else []
                print_text(Text(without_controls(f"{message['role']}: {' '.join(said)}"), style=PROMPT))


def masked_text(ids: Sequence[int], mask: Sequence[bool], tokenizer: Any, bracketed: bool) -> Text:
    """Return the text with the masked part in COUNTED. bracketed: in brackets too, for output without color."""
    text = Text()
    # Whole runs: a character may be several tokens.
    for counted, run in itertools.groupby(range(len(ids)), lambda at: bool(mask[at])):
        piece = without_controls(tokenizer.decode([ids[at] for at in run]))
        text.append(f"⟦{piece}⟧" if counted and bracketed else piece, style=COUNTED if counted else PROMPT)
    return text


def print_labels(row: dict[str, Any], tokenizer: Any) -> None:
    """Print the answers, each token colored by P of the token drafted there, and a table of the first positions."""
    ids, probs, text, end = row["input_ids"], row["accept_prob"], Text(), 0
    positions = np.flatnonzero(row["loss_mask"]).tolist()
    for at, prob in zip(positions, probs, strict=True):
        # Text between two answer tokens was not drafted.
        text.append(without_controls(tokenizer.decode(ids[end:at])), style=PROMPT)
        text.append(without_controls(tokenizer.decode([ids[at]])), style=band(prob))
        end = at + 1
    print_text(text)
    means = f"mean {sum(probs) / len(probs):.3f}, mean overlap {sum(row['overlap']) / len(probs):.3f}"
    print_text(LEGEND.copy().append(means))
    cells = []
    for j, at in enumerate(positions[:LABELS_SHOWN]):
        words = (repr(tokenizer.decode([token])) for token in (ids[at], row["draft_ids"][j]))
        numbers = (f"{row[name][j]:.3f}" for name in ("accept_prob", "overlap", "log_p", "log_q"))
        cells.append([Text(cell, band(probs[j])) for cell in (str(at), *words, *numbers)])
    right = ("P", "overlap", "log p(Y)", "log q(Y)")
    print_table(table_from_cells("labels", ("position", "target X", "draft Y", *right), cells, right))


def print_drafts(row: dict[str, Any], depth: int, tokenizer: Any) -> None:
    """Print the text with the starts of drafts, the first drafts beside the target's text, and mean P by depth."""
    ids, starts = row["input_ids"], row["starts"]
    is_start = [at in starts for at in range(len(ids))]
    print_text(masked_text(ids, is_start, tokenizer, bracketed=not Console().is_terminal))
    cells = []
    for number, start in enumerate(starts[:DRAFTS_SHOWN]):
        tokens = slice(number * depth, (number + 1) * depth)
        probs, drafted = row["accept_prob"][tokens], Text()
        for token, prob in zip(row["draft_ids"][tokens], probs, strict=True):
            drafted.append(repr(tokenizer.decode([token]))[1:-1], style=band(prob))
        target_text = Text(repr(tokenizer.decode(ids[start : start + depth]))[1:-1])
        cells.append((start, target_text, drafted, " ".join(f"{prob:.2f}" for prob in probs)))
    print_table(table_from_cells("drafts", ("start", "target X", "draft Y", "P of each"), cells))
    # Means weigh a token by the probability that a round reaches it.
    weights, probs = (np.array(row[name]).reshape(-1, depth) for name in ("reached", "accept_prob"))
    accepted, verified = (weights * probs).sum(0), weights.sum(0)
    by_depth = (f"{part / all_:.3f}" if all_ else "-" for part, all_ in zip(accepted, verified, strict=True))
    print_text(LEGEND.copy().append(f"mean of those that are verified, by depth: {' '.join(by_depth)}"))


def band(prob: float) -> str:
    """Return the color of an acceptance probability."""
    return next(style for lowest, style in BANDS if prob >= lowest)
