"""SpecDec++'s acceptance head as its authors' code holds it (Kaffaljidhmah2/SpecDec_pp, specdec_pp/wrap_model.py).

Its class is `Sequential(*([ResBlock(H)] * n), Linear(H, 2))`: list multiplication repeats ONE block, so a head of n
"layers" applies the same weights n times. Class 1 is "accepted". The file has `model.0.linear.*` once, the classifier
as `model.{n}.*`, and the block's other names in its metadata. `config.json` has `hidden_size` and `num_layers`; the
thresholds are run-time values, and the loss weights are nowhere.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.formats.base import HeadFormat, ImportedHead, Package, TargetFacts, check_tensors
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
    writes = False
    predicts = True

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
