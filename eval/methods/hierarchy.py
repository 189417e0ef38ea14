"""Methods of three models (HSDDW): M1 drafts, M2 (`--mid`) verifies first, the target verifies what M2 emitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from draftsmith.eval.methods.base import Method, Models, at_least, at_most
from draftsmith.modules.decoding.protocols import Drafter, EachRow, NestedDrafter, StopPolicy

if TYPE_CHECKING:
    from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter

MAX_HANDED_OVER = 64


@dataclass(frozen=True)
class PreVerification(Method):
    """M1 drafts k tokens, M2 verifies them once, and what M2 emits is the draft for the target.

    drafter: draft for a draft model, eagle for an EAGLE head that was trained for M2.
    """

    k: int = 10
    drafter: Literal["draft", "eagle"] = "draft"
    eagle_for = "mid"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("mid", self.drafter)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)
        at_most("k", self.k, MAX_HANDED_OVER - 1)

    def policy(self) -> StopPolicy:
        from draftsmith.modules.decoding.stop import FixedLength

        return FixedLength(self.k)

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        return EachRow([self.hierarchy(models, self.k + 1, dynamic=False) for _ in range(rows)])

    def hierarchy(self, models: Models, max_drafted: int, dynamic: bool) -> HierarchicalDrafter:
        """Of one row."""
        from draftsmith.modules.drafters.draft_model import DraftModelDrafter
        from draftsmith.modules.drafters.eagle.drafting import EagleDrafter
        from draftsmith.modules.drafters.eagle.head import EagleHead
        from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter

        assert models.mid is not None
        inner: NestedDrafter
        if self.drafter == "eagle":
            assert isinstance(models.eagle, EagleHead)
            inner = EagleDrafter(models.eagle, models.mid, [self.policy()], models.capacity)
        else:
            assert models.draft is not None
            inner = DraftModelDrafter(models.draft, [self.policy()], models.capacity)
        return HierarchicalDrafter(models.mid, inner, max_drafted, dynamic, models.capacity)


@dataclass(frozen=True)
class PreAndSelfVerification(PreVerification):
    """As pre-verify, and M1 stops by its own entropy (HSDDW, figure 5b)."""

    def policy(self) -> StopPolicy:
        from draftsmith.modules.decoding.stop import SelfVerify

        return SelfVerify(self.k)


@dataclass(frozen=True)
class Hsddw(PreAndSelfVerification):
    """HSDDW: M1 and M2 take turns until M2's entropy exceeds its mean at rejected tokens, then the target verifies.

    The paper looks at M2's entropy at all drafted positions (algorithm 2, line 28), this at those of the tokens that M2
    hands on: what M1 drafted behind its first rejected token says nothing of them.

    max: most tokens handed to the target at once.
    """

    max: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("max", self.max, 1)
        at_most("max", self.max, MAX_HANDED_OVER)

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        return EachRow([self.hierarchy(models, self.max, dynamic=True) for _ in range(rows)])
