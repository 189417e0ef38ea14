"""`measured.json` of a head directory: what a benchmark has measured of the head, and the card that says it.

It lies beside what the training wrote and is not part of it: a head loads with it and without it, and one that is saved
in the place of another has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.data.heads.card import model_card
from draftsmith.data.heads.directory import head_config
from draftsmith.data.store.files import write_json, write_text
from draftsmith.data.store.manifest import file_sha256
from draftsmith.data.store.reading import read_object

MEASURED, CARD, WEIGHTS = "measured.json", "README.md", "model.safetensors"
NUMBER, INTERVAL = (float, None), ([(float, None)], None)
ROW = {
    "tau": NUMBER,
    "speedup": NUMBER,
    "tau_ci95?": INTERVAL,
    "speedup_ci95?": INTERVAL,
    "prompts?": int,
    "tokens?": int,
}
SHAPE = {
    "head_sha256": str,
    "methods": [{"method": str, "temperature?": float, **ROW, "by_task?": {"*": ROW}}],
    "settings": {"temperature": float},
    "prompts": dict,
    "clock": str,
    "hardware": dict,
    "date": str,
    "target?": dict,
    "versions?": dict,
}


def write_measured(directory: str | Path, measured: Mapping[str, Any]) -> None:
    """Keep what was measured of the head, in the place of what was there before, and write its card anew.

    measured: `settings`, `methods`, `prompts`, `clock`, `hardware`, `date`, `git_commit` (eval/bench/command.py).

    Raises:
        InputError: not a head directory.
    """
    directory = Path(directory)
    head_config(directory)
    write_json(directory / MEASURED, {**measured, "head_sha256": file_sha256(directory / WEIGHTS)})
    write_card(directory)


def measured_of(directory: str | Path) -> dict[str, Any] | None:
    """What `write_measured` kept; None where nothing was measured, or it was of other weights."""
    directory = Path(directory)
    if not (directory / MEASURED).exists():
        return None
    remedy = "Delete it, or measure again: eval bench --card."
    whose = read_object(directory / MEASURED, {"head_sha256": str}, remedy)["head_sha256"]
    if whose != file_sha256(directory / WEIGHTS):
        return None
    return read_object(directory / MEASURED, SHAPE, remedy)


def write_card(directory: str | Path) -> None:
    """The card of a head directory anew, atomically, from the files beside it."""
    directory = Path(directory)
    config = head_config(directory)
    manifest = {"head": config["head"], **read_object(directory / "manifest.json", {})}
    write_text(directory / CARD, model_card(config["kind"], manifest, measured=measured_of(directory)))
