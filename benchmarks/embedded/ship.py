"""Ship a trained head, in bfloat16, as `TARGET:KIND`: `python benchmarks/embedded/ship.py smollm2 HEAD`, or gemma3.

smollm2.sh and gemma3.sh beside this file have the commands that make HEAD.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from draftsmith.modules.pretrained.card import model_card
from draftsmith.modules.pretrained.heads import head_config, load_head, save_head
from draftsmith.modules.pretrained.hub import FOLDERS
from draftsmith.modules.pretrained.reading import read_object

LICENSES = {"smollm2": "apache-2.0", "gemma3": "gemma"}


def ship(target: str, directory: Path) -> Path:
    """Write the head into the package under the names of its target and kind, and return where it is."""
    config, manifest = head_config(directory), read_object(directory / "manifest.json", {})
    manifest["license"] = LICENSES[target]
    head: Any = load_head(directory)
    shipped = FOLDERS[f"{target}:"] / config["kind"]
    card = model_card(config["kind"], {"head": config["head"], **manifest})
    return save_head(shipped, head.to(torch.bfloat16), manifest, card)


if __name__ == "__main__":
    print(ship(sys.argv[1], Path(sys.argv[2])))
