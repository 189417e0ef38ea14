"""Interface of a public format of heads, and the plain data that its functions take and return."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.modules.targets.shape import (
    LayerKind,
    family_of,
    is_hybrid,
    layer_kinds,
    num_layers,
    shared_window,
    stated_positions,
    text_config,
)
from draftsmith.modules.types import InputError

Raw = Mapping[str, object]  # a `config.json`

# Types of weights that layers compute with; integers and float8 are quantized weights, whose scales are elsewhere.
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


# Versions of other systems whose sources were read.
VERSIONS = {
    "SafeAILab/EAGLE": "cb7e084", "vLLM": "0.33.0", "SGLang": "0.5.23", "speculators": "0.9.0",
    "llama.cpp": "(llama-cpp-python 0.3.36)", "DeepSpec": "afdfa7c", "SpecForge": "0.2.0", "SpecForge main": "9aafadf",
    "ModelOpt": "0.47.0", "ModelOpt main": "33d8c76", "Automodel": "0.7.0", "TorchSpec": "6f21829", "Hydra": "3f39fbd",
    "eagle-harness": "0.1.3",
}  # fmt: skip


class NotReadHere(InputError):
    """A head that our drafters do not compute, and its trainer and servers may: no fault of its files."""

    def __init__(self, field: str, found: object, expected: str, remedy: str = "Such heads are not supported."):
        super().__init__(field, found, expected, remedy)


def with_versions(systems: Iterable[str]) -> str:
    """Join names of systems, each with the version that was read."""
    return ", ".join(f"{system} {VERSIONS[system]}" for system in systems)


@dataclass(frozen=True)
class Package:
    """Content of a head's directory: `config.json`, the tensors of its weights files, and the record of an export.

    exported: `draftsmith.json`, which an export leaves; None in a directory that this project did not write.
    quantized: names of weights that the files hold in 8 or 4 bits. notes: what was changed in reading.
    """

    config: Raw
    tensors: Mapping[str, Tensor]
    exported: Mapping[str, Any] | None = None
    quantized: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetFacts:
    """Facts of the model whose hidden states a head reads.

    raw: its `config.json`. embed_tokens, lm_head: [V, H], if they are loaded. scale: of its logits, against their
    products. left_out: what else makes its logits, and no system does to those of a head that borrows lm_head.
    path: by which servers load it.
    """

    raw: Raw
    embed_tokens: Tensor | None = None
    lm_head: Tensor | None = None
    scale: float = 1.0
    left_out: str = ""
    path: str = ""

    @property
    def text(self) -> Raw:
        """The config's settings about text."""
        return text_config(self.raw)

    @property
    def family(self) -> str:
        """The model type of the text (`family_of`)."""
        return family_of(self.raw)

    @property
    def served_family(self) -> str:
        """The model type of the whole, by which vLLM and SGLang choose a class: a multimodal model's own."""
        return str(self.raw.get("model_type") or self.family).removesuffix("_text")

    @cached_property
    def kinds(self) -> list[LayerKind]:
        """Kind of each layer's cache."""
        return layer_kinds(self.text)

    @property
    def hybrid(self) -> bool:
        """True if some layers have a recurrent or convolution state in the place of keys and values."""
        return is_hybrid(self.kinds)

    @property
    def window(self) -> int | None:
        """The window of a target whose layers all have one, as a Mistral's."""
        return shared_window(self.kinds)

    @property
    def hidden_size(self) -> int | None:
        size = self.text.get("hidden_size")
        return size if isinstance(size, int) else None

    @property
    def num_layers(self) -> int | None:
        return num_layers(self.text)

    @property
    def max_position(self) -> int:
        """The context length as servers take it, 0 if it is unknown."""
        return stated_positions(self.text)


@dataclass(frozen=True)
class Problem:
    """A tensor or config field by which a system refuses a directory, or computes something else than the head."""

    where: str
    text: str


@dataclass(frozen=True)
class ImportedHead:
    """A foreign head as one of ours.

    config: dataclass of the head's settings. state: tensors by our names, in the type of the file. notes: what was left
    out or assumed. problems: why the format's own system does not compute this head from the directory.
    """

    config: Any
    state: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Served:
    """Paths and numbers in the command that serves a head.

    model: whose hidden states the head reads.
    family: `TargetFacts.served_family` of the model; empty if it is unknown.
    window: most tokens that the head attends to, itself included.
    confidence: the head predicts what is accepted, and the server is to verify no more.
    """

    model: str
    directory: str
    num_drafted: int
    family: str = ""
    window: int | None = None
    confidence: bool = False


class HeadFormat(ABC):
    """Directory layout in which another system holds one kind of head."""

    # On the command line, in messages, and the kind of our heads.
    name: str
    system: str
    kind: str
    # It can be exported.
    writes: bool = True
    # The head is an acceptance head, which reads a draft's hidden states.
    predicts: bool = False
    # Values of `architectures` by which the system builds the head.
    classes: tuple[str, ...] = ()
    # The system finds the target's tensors through an index of shards.
    target_index: bool = False
    # Lines for users that hold for every head (`serve_notes`).
    notes: tuple[str, ...] = ()
    # Pattern of the weights, by our names, that the system reads in 8 bits; empty if it reads none, for this reason.
    eight_bits: str = ""
    sixteen_bits: str = "reads no quantized weights"

    @abstractmethod
    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        """Read a directory by this system's fields and defaults.

        target: the model whose hidden states the head reads.

        Raises:
            InputError: a tensor is missing, unknown or of another shape; an option is not supported by our head.
        """

    def unserved(self, target: TargetFacts) -> str:
        """Return why the system cannot draft with such a head for a target, or an empty string."""
        return ""

    def wrote(self, package: Package) -> bool:
        """Return whether a directory is the system's own, by what no other system's has."""
        return False

    def disk_name(self, name: str) -> str:
        """Return the name in a file of one of our parameters."""
        return name

    def check(self, config: Any) -> None:  # noqa: B027 (a format may hold every head)
        """Raise InputError if the format cannot hold a head of these settings."""

    def write(
        self, config: Any, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        """Convert one of our heads to this format. target: the model whose hidden states it reads.

        Raises:
            InputError: as of `check`.
        """
        raise NotImplementedError(f"{self.name} is read only")

    def serve(self, served: Served) -> str:
        """Return the command that serves the head."""
        raise NotImplementedError(f"{self.name} is read only")

    def serve_notes(self, served: Served) -> list[str]:
        """Return what users should know of the command, printed with it and on the card."""
        return [*self.notes]

    def holds(self, config: Any) -> bool:
        """Return whether `check` passes."""
        try:
            self.check(config)
        except InputError:
            return False
        return self.writes


def layer_types(raw: Raw) -> list[str]:
    """Return the kinds of attention in a `config.json`, by layers; empty if it does not list them.

    Raises:
        InputError: another value than a list of names.
    """
    types = raw.get("layer_types") or []
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise InputError("config.json, layer_types", repr(types)[:80], "a list of names", "Correct config.json.")
    return types


def check_tensors(net: nn.Module, state: Mapping[str, Tensor], disk_name: Callable[[str], str] = str) -> None:
    """Check tensors against the net that they are to fill, which may be on the meta device.

    A weight may be of any floating-point type that layers compute in; an integer buffer keeps its type. disk_name: name
    in the file of one of our names.

    Raises:
        InputError: names the tensors that are missing, unknown, or of another shape or type.
    """
    # Tied blocks share storage: each tensor is expected once, under its first name.
    aliases = dict(net.named_parameters(remove_duplicate=False)).keys() - dict(net.named_parameters()).keys()
    expected = {name: tensor for name, tensor in net.state_dict().items() if name not in aliases}
    wrong = {name: "is missing" for name in sorted(expected.keys() - state.keys())}
    wrong |= {name: "is unknown" for name in sorted(state.keys() - expected.keys())}
    for name, wanted in expected.items():
        tensor = state.get(name, wanted)
        dtypes = [*FLOATS.values()] if wanted.is_floating_point() else [wanted.dtype]
        if tensor.shape != wanted.shape:
            wrong[name] = f"is {list(tensor.shape)} in place of {list(wanted.shape)}"
        elif tensor.dtype not in dtypes:
            wrong[name] = f"is {dtype_name(tensor.dtype)} in place of {dtype_name(dtypes[0])}"
    if wrong:
        found = ", ".join(f"{disk_name(name)} {text}" for name, text in list(wrong.items())[:4])
        found += f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise InputError("weights", found, "the tensors that config.json asks for", "Check config.json and the file.")


def same_values(one: Tensor, other: Tensor) -> bool:
    """Compare in the coarser of two types: a float32 copy of a bfloat16 tensor is the same tensor."""
    if one.shape != other.shape:
        return False
    coarser = max(one.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return torch.equal(one.to(coarser), other.to(coarser))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def largest(values: Tensor) -> float:
    """Return the largest absolute value; infinity if anything is not a number."""
    return float(values.abs().nan_to_num(math.inf, math.inf, math.inf).max()) if values.numel() else 0.0
