"""`data inspect`: print the summary of an artifact, and rows with their masks in color."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.data.console import print_facts, print_text
from draftsmith.data.stages import InspectConfig
from draftsmith.data.store.datasets import feature_key
from draftsmith.data.store.feature_codec import FeatureFiles, decode
from draftsmith.data.store.manifest import Manifest, check_files, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.types import InputError, without_controls

KINDS = ("prompts", "responses", "acceptance", "rollouts", "features")
PROMPT, COUNTED = "dim", "bold green"


def run(config: InspectConfig) -> None:
    """Print the summary and the rows; the hashes of the files that are read for them are checked."""
    manifest = open_artifact(config.data, KINDS, check="size")
    # Another tokenizer would show other text without an error.
    model = Checkpoint(name := str(manifest.config.get("target")))
    found, expected = model.tokenizer_identity["tokenizer"], manifest.identity.get("tokenizer")
    if found != expected:
        remedy = "Put the model that it was made with in its place."
        raise InputError("target", f"{name} with tokenizer {found}", f"{expected}, as recorded", remedy)
    tokenizer = model.tokenizer

    # Print the facts, then the rows.
    rows = Rows(manifest)
    if config.rows and config.row >= len(rows):
        raise InputError("row", config.row, f"less than {len(rows)}, the number of rows", "Pass a smaller number.")
    check_files(manifest, files_read(manifest, config.row, config.row + config.rows).__contains__)
    print_facts(summary(manifest), f"{manifest.kind} in {config.data}")
    for number in range(config.row, min(config.row + config.rows, len(rows))):
        (row,) = rows.read(number, number + 1)
        labels = {"task": row.get("task"), **json.loads(row.get("labels") or "{}")}
        task = "".join(f", {name} {text}" for name, text in labels.items() if text)
        print_text(Text(without_controls(f"\nrow {number}, id {row['id']}{task}"), "bold"))
        print_row(row, manifest.kind, manifest.directory, tokenizer)


def files_read(manifest: Manifest, first: int, stop: int) -> set[str]:
    """Return the names of the files that rows [first, stop) are read from."""
    names, end = set[str](), 0
    for entry in manifest.files:
        if entry.name.endswith(".parquet"):
            start, end = end, end + entry.rows
            if start < stop and first < end:
                names |= {entry.name, entry.name.replace(".parquet", ".safetensors")}
    return names


def summary(manifest: Manifest) -> dict[str, str]:
    """Return the manifest's facts."""
    facts = {name.replace("_", " "): f"{value:,}" for name, value in manifest.counts.items()}
    facts["bytes"] = f"{sum(entry.bytes for entry in manifest.files):,}, sizes right, and hashes of what is read"

    for name, value in {"sampling": manifest.sampling or {}, **manifest.identity}.items():
        items = value.items() if isinstance(value, dict) else [("", value)]
        parts = [f"{key} {one:g}" if isinstance(one, float) else f"{key} {one}".strip() for key, one in items]
        facts |= {name: ", ".join(parts)} if parts else {}
    return {**facts, "made by": manifest.command}


def print_row(row: dict[str, Any], kind: str, directory: Path, tokenizer: Any) -> None:
    """Print the text with its answers in color, and for prompts the messages of all turns."""
    ids = row.get("input_ids") or row["prompt_ids"]
    mask = row.get("loss_mask") or [False] * len(ids)
    print_text(masked_text(ids, mask, tokenizer, bracketed=not Console().is_terminal))
    notes = [f"{len(ids)} tokens", f"{sum(mask)} counted by the loss"]
    if kind == "responses":
        notes.append("ended" if row["ended"] else "cut off")
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
