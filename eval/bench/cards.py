"""What a benchmark tells of the heads it has used: `measured.json` in their directories, and their cards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.heads.draft_settings import MODEL
from draftsmith.data.heads.measured import write_measured
from draftsmith.modules.drafters.methods import Named
from draftsmith.modules.types import InputError

SCHEMA_VERSION = 1
# Of the meta and the rows of a results.json.
HOW = ("date", "git_commit", "clock", "hardware", "versions", "prompts", "target", "settings")
ROW = ("tau", "tau_ci95", "prompts", "tokens", "speedup", "speedup_ci95", "matches_ar")


def heads_of(named: Sequence[Named], paths: Mapping[str, str]) -> dict[str, str]:
    """Kind -> directory of the heads that some method uses. paths: role or kind -> what the user passed."""
    used = {need for item in named for need in item.method.needs} - {MODEL, "mid"}
    return {kind: path for kind, path in paths.items() if kind in used}


def check_cards(named: Sequence[Named], paths: Mapping[str, str]) -> None:
    """Check that cards can be written, before anything is measured.

    Raises:
        InputError: no method uses a head, or the directory of one cannot be written to.
    """
    heads = heads_of(named, paths)
    if not heads:
        remedy = "Pass --draft HEAD or --acceptance HEAD with a method that uses it, or leave --card out."
        raise InputError("card", "no method that uses a head", "a head to write the card of", remedy)
    for kind, directory in heads.items():
        if Path(directory).is_dir() and not os.access(directory, os.W_OK):
            remedy = "Copy it to a place of your own, or leave --card out."
            raise InputError(kind, f"{directory}, which cannot be written to", "a head directory of yours", remedy)


def write_cards(results: Mapping[str, Any], named: Sequence[Named], paths: Mapping[str, str]) -> list[str]:
    """Write what was measured of each head into its directory; returns the directories.

    results: the content of results.json.
    """
    heads = heads_of(named, paths)
    for kind, directory in heads.items():
        write_measured(directory, of_head(results, named, kind))
    return list(heads.values())


def of_head(results: Mapping[str, Any], named: Sequence[Named], kind: str) -> dict[str, Any]:
    """What `measured.json` holds of one head: the rows of the methods that used it, and how they were taken."""
    meta, labels = results["meta"], {item.label for item in named if kind in item.method.needs}
    rows = []
    for row in results["methods"]:
        if row["method"] in labels:
            by_task = {task: {key: part[key] for key in ROW} for task, part in row.get("by_task", {}).items()}
            own = {key: row[key] for key in ("method", "temperature", *ROW)}
            rows.append({**own, "by_task": by_task})
    how = {name: meta[name] for name in HOW}
    return {"schema_version": SCHEMA_VERSION, **how, "methods": rows}
