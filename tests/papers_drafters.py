"""Registers the drafters of benchmarks/papers/drafters for every test, as a user's own are: they prove that contract.

Import it before `draftsmith.modules.drafters.medusa`, `hydra` or `lookahead`.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.modules.drafters.plug_ins import add_folder

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "papers" / "drafters"
add_folder(str(FOLDER))
