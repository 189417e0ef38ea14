"""What stop policies have learned while decoding, kept and put back, so that a repeated run does the same work."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from draftsmith.modules.decoding.policies import JudgedStop


def remember(runner: Any) -> Callable[[], None]:
    """What puts everything back that the runner's policies know now; a runner of policies that learn nothing is fine
    too."""
    known = [(learner, deepcopy(vars(learner))) for stop in policies_of(runner) for learner in stop.learners]

    def restore() -> None:
        for learner, numbers in known:
            vars(learner).update(deepcopy(numbers))

    return restore


def policies_of(runner: Any) -> list[JudgedStop]:
    """Of the drafter that a runner decodes with, one for each row where there are several."""
    drafter = getattr(getattr(runner, "runner", runner), "drafter", None)
    own = getattr(drafter, "stop", None)
    stops = getattr(drafter, "stops", []) if own is None else [own]
    return [stop for stop in stops if isinstance(stop, JudgedStop)]
