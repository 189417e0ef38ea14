"""What a public format is to this project. Each file of `FORMATS` has four functions:

write(config, state, dtype) -> Package
    Our head (its config dataclass and its `named_parameters`) as that system wants it. Raises InputError with the
    reason and the remedy where the format can not hold the head.
read(package, target) -> Reading
    What that system would compute with: its names, prefixes, skips, defaults, silent drops and errors, as its own
    source has them and never as ours. Every tensor of the package is either used or has a finding, so has every tensor
    of the system that the package does not fill.
parse(package, target) -> Parsed
    The head as one of ours. Raises InputError for what our head can not be.
serve(target, directory, num_drafted) -> str
    The command line that serves it. For an acceptance head `target` is the draft, and `verifier=` names the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True)
class Package:
    """The content of a directory: `config.json`, and the tensors and metadata of its one weights file."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetFacts:
    """What a format needs to know of the model that a head reads.

    raw: its `config.json`. embed_tokens, lm_head: [V, H], where they are at hand.
    """

    raw: Mapping[str, Any]
    embed_tokens: Tensor | None = None
    lm_head: Tensor | None = None


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
class Reading:
    """A head as one system holds it in memory.

    weights: float32, under the names of our head (`fc.weight`, `layers.0.self_attn.q_proj.bias`, `model.0...`); what
        the system would leave uninitialised is NaN, so that no comparison can pass by chance.
    settings: scalars that the forward needs beside weights (`reference.py` and `specdec_pp.py` say which).
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
