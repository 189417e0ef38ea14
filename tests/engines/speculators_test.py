"""Exported EAGLE-3 heads in speculators' own model, float32, on a CPU: loaded by its `from_pretrained`, drafting in its
`forward`. Run by `make test-engines`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from exported import assert_close
from safetensors.torch import load_file
from speculators.models.attention import create_float_mask
from speculators.models.eagle3 import Eagle3DraftModel
from torch import Tensor

HEADS = Path(os.environ["DRAFTSMITH_ENGINES"]) / "eagle3"
CASES = sorted(path.name for path in HEADS.iterdir())


def loaded(directory: Path) -> Eagle3DraftModel:
    """The model, with attention that a CPU has for any length."""
    model = Eagle3DraftModel.from_pretrained(str(directory), dtype=torch.float32).eval()
    model._attn_impl, model._create_mask_fn = "eager", create_float_mask
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    return model


@pytest.mark.parametrize("case", CASES)
def test_an_exported_head_drafts_in_speculators_as_it_does_here(case):
    model, ours = loaded(HEADS / case / "speculators"), load_file(HEADS / case / "ours.safetensors")
    wanted = sorted(name for name in ours if name.startswith("logits."))
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    ids = ours["ids"][None, 1:]
    with torch.no_grad():
        model(ours["states"][None].clone(), ids, torch.zeros_like(ids), ttt_steps=len(wanted))
    assert_close(f"speculators {case}", ours, **dict(zip(wanted, logits, strict=True)))
    if model.d2t is not None:
        assert torch.equal(model.d2t + torch.arange(len(model.d2t)), ours["d2t"])
        assert torch.equal(model.t2d.nonzero()[:, 0], ours["d2t"])


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_the_file_is_in_its_place(case):
    directory = HEADS / case / "speculators"
    model, file = loaded(directory), load_file(directory / "model.safetensors")
    held = model.state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in file.items())
    assert held.keys() - file.keys() <= {"verifier_lm_head.weight", "verifier_norm.weight"}
    config = json.loads((directory / "config.json").read_text())
    layers = config["eagle_aux_hidden_state_layer_ids"] or [2, 4, 5]
    assert model.config.eagle_aux_hidden_state_layer_ids == layers
