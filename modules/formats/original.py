"""A head's directory as another system wrote it: what has to be kept so that a head trained on is written back so."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.formats.base import FLOATS, ImportedHead, Package, TargetFacts, dtype_name, same_values
from draftsmith.modules.formats.llama import inner_object
from draftsmith.modules.formats.llama_format import LlamaFormat
from draftsmith.modules.types import InputError

OTHER_FORMAT = "Write it in a server's format: pass --format."
CONFIDENCE, WITH_MARKOV = "confidence_head.proj.weight", "confidence_head_with_markov"


@dataclass(frozen=True)
class Original:
    """Directory that a head was imported from.

    format: name of its format. config: its `config.json`. tensors: name -> type and sizes of each weight. copies: those
    that are the target's, `embed_tokens` or `lm_head`. kept: tensors that are neither the head's nor the target's, such
    as tables of ids. problems: what its system misreads. target: identity of the target.
    """

    format: str
    config: dict[str, Any]
    tensors: dict[str, tuple[str, list[int]]]
    copies: dict[str, str]
    problems: list[str]
    target: dict[str, str] | None
    kept: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, format: object, package: Package, head: ImportedHead, target: TargetFacts | None, identity: Any
    ) -> Original | None:
        """Return what is to be kept of a directory; None for one that cannot be written back: GGUF, 8 or 4 bits, or a
        norm by both of its names (`systems.ServedEagle3.disk_tensors`)."""
        both = any(re.search(r"layers\.[1-9]\d*\.hidden_norm\.", name) for name in package.tensors)
        if both or not isinstance(format, LlamaFormat) or package.quantized or "gguf" in package.config:
            return None
        tensors, copies, kept = {}, {}, {}
        for name, tensor in package.tensors.items():
            own = format.our_name(name.removeprefix("model."))
            theirs = getattr(target, own.removesuffix(".weight"), None) if own.count(".") == 1 else None
            if own not in head.state or not tensor.is_floating_point():
                if not isinstance(theirs, Tensor) or not same_values(tensor, theirs):
                    kept[name] = tensor
                    continue
                copies[name] = own.removesuffix(".weight")
            tensors[name] = dtype_name(tensor.dtype), list(tensor.shape)
        problems = [f"{problem.where}: {problem.text}" for problem in head.problems]
        return cls(format.name, dict(package.config), tensors, copies, problems, identity, kept)

    def write(
        self, format: LlamaFormat[Any], state: Mapping[str, Tensor], target: TargetFacts, identity: Any
    ) -> Package:
        """Return the directory with the weights of a head that was trained on.

        Every weight goes back to where reading took it from: the directory is read once with the numbers of rows in the
        place of the weights.

        Raises:
            InputError: the files have no place for a weight.
        """
        tables = {"embed_tokens": target.embed_tokens, "lm_head": target.lm_head}
        tensors = dict(self.kept)
        for name, (dtype, shape) in self.tensors.items():
            numbers = torch.arange(1.0, shape[0] + 1).view(-1, *[1] * (len(shape) - 1)).expand(shape)
            table = tables.get(self.copies.get(name, ""))
            # Embedding and lm_head of a tied target are one tensor, which no file holds twice.
            tensors[name] = numbers if table is None else table.to(FLOATS[dtype]).contiguous().clone()
        rows = format.read(Package(self.config, tensors), dataclasses.replace(target, scale=1.0)).state
        state = format.scaled(state, target.scale) if target.scale != 1 else state

        config = copy.deepcopy(self.config)
        places = {format.our_name(name.removeprefix("model.")): name for name in self.tensors.keys() - self.copies}
        for own, new in state.items():
            if not new.is_floating_point():
                continue
            if (place := places.get(own)) is None:
                # An lm_head that was taken from the target.
                if own not in rows or not same_values(new, rows[own]):
                    raise InputError(own, "trained weights", "none: the files have no such tensor", OTHER_FORMAT)
                continue
            dtype, shape = self.tensors[place]
            if new.ndim == 2 and new.shape[1] > shape[1]:
                # Zeros were added for the token before, which a confidence head of the state alone does not read.
                if own == CONFIDENCE and bool(new[:, shape[1] :].any()):
                    config, shape = _with_markov(config), list(new.shape)
                new = new[:, : shape[1]]
            written = torch.empty(shape, dtype=FLOATS[dtype])
            numbers = rows[own].flatten(1)[:, 0] if new.ndim > 1 else rows[own]
            written[numbers.long() - 1] = new.to(written.dtype)
            tensors[place] = written
        verifier = inner_object(config, "speculators_config").get("verifier")
        if identity != self.target and isinstance(verifier, dict):
            verifier["name_or_path"] = target.path
        return Package(config, tensors)


def _with_markov(config: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` whose confidence head reads the token before, said where the Markov head is described."""
    for place in ("dspark_config", "dflash_config"):
        if isinstance(inner := config.get(place), dict) and "markov_rank" in inner:
            return {**config, place: {**inner, WITH_MARKOV: True}}
    return {**config, WITH_MARKOV: True}
