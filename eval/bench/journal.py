"""The journal of an unfinished run: what is done survives a kill, and the same command goes on behind it.

JSON lines. The first one holds what the run is decided by; each later one what was measured of one group of prompts. A
line is synced to the disk before the next group begins. A torn last line is what a kill leaves: it is cut off, and its
group measured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.data.store.files import append, cut, make_directory, write_text
from draftsmith.data.store.manifest import differences, flatten
from draftsmith.data.store.reading import Shape, check_shape, read_lines
from draftsmith.modules.types import InputError

JOURNAL = "journal.jsonl"
AGAIN = "Delete it and measure again."


class Journal:
    """Entries of one run, `entries` those that were there when it was opened."""

    def __init__(self, directory: Path, decided_by: Mapping[str, Any], entry: Shape, auto: Mapping[str, Any]):
        """
        decided_by: all that a measurement depends on, as JSON values. entry: the shape of what is added. auto: what the
            run's first start has measured, for whoever goes on (`unfinished_auto`).

        Raises:
            InputError: the directory holds an unfinished run of something else, or a damaged journal.
        """
        self.path = make_directory(directory) / JOURNAL
        decided = json.loads(json.dumps(decided_by))
        lines = whole_lines(self.path) or [{"settings": decided, "auto": auto}]
        for number, line in enumerate(lines, start=1):
            check_shape(self.path, line, entry if number > 1 else {"settings": dict}, AGAIN, f"line {number}")
        if differing := differences(flatten(lines[0]["settings"]), flatten(decided)):
            said = "; ".join(f"{key} {theirs} there, {ours} here" for key, theirs, ours in differing)
            found = f"an unfinished run of other settings in {directory} ({said})"
            remedy = f"Go on with its own settings, pass another --output, or delete {self.path}."
            raise InputError("output", found, "none, or one of these settings", remedy)
        self.entries = lines[1:]
        if not self.path.exists():
            write_text(self.path, json.dumps(lines[0]) + "\n")

    def add(self, entry: Any) -> None:
        """Append a line; it is on the disk when this returns."""
        append(self.path, json.dumps(entry) + "\n")

    def remove(self) -> None:
        """The run is complete."""
        self.path.unlink()


def unfinished_auto(directory: Path) -> dict[str, Any]:
    """What the first start of an unfinished run has measured: drafts are of other lengths with other numbers."""
    lines = whole_lines(directory / JOURNAL)
    return lines[0].get("auto", {}) if lines else {}


def whole_lines(path: Path) -> list[Any]:
    """The lines that end with a newline; the file is cut behind them."""
    if not path.exists():
        return []
    cut(path, path.read_bytes().rfind(b"\n") + 1)
    return list(read_lines(path, {}, AGAIN))
