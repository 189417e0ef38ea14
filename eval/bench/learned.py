"""What drafters have learned while decoding, found wherever they hold it: kept and put back, so that a repeated run
does the same work, and kept apart for every way of sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from draftsmith.modules.decoding.learner import Learner

Built = TypeVar("Built")


def learners_of(owner: Any) -> list[Learner]:
    """All that a drafter, or a runner's, has learned or will, always in the same order."""
    found: list[Learner] = []
    seen: set[int] = set()
    unseen = [owner]
    while unseen:
        item = unseen.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Learner):
            found.append(item)
        elif isinstance(item, list | tuple):
            unseen += reversed(item)
        elif isinstance(item, dict):
            unseen += reversed(item.values())
        elif type(item).__module__.startswith("draftsmith.") and not isinstance(item, nn.Module):
            unseen += reversed(list(getattr(item, "__dict__", {}).values()))
    return found


def known(owner: Any) -> list[dict[str, Any]]:
    """What it has learned, as JSON values, for `teach`."""
    return [learner.state_dict() for learner in learners_of(owner)]


def teach(owner: Any, states: Sequence[dict[str, Any]]) -> None:
    """Let it know what `known` said of it, or of another that was built alike."""
    for learner, state in zip(learners_of(owner), states, strict=True):
        learner.load_state_dict(state)


def remember(owner: Any) -> Callable[[], None]:
    """What puts everything back that it knows now."""
    states = known(owner)
    return lambda: teach(owner, states)


def built_for_each(build: Callable[[], Built], count: int) -> list[Built]:
    """So many of what `build` makes, all of them one where it learns nothing: a drafter for every way of sampling."""
    first = build()
    return [first, *(build() if learners_of(first) else first for _ in range(count - 1))]
