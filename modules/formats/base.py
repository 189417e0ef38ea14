"""What a public format of heads is to this project, and what its four functions hand around."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from draftsmith.modules.types import InputError

# Types of weights that layers compute with as they are; integers and float8 are quantised ones, whose scales are lost.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Package:
    """The content of a directory: `config.json`, and the tensors and metadata of its one weights file. files: names of
    all its files of weights, where it lies on a disk."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetFacts:
    """What a format needs to know of the model that a head reads.

    raw: its `config.json`. embed_tokens, lm_head: [V, H], where they are at hand.
    """

    raw: Mapping[str, Any]
    embed_tokens: Tensor | None = None
    lm_head: Tensor | None = None

    @property
    def hidden_size(self) -> int | None:
        return self.raw.get("hidden_size") or (self.raw.get("text_config") or {}).get("hidden_size")

    @property
    def num_layers(self) -> int | None:
        return self.raw.get("num_hidden_layers") or (self.raw.get("text_config") or {}).get("num_hidden_layers")


@dataclass(frozen=True)
class Finding:
    """One line of a check.

    level: `error`, the system refuses the directory or computes something else than the head; `note`, what it does with
        a tensor or field, for whoever looks for a reason.
    where: name of the tensor or of the config's field.
    """

    level: Literal["error", "note"]
    where: str
    text: str


@dataclass(frozen=True)
class Measure:
    """One number of a check: name, value and bar in words, and whether the bar is met.

    weak: it is met because the head drafts too little to show a difference. alike: readings that the check cannot tell
    from the measured one.
    """

    name: str
    value: str
    bar: str
    passed: bool
    weak: bool = False
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A head as one system holds it in memory.

    weights: float32, under the names of our head (`fc.weight`, `layers.0.self_attn.q_proj.bias`, `model.0...`); what
        the system would leave uninitialised is NaN, so that no comparison can pass by chance. A table of token ids is
        int64.
    settings: what the forward needs beside weights (`reader.py` and the formats of predictors say which).
    used: names on disk that the system read.
    """

    weights: dict[str, Tensor]
    settings: dict[str, Any]
    findings: tuple[Finding, ...]
    used: tuple[str, ...]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]


@dataclass(frozen=True)
class Parsed:
    """A foreign head as one of ours: its config dataclass, its parameters by our names, and what a user should know of
    the translation (a tensor that was left out, a default that was taken)."""

    config: Any
    state: dict[str, Tensor]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """One prompt with the model's answer, and its hidden states [T, H] in float32.

    ids: [T]. start: where the answer begins. choices [T]: the model's greedy choice of the token behind each. features:
    after the final norm. before_norm: the same before it; None where the model does not show them. states: number k ->
    the residual state [T, H] after the first k layers, of those that were asked for.
    """

    ids: Tensor
    start: int
    choices: Tensor
    features: Tensor
    before_norm: Tensor | None
    states: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """Real text to try a head on.

    facts: of the model whose hidden states it reads, with embedding and lm_head. probes: for a head that drafts.
    inputs: for a predictor, name -> [N, size] of all that it may read of N tokens (`formats/acceptance.py` names them).
    known: the head is at hand, or a record of it: how well it drafts says less of how it was made than these do.
    """

    facts: TargetFacts
    probes: Sequence[Probe] = ()
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    known: bool = False


@dataclass(frozen=True)
class Served:
    """What a command line that serves a head names. model: whose hidden states the head reads. drafter: the head on it
    whose hidden states those are, where a predictor reads that one's. verifier: the target of a predictor's draft."""

    model: str
    directory: str
    num_drafted: int
    drafter: str | None = None
    verifier: str | None = None


@dataclass(frozen=True)
class ForeignHead:
    """A foreign directory without its values. names: as stored; bare: without the prefix `model.`."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    bare: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bare", {name.removeprefix("model."): shape for name, shape in self.shapes.items()})

    @property
    def architecture(self) -> str:
        """The first of `architectures`, which every system goes by; empty where there is none."""
        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) and first.isprintable() else ""

    def has(self, pattern: str) -> bool:
        """Does a tensor's bare name begin with this?"""
        return any(re.match(pattern, name) for name in self.bare)

    def columns(self, name: str) -> int | None:
        """Inputs of a linear layer; None where there is no such matrix."""
        return matrix_size(self.bare.get(name), 1)

    def rows(self, name: str) -> int | None:
        """Outputs of a linear layer; None where there is no such matrix."""
        return matrix_size(self.bare.get(name), 0)

    @property
    def sizes(self) -> Mapping[str, Any]:
        """The config's fields, with those of the layer that speculators have inside it at the top."""
        return flat(self.config)

    @property
    def fuses_two(self) -> bool:
        """EAGLE-1's mark: fc reads an embedding and one feature, both of the width that it gives."""
        width = self.rows("fc.weight")
        return width is not None and self.columns("fc.weight") == 2 * width

    @property
    def eagle3(self) -> bool:
        """EAGLE-3's marks: tables of a draft vocabulary, norms of two inputs, attention that reads both at once."""
        if self.has(r"midlayer\.|layers\.\d+\.hidden_norm\.|fc_norm\.|aux_norm_|d2t$|t2d$"):
            return True
        query, output = (f"layers.0.self_attn.{name}_proj.weight" for name in ("q", "o"))
        width = self.rows(output)
        if width is not None and self.columns(query) == 2 * width:
            return True
        several = self.columns("fc.weight") is not None and not self.fuses_two and "norm.weight" in self.bare
        named = "eagle3" in self.architecture.lower() or "eagle_config" in self.config
        named = named or self.config.get("speculators_model_type") == "eagle3"
        return several or (named and not self.fuses_two)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` whose fields of the layers stand at the top, where those of speculators do not have them."""
    inner = config.get("transformer_layer_config")
    return {**(inner if isinstance(inner, Mapping) else {}), **config}


def matrix_size(shape: tuple[int, ...] | None, index: int) -> int | None:
    """Rows (0) or columns (1) of a matrix; None where it is none."""
    return shape[index] if shape is not None and len(shape) == 2 else None


class HeadFormat(ABC):
    """A directory that another system reads as a head of one kind.

    name: as users write it. system: whose it is, as messages say it. kind: of our heads that it holds.
    predicts: the head is a predictor, which reads a draft's hidden states, and no drafter.
    num_drafted: tokens a round in the command that serves it, where nothing was measured.
    probe_room: positions that `compare` needs behind a probe.
    float32: the system reads no other type. weights_files: what the weights are written as; the system reads the last.
    target_index: it finds the target's tensors through an index of shards. notes: what its users should know.
    w_rej: the loss weight of rejected tokens is no part of the file, and has to be told.
    """

    name: ClassVar[str]
    system: ClassVar[str]
    kind: ClassVar[str]
    predicts: ClassVar[bool] = False
    num_drafted: ClassVar[int] = 5
    probe_room: ClassVar[int] = 0
    float32: ClassVar[bool] = False
    weights_files: ClassVar[tuple[str, ...]] = ("model.safetensors",)
    target_index: ClassVar[bool] = False
    notes: ClassVar[tuple[str, ...]] = ()
    w_rej: ClassVar[bool] = False

    @property
    def reads(self) -> Literal["target", "draft"]:
        """The flag of the model whose hidden states the head reads."""
        return "draft" if self.predicts else "target"

    @abstractmethod
    def recognises(self, found: ForeignHead) -> bool:
        """Is this the format of a foreign directory? Asked once those that are known and not read are ruled out."""

    @abstractmethod
    def write(
        self, config: Any, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        """Our head (its config dataclass and the tensors of its directory) as that system wants it.

        target: the model whose hidden states it reads, for what depends on it.

        Raises:
            InputError: as of `check`.
        """

    @abstractmethod
    def read(self, package: Package, target: TargetFacts | None = None) -> Reading:
        """What that system would compute with: its names, prefixes, skips, defaults, silent drops and errors, as its
        own source has them and never as ours. Every tensor of the package is either used or has a finding, so has every
        tensor of the system that the package does not fill.

        target: the model whose hidden states the head reads.

        Raises:
            InputError: for sizes in `config.json` that are no sizes.
        """

    @abstractmethod
    def parse(self, package: Package, target: TargetFacts | None = None) -> Parsed:
        """The head as one of ours.

        Raises:
            InputError: for what our head cannot be, or where the system would compute with undefined numbers.
        """

    @abstractmethod
    def serve(self, served: Served) -> str:
        """The command line that serves it."""

    @abstractmethod
    def compare(self, reading: Reading, head: nn.Module, package: Package, trial: Trial) -> list[Measure]:
        """The system's reading beside the same head as one of ours, in float32, on real text."""

    def dialect(self, found: ForeignHead) -> str:
        """Whose directory this is, as messages say it."""
        return self.system

    def check(self, config: Any) -> None:  # noqa: B027 (a format may hold every head)
        """Raises InputError with the reason and the remedy where the format cannot hold a head of these settings."""

    def holds(self, config: Any) -> bool:
        """Does `check` pass?"""
        try:
            self.check(config)
        except InputError:
            return False
        return True

    def layers(self, reading: Reading, head: Any, num_layers: int) -> tuple[int, ...]:
        """The target's layers whose states `compare` reads beside its features, `Probe.states`."""
        return ()

    def completed(self, target: Mapping[str, Any], manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        """More fields of `config.json`, by the target's own and by the manifest of the exported head. path: of the
        model whose hidden states it reads."""
        return {}

    def recorded(self, state: Mapping[str, Tensor], package: Package) -> Mapping[str, Tensor]:
        """What was exported, by the names of `Reading.weights`."""
        return package.tensors

    def settings_differ(self, config: Mapping[str, Any], reading: Reading) -> list[Finding]:
        """The settings of an exported head (its config as JSON values) against those that the system takes."""
        return []


def misfits(net: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Compare tensors with a net's parameters and buffers; return what differs, by name: missing and unknown too.

    A weight may be of any floating-point type that layers compute in; an integer buffer keeps its type.
    """
    wrong = {name: "is missing" for name in sorted(net.keys() - tensors.keys())}
    wrong |= {name: "is unknown" for name in sorted(tensors.keys() - net.keys())}
    for name, own in net.items():
        if name not in tensors:
            continue
        found, dtypes = tensors[name], FLOATS if own.is_floating_point() else (own.dtype,)
        if found.shape != own.shape:
            wrong[name] = f"is {list(found.shape)} in place of {list(own.shape)}"
        elif found.dtype not in dtypes:
            wrong[name] = f"is {dtype_name(found.dtype)} in place of {dtype_name(dtypes[0])}"
    return wrong


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def largest(values: Tensor) -> float:
    """Largest absolute value; infinite where anything is not a number."""
    return float(values.abs().nan_to_num(math.inf, math.inf, math.inf).max()) if values.numel() else 0.0
