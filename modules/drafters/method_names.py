"""Names of decoding methods as users write them: `ar,spec:k=5,specdec++:h=0.7:min=2:max=20,eagle:k=5`.

What stands behind a name is a setting: a field of its method (methods.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from draftsmith.modules import drafters
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.drafters.method import Method
from draftsmith.modules.drafters.methods import METHODS, DraftingMethod, methods_of
from draftsmith.modules.types import InputError

SWITCH = {"on": True, "off": False}


@dataclass(frozen=True)
class LabeledMethod:
    """A method with its name in tables, as the user wrote it.

    `eagle3@a:k=5` is that of the drafter a, of several that were passed (`variant` is `@a`).
    """

    label: str
    method: Method

    @property
    def variant(self) -> str:
        at, name = self.label.partition(":")[0].partition("@")[1:]
        return at + name

    def by(self, variant: str) -> LabeledMethod:
        """Return the same method of a drafter's name."""
        name, *settings = self.label.split(":")
        return LabeledMethod(":".join([f"{name.partition('@')[0]}{variant}", *settings]), self.method)

    def keys(self, given: Mapping[str, str]) -> list[str]:
        """Return the keys in `given` of the models that it needs: `kind@name` where several of a kind were passed."""
        return [own if (own := f"{need}{self.variant}") in given else need for need in self.method.needs]


@functools.cache
def known_methods() -> dict[str, Method]:
    """Return every method of this engine by its name, with its default settings. `add_folder` adds to it."""
    return METHODS | {name: method for kind in drafters.HEADS for name, method in methods_of(kind).items()}


def kind_of(method: Method) -> str:
    """Return the kind of trained drafter whose own method this is; empty for other methods."""
    return method.drafter if isinstance(method, DraftingMethod) and method.drafter != MODEL else ""


def settings_of(method: Method) -> dict[str, object]:
    """Return the settings of a named method with their types."""
    hints = get_type_hints(type(method))
    # The methods of a kind draft with it: their drafter is no setting.
    fixed = {"drafter"} if kind_of(method) else set()
    return {spec.name: hints[spec.name] for spec in dataclasses.fields(method) if spec.name not in fixed}


def parse_methods(text: str) -> list[LabeledMethod]:
    """Parse methods `name:setting=value`, separated by commas.

    Raises:
        InputError: unknown method or setting, a value of another type, a method named twice.
    """
    labels = [label.strip() for label in text.split(",") if label.strip()]
    if not labels:
        expected = f"some of {', '.join(known_methods())}"
        raise InputError("methods", repr(text), expected, "Name at least one.")
    for label in labels:
        if labels.count(label) > 1:
            raise InputError("methods", f"{label} twice", "each method once", "Remove one of them.")
    return [LabeledMethod(label, parse_method(label)) for label in labels]


def parse_method(label: str) -> Method:
    """Parse one method with its settings."""
    known = known_methods()
    name, *parts = (part.strip() for part in label.split(":"))
    name, at, variant = name.partition("@")
    if at and not variant:
        raise InputError(
            "methods", repr(label), f"the name of a drafter behind {name}@", "Name it, or leave out the @."
        )
    if name not in known:
        raise InputError("methods", repr(name), f"one of {', '.join(known)}", "Correct the name.")
    method, kinds = known[name], settings_of(known[name])
    values: dict[str, bool | float | str] = {}
    for part in parts:
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if setting not in kinds:
            allowed = ", ".join(kinds) or "no settings"
            others = [key for key, own in known.items() if kind_of(own) == kind_of(method) != ""]
            remedy = next(
                (f"{key} has it." for key in others if setting in settings_of(known[key])), "Correct or remove it."
            )
            raise InputError(f"methods, {name}", f"setting {setting!r}", allowed, remedy)
        if setting in values or not equals:
            found = f"{setting} twice" if equals else repr(part)
            raise InputError(f"methods, {name}", found, f"{setting}=VALUE once", "Correct it.")
        values[setting] = convert(f"methods, {name}, {setting}", value, kinds[setting])
    return replace(method, **values)


def convert(name: str, text: str, kind: object) -> bool | float | str:
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
                if math.isfinite(number := int(text) if kind is int else float(text)):
                    return number
    raise InputError(name, repr(text), " or ".join(words), "Correct it.")


def check_needs(named: LabeledMethod, given: Mapping[str, str]) -> None:
    """Raise InputError if a model that the method needs was not passed. given: `Models.paths`."""
    known = {
        "draft": ("a draft model", "--head DIR"),
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
            what, option = known.get(need, (f"a head of kind {need}", "--head HEAD"))
            found = ", ".join([f"{named.label} without {what}", *drafters])
            raise InputError("methods", found, option, f"Pass {option}: {what}.")
