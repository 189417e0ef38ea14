"""Ship a trained head of SmolLM2-135M-Instruct, in bfloat16: `python benchmarks/embedded/smollm2.py HEAD`.

benchmarks/README.md ("SmolLM2-135M on six tasks") has the commands that make HEAD.
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


def ship(directory: Path) -> Path:
    """Write the head into the package under the name of its kind, `smollm2:KIND`, and return where it is."""
    config, manifest = head_config(directory), read_object(directory / "manifest.json", {})
    manifest["license"] = "apache-2.0"
    head: Any = load_head(directory)
    shipped = FOLDERS["smollm2:"] / config["kind"]
    card = model_card(config["kind"], {"head": config["head"], **manifest})
    return save_head(shipped, head.to(torch.bfloat16), manifest, card)


if __name__ == "__main__":
    print(ship(Path(sys.argv[1])))
