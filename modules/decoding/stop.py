"""Stop policies that need no head."""

from __future__ import annotations

from draftsmith.modules.decoding.protocols import DraftView


class FixedLength:
    """Draft K tokens a round (Leviathan et al. 2023)."""

    def __init__(self, k: int):
        self.max_drafted = k

    def reset(self) -> None:
        """Nothing is remembered."""

    def start_round(self) -> None:
        """Nothing is remembered."""

    def should_stop(self, view: DraftView) -> bool:
        return view.num_drafted >= self.max_drafted

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learned."""
