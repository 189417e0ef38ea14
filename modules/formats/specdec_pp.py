"""SpecDec++'s acceptance head as its authors' code holds it (Kaffaljidhmah2/SpecDec_pp, specdec_pp/wrap_model.py).

Its class is `Sequential(*([ResBlock(H)] * n), Linear(H, 2))`: list multiplication repeats ONE block, so a head of n
"layers" applies the same weights n times. Class 1 is "accepted". The file has `model.0.linear.*` once, the classifier
as `model.{n}.*`, and the block's other names in its metadata. `config.json` has `hidden_size` and `num_layers`; the
thresholds are run-time values, and the loss weights are nowhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.formats.base import (
    HeadFormat,
    ImportedHead,
    Package,
    Served,
    TargetFacts,
    check_tensors,
)
from draftsmith.modules.types import InputError

PARTS = ("weight", "bias")
UNCORRECTED = (
    "the loss weights are not in the file: w_acc = w_rej = 1 is assumed, so that the calibrated output is not "
    "corrected for them"
)


class SpecDecPP(HeadFormat):
    """A head of tied blocks or at most one."""

    name = "specdec_pp"
    system = "SpecDec_pp"
    kind = "acceptance"
    predicts = True
    float32 = True
    num_drafted = 20
    weights_files = ("model.safetensors", "pytorch_model.bin")
    w_rej = True

    def check(self, config: AcceptanceHeadConfig) -> None:
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
        # In float32 whatever `dtype`: their code runs it in float32 beside a draft of any type. The correction for the
        # loss weights and the calibration have no place in the file.
        self.check(config)
        n = config.num_blocks
        tensors = {f"model.0.linear.{part}": state[f"blocks.0.linear.{part}"] for part in PARTS if n}
        # Our logit z becomes two, (0, z): softmax([0, z])[1] = sigmoid(z).
        for part in PARTS:
            accepted = state[f"out.{part}"]  # [1, H] or [1]
            tensors[f"model.{n}.{part}"] = torch.cat([torch.zeros_like(accepted), accepted])
        tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
        aliases = {f"model.{i}.linear.{part}": f"model.0.linear.{part}" for i in range(1, n) for part in PARTS}
        return Package({"hidden_size": config.hidden_size, "num_layers": n}, tensors, aliases)

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        width, n = package.config.get("hidden_size"), package.config.get("num_layers", 0)
        if not isinstance(width, int) or width < 1:
            raise InputError("config.json, hidden_size", width, "the draft model's width", "Correct config.json.")
        if not isinstance(n, int) or n < 0:
            raise InputError("config.json, num_layers", n, "a number of residual blocks", "Correct config.json.")
        config = AcceptanceHeadConfig(width, num_blocks=n, w_acc=1.0, w_rej=1.0, tied=True)
        if target is not None and target.hidden_size not in (None, width):
            expected = f"{target.hidden_size}, the width of the model's hidden states"
            raise InputError("config.json, hidden_size", width, expected, "Pass the head's own draft.")
        tensors, state = dict(package.tensors), dict[str, Tensor]()
        for part in PARTS:
            # One block object has a name for each of its places: `load_state_dict` fills it in turn, the last counts.
            copies = [tensors.pop(name) for i in range(n) if (name := f"model.{i}.linear.{part}") in tensors]
            if copies:
                state[f"blocks.0.linear.{part}"] = copies[-1]
            classes = tensors.pop(f"model.{n}.{part}", None)
            # P = softmax(logits)[1] = sigmoid of their difference.
            if classes is not None and classes.ndim and len(classes) == 2:
                rejected, accepted = classes.float()
                state[f"out.{part}"] = (accepted - rejected)[None]

        def disk_name(name: str) -> str:
            return re.sub(r"^out", f"model.{n}", re.sub(r"^blocks", "model", name))

        with torch.device("meta"):
            check_tensors(AcceptanceHead(config), {**state, **tensors}, disk_name)
        return ImportedHead(config, {name: value.detach().float() for name, value in state.items()}, (UNCORRECTED,))

    def serve(self, served: Served) -> str:
        # SpecDec_pp's own benchmark, to be run in a clone of it. The model that the head reads is their `assistant`;
        # 0.7 is the stop threshold in their sample.py.
        words = ["python3", "specdec_pp/evaluate.py", "--model_name", served.verifier or "TARGET"]
        words += ["--assistant_name", served.model, "--num_assistant_tokens_schedule", "ada"]
        words += ["--assist_acc_head_dir", served.directory, "--stop_threshold", "0.7"]
        words += ["--bound", str(min(2, served.num_drafted)), str(served.num_drafted)]
        words += ["--do_sample", "--data_path", "data/alpaca_data/test.json", "--save_path", "results"]
        return shlex.join(words)
