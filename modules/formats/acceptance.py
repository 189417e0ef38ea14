"""An acceptance head for a server that is to feed it: `config.json` says what, in which order, and what is computed.

No server reads it yet. What it would need to know and this project's own head directories leave to its code is stated
here: which hidden state, the token's embedding or not, numbers of the draft's distribution with their formulas, and how
the output becomes a probability. Tensors: `join.*` where there is more to read than a state, `blocks.{i}.linear.*`
(tied blocks once), `out.*`, and `direct.weight` of the numbers. Float32 throughout.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import RETIRED, AcceptanceHead, AcceptanceHeadConfig, Feature, State
from draftsmith.modules.formats.base import Finding, ForeignHead, Package, Reading, Served, TargetFacts, misfits
from draftsmith.modules.formats.predictor import PredictorFormat, unreadable
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
# What a server may do by what a head says, so that its output still follows the target.
STOP = "to draft no further by P follows the target at any temperature"
TRIM = "to verify fewer of the tokens that were drawn, by P, follows the target "
TRIM_UNDRAWN = TRIM + (
    "at any temperature, where whether a token stays depends on P of its place and of those before it, and on nothing "
    "behind them: no budget by P of later places"
)
TRIM_SEEN = TRIM + (
    "when greedy only: P has seen its token, and to drop that one by it changes the output's distribution; whether the "
    "next one stays it may say"
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
LATER = {"activation": "none"}  # what exports of before do not say
CONFIG = (*COUNTS, "tied", "w_acc", "w_rej", "calibration", "inputs")
# What is said of the head and computed with by nobody.
SAID = ("format", "format_version", "dtype", "law", "predicts", "uses", "forward", "drafter", "sampling")


def inputs_of(hidden_size: int, state: str, features: Sequence[Any]) -> list[dict[str, Any]]:
    """What a head reads of a token, in order: `name`, `size`, and in words what it `is`."""
    at = "after" if state == "after" else "before"
    inputs = [{"name": f"state_{at}", "size": hidden_size, "is": STATES[at]}]
    if state == "before":
        inputs.append({"name": "embedding", "size": hidden_size, "is": EMBEDDING})
    return inputs + [{"name": name, "size": 1, "is": FEATURES[name]} for name in features]


def uses_of(state: str) -> dict[str, str]:
    """In words, how a head may be used: to `stop` drafts, and to `trim` what was drawn."""
    return {"stop": STOP, "trim": TRIM_UNDRAWN if state == "undrawn" else TRIM_SEEN}


class Acceptance(PredictorFormat):
    """Holds any acceptance head."""

    name = system = "acceptance"

    def recognises(self, found: ForeignHead) -> bool:
        return found.config.get("format") == FORMAT

    def completed(self, target: Mapping[str, Any], manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {name: manifest.get(name) for name in ("drafter", "sampling")}

    def write(
        self,
        config: AcceptanceHeadConfig,
        state: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        target: TargetFacts | None = None,
    ) -> Package:
        """Any acceptance head; in float32 whatever `dtype`, as it decodes, standardisation in its weights."""
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
            "uses": uses_of(config.state),
            "inputs": inputs_of(config.hidden_size, config.state, config.features),
            "law": DISTRIBUTION,
            "forward": list(FORWARD),
            "w_acc": config.w_acc,
            "w_rej": config.w_rej,
            "calibration": list(config.calibration),
        }
        tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in state.items()}
        return Package(fields, tensors)

    def read(self, package: Package, target: TargetFacts | None = None) -> Reading:
        """What a server would hold that goes by `config.json`. weights: by the file's names. settings: `config`, as
        ours.

        target: the model whose hidden states the head reads: the draft, or the target of an EAGLE head.
        """
        raw = package.config
        if refused := _refused(raw):
            return unreadable(package, [refused], "config.json does not say how")
        config = _config_of(raw)
        known = {*CONFIG, *LATER, *RETIRED, *SAID}
        findings = [Finding("note", key, "a field that is not read") for key in raw if key not in known]
        if target is not None and target.hidden_size not in (None, config.hidden_size):
            found = f"{config.hidden_size}, but the model's hidden states have width {target.hidden_size}"
            findings.append(Finding("error", "hidden_size", found))
        with torch.device("meta"):
            net = dict(AcceptanceHead(config).named_parameters())
        wrong = misfits(net, package.tensors)
        findings += [Finding("error", name, text) for name, text in wrong.items()]
        weights = {name: torch.full(weight.shape, torch.nan) for name, weight in net.items()}
        weights |= {name: package.tensors[name].detach().float() for name in net.keys() - wrong.keys()}
        used = tuple(name for name in weights if name in package.tensors)
        return Reading(weights, {"config": config}, tuple(findings), used)

    def ours(self, reading: Reading) -> tuple[AcceptanceHeadConfig, dict[str, Tensor]]:
        return reading.settings["config"], dict(reading.weights)

    def own_prob(self, head: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """The calibrated output."""
        config = head.config
        numbers = torch.cat([inputs[name] for name in config.features], -1) if config.features else None
        embeds = inputs["embedding"] if config.reads_token else None
        hidden = inputs["state_after" if config.late else "state_before"]
        return torch.sigmoid(head.calibrated(head(hidden, embeds, numbers)))

    def serve(self, served: Served) -> str:
        """No server loads it by itself: how to check the directory, which is a model for the code that will."""
        models = ["--draft", served.model]
        if served.drafter is not None:
            models = ["--target", served.model, "--draft", served.drafter]
        return shlex.join(["draftsmith", "check", served.directory, "--format", "acceptance", *models])


def _refused(raw: Mapping[str, Any]) -> Finding | None:
    """What makes a config one that cannot be gone by."""
    if raw.get("format") != FORMAT or raw.get("format_version") != VERSION:
        found = f"{raw.get('format')} {raw.get('format_version')} where {FORMAT} {VERSION} is wanted"
        return Finding("error", "format", found)
    for name in CONFIG:
        if name not in raw:
            return Finding("error", name, "missing")
    for name, harmless in RETIRED.items():
        if raw.get(name, harmless) != harmless:
            return Finding("error", name, f"{raw[name]}, which no head has any more")
    for name in COUNTS:
        if not isinstance(raw[name], int):
            return Finding("error", name, f"{raw[name]} where a whole number is wanted")
    config = _config_of(raw)
    if [part.get("name") for part in raw["inputs"]] != [
        part["name"] for part in inputs_of(config.hidden_size, config.state, config.features)
    ]:
        names = [part.get("name") for part in raw["inputs"]]
        return Finding("error", "inputs", f"{names}, which is no order of inputs that is known")
    return None


def _config_of(raw: Mapping[str, Any]) -> AcceptanceHeadConfig:
    names = [part.get("name") for part in raw["inputs"]]
    return AcceptanceHeadConfig(
        **{name: raw[name] for name in ("hidden_size", "num_blocks", "tied", "w_acc", "w_rej")},
        **{name: raw.get(name, default) for name, default in LATER.items()},
        width=raw["width"] if raw["width"] != raw["hidden_size"] else 0,
        calibration=tuple(raw["calibration"]),
        state=_state_of(names),
        features=tuple(name for name in names if name in FEATURES),
    )


def _state_of(names: Sequence[Any]) -> State:
    """Of the names of inputs."""
    if names[:1] != ["state_before"]:
        return "after"
    return "before" if "embedding" in names else "undrawn"


def check_trim(config: AcceptanceHeadConfig, sampling: Mapping[str, Any] | None) -> None:
    """Raises InputError where a server that drops drawn tokens by this head would not follow the target. sampling: of
    its labels, None where they are not known."""
    temperature = (sampling or {}).get("temperature")
    if config.state != "undrawn" and temperature != 0:
        found = f"trim by a head that has seen the token, state {config.state}, of labels at temperature {temperature}"
        remedy = "Train one: draftsmith train acceptance --state undrawn. Or let it stop drafts: --use stop."
        raise InputError("use", found, "a head of state undrawn, or of greedy labels", remedy)
