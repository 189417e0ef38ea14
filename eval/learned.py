"""What stop policies and trees have learned while decoding, kept and put back, so that a repeated run does the same
work."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from draftsmith.modules.decoding.policies import JudgedStop
from draftsmith.modules.heads.eagle_tree import EagleTreeDrafter


def remember(runner: Any) -> Callable[[], None]:
    """What puts everything back that the runner's policies, or its tree's rule, know now; a runner of what learns
    nothing is fine too."""
    learners: list[Any] = [learner for stop in policies_of(runner) for learner in stop.learners]
    drafter = drafter_of(runner)
    if isinstance(drafter, EagleTreeDrafter) and drafter.rule is not None:
        learners.append(drafter.rule)
    known = [(learner, deepcopy(vars(learner))) for learner in learners]

    def restore() -> None:
        for learner, state in known:
            vars(learner).update(deepcopy(state))

    return restore


def policies_of(runner: Any) -> list[JudgedStop]:
    """Of the drafter that a runner decodes with, one for each row where there are several."""
    drafter = drafter_of(runner)
    stops = [drafter.stop] if hasattr(drafter, "stop") else getattr(drafter, "stops", [])
    return [stop for stop in stops if isinstance(stop, JudgedStop)]


def drafter_of(runner: Any) -> Any:
    """What a runner drafts with; None where nothing drafts."""
    return getattr(getattr(runner, "runner", runner), "drafter", None)
