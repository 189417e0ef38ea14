"""What drafts while labels are made, and while a head is trained on them: a language model, or a trained drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.data.heads.directory import drafter_identity, kind_at, load_draft_head
from draftsmith.modules.decoding.branches import BranchDrafter, DraftModelBranches
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.targets.base import CausalLM


@dataclass(frozen=True)
class FrozenDrafter:
    """A draft model, or the target of a trained drafter with it.

    lm: the model that reads texts. head: the trained drafter. identity: of all that drafts.
    """

    lm: CausalLM
    identity: dict[str, str]
    head: DraftHead | None = None

    @property
    def name(self) -> str:
        """`draft` for a language model, else the kind of the head."""
        return "draft" if self.head is None else self.head.kind

    @property
    def max_position(self) -> int:
        """The longest text that it reads."""
        own = self.lm.info.max_position
        return own if self.head is None else min(own, self.head.config.max_position)

    @property
    def capture(self) -> tuple[int, ...]:
        """What its head reads of the target."""
        return () if self.head is None else self.head.capture

    def branches(self, depth: int) -> BranchDrafter:
        """What drafts from many places of a text, at most `depth` tokens each."""
        return DraftModelBranches(self.lm, depth) if self.head is None else self.head.branches(self.lm, depth)

    @torch.no_grad()
    def features(self, text: Sequence[int]) -> Tensor | None:
        """[T, L*H]: what the head reads of the target along a text; None for a language model."""
        if self.head is None or not self.head.needs_features:
            return None
        return self.lm.features(torch.tensor([text], device=self.lm.device), capture=self.capture)[0]


def load_drafter(draft: str | Path, target: Callable[[], CausalLM], load: Callable[[str], CausalLM]) -> FrozenDrafter:
    """draft: path of a head, or of a language model, which `load` reads. target: gives the model of a head.

    Raises:
        InputError: a head that does not draft, or one for another target.
    """
    if kind_at(draft) is None:
        lm = load(str(draft))
        return FrozenDrafter(lm, lm.info.identity)
    lm = target()
    return FrozenDrafter(lm, drafter_identity(draft, lm), load_draft_head(draft, lm))
