"""Values of options as they are typed, in the form that cyclopts reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from cyclopts import Argument, CoercionError, Token

from draftsmith.launch import TRUTH
from draftsmith.launch.yaml_files import PlainLoader

TEXTS = ("prompt", "system", "command")  # options whose words stay as they are
MAX_INTEGER = 2**63 - 1  # the largest that torch, Arrow and NumPy hold
MAX_THREADS = 1024  # with more, the threads' library ends the process without a message


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)


def plain_tokens(argument: Argument) -> list[Token]:
    """Return the words of an option in cyclopts' form: None for `null`, true for `on`, items for a list with commas.

    Raises:
        CoercionError: a fraction in place of an integer, which cyclopts would round.
    """
    tokens = argument.tokens
    if argument.name.lstrip("-") not in TEXTS:
        # Shells expand `~`, but not in `--output=~/runs`; YAML and Python do not.
        tokens = [
            token.evolve(value=str(Path.home() / rest)) if start in ("~", "$HOME", "${HOME}") and slash else token
            for token in tokens
            for start, slash, rest in [token.value.partition("/")]
        ]
    kinds = {item for kind in members(argument.hint) for item in get_args(kind) or (kind,)}
    if [token.value for token in tokens] == ["null"] and NoneType in members(argument.field_info.annotation):
        return [tokens[0].evolve(value="", implicit_value=None)]
    if bool in kinds:
        return [token.evolve(value=str(TRUTH.get(token.value.lower(), token.value))) for token in tokens]
    if get_origin(argument.hint) in {list, tuple} and argument.keys != ("command",):  # whose words stay as they are
        items = []
        for token in tokens:
            if token.source != "cli":  # of a YAML file, which has lists of its own
                texts = [token.value]
            elif token.value.startswith("["):  # a YAML list, for items with commas
                texts = [str(item) for item in yaml.load(token.value, PlainLoader)]
            else:
                texts = [text for text in token.value.split(",") if text]
            items += [token.evolve(value=text) for text in texts]
        tokens = items or [token.evolve(implicit_value=get_origin(argument.hint)()) for token in tokens[:1]]
    for token in tokens:
        if int in kinds and kinds.isdisjoint({float, str}) and "." in token.value:
            raise CoercionError(argument=argument, token=token, target_type=int)
    return tokens


def number_limits(name: str) -> Callable[[Any, Any], None]:
    """Return the validator of numbers of every command; a command's own ranges are checked by its config."""
    least = 0 if name.endswith("seed") else -MAX_INTEGER
    most = MAX_THREADS if name == "num_threads" else MAX_INTEGER

    def check(kind: Any, value: Any) -> None:
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError("Expected a finite number.")
            if isinstance(number, int) and not least <= number <= most:
                raise ValueError(f"Expected an integer from {least} to {most}.")

    return check
