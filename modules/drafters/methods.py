"""Decoding methods by name: `ar,spec:k=5,specdec++:h=0.7:min=2:max=20,eagle:k=5`.

A method is a frozen dataclass; its fields are the settings that users write behind its name. It is defined beside its
drafter, in a module that lists it in METHODS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.tree_rule import TreeTimes
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

# Modules of this package with a METHODS table: name -> class of the method.
METHOD_MODULES = (
    "chains",
    "block.methods",
    "eagle.head",
    "eagle3.head",
    "hierarchical",
    "hydra",
    "lookahead",
    "medusa",
    "pearl",
    "prompt_lookup",
)

# Follows the name of a method that does not keep the target's distribution, wherever it is shown.
LOSSY = " (not lossless)"
SWITCH = {"on": True, "off": False}


class MachineTimes:
    """Times of this machine for settings of `auto`, measured when they are first needed. This one has none."""

    def step_cost(self, models: Models, drafter: str, rows: int = 1) -> float:
        """Return c of a drafter of chains, with this many rows decoded together.

        It is the time of one more drafted token, and of verifying it, by the time of a round without a draft.
        """
        raise NotImplementedError("no times of this machine were handed in")

    def tree_times(self, models: Models, trees: str, probe: Callable[[int], Drafter]) -> TreeTimes:
        """Return the times of a round's parts. trees: a name for these trees. probe(levels): their drafter."""
        raise NotImplementedError("no times of this machine were handed in")

    def state_dict(self) -> dict[str, dict[str, Any]]:
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
    heads: Mapping[str, Any] = field(default_factory=dict)
    acceptance: AcceptanceHead | None = None
    paths: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    capacity: int = 0
    ends: tuple[int, ...] = ()
    trees: Mapping[str, StaticTree] = field(default_factory=dict)
    times: MachineTimes = field(default_factory=MachineTimes)

    def of(self, variant: str) -> Models:
        """Return these models with the drafters of a name (`Named.variant`) in place of others of their kind."""
        own = {key.removesuffix(variant): model for key, model in self.others.items() if key.endswith(variant)}
        if not variant or not own:
            return self
        paths = {**self.paths, **{kind: self.paths[f"{kind}{variant}"] for kind in own}}
        draft = own.pop("draft", self.draft)
        return dataclasses.replace(self, draft=draft, heads={**self.heads, **own}, paths=paths, variant=variant)

    def embedder(self, drafter: str) -> CausalLM:
        """Return the model whose token embeddings a drafter of chains reads."""
        model = self.draft if drafter == "draft" else self.target
        assert model is not None
        return model


@dataclass(frozen=True)
class Method:
    """A way to decode.

    uses: models that it needs whatever its settings: `draft`, `mid`, the kind of a head, or `acceptance`.
    batchable: several prompts can be decoded together.
    """

    batchable: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Models that it needs with these settings, as `uses`."""
        return self.uses

    @property
    def lossless(self) -> bool:
        """Whether its output follows the target. A lossy method is never chosen for the user."""
        return True

    @property
    def trees(self) -> tuple[str, ...]:
        """Names of draft trees that it reads (`Models.trees`)."""
        return ()

    @property
    def timed(self) -> bool:
        """Whether it depends on times of this machine (`Models.times`), so that its drafts are not reproducible."""
        return "auto" in vars(self).values()

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        """Build the drafter for this many rows of our decoder; None decodes without one."""
        raise TypeError(f"{type(self).__name__} is run by transformers and has no drafter")


@dataclass(frozen=True)
class Autoregressive(Method):
    """One token a target call: the baseline of every speed-up."""

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        return None


@dataclass(frozen=True)
class Named:
    """A method with its name in tables: as the user wrote it, with LOSSY behind it if it is lossy.

    `eagle3@a:k=5` is that of the drafter a, of several that were passed (`variant` is `@a`).
    """

    label: str
    method: Method

    @property
    def variant(self) -> str:
        at, name = self.label.removesuffix(LOSSY).partition(":")[0].partition("@")[1:]
        return at + name

    def by(self, variant: str) -> Named:
        """Return the same method of a drafter's name."""
        name, *settings = self.label.split(":")
        return Named(":".join([f"{name.partition('@')[0]}{variant}", *settings]), self.method)

    def keys(self, given: Mapping[str, str]) -> list[str]:
        """Return the keys in `given` of the models that it needs: `kind@name` where several of a kind were passed."""
        return [own if (own := f"{need}{self.variant}") in given else need for need in self.method.needs]

    def __post_init__(self) -> None:
        if not self.method.lossless:
            object.__setattr__(self, "label", self.label.removesuffix(LOSSY) + LOSSY)


@functools.cache
def known_methods() -> dict[str, type[Method]]:
    """Return every method of this engine by its name: `ar`, and the METHODS of METHOD_MODULES."""
    methods: dict[str, type[Method]] = {"ar": Autoregressive}
    for name in METHOD_MODULES:
        methods |= importlib.import_module(f"{__package__}.{name}").METHODS
    return methods


def parse_methods(text: str, more: Mapping[str, type[Method]] | None = None) -> list[Named]:
    """Parse methods `name:setting=value`, separated by commas. more: methods of other engines.

    Raises:
        InputError: unknown method or setting, a value of another type, a method named twice.
    """
    labels = [label.strip() for label in text.split(",") if label.strip()]
    if not labels:
        known = ", ".join([*known_methods(), *(more or {})])
        raise InputError("methods", repr(text), f"some of {known}", "Name at least one.")
    for label in labels:
        if labels.count(label) > 1:
            raise InputError("methods", f"{label} twice", "each method once", "Remove one of them.")
    return [Named(label, parse_method(label, more)) for label in labels]


def parse_method(label: str, more: Mapping[str, type[Method]] | None = None) -> Method:
    """Parse one method with its settings."""
    known = {**known_methods(), **(more or {})}
    name, *parts = (part.strip() for part in label.removesuffix(LOSSY).split(":"))
    name, at, variant = name.partition("@")
    if at and not variant:
        raise InputError(
            "methods", repr(label), f"the name of a drafter behind {name}@", "Name it, or leave out the @."
        )
    if name not in known:
        raise InputError("methods", repr(name), f"one of {', '.join(known)}", "Correct the name.")
    method_class: Any = known[name]
    hints = get_type_hints(method_class)
    kinds = {spec.name: hints[spec.name] for spec in dataclasses.fields(method_class)}
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


def convert(name: str, text: str, kind: Any) -> Any:
    """Convert the text of a setting to its type: a switch, a word, a number, or a number or a word."""
    words: tuple[str, ...] = ()
    if get_origin(kind) in (Union, UnionType):
        kind, literal = get_args(kind)
        words = get_args(literal)
    elif get_origin(kind) is Literal:
        words = get_args(kind)
    elif kind is bool:
        words = tuple(SWITCH)
    if (kind is str and text) or text in words:
        return SWITCH[text] if kind is bool else text
    numbers = {int: "an integer", float: "a number", str: "a word"}
    if kind in numbers:
        words = (numbers[kind], *words)
        # Python takes 1_0, inf and the digits of every script, too.
        if kind is not str and re.fullmatch(r"[-+.0-9eE]+", text):
            with contextlib.suppress(ValueError):
                if math.isfinite(number := kind(text)):
                    return number
    raise InputError(name, repr(text), " or ".join(words), "Correct it.")


def check_needs(named: Named, given: Mapping[str, str]) -> None:
    """Raise InputError if a model that the method needs was not passed. given: `Models.paths`."""
    known = {
        "draft": ("a draft model", "--draft DIR"),
        "mid": ("a model between draft and target", "--mid DIR"),
        "acceptance": ("an acceptance head", "--acceptance HEAD"),
    }
    others = ("target", "mid", "acceptance")
    drafters = [f"{path} ({kind})" for kind, path in given.items() if kind not in others and "@" not in kind]
    if named.variant and not any(key.endswith(named.variant) for key in named.keys(given)):
        names = [f"@{key.partition('@')[2]}" for key in given if "@" in key] or ["no name: one drafter of a kind"]
        raise InputError("methods", named.label, ", ".join(names), "Correct the name, or leave it out.")
    for need in named.method.needs:
        if need not in given:
            what, option = known.get(need, (f"a head of kind {need}", "--draft HEAD"))
            found = ", ".join([f"{named.label} without {what}", *drafters])
            raise InputError("methods", found, option, f"Pass {option}: {what}.")
