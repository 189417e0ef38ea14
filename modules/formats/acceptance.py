"""An acceptance head for a server that is to feed it: `config.json` states the inputs, their order and the formulas.

No server reads it yet. Tensors: `join.*` if there is more to read than a state, `blocks.{i}.linear.*` (tied blocks
once), `out.*`, and `direct.weight` of the numbers. Float32 throughout.
"""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, Feature, State
from draftsmith.modules.formats.base import (
    ForeignHead,
    HeadFormat,
    HeadTrial,
    ImportedHead,
    Package,
    Served,
    TargetFacts,
    check_tensors,
)
from draftsmith.modules.types import InputError

FORMAT, VERSION = "draftsmith-acceptance", 1
LIMIT = 12.0  # of logarithms and log-odds
STATES = {
    "after": "the drafter's last hidden state (after its final norm) once it has read the token",
    "before": "the drafter's last hidden state (after its final norm) that predicted the token",
}
EMBEDDING = "the drafter's input embedding of the token"
REPEATED = (
    "of the longest suffix, of n = 8, 4 or 2 tokens of all before y, drafted ones included, that occurred in prompt "
    "and answer before"
)
FEATURES: dict[Feature, str] = {
    "log_q": f"max(log q(y), -{LIMIT:g})",
    "logit_q": f"log(q(y) / (1 - q(y))), kept within [-{LIMIT:g}, {LIMIT:g}]",
    "logit_max_q": f"log(m / (1 - m)) with m = max_v q(v), kept within [-{LIMIT:g}, {LIMIT:g}]",
    "entropy": "-sum_v q(v) log q(v)",
    "depth": "log(place of the token in its draft), places from 1",
    "temperature": "that of q; 0 where the draft is greedy",
    "repeat": f"n / 2 or -n / 2 {REPEATED}: n / 2 where y followed it there the last time, -n / 2 where another token "
    "did; 0 where no such suffix occurred",
    "repeat_mean": f"n / 2 times 2 q(x) - 1, {REPEATED}, and of the x that followed it there the last time; 0 where no "
    "such suffix occurred",
}
# What a server may do with P so that its output still follows the target.
USES = (
    "To draft no further by P follows the target at any temperature. To drop tokens that were drawn follows it by a "
    "head of state undrawn alone, which has not seen them, where places behind a token have no say in it; by any other "
    "head only when greedy."
)
DISTRIBUTION = (
    "q is the draft's law that the token y was drawn from: after temperature, top-k and top-p; of a greedy draft the "
    "softmax of its logits at temperature 1. Logarithms are natural."
)
PREDICTED = "a drafted token of a chain: P(the target keeps it | it keeps those before it)"
FORWARD = (
    "x = join(inputs, one after the other, the numbers last) where there is a join, else the state",
    "where the activation is relu: x = max(join(inputs, but for the numbers), 0)",
    "num_blocks times: x = x + silu(W x + b), with blocks.i.linear of the i-th, or blocks.0.linear always where tied",
    "z = out(x) + direct(the numbers among the inputs, in their order) where there is a direct",
    "z = z + log(w_rej / w_acc)",
    "z = scale * z + shift, both in `calibration`",
    "P = sigmoid(z)",
)
COUNTS = ("hidden_size", "width", "num_blocks")
# Fields that are computed with; the others describe the head in words.
REQUIRED = (*COUNTS, "tied", "activation", "w_acc", "w_rej", "calibration", "inputs")


def inputs_of(hidden_size: int, state: str, features: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what a head reads of a token, in order: `name`, `size`, and a description `is`."""
    at = "after" if state == "after" else "before"
    inputs = [{"name": f"state_{at}", "size": hidden_size, "is": STATES[at]}]
    if state == "before":
        inputs.append({"name": "embedding", "size": hidden_size, "is": EMBEDDING})
    return inputs + [{"name": name, "size": 1, "is": FEATURES[name]} for name in features]


class AcceptanceFormat(HeadFormat):
    """Directory of an acceptance head, which reads a draft's hidden states in float32."""

    kind = "acceptance"
    predicts = True
    float32 = True
    num_drafted = 20

    @abstractmethod
    def logit(self, head: Any, states: Tensor, embeds: Tensor | None, numbers: Tensor | None) -> Tensor:
        """Return the logit [N] of acceptance, as far as the format holds it, by one of our heads."""

    def forward(self, head: Any, trial: HeadTrial) -> list[list[Tensor]]:
        config, inputs = head.config, trial.inputs
        numbers = torch.cat([inputs[name] for name in config.features], -1) if config.features else None
        embeds = inputs["embedding"] if config.reads_token else None
        states = inputs["state_after" if config.late else "state_before"]
        return [[torch.sigmoid(self.logit(head, states, embeds, numbers))]]


class Acceptance(AcceptanceFormat):
    """Any acceptance head."""

    name = system = "acceptance"

    def recognises(self, foreign: ForeignHead) -> bool:
        return foreign.config.get("format") == FORMAT

    def extra_fields(self, target: Mapping[str, Any], manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {name: manifest.get(name) for name in ("drafter", "sampling")}

    def write(
        self,
        config: AcceptanceHeadConfig,
        state: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        target: TargetFacts | None = None,
    ) -> Package:
        # In float32 whatever `dtype`. Standardisation is folded into the weights: a server need not know of it.
        if config.standardize:
            head = AcceptanceHead(config)
            head.load_state_dict(state, strict=False)
            config, state = head.folded().config, dict(head.folded().named_parameters())
        fields = {
            "format": FORMAT,
            "format_version": VERSION,
            "hidden_size": config.hidden_size,
            "width": config.inner_size,
            "num_blocks": config.num_blocks,
            "tied": config.tied,
            "activation": config.activation,
            "dtype": "float32",
            "predicts": PREDICTED,
            "uses": USES,
            "inputs": inputs_of(config.hidden_size, config.state, config.features),
            "law": DISTRIBUTION,
            "forward": list(FORWARD),
            "w_acc": config.w_acc,
            "w_rej": config.w_rej,
            "calibration": list(config.calibration),
        }
        tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in state.items()}
        return Package(fields, tensors)

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        raw = package.config
        if (raw.get("format"), raw.get("format_version")) != (FORMAT, VERSION):
            found = f"{raw.get('format')} {raw.get('format_version')}"
            raise InputError("config.json, format", found, f"{FORMAT} {VERSION}", "Export the head again.")
        for name in REQUIRED:
            if name not in raw or (name in COUNTS and not isinstance(raw[name], int)):
                expected = "a whole number" if name in COUNTS else "a value"
                raise InputError(f"config.json, {name}", raw.get(name, "none"), expected, "Export the head again.")
        names = [part.get("name") for part in raw["inputs"]]
        state: State = "after"
        if names[:1] == ["state_before"]:
            state = "before" if "embedding" in names else "undrawn"
        config = AcceptanceHeadConfig(
            **{name: raw[name] for name in ("hidden_size", "num_blocks", "tied", "activation", "w_acc", "w_rej")},
            width=raw["width"] if raw["width"] != raw["hidden_size"] else 0,
            calibration=tuple(raw["calibration"]),
            state=state,
            features=tuple(name for name in names if name in FEATURES),
        )
        if names != [part["name"] for part in inputs_of(config.hidden_size, config.state, config.features)]:
            raise InputError("config.json, inputs", names, "an order of inputs that is known", "Export the head again.")
        check_width(config, target)
        with torch.device("meta"):
            check_tensors(AcceptanceHead(config), package.tensors)
        return ImportedHead(config, {name: tensor.detach().float() for name, tensor in package.tensors.items()})

    def logit(self, head: Any, states: Tensor, embeds: Tensor | None, numbers: Tensor | None) -> Tensor:
        return head.calibrated(head(states, embeds, numbers))

    def serve(self, served: Served) -> str:
        # No server loads it by itself: the command checks the directory.
        models = ["--draft", served.model]
        if served.drafter is not None:
            models = ["--target", served.model, "--draft", served.drafter]
        return shlex.join(["draftsmith", "check", served.directory, "--format", "acceptance", *models])


def check_width(config: AcceptanceHeadConfig, target: TargetFacts | None) -> None:
    """Raise InputError if the head's width is not that of the hidden states it reads."""
    width = None if target is None else target.hidden_size
    if width not in (None, config.hidden_size):
        expected = f"{width}, the width of the model's hidden states"
        raise InputError("config.json, hidden_size", config.hidden_size, expected, "Pass the head's own draft.")
