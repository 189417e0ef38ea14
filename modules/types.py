"""Types shared by all modules, and the legend of shapes.

B sequences, T positions, H hidden size, V vocabulary, L captured layers, K drafted tokens, N nodes of a draft tree.
p is the target's next-token distribution and q the draft's, both AFTER temperature, top-k and top-p.

The command line raises errors from here, so torch is not imported.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import TYPE_CHECKING, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class InputError(ValueError):
    """Bad input from a user, as one line: the field, what was found, what was expected, and the remedy.

    The command line prints it and exits with code 2. Any other exception is a defect and shows its traceback.
    """

    def __init__(self, field: str, found: object, expected: str, remedy: str):
        super().__init__(without_controls(without_passwords(f"{field}: found {found}, expected {expected}. {remedy}")))
        self.field, self.found, self.expected, self.remedy = field, found, expected, remedy

    def within(self, place: str, remedy: str) -> InputError:
        """Return the error for a field of `place`: a file, or one of several items."""
        return InputError(f"{place}, {self.field}", self.found, self.expected, remedy)


def describe_error(error: BaseException) -> str:
    """Return an exception of a library as one line, for an error of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def without_controls(text: str) -> str:
    """Write the control characters of a text as escapes, all but tabs and line breaks: a terminal would obey them."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def without_passwords(text: str) -> str:
    """Hide the user and password of every address in a text."""
    return re.sub(r"(?<=://)[^/\s]*@", "***@", text)


@dataclass(frozen=True)
class SamplingParams:
    """Options that turn logits into a distribution; p and q always share them.

    temperature: 0 is greedy: all mass on the argmax (lowest index on ties).
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_config(self, temperature=(0, math.inf), top_k=(0, math.inf), top_p=(0, 1, "(]"))

    # Read for every drafted token.
    @functools.cached_property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class FeatureBatch:
    """Target features of whole sequences, unshifted: row t holds token x_t and the target's feature f_t.

    lengths: of documents packed end to end in one row [1, N] (modules/attention.py); None: one sequence in each row.
    """

    input_ids: Tensor  #: [B, T] int64
    features: Tensor | None  #: [B, T, L*H]; None until the target has read the batch
    loss_mask: Tensor  #: [B, T] bool, true where x_t is a response token
    position_ids: Tensor  #: [B, T] int64, from 0 in every sequence
    attention_mask: Tensor | None = None  #: [B, T] bool, false on padding (which is at the right)
    lengths: tuple[int, ...] | None = None
    scale: Tensor | None = None  #: [B, T] of features in fp8, which are decoded on their device


@dataclass(frozen=True)
class LossOutput:
    """A loss to back-propagate, and what is needed to average it over ranks: sums and counts, never means."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)


# Lowest value, or lowest and highest value and the brackets of their interval: "(" and ")" leave the end out.
Range = float | tuple[float, float] | tuple[float, float, str]


def check_range(name: str, value: object, low: float = -math.inf, high: float = math.inf, ends: str = "[]") -> None:
    """Raise InputError unless a number is in this range, or None, which stands for a default.

    It is a whole number if the ends that are given are. ends: brackets of the interval, as in `Range`.
    """
    kind = int if all(isinstance(end, int) for end in (low, high) if abs(end) != math.inf) else float
    if value is not None and (expected := _expected(value, kind, (low, high, ends))):
        raise InputError(name, _shown(value), expected, "Correct it.")


def check_ranges(config: object, **ranges: Range) -> None:
    """Apply `check_range` to some fields of a config."""
    for name, span in ranges.items():
        check_range(name, getattr(config, name), *(span if isinstance(span, tuple) else (span,)))


def check_config(config: DataclassInstance, **ranges: tuple[float, float] | tuple[float, float, str]) -> None:
    """Check every field of a config dataclass by its annotated type, and its numbers by their ranges.

    Called in a config's `__post_init__`, so that no command sees a wrong value from a file or a caller.

    ranges: field -> lowest and highest value, and the brackets of their interval (`Range`); for a tuple, of its items.

    Raises:
        InputError: names the first field that does not fit.
    """
    hints = _hints(type(config))
    for spec in fields(config):
        value = getattr(config, spec.name)
        if expected := _expected(value, hints[spec.name], ranges.get(spec.name, (-math.inf, math.inf))):
            raise InputError(spec.name, _shown(value), expected, "Correct it.")


@functools.cache
def _hints(config: type) -> dict[str, type]:
    return get_type_hints(config)


_NAMES = {bool: "true or false", str: "text"}


def _expected(value: object, kind: type, span: tuple[float, float] | tuple[float, float, str]) -> str:
    """Describe the values of this type and range; empty if `value` is one of them."""
    origin, args = get_origin(kind), get_args(kind)
    # Configs have a type or None.
    if origin in (Union, UnionType):
        return "" if value is None else _expected(value, args[0], span)
    if origin is Literal:
        return "" if value in args and type(value) is type(args[0]) else f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        kinds = itertools.repeat(args[0]) if args[-1] is Ellipsis else args
        if not isinstance(value, tuple) or (args[-1] is not Ellipsis and len(value) != len(args)):
            return "a list" if args[-1] is Ellipsis else f"a list of {len(args)}"
        wrong = (_expected(item, own, span) for item, own in zip(value, kinds, strict=False))
        return next((f"a list, each {words}" for words in wrong if words), "")
    if kind in (int, float):
        return _expected_number(value, kind, *span)
    return "" if isinstance(value, kind) else _NAMES.get(kind, f"a {kind.__name__}")


def _expected_number(value: object, kind: type, low: float, high: float, ends: str = "[]") -> str:
    # NaN is in no range; infinity would be in an open one.
    if isinstance(value, int if kind is int else int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        at_end = (value == low and ends[0] == "(") or (value == high and ends[1] == ")")
        if low <= value <= high and not at_end:
            return ""
    name = "a whole number" if kind is int else "a finite number"
    if ends != "[]":
        return f"a number in {ends[0]}{low:g}, {high:g}{ends[1]}"
    if high == math.inf:
        return name if low == -math.inf else f"{name}, {low:,} or more"
    if low == -math.inf:
        return f"{name}, {high:,} or less"
    return f"{name} from {low:,} to {high:,}" if isinstance(high, int) else f"{name} from {low:g} to {high:g}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
