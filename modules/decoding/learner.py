"""State that is learned while decoding: all that drafters, policies and rules keep from one answer to the next.

Whoever holds a `Learner` lists it in its `learners`, so that a bench can keep the state apart for every temperature,
restore it before repeated work, and save it with an interrupted run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any


class Learner(ABC):
    """Part of a drafter, a policy or a rule that learns from the verdicts of the target."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what was learned, as JSON values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace what was learned by a `state_dict`."""


def learners_of(owner: object) -> Sequence[Learner]:
    """Return the learners of a drafter, a policy or a rule; drafters of users may have no such attribute."""
    return getattr(owner, "learners", ())


def learned_state(owner: object) -> list[dict[str, Any]]:
    """Return what a drafter, a policy or a rule has learned, as JSON values; empty where it does not learn."""
    return [learner.state_dict() for learner in learners_of(owner)]


def load_learned_state(owner: object, states: Sequence[dict[str, Any]]) -> None:
    """Replace what was learned by the `learned_state` of this owner, or of another one that was built alike."""
    for learner, state in zip(learners_of(owner), states, strict=True):
        learner.load_state_dict(state)


def snapshot_learned_state(owner: object) -> Callable[[], None]:
    """Return a function that restores what is learned now."""
    states = learned_state(owner)
    return lambda: load_learned_state(owner, states)
