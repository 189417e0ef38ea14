"""The acceptance heads of a study: directories, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from draftsmith.data.heads.directory import load_head
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError


def head_directories(root: Path) -> dict[str, Path]:
    """Name -> head directory, of every folder in `root` that is a head or a training's output (its best/).

    Raises:
        InputError: there is none.
    """
    found: dict[str, Path] = {}
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        directory = next((place for place in (folder, folder / "best") if (place / "config.json").exists()), None)
        if directory is not None:
            found[folder.name] = directory
    if not found:
        expected = "a folder of acceptance heads or of trainings' outputs"
        raise InputError("heads", f"no head in {root}", expected, "Check the path, or leave --heads out to train some.")
    return found


def load_heads(
    directories: Mapping[str, Path], draft: CausalLM, identity: Mapping[str, str] | None = None
) -> dict[str, AcceptanceHead]:
    """Name -> head, each of which must have been trained for this draft; arguments as of `load_head`.

    Raises:
        InputError: one was trained for another, or judges trees: studies record chains.
    """
    loaded = {}
    for name, directory in directories.items():
        head = load_head(directory, draft, kind="acceptance", identity=identity)
        assert isinstance(head, AcceptanceHead)
        if head.config.judges != "chain":
            found, expected = f"{directory}, which judges {head.config.judges}s", "heads that judge chains"
            raise InputError("heads", found, expected, "Take it out of the folder.")
        loaded[name] = head
    return loaded
