"""Decoding methods by name: `ar,spec:k=5,specdec++:h=0.7:min=2:max=20,eagle:k=5`.

A method is a frozen dataclass; its fields are the settings that users write behind its name. The kind of a trained
drafter names its chains, KIND-tree its dynamic trees and KIND-static its static ones: `DraftHead.drafts` lists which it
drafts, and HEADS which heads there are. `eagle3:k=5` is `spec:k=5:drafter=eagle3`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from draftsmith.modules import drafters
from draftsmith.modules.acceptance.head import HeadPredictor
from draftsmith.modules.acceptance.online import OnlinePredictor
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.stop import (
    ConfidenceStop,
    CostRule,
    FixedLengthStop,
    Predictor,
    PredictorStop,
    SelfVerifyStop,
    SlotConfidenceStop,
    StopPolicy,
    ThresholdRule,
)
from draftsmith.modules.decoding.tree import MAX_NODES, DynamicTree, num_candidates
from draftsmith.modules.decoding.tree_rule import TreeRule
from draftsmith.modules.drafters import MODEL, hierarchical, prompt_lookup
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.types import InputError, Range, check_range

SWITCH = {"on": True, "off": False}
# Expansions of a dynamic tree with depth=auto.
MOST_LEVELS = 8

# -- chains


@dataclass(frozen=True)
class AutoregressiveMethod(Method):
    """One token a target call: the baseline of every speed-up."""

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        return None


@dataclass(frozen=True)
class DraftingMethod(Method, ABC):
    """A method of a draft model or a trained drafter.

    drafter: draft for a draft model, or the kind of a trained drafter. The methods of a kind have its own.
    """

    drafter: str = field(default=MODEL, kw_only=True)

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.drafter, *self.uses)


@dataclass(frozen=True)
class ChainMethod(DraftingMethod, ABC):
    """One chain a round, which a policy ends.

    Rows that are decoded together have a policy each, which learns from that row alone: a row's drafts do not depend on
    the rows beside it.
    """

    def __post_init__(self) -> None:
        if self.drafter not in chain_drafters():
            raise InputError("drafter", repr(self.drafter), f"one of {', '.join(chain_drafters())}", "Choose one.")
        super().__post_init__()

    @abstractmethod
    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        """Make a new policy for each row."""

    def build(self, models: Models, rows: int = 1) -> ChainDrafter:
        return build_chains(models, self.drafter, self.policies(models, rows))


def chain_drafters() -> list[str]:
    """Return everything that drafts chains: `draft`, and kinds of trained drafters."""
    return [MODEL, *(kind for kind in drafters.HEADS if "chain" in drafters.head_class(kind).drafts)]


def chain_method(drafter: str) -> str:
    """Return the name of the method that drafts chains of a fixed length with a drafter."""
    return "spec" if drafter == MODEL else drafter


def by_drafter(name: str) -> str:
    """Return the setting that names the drafter, to follow the name of a stop rule."""
    return "" if name == MODEL else f":drafter={name}"


def build_chains(models: Models, drafter: str, stops: Sequence[StopPolicy]) -> ChainDrafter:
    """Build a drafter of chains for as many rows as there are policies. drafter: see `chain_drafters`."""
    return ChainDrafter(models.net(drafter), stops, models.capacity, frozenset(models.ends))


@dataclass(frozen=True)
class FixedLengthMethod(ChainMethod):
    """Speculative sampling (Leviathan et al. 2023): k drafted tokens a round.

    k: 5, or the drafter's own default (`DraftHead.default_k`), or fewer where a head drafts no more.
    """

    k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("k", self.k, 1)

    @property
    def length(self) -> int:
        """`k`, or its default."""
        if self.k is not None:
            return self.k
        return 5 if self.drafter == MODEL else drafters.head_class(self.drafter).default_k

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        length = self.length
        if self.drafter != MODEL:
            longest = models.heads[self.drafter].longest_draft
            check_range("k", self.k, high=longest)
            length = min(length, longest)
        return [FixedLengthStop(length) for _ in range(rows)]


@dataclass(frozen=True)
class BoundedMethod(ChainMethod, ABC):
    """At least min, at most max drafted tokens a round."""

    min: int = 1
    max: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("min", self.min, 1)
        check_range("max", self.max, self.min)


@dataclass(frozen=True)
class SpecDecPlusPlusMethod(BoundedMethod):
    """SpecDec++: stopped by the acceptance head once 1 - (product of its outputs) > h.

    min: 2 or more make a difference: the head speaks of a token after the next one is drafted.
    calibrated: off applies h to the head's raw output, as the paper does; on to its calibrated probability.
    """

    h: float = 0.7
    min: int = 2
    calibrated: bool = False
    uses = ("acceptance",)
    ranges: ClassVar = {"h": (0.0, 1.0, "()")}

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        assert models.acceptance is not None
        predictor = HeadPredictor(models.acceptance, self.calibrated)
        return [PredictorStop(predictor, ThresholdRule(self.h), self.min, self.max) for _ in range(rows)]


# Of the time of one more drafted token, and of verifying it, by the time of a round without a draft; auto measures it
# on this machine, once a run.
COST: dict[str, Range] = {"c": (0.0, math.inf, "()")}


def cost_rules(c: float | str, models: Models, drafter: str, rows: int) -> list[CostRule]:
    """Make a rule with this cost (`COST`) for each row."""
    cost = models.times.step_cost(models, drafter, rows) if isinstance(c, str) else c
    return [CostRule(cost) for _ in range(rows)]


@dataclass(frozen=True)
class CostMethod(BoundedMethod):
    """Stopped once one more token is worth less than its time (`stop.CostRule`), by the acceptance head's calibrated
    probabilities: no threshold to choose.

    c: see `COST`.
    """

    c: float | Literal["auto"] = "auto"
    max: int = 16
    uses: ClassVar[tuple[str, ...]] = ("acceptance",)
    ranges: ClassVar = COST

    def predictor(self, models: Models) -> Predictor:
        """Make a predictor of acceptance."""
        assert models.acceptance is not None
        return HeadPredictor(models.acceptance)

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        rules = cost_rules(self.c, models, self.drafter, rows)
        return [PredictorStop(self.predictor(models), rule, self.min, self.max) for rule in rules]


@dataclass(frozen=True)
class OnlineMethod(CostMethod):
    """Stopped by cost without a head: a logistic regression on the draft's own confidence predicts acceptance, and is
    updated after every verification.

    Whether the token continues a repetition of the text counts too.
    """

    uses = ()

    def predictor(self, models: Models) -> Predictor:
        return OnlinePredictor()


@dataclass(frozen=True)
class ConfidenceMethod(BoundedMethod):
    """Stopped once the drafted token's probability q falls below t, as in transformers' assisted generation."""

    t: float = 0.4
    ranges: ClassVar = {"t": (0.0, 1.0, "()")}

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        return [ConfidenceStop(self.t, self.min, self.max) for _ in range(rows)]


@dataclass(frozen=True)
class SelfVerifyMethod(ChainMethod):
    """HSDDW's self-verification: stopped once the draft's entropy exceeds its mean at rejected tokens; at most k."""

    k: int = 10
    ranges: ClassVar = {"k": 1}

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        return [SelfVerifyStop(self.k) for _ in range(rows)]


@dataclass(frozen=True)
class SlotConfidenceMethod(ChainMethod):
    """A block drafter's chain of at most k tokens, cut before the first one whose confidence is below t, as servers do.

    rule: token, its own confidence, as in llama.cpp; draft, the product of the confidences so far.
    """

    k: int = 7
    t: float = 0.5
    rule: Literal["token", "draft"] = "token"
    ranges: ClassVar = {"k": 1, "t": (0.0, 1.0, "()")}

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        check_slots(models.heads[self.drafter].config, self.k)
        return [SlotConfidenceStop(self.t, self.rule == "draft", self.k) for _ in range(rows)]


@dataclass(frozen=True)
class SlotCostMethod(ChainMethod):
    """A block drafter's chain of at most k tokens, cut where one more is worth less than its time, by its confidences.

    c: see `COST`.
    """

    k: int = 7
    c: float | Literal["auto"] = "auto"
    ranges: ClassVar = COST | {"k": 1}

    def policies(self, models: Models, rows: int) -> Sequence[StopPolicy]:
        check_slots(models.heads[self.drafter].config, self.k)
        return [SlotConfidenceStop(rule, True, self.k) for rule in cost_rules(self.c, models, self.drafter, rows)]


def check_slots(config: Any, k: int) -> None:
    """Raise InputError if a block drafter has no confidence head, or drafts fewer than k tokens."""
    check_range("k", k, high=config.drafts)
    if not config.confidence:
        raise InputError("methods", "a DSpark head without confidences", "one with", "Train it with --confidence.")


# -- trees of a trained drafter


@dataclass(frozen=True)
class StaticTreeMethod(DraftingMethod):
    """The same tree of ranks in every round: 25 nodes of EAGLE-1, or any tree from a YAML list of paths of ranks.

    drawn: when sampling, draw a node's children without replacement, in place of the likeliest ones.
    """

    tree: str = "eagle-1"
    drawn: bool = False

    @property
    def trees(self) -> tuple[str, ...]:
        return (self.tree,)

    def build(self, models: Models, rows: int = 1) -> Drafter:
        shape = replace(models.trees[self.tree], drawn=self.drawn)
        check_range(f"tree {self.tree}, ranks", max(shape.ranks) + 1, high=models.target.info.vocab_size)
        return TreeDrafter(models.net(self.drafter), shape, models.capacity, rows)


@dataclass(frozen=True)
class DynamicTreeMethod(DraftingMethod):
    """EAGLE-2's trees: the topk best nodes of a level are expanded depth times, the nodes best are verified.

    nodes: drafted tokens; SafeAILab's total_token counts the root too, so that its 60 is 59 here. auto takes as many in
        every round as are worth their time on this machine, which is measured once.
    depth: 6 gives 7 levels, as in SafeAILab's code. auto, with nodes=auto, expands as often in every round as is worth
        its time.
    """

    nodes: int | Literal["auto"] = 60
    depth: int | Literal["auto"] = 6
    topk: int = 10
    ranges: ClassVar = {"depth": 1, "topk": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes != "auto":
            check_range("nodes", self.nodes, 1, self.most_nodes)
            if self.depth == "auto":
                raise InputError("depth", f"auto with nodes={self.nodes}", "nodes=auto with it", "Give a depth.")

    @property
    def most_depth(self) -> int:
        """`depth`, or the most that auto takes."""
        return MOST_LEVELS if self.depth == "auto" else self.depth

    @property
    def most_nodes(self) -> int:
        """Number of nodes that a tree is chosen from, or the most that the target scores."""
        return min(MAX_NODES, num_candidates(self.topk, self.most_depth + 1))

    def build(self, models: Models, rows: int = 1) -> Drafter:
        if self.nodes != "auto":
            return self.fixed(models, self.nodes, self.most_depth, rows)
        trees = f"trees of topk {self.topk}"
        times = models.times.tree_times(models, trees, lambda levels: self.fixed(models, self.topk, levels))
        rules = [TreeRule(times, self.depth == "auto") for _ in range(rows)]
        return self.fixed(models, self.most_nodes, self.most_depth, rows, rules)

    def fixed(
        self, models: Models, nodes: int, depth: int, rows: int = 1, rules: Sequence[TreeRule] | None = None
    ) -> Drafter:
        """Build the drafter of trees of at most this size, whatever `nodes` and `depth` are."""
        check_range("topk", self.topk, high=models.target.info.vocab_size)
        shape = DynamicTree(nodes, depth, self.topk)
        return TreeDrafter(models.net(self.drafter), shape, models.capacity, rows, rules)


# -- names


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


# Methods by name, with their default settings.
METHODS: dict[str, Method] = {
    "ar": AutoregressiveMethod(),
    "spec": FixedLengthMethod(),
    "specdec++": SpecDecPlusPlusMethod(),
    "cost": CostMethod(),
    "online": OnlineMethod(),
    "confidence": ConfidenceMethod(),
    "self-verify": SelfVerifyMethod(),
    **hierarchical.METHODS,
    **prompt_lookup.METHODS,
}
# What a trained drafter may draft (`DraftHead.drafts`): the end of the method's name behind its kind, and the method.
OF_HEADS: dict[str, tuple[str, type[DraftingMethod]]] = {
    "chain": ("", FixedLengthMethod),
    "tree": ("-tree", DynamicTreeMethod),
    "static": ("-static", StaticTreeMethod),
    "confidence": ("-confidence", SlotConfidenceMethod),
    "cost": ("-cost", SlotCostMethod),
}


def methods_of(kind: str) -> dict[str, Method]:
    """Return the methods of a kind of trained drafter by name."""
    own = [OF_HEADS[draft] for draft in drafters.head_class(kind).drafts]
    return {f"{kind}{end}": method(drafter=kind) for end, method in own}


@functools.cache
def known_methods() -> dict[str, Method]:
    """Return every method of this engine by its name, with its default settings. `add_folder` adds to it."""
    return METHODS | {name: method for kind in drafters.HEADS for name, method in methods_of(kind).items()}


def add_folder(folder: str) -> None:
    """Register the drafters of another folder: heads listed in its files' HEADS, and methods in their METHODS.

    A file NAME.py is imported as `draftsmith.modules.drafters.NAME`; files of the folder import each other relatively.

    Raises:
        InputError: the folder holds no Python files, or a file, head or method with a name that is taken.
    """
    modules = list(pkgutil.iter_modules([folder]))
    if not modules:
        raise InputError("drafters", folder, "a folder of Python files", "Correct the path.")
    # Its absolute path.
    finder: Any = modules[0].module_finder
    folder, names, path = finder.path, [module.name for module in modules], drafters.__path__
    # Python would import the file of the first folder, without a word.
    taken = {module.name for module in pkgutil.iter_modules(own for own in path if own != folder)}
    if clash := sorted(taken & set(names)):
        raise InputError("drafters", f"{', '.join(clash)} in {folder}", "names that are not taken", "Rename it.")
    if folder not in path:
        path.append(folder)
    for name in names:
        # A second call finds the module imported, or the file fails again.
        module = importlib.import_module(f"{drafters.__name__}.{name}")
        kinds = {
            head.kind: drafters.Kind(f"{name}:{head.__name__}", (module.__doc__ or name).splitlines()[0])
            for head in getattr(module, "HEADS", ())
        }
        if clash := sorted(kind for kind in kinds if drafters.HEADS.get(kind, kinds[kind]) != kinds[kind]):
            raise InputError("HEADS", f"{', '.join(clash)} in {name}.py", "kinds that are not taken", "Rename it.")
        drafters.HEADS |= kinds
        methods = dict(getattr(module, "METHODS", {}))
        for kind in kinds:
            methods |= methods_of(kind)
        if clash := sorted(key for key in methods if known_methods().get(key, methods[key]) != methods[key]):
            raise InputError("METHODS", f"{', '.join(clash)} in {name}.py", "names that are not taken", "Rename it.")
        known_methods().update(methods)


def settings_of(method: Method) -> dict[str, Any]:
    """Return the settings of a named method with their types."""
    hints = get_type_hints(type(method))
    # The methods of a kind draft with it: their drafter is no setting.
    fixed = {"drafter"} if getattr(method, "drafter", MODEL) != MODEL else set()
    return {spec.name: hints[spec.name] for spec in dataclasses.fields(method) if spec.name not in fixed}


def parse_methods(text: str, more: Mapping[str, Method] | None = None) -> list[LabeledMethod]:
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
    return [LabeledMethod(label, parse_method(label, more)) for label in labels]


def parse_method(label: str, more: Mapping[str, Method] | None = None) -> Method:
    """Parse one method with its settings."""
    known = {**known_methods(), **(more or {})}
    name, *parts = (part.strip() for part in label.split(":"))
    name, at, variant = name.partition("@")
    if at and not variant:
        raise InputError(
            "methods", repr(label), f"the name of a drafter behind {name}@", "Name it, or leave out the @."
        )
    if name not in known:
        raise InputError("methods", repr(name), f"one of {', '.join(known)}", "Correct the name.")
    method, kinds = known[name], settings_of(known[name])
    values: dict[str, Any] = {}
    for part in parts:
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if setting not in kinds:
            allowed = ", ".join(kinds) or "no settings"
            kind = getattr(method, "drafter", MODEL)
            others = [key for key, own in known.items() if getattr(own, "drafter", MODEL) == kind != MODEL]
            remedy = next(
                (f"{key} has it." for key in others if setting in settings_of(known[key])), "Correct or remove it."
            )
            raise InputError(f"methods, {name}", f"setting {setting!r}", allowed, remedy)
        if setting in values or not equals:
            found = f"{setting} twice" if equals else repr(part)
            raise InputError(f"methods, {name}", found, f"{setting}=VALUE once", "Correct it.")
        values[setting] = convert(f"methods, {name}, {setting}", value, kinds[setting])
    return replace(method, **values)


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


def check_needs(named: LabeledMethod, given: Mapping[str, str]) -> None:
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
