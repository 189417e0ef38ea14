"""The decoding methods that can be compared, by name: `ar,spec:k=5,specdec++:h=0.7:min=2:max=20,eagle:k=5`.

A method is a frozen dataclass: its fields are its settings. To add one, write the dataclass with `build` and list it
in METHODS; names, parsing, checks and the bench follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from torch import nn

from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@dataclass(frozen=True)
class Models:
    """What the methods of one run may use; None where the user named no such model.

    paths: flag (`target`, `draft`, ...) -> what the user passed, for methods that load models in their own way.
    capacity: most tokens that a sequence of this run can hold, drafts included.
    """

    target: CausalLM
    draft: CausalLM | None = None
    eagle: nn.Module | None = None
    acceptance: nn.Module | None = None
    paths: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    capacity: int = 0


class Method:
    """A way to decode.

    needs: flags of the models it cannot do without.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def build(self, models: Models) -> Drafter | None:
        """The drafter for this engine's own loop; None decodes without one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Autoregressive(Method):
    """One token a target call, by this engine: what every speed-up is measured against."""

    def build(self, models: Models) -> Drafter | None:
        return None


@dataclass(frozen=True)
class FixedK(Method):
    """Speculative sampling with a draft model (Leviathan et al. 2023): k drafted tokens a round."""

    k: int = 5
    needs: ClassVar[tuple[str, ...]] = ("draft",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def build(self, models: Models) -> Drafter | None:
        from draftsmith.modules.decoding.drafters.draft_model import DraftModelDrafter
        from draftsmith.modules.decoding.stop import FixedLength

        assert models.draft is not None
        return DraftModelDrafter(models.draft, FixedLength(self.k), models.capacity)


@dataclass(frozen=True)
class SpecDecPlusPlus(Method):
    """SpecDec++: a draft model, stopped by the acceptance head once 1 - (product of its outputs) > h.

    calibrated: off applies h to the head's raw output, as the paper does; on to its calibrated probability.
    """

    h: float = 0.7
    min: int = 2
    max: int = 20
    calibrated: bool = False
    needs: ClassVar[tuple[str, ...]] = ("draft", "acceptance")

    def __post_init__(self) -> None:
        if not 0 <= self.h <= 1:
            raise InputError("h", self.h, "a number from 0 to 1", "It bounds the probability of a rejection.")
        at_least("min", self.min, 1)
        at_least("max", self.max, self.min)

    def build(self, models: Models) -> Drafter | None:
        from draftsmith.modules.decoding.drafters.draft_model import DraftModelDrafter
        from draftsmith.modules.heads.acceptance import AcceptanceHead, SpecDecPP

        assert models.draft is not None and isinstance(models.acceptance, AcceptanceHead)
        stop = SpecDecPP(models.acceptance, self.h, self.min, self.max, calibrated=self.calibrated)
        return DraftModelDrafter(models.draft, stop, models.capacity)


@dataclass(frozen=True)
class EagleChain(Method):
    """An EAGLE head drafts a chain of k tokens a round (Li et al. 2024)."""

    k: int = 5
    needs: ClassVar[tuple[str, ...]] = ("eagle",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def build(self, models: Models) -> Drafter | None:
        from draftsmith.modules.decoding.stop import FixedLength
        from draftsmith.modules.heads.eagle import EagleDrafter, EagleHead

        assert isinstance(models.eagle, EagleHead)
        return EagleDrafter(models.eagle, models.target, FixedLength(self.k), models.capacity)


@dataclass(frozen=True)
class HFGenerate(Method):
    """transformers' own `generate`: a baseline that shares no code with this engine."""


@dataclass(frozen=True)
class HFAssisted(Method):
    """transformers' assisted generation with the draft model, a constant k drafted tokens a round."""

    k: int = 5
    needs: ClassVar[tuple[str, ...]] = ("draft",)

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)


METHODS: dict[str, type[Method]] = {
    "ar": Autoregressive,
    "spec": FixedK,
    "specdec++": SpecDecPlusPlus,
    "eagle": EagleChain,
    "hf": HFGenerate,
    "hf-assisted": HFAssisted,
}


@dataclass(frozen=True)
class Named:
    """A method and its name in tables, as the user wrote it."""

    label: str
    method: Method


def at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise InputError(name, value, f"{smallest} or more", "Raise it.")


def parse_methods(text: str) -> list[Named]:
    """`name:setting=value`, several separated by commas.

    Raises:
        InputError: unknown method or setting, a value of another type, a method named twice.
    """
    labels = [label.strip() for label in text.split(",") if label.strip()]
    if not labels:
        raise InputError("methods", repr(text), f"some of {', '.join(METHODS)}", "Name at least one.")
    for label in labels:
        if labels.count(label) > 1:
            raise InputError("methods", f"{label} twice", "each method once", "Remove one of them.")
    return [Named(label, parse_method(label)) for label in labels]


def parse_method(label: str) -> Method:
    """One method with its settings."""
    name, *parts = (part.strip() for part in label.split(":"))
    if name not in METHODS:
        raise InputError("methods", repr(name), f"one of {', '.join(METHODS)}", "Correct the name.")
    method_class: Any = METHODS[name]
    hints = get_type_hints(method_class)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(method_class)}
    values: dict[str, Any] = {}
    for part in parts:
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if setting not in kinds:
            allowed = ", ".join(kinds) or "no settings"
            raise InputError(f"methods, {name}", f"setting {setting!r}", allowed, "Correct or remove it.")
        if setting in values or not equals:
            found = f"{setting} twice" if equals else repr(part)
            raise InputError(f"methods, {name}", found, f"{setting}=VALUE once", "Correct it.")
        values[setting] = convert(f"methods, {name}, {setting}", value, kinds[setting])
    return method_class(**values)


def convert(field: str, text: str, kind: Any) -> Any:
    """The text of a setting as its type."""
    if kind is bool:
        if text.lower() not in SWITCH:
            raise InputError(field, repr(text), "on or off", "Correct it.")
        return SWITCH[text.lower()]
    if get_origin(kind) is not None:  # Literal
        if text not in get_args(kind):
            raise InputError(field, repr(text), f"one of {', '.join(get_args(kind))}", "Choose one of these.")
        return text
    try:
        return kind(text)
    except ValueError as error:
        words = {int: "an integer", float: "a number"}
        raise InputError(field, repr(text), words.get(kind, kind.__name__), "Correct it.") from error


def check_needs(named: Named, given: Mapping[str, str | None]) -> None:
    """Every model that the method needs was named."""
    for flag in named.method.needs:
        if not given.get(flag):
            what = "DIR" if flag == "draft" else "HEAD"
            raise InputError("methods", f"{named.label} without --{flag}", f"--{flag} {what}", f"Pass --{flag} {what}.")
