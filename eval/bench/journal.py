"""The journal of an unfinished run: what is done survives a kill, and the same command goes on behind it.

JSON lines. The first one holds what the run is decided by and its hash; each later one what was measured of one group
of prompts. A line is synced to the disk before the next group begins. A torn last line is what a kill leaves: it is cut
off, and its group measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.data.store.files import append, cut, make_directory, write_text
from draftsmith.data.store.manifest import differences, flatten
from draftsmith.data.store.reading import Shape, check_shape
from draftsmith.modules.types import InputError

JOURNAL = "journal.jsonl"
AGAIN = "Delete it and measure again."


class Journal:
    """Entries of one run, `entries` those that were there when it was opened."""

    def __init__(
        self,
        directory: Path,
        decided_by: Mapping[str, Any],
        entry: Shape = object,
        auto: Mapping[str, Any] | None = None,
    ):
        """
        decided_by: all that a measurement depends on, as JSON values. entry: the shape of what is added. auto: what the
            run's first start has measured, for whoever goes on (`unfinished_auto`).

        Raises:
            InputError: the directory holds an unfinished run of something else, or a damaged journal.
        """
        self.path = directory / JOURNAL
        make_directory(directory)
        lines, self._length = _whole_lines(self.path)
        self.entries: list[Any] = []
        for number, line in enumerate(lines, start=1):
            shape = entry if number > 1 else {"settings": dict, "sha256": str}
            check_shape(self.path, line, shape, AGAIN, f"line {number}")
        if lines:
            self._check(lines[0], decided_by)
            self.entries = lines[1:]
            cut(self.path, self._length)
        else:
            head = {"settings": dict(decided_by), "sha256": digest(decided_by), "auto": dict(auto or {})}
            write_text(self.path, json.dumps(head) + "\n")

    def _check(self, head: Any, decided_by: Mapping[str, Any]) -> None:
        if head.get("sha256") == digest(decided_by):
            return
        differing = differences(flatten(head["settings"]), flatten(json.loads(json.dumps(decided_by))))
        said = "; ".join(f"{key} {theirs} there, {ours} here" for key, theirs, ours in differing)
        found = f"an unfinished run of other settings in {self.path.parent} ({said})"
        remedy = f"Go on with its own settings, pass another --output, or delete {self.path}."
        raise InputError("output", found, "none, or one of these settings", remedy)

    def add(self, entry: Any) -> None:
        """Append a line; it is on the disk when this returns."""
        append(self.path, json.dumps(entry) + "\n")

    def remove(self) -> None:
        """The run is complete."""
        self.path.unlink()


def unfinished_auto(directory: Path) -> dict[str, Any]:
    """What the first start of an unfinished run has measured: drafts are of other lengths with other numbers."""
    lines, _ = _whole_lines(directory / JOURNAL)
    return lines[0].get("auto", {}) if lines and isinstance(lines[0], dict) else {}


def digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _whole_lines(path: Path) -> tuple[list[Any], int]:
    """The parsed lines that end with a newline, and their length in bytes.

    Raises:
        InputError: one of them is not JSON.
    """
    raw = path.read_bytes() if path.exists() else b""
    length = raw.rfind(b"\n") + 1
    lines = []
    for number, line in enumerate(raw[:length].splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            found = f"damaged in line {number} ({error})"
            raise InputError(str(path), found, "a journal of this program", AGAIN) from error
    return lines, length
