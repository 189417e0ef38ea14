"""`Models` as a run has them: draft trees by name, and times of this machine, beside the models that a test loads."""

from __future__ import annotations

from typing import Any

from draftsmith.eval.bench.runner import read_tree
from draftsmith.eval.costs import MeasuredTimes
from draftsmith.modules.drafters.method import Models

HEADS = ("medusa", "hydra", "dflash", "dspark")


def run_models(*lms: Any, eagle: Any = None, eagle3: Any = None, **more: Any) -> Models:
    """lms: target, draft, mid. eagle, eagle3, and those of HEADS among more: heads."""
    given = {"eagle": eagle, "eagle3": eagle3, **{kind: more.pop(kind, None) for kind in HEADS}}
    heads = {kind: head for kind, head in given.items() if head is not None}
    known = {"trees": {"eagle-1": read_tree("eagle-1")}, "times": MeasuredTimes(), **more}
    return Models(*lms, heads=heads, **known)
