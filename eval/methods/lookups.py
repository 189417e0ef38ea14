"""Methods without a model of their own: n-grams of the text so far, or of the target's own guesses; and PEARL."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.eval.methods.base import Method, Models, at_least, at_most
from draftsmith.eval.methods.trees import MAX_NODES
from draftsmith.modules.decoding.protocols import Drafter, EachRow


@dataclass(frozen=True)
class PromptLookup(Method):
    """What followed the last ngram (or fewer) tokens when they last occurred, up to k tokens."""

    k: int = 10
    ngram: int = 3

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)
        at_most("k", self.k, MAX_NODES)
        at_least("ngram", self.ngram, 1)

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        from draftsmith.modules.drafters.prompt_lookup import PromptLookupDrafter

        return EachRow([PromptLookupDrafter(self.k, self.ngram) for _ in range(rows)])


@dataclass(frozen=True)
class Lookahead(Method):
    """Lookahead decoding (Fu et al. 2024): w columns of guesses, n-grams of n tokens, at most g of them verified."""

    w: int = 15
    n: int = 5
    g: int = 15

    def __post_init__(self) -> None:
        at_least("w", self.w, 1)
        at_least("n", self.n, 2)
        at_least("g", self.g, 1)
        at_most("(w + g) * (n - 1), nodes a round", (self.w + self.g) * (self.n - 1), MAX_NODES)

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        from draftsmith.modules.drafters.lookahead import LookaheadDrafter

        return EachRow([LookaheadDrafter(self.w, self.n, self.g) for _ in range(rows)])


@dataclass(frozen=True)
class Pearl(Method):
    """PEARL (Liu et al. 2024): k tokens are drafted beside every target call, which verifies those drafted before."""

    k: int = 5
    uses = ("draft",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)
        at_most("k", self.k, MAX_NODES // 2)

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        from draftsmith.modules.drafters.pearl import PearlDrafter

        assert models.draft is not None
        return EachRow([PearlDrafter(models.draft, self.k, models.capacity) for _ in range(rows)])
