"""The decoding methods that can be compared, by name: `ar,spec:k=5,specdec++:h=0.7:min=2:max=20,eagle:k=5`.

A method is a frozen dataclass: its fields are its settings. To add one, write the dataclass with `build` and list it
in METHODS; names, parsing, checks and the bench follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from draftsmith.eval.methods.base import Method, Named
from draftsmith.eval.methods.chains import (
    Autoregressive,
    ConfidenceStop,
    EagleChain,
    FixedK,
    HeadByCost,
    Online,
    SelfVerification,
    SpecDecPlusPlus,
)
from draftsmith.eval.methods.hf import HFAssisted, HFGenerate
from draftsmith.eval.methods.hierarchy import Hsddw, PreAndSelfVerification, PreVerification
from draftsmith.eval.methods.lookups import Lookahead, Pearl, PromptLookup
from draftsmith.eval.methods.trees import Eagle2, EagleStaticTree
from draftsmith.modules.types import InputError

SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
METHODS: dict[str, type[Method]] = {
    "ar": Autoregressive,
    "spec": FixedK,
    "specdec++": SpecDecPlusPlus,
    "cost": HeadByCost,
    "online": Online,
    "confidence": ConfidenceStop,
    "self-verify": SelfVerification,
    "eagle": EagleChain,
    "eagle-tree": EagleStaticTree,
    "eagle2": Eagle2,
    "pre-verify": PreVerification,
    "pre+self-verify": PreAndSelfVerification,
    "hsddw": Hsddw,
    "pld": PromptLookup,
    "lookahead": Lookahead,
    "pearl": Pearl,
    "hf": HFGenerate,
    "hf-assisted": HFAssisted,
}


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
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise InputError(field, repr(text), f"one of {', '.join(get_args(kind))}", "Choose one of these.")
        return text
    allowed: tuple[str, ...] = ()
    if get_origin(kind) in (Union, UnionType):  # a number, or a word
        kind, words = get_args(kind)
        allowed = get_args(words)
    if text in allowed:
        return text
    try:
        return kind(text)
    except ValueError as error:
        names = {int: "an integer", float: "a number"}
        raise InputError(field, repr(text), " or ".join([names[kind], *allowed]), "Correct it.") from error


def check_needs(named: Named, given: Mapping[str, str | None]) -> None:
    """Every model that the method needs was named."""
    for flag in named.method.needs:
        if not given.get(flag):
            what = "DIR" if flag in ("draft", "mid") else "HEAD"
            raise InputError("methods", f"{named.label} without --{flag}", f"--{flag} {what}", f"Pass --{flag} {what}.")
