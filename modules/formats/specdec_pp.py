"""SpecDec++'s acceptance head as its authors' code holds it (Kaffaljidhmah2/SpecDec_pp, specdec_pp/wrap_model.py).

Its class is `Sequential(*([ResBlock(H)] * n), Linear(H, 2))`: list multiplication repeats ONE block, so that a head of
n "layers" applies the same weights n times. Class 1 is "accepted". The file holds `model.0.linear.*` once and the
classifier as `model.{n}.*`; the block's other names, `model.1.linear.weight` and so on, are in the file's metadata.
`config.json` has `hidden_size` and `num_layers`. The thresholds are run-time values and the loss weights are nowhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHeadConfig
from draftsmith.modules.formats.base import (
    FLOATS,
    Finding,
    ForeignHead,
    Package,
    Reading,
    Served,
    TargetFacts,
    dtype_name,
    matrix_size,
)
from draftsmith.modules.formats.predictor import PredictorFormat, unreadable
from draftsmith.modules.types import InputError

FIELDS = ("hidden_size", "num_layers")
PARTS = ("weight", "bias")
UNCORRECTED = (
    "the loss weights are not in the file: w_acc = w_rej = 1 is assumed, so that the calibrated output is not "
    "corrected for them"
)

OVERWRITTEN = "overwritten by"


class SpecDecPP(PredictorFormat):
    """Its class is fed the state after the token alone, and holds one block, or several that are the same one."""

    name = "specdec_pp"
    system = "SpecDec_pp"
    weights_files = ("model.safetensors", "pytorch_model.bin")
    w_rej = True
    tolerated = OVERWRITTEN
    assumed = (UNCORRECTED,)

    def recognises(self, found: ForeignHead) -> bool:
        """Residual blocks numbered in one Sequential, and a last layer of two classes (SpecDec_pp, wrap_model.py)."""
        matched = [re.fullmatch(r"model\.(\d+)\.(linear\.)?(weight|bias)", name) for name in found.shapes]
        names = [name for name in matched if name is not None]
        if not names or len(names) != len(matched):
            return False
        last = [name[1] for name in names if name[2] is None and name[3] == "weight"]
        return len(last) == 1 and matrix_size(found.shapes[f"model.{last[0]}.weight"], 0) == 2

    def check(self, config: AcceptanceHeadConfig) -> None:
        """Refuses several blocks with weights of their own, and inputs and a width that their class does not have."""
        if not config.as_published:
            extra = [f"the state {config.state} the token"] * (config.state != "after") + list(config.features)
            found = f"a head that predicts by {', '.join(extra)}"
            expected = "one that predicts by the state after the token alone, all that SpecDec_pp's class is fed"
            remedy = "Write it with its inputs: draftsmith export --format acceptance."
            raise InputError("head", found, expected, remedy)
        if config.joins:
            found, expected = f"hidden layers of width {config.width}", f"{config.hidden_size}, the state's"
            raise InputError("head", found, expected, "Train one for it: draftsmith train acceptance --width 0.")
        if config.num_blocks > 1 and not config.tied:
            found = f"{config.num_blocks} blocks, each with its own weights"
            expected = "tied blocks or at most one: SpecDec_pp's class repeats one block object"
            remedy = "Train one for it: draftsmith train acceptance --tied true (or --num-blocks 1)."
            raise InputError("head", found, expected, remedy)

    def write(
        self,
        config: AcceptanceHeadConfig,
        state: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        target: TargetFacts | None = None,
    ) -> Package:
        """The head in float32 whatever `dtype`: their code runs it in float32 beside a draft of any type.

        Our one logit z becomes two, (0, z): softmax([0, z])[1] = sigmoid(z). Like theirs, the output is the raw one;
        our correction for the loss weights and the fitted calibration have no place in the file.
        """
        self.check(config)
        n = config.num_blocks
        tensors = {f"model.0.linear.{part}": state[f"blocks.0.linear.{part}"] for part in PARTS if n}
        for part in PARTS:
            accepted = state[f"out.{part}"]
            tensors[f"model.{n}.{part}"] = torch.cat([torch.zeros_like(accepted), accepted])
        tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
        aliases = {f"model.{i}.linear.{part}": f"model.0.linear.{part}" for i in range(1, n) for part in PARTS}
        return Package({"hidden_size": config.hidden_size, "num_layers": n}, tensors, aliases)

    def read(self, package: Package, target: TargetFacts | None = None) -> Reading:
        """What `AcceptancePredictionHead.from_pretrained` would hold. weights: under their names, the block as
        `model.0.linear.*`. settings: `hidden_size`, `num_layers`.

        target: the model whose hidden states it reads, which is the DRAFT.
        """
        width, n = package.config.get("hidden_size"), package.config.get("num_layers", 0)
        if refused := _refused(width, n):
            return unreadable(package, refused, "the class cannot be built")
        assert isinstance(width, int) and isinstance(n, int)
        findings = [Finding("note", key, "a field that is not read") for key in package.config if key not in FIELDS]
        if "num_layers" not in package.config:
            findings.append(Finding("note", "num_layers", "absent: no residual block"))
        if target is not None and target.hidden_size not in (None, width):
            expected = f"the draft's hidden states have width {target.hidden_size}"
            findings.append(Finding("error", "hidden_size", f"{width}, but {expected}: the first matrix product fails"))
        block = {f"model.0.linear.{part}": [f"model.{i}.linear.{part}" for i in range(n)] for part in PARTS if n}
        names = block | {f"model.{n}.{part}": [f"model.{n}.{part}"] for part in PARTS}
        weights: dict[str, Tensor] = {}
        used: list[str] = []
        for name, aliases in names.items():
            rows = width if name in block else 2
            shape = (rows, width) if name.endswith("weight") else (rows,)
            weights[name], found = _loaded(package.tensors, name, aliases, shape)
            findings += found
            used += [alias for alias in aliases if alias in package.tensors]
        unknown = [name for name in package.tensors if name not in used]
        findings += [Finding("error", name, "no such parameter: dropped without a word") for name in unknown]
        return Reading(weights, {"hidden_size": width, "num_layers": n}, tuple(findings), tuple(used))

    def ours(self, reading: Reading) -> tuple[AcceptanceHeadConfig, dict[str, Tensor]]:
        """A tied head whose logit is the difference of their two: P = softmax(logits)[1]
        (specdec_pp/hf_generation.py)."""
        n = reading.settings["num_layers"]
        state = {f"blocks.0.linear.{part}": reading.weights[f"model.0.linear.{part}"].clone() for part in PARTS if n}
        for part in PARTS:
            rejected, accepted = reading.weights[f"model.{n}.{part}"]
            state[f"out.{part}"] = (accepted - rejected)[None]
        config = AcceptanceHeadConfig(reading.settings["hidden_size"], num_blocks=n, w_acc=1.0, w_rej=1.0, tied=True)
        return config, state

    def own_prob(self, head: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """The raw output: our correction for the loss weights and the calibration have no place in the file."""
        return torch.sigmoid(head(inputs["state_after"]))

    def serve(self, served: Served) -> str:
        """The command line of SpecDec_pp's own benchmark, to be run in a clone of it. The model that the head reads is
        their `assistant`; 0.7 is the threshold of the stop rule in their sample.py."""
        words = ["python3", "specdec_pp/evaluate.py", "--model_name", served.verifier or "TARGET"]
        words += ["--assistant_name", served.model, "--num_assistant_tokens_schedule", "ada"]
        words += ["--assist_acc_head_dir", served.directory, "--stop_threshold", "0.7"]
        words += ["--bound", str(min(2, served.num_drafted)), str(served.num_drafted)]
        words += ["--do_sample", "--data_path", "data/alpaca_data/test.json", "--save_path", "results"]
        return shlex.join(words)


def _refused(width: object, n: object) -> list[Finding]:
    """Fields with which their constructor fails."""
    findings = []
    if not isinstance(width, int) or width < 1:
        findings.append(Finding("error", "hidden_size", f"{width} where the draft model's width is needed"))
    if not isinstance(n, int) or n < 0:
        findings.append(Finding("error", "num_layers", f"{n} where a number of residual blocks is needed"))
    return findings


def _loaded(
    tensors: Mapping[str, Tensor], name: str, aliases: list[str], shape: tuple[int, ...]
) -> tuple[Tensor, list[Finding]]:
    """One parameter after `load_state_dict(strict=False)`, which copies into it once for each of its names in turn."""
    present = [alias for alias in aliases if alias in tensors]
    if not present:
        text = "missing: left at its random initial values without a word"
        return torch.full(shape, torch.nan), [Finding("error", name, text)]
    wrong = [alias for alias in present if tuple(tensors[alias].shape) != shape]
    if wrong:
        text = f"shape {list(tensors[wrong[0]].shape)} where {list(shape)} is wanted: loading fails"
        return torch.full(shape, torch.nan), [Finding("error", wrong[0], text)]
    last, findings = present[-1], []
    if tensors[last].dtype not in FLOATS:
        text = f"{dtype_name(tensors[last].dtype)} values: quantised weights, whose scales it does not read"
        return torch.full(shape, torch.nan), [Finding("error", last, text)]
    for alias in present[:-1]:
        if torch.equal(tensors[alias], tensors[last]):
            findings.append(Finding("note", alias, f"a copy of {last}: the blocks are one object"))
        else:
            findings.append(Finding("error", alias, f"{OVERWRITTEN} {last}, which differs: the blocks are one object"))
    if tensors[last].dtype != torch.float32:
        findings.append(Finding("note", last, f"{tensors[last].dtype} on disk, float32 in memory"))
    return tensors[last].detach().float(), findings
