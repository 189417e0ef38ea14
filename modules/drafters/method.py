"""Interface of decoding methods, and the models and times that they are built from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, Range, check_ranges


class CostModel:
    """Times of this machine for settings of `auto`, measured when they are first needed. This one has none."""

    def step_cost(self, models: Models, drafter: str) -> float:
        """Return c of a drafter of chains: the time of one more drafted token, and of verifying it, by the time of a
        round without a draft."""
        raise InputError("c", "auto where nothing is timed", "a number", "Give one, or use `eval bench`.")

    def state_dict(self) -> dict[str, dict[str, object]]:
        """Return all measured times, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use these times instead of measuring; others are measured when they are needed."""


@dataclass(frozen=True)
class Models:
    """Models and limits of a run, for its methods; None for models that the user did not pass.

    heads: trained drafters by kind.
    paths: role or kind (`target`, `draft`, ...) -> what the user passed, for methods that load models themselves.
    others: where several drafters of one kind were passed, each by `kind@name`.
    variant: `@name` of the ones that are in `draft` and `heads`, or nothing.
    capacity: most tokens of a sequence, drafts included.
    ends: tokens that end an answer, and drafts of chains.
    trees: the draft trees that the methods name.
    """

    target: CausalLM
    draft: CausalLM | None = None
    mid: CausalLM | None = None
    heads: Mapping[str, DraftHead] = field(default_factory=dict)
    acceptance: AcceptanceHead | None = None
    paths: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    capacity: int = 0
    ends: tuple[int, ...] = ()
    trees: Mapping[str, StaticTree] = field(default_factory=dict)
    times: CostModel = field(default_factory=CostModel)

    def of(self, variant: str) -> Models:
        """Return these models with the drafters of a name in place of others (`LabeledMethod.variant`)."""
        own = {key.removesuffix(variant): model for key, model in self.others.items() if key.endswith(variant)}
        if not variant or not own:
            return self
        paths = {**self.paths, **{kind: self.paths[f"{kind}{variant}"] for kind in own}}
        draft = own.pop("draft", self.draft)
        return dataclasses.replace(self, draft=draft, heads={**self.heads, **own}, paths=paths, variant=variant)

    def embedder(self, drafter: str) -> CausalLM:
        """Return the model whose token embeddings a drafter of chains reads."""
        model = self.draft if drafter == MODEL else self.target
        assert model is not None
        return model

    def net(self, drafter: str) -> DraftNet:
        """Return the network of the draft model, or of a trained drafter of this kind."""
        return DraftModelNet(self.embedder(drafter)) if drafter == MODEL else self.heads[drafter].net(self.target)


@dataclass(frozen=True)
class Method:
    """A way to decode.

    uses: models that it needs whatever its settings: `draft`, `mid`, or `acceptance`.
    ranges: of its numeric settings; `auto` is in each.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    ranges: ClassVar[Mapping[str, Range]] = {}

    def __post_init__(self) -> None:
        check_ranges(self, **{name: span for name, span in self.ranges.items() if getattr(self, name) != "auto"})

    @property
    def needs(self) -> tuple[str, ...]:
        """Models that it needs with these settings, as `uses`, or kinds of trained drafters."""
        return self.uses

    @property
    def trees(self) -> tuple[str, ...]:
        """Names of draft trees that it reads (`Models.trees`)."""
        return ()

    @property
    def timed(self) -> bool:
        """Return whether it reads times of this machine (`Models.times`), so that its drafts are not reproducible."""
        return "auto" in vars(self).values()

    def build(self, models: Models) -> Drafter | None:
        """Build the drafter of our decoder; None decodes without one."""
        raise TypeError(f"{type(self).__name__} is run by transformers and has no drafter")
