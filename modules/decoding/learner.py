"""What verdicts teach: the only state of drafters, policies and rules that outlives an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Learner(ABC):
    """Learns while decoding. Whatever lasts from answer to answer is one of these, wherever a drafter holds it: that is
    how it is found, kept apart for every way of sampling, and put back where work is repeated."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that was learned, as JSON values; nothing in it changes afterwards."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know what `state_dict` said, and nothing else."""
