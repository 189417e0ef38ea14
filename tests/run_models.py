"""`Models` as a run has them: draft trees by name, and times of this machine, beside the models that a test loads."""

from __future__ import annotations

from typing import Any

from draftsmith.eval.bench.auto import MeasuredTimes
from draftsmith.eval.bench.trees import read_tree
from draftsmith.modules.drafters.methods import Models


def run_models(*lms: Any, eagle: Any = None, **more: Any) -> Models:
    """lms: target, draft, mid. eagle: an EAGLE head."""
    heads = {} if eagle is None else {"eagle": eagle}
    return Models(*lms, heads=heads, trees={"eagle-1": read_tree("eagle-1")}, times=MeasuredTimes(), **more)
