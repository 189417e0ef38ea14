"""Baselines of the papers, as a user's own drafters: Medusa, Hydra (trained) and lookahead decoding.

No server runs them; they are rows of EAGLE-2's table 1 and prove what a folder of drafters can do. From a shell:

    export DRAFTSMITH_DRAFTERS=benchmarks/papers/drafters
    draftsmith train medusa --config benchmarks/papers/drafters/embedded.yaml --lm-head own --output runs/medusa
    draftsmith decode PROMPT --target embedded:target --head runs/medusa/best --method medusa
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def register() -> None:
    """Register them in this process, and for the commands that it starts."""
    from draftsmith.launch.cli import DRAFTERS
    from draftsmith.launch.commands import add_trainers
    from draftsmith.modules.drafters.plug_ins import add_folder

    os.environ[DRAFTERS] = str(FOLDER)
    add_folder(str(FOLDER))
    add_trainers()
