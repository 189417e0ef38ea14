"""An acceptance head for a server that is to feed it: `config.json` says what, in which order, and what is computed.

No server reads it yet. What it would need to know and this project's own head directories leave to its code is stated
here: which hidden state, the token's embedding or not, numbers of the draft's distribution with their formulas, and how
the output becomes a probability. Tensors: `join.*` where there is more to read than a state, `blocks.{i}.linear.*`
(tied blocks once), `out.*`, and `direct.weight` of the numbers. Float32 throughout.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHeadConfig, Feature, State
from draftsmith.modules.interop.base import Finding, ForeignHead, Package, Parsed, Reading, Served, TargetFacts
from draftsmith.modules.interop.predictor import PredictorFormat
from draftsmith.modules.types import InputError

FORMAT, VERSION = "draftsmith-acceptance", 1
LIMIT = 12.0  # of logarithms and log-odds
STATES = {
    "after": "the drafter's last hidden state (after its final norm) once it has read the token",
    "before": "the drafter's last hidden state (after its final norm) that predicted the token",
}
EMBEDDING = "the drafter's input embedding of the token"
FEATURES: dict[Feature, str] = {
    "log_q": f"max(log q(y), -{LIMIT:g})",
    "logit_q": f"log(q(y) / (1 - q(y))), kept within [-{LIMIT:g}, {LIMIT:g}]",
    "logit_max_q": f"log(m / (1 - m)) with m = max_v q(v), kept within [-{LIMIT:g}, {LIMIT:g}]",
    "entropy": "-sum_v q(v) log q(v)",
    "depth": "log(place of the token in its draft), places from 1",
    "temperature": "that of q; 0 where the draft is greedy",
    "repeat": "n / 2 or -n / 2 of the longest suffix, of n = 8, 4 or 2 tokens of all before y, drafted ones included, "
    "that occurred in prompt and answer before: n / 2 where y followed it there the last time, -n / 2 where another "
    "token did; 0 where no such suffix occurred",
}
DISTRIBUTION = (
    "q is the draft's law that the token y was drawn from: after temperature, top-k and top-p; of a greedy draft the "
    "softmax of its logits at temperature 1. Logarithms are natural."
)
PREDICTED = {  # by the setting `judges`
    "chain": "a drafted token of a chain: P(the target keeps it | it keeps those before it)",
    "tree": "a child of a tree's node: P(the target's own token at that place is this child)",
}
FORWARD = (
    "x = join(inputs, one after the other) where there is a join, else the state",
    "num_blocks times: x = x + silu(W x + b), with blocks.i.linear of the i-th, or blocks.0.linear always where tied",
    "z = out(x) + direct(the numbers among the inputs, in their order) where there is a direct",
    "z = z + log(w_rej / w_acc)",
    "z = straight lines between the knots (x, y), end values beyond them; without knots scale * z + shift",
    "P = sigmoid(z)",
)
CONFIG = ("hidden_size", "width", "num_blocks", "tied", "judges", "w_acc", "w_rej", "calibration", "knots", "inputs")
# What is said of the head and computed with by nobody.
SAID = ("format", "format_version", "dtype", "law", "judged", "forward", "drafter", "sampling")


def inputs_of(hidden_size: int, state: str, features: Sequence[Any]) -> list[dict[str, Any]]:
    """What a head reads of a token, in order: `name`, `size`, and in words what it `is`."""
    inputs = [{"name": f"state_{state}", "size": hidden_size, "is": STATES[state]}]
    if state == "before":
        inputs.append({"name": "embedding", "size": hidden_size, "is": EMBEDDING})
    return inputs + [{"name": name, "size": 1, "is": FEATURES[name]} for name in features]


class Acceptance(PredictorFormat):
    """Holds any acceptance head."""

    name = system = "acceptance"

    def recognises(self, found: ForeignHead) -> bool:
        return found.config.get("format") == FORMAT

    def completed(self, target: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
        return {name: manifest.get(name) for name in ("drafter", "sampling")}

    def write(
        self, config: AcceptanceHeadConfig, state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
    ) -> Package:
        """Any acceptance head; in float32 whatever `dtype`, as it decodes."""
        fields = {
            "format": FORMAT,
            "format_version": VERSION,
            "hidden_size": config.hidden_size,
            "width": config.inner_size,
            "num_blocks": config.num_blocks,
            "tied": config.tied,
            "dtype": "float32",
            "judges": config.judges,
            "judged": PREDICTED[config.judges],
            "inputs": inputs_of(config.hidden_size, config.state, config.features),
            "law": DISTRIBUTION,
            "forward": list(FORWARD),
            "w_acc": config.w_acc,
            "w_rej": config.w_rej,
            "calibration": list(config.calibration),
            "knots": [list(knot) for knot in config.knots],
        }
        tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in state.items()}
        return Package(fields, tensors)

    def read(self, package: Package, target: TargetFacts | None = None) -> Reading:
        """What a server would hold that goes by `config.json`. weights: by the file's names. settings: the config's.

        target: the model whose hidden states the head reads: the draft, or the target of an EAGLE head.
        """
        config = package.config
        refused = _refused(config)
        if refused:
            unread = [Finding("error", name, "not read: config.json does not say how") for name in package.tensors]
            return Reading({}, {}, (*refused, *unread), ())
        findings = [Finding("note", key, "a field that is not read") for key in config if key not in (*CONFIG, *SAID)]
        width = (target.raw.get("hidden_size") if target is not None else None) or config["hidden_size"]
        if width != config["hidden_size"]:
            found = f"{config['hidden_size']}, but the model's hidden states have width {width}"
            findings.append(Finding("error", "hidden_size", found))
        weights: dict[str, Tensor] = {}
        for name, shape in _shapes(config).items():
            tensor = package.tensors.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "missing" if tensor is None else f"shape {list(tensor.shape)} where {list(shape)} is wanted"
                findings.append(Finding("error", name, found))
                tensor = torch.full(shape, torch.nan)
            weights[name] = tensor.detach().float()
        used = tuple(name for name in weights if name in package.tensors)
        findings += [Finding("error", name, "no such parameter") for name in package.tensors if name not in weights]
        return Reading(weights, {name: config[name] for name in CONFIG}, tuple(findings), used)

    def parse(self, package: Package, target: TargetFacts | None = None) -> Parsed:
        """The head as it was written.

        Raises:
            InputError: a config that cannot be gone by, or tensors that are not those it asks for.
        """
        reading = self.read(package, target)
        for finding in reading.errors:
            found = f"{finding.where}: {finding.text}"
            raise InputError("head", found, f"a whole head of the format {FORMAT} {VERSION}", "Export it again.")
        fields = {name: package.config[name] for name in CONFIG if name != "inputs"}
        fields["width"] = fields["width"] if fields["width"] != fields["hidden_size"] else 0
        fields["calibration"] = tuple(fields["calibration"])
        fields["knots"] = tuple(tuple(knot) for knot in fields["knots"])
        state, features = _state_and_features(package.config)
        return Parsed(AcceptanceHeadConfig(**fields, state=state, features=features), dict(reading.weights))

    def accept_prob(self, reading: Reading, inputs: Mapping[str, Tensor]) -> Tensor:
        """P [N], by `forward` of the config. inputs: name -> [N, size] of each of `inputs`."""
        weights, settings = reading.weights, reading.settings
        names = [part["name"] for part in settings["inputs"]]
        given = [inputs[name].float() for name in names]
        x = given[0]
        if _joins(settings):
            x = F.linear(torch.cat(given, -1), weights["join.weight"], weights["join.bias"])
        for i in range(settings["num_blocks"]):
            block = f"blocks.{0 if settings['tied'] else i}.linear"
            x = x + F.silu(F.linear(x, weights[f"{block}.weight"], weights[f"{block}.bias"]))
        z = F.linear(x, weights["out.weight"], weights["out.bias"])
        numbers = [values for name, values in zip(names, given, strict=True) if name in FEATURES]
        if numbers:
            z = z + F.linear(torch.cat(numbers, -1), weights["direct.weight"])
        z = z[..., 0] + math.log(settings["w_rej"] / settings["w_acc"])
        return torch.sigmoid(_calibrated(z, settings))

    def own_prob(self, head: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """The calibrated output."""
        config = head.config
        numbers = torch.cat([inputs[name] for name in config.features], -1) if config.features else None
        embeds = inputs["embedding"] if config.state == "before" else None
        return torch.sigmoid(head.calibrated(head(inputs[f"state_{config.state}"], embeds, numbers)))

    def serve(self, served: Served) -> str:
        """No server loads it by itself: how to check the directory, which is a model for the code that will."""
        models = ["--draft", served.model]
        if served.drafter is not None:
            models = ["--target", served.model, "--draft", served.drafter]
        return shlex.join(["draftsmith", "check", served.directory, "--format", "acceptance", *models])


def _refused(config: Mapping[str, Any]) -> list[Finding]:
    """What makes a config one that cannot be gone by."""
    if config.get("format") != FORMAT or config.get("format_version") != VERSION:
        found = f"{config.get('format')} {config.get('format_version')} where {FORMAT} {VERSION} is wanted"
        return [Finding("error", "format", found)]
    missing = [Finding("error", name, "missing") for name in CONFIG if name not in config]
    names = [part.get("name") for part in config.get("inputs", ())]
    known = {f"state_{state}" for state in STATES} | {"embedding"} | set(FEATURES)
    if missing or not set(names) <= known or names != [part["name"] for part in _expected_inputs(config)]:
        missing = missing or [Finding("error", "inputs", f"{names}, which is no order of inputs that is known")]
    return missing


def _expected_inputs(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    state, features = _state_and_features(config)
    return inputs_of(config["hidden_size"], state, features)


def _state_and_features(config: Mapping[str, Any]) -> tuple[State, tuple[Any, ...]]:
    names = [part["name"] for part in config["inputs"]]
    state: State = "before" if names[:1] == ["state_before"] else "after"
    return state, tuple(name for name in names if name in FEATURES)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that the config asks for."""
    size, parts = config["width"], config["inputs"]
    wide = sum(part["size"] for part in parts)
    shapes: dict[str, tuple[int, ...]] = {}
    if _joins(config):
        shapes |= {"join.weight": (size, wide), "join.bias": (size,)}
    for i in range(min(config["num_blocks"], 1) if config["tied"] else config["num_blocks"]):
        shapes |= {f"blocks.{i}.linear.weight": (size, size), f"blocks.{i}.linear.bias": (size,)}
    shapes |= {"out.weight": (1, size), "out.bias": (1,)}
    numbers = sum(part["name"] in FEATURES for part in parts)
    return shapes | ({"direct.weight": (1, numbers)} if numbers else {})


def _joins(config: Mapping[str, Any]) -> bool:
    return len(config["inputs"]) > 1 or config["width"] != config["hidden_size"]


def _calibrated(z: Tensor, settings: Mapping[str, Any]) -> Tensor:
    if not settings["knots"]:
        scale, shift = settings["calibration"]
        return scale * z + shift
    result = torch.full_like(z, settings["knots"][0][1])
    for (x0, y0), (x1, y1) in itertools.pairwise(settings["knots"]):
        result = torch.where(z >= x0, y0 + (y1 - y0) * ((z - x0) / (x1 - x0)).clamp(max=1), result)
    return result
