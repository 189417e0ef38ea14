"""Exported EAGLE-3, DFlash, DFlash2 and DSpark heads in speculators' own models, float32, on a CPU: loaded by
`from_pretrained`, drafting in their forward. Run by `make test-engines`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from exported import assert_close, cases
from safetensors.torch import load_file
from speculators.losses.eager import tv_loss
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from speculators_code import block_logits, eagle3_logits, load
from torch import nn

HEADS = Path(os.environ["DRAFTSMITH_ENGINES"]) / "eagle3"
CASES = cases("eagle3", "speculators")
BLOCKS = {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel, "dspark": DSparkDraftModel}
TARGETS_OWN = {"verifier_lm_head.weight", "verifier_norm.weight"}


def span(model: nn.Module) -> int:
    """The first positions, which a window hides nothing from."""
    return model.sliding_window if model.uses_sliding_window_attn else 2**62


def assert_held(model: nn.Module, directory: Path) -> None:
    """Check that every tensor of the file is in its place."""
    held, file = model.state_dict(), load_file(directory / "model.safetensors")
    assert all(torch.equal(held[name], tensor) for name, tensor in file.items())
    if model.d2t is not None:
        ids = model.d2t + torch.arange(len(model.d2t))
        assert torch.equal(ids, load_file(directory.parent / "ours.safetensors")["d2t"])
        assert torch.equal(model.t2d.nonzero()[:, 0], ids)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_an_exported_head_drafts_in_speculators_as_it_does_here(case):
    directory = HEADS / case / "speculators"
    model, ours = load(Eagle3DraftModel, directory), load_file(HEADS / case / "ours.safetensors")
    assert_held(model, directory)
    assert model.state_dict().keys() - load_file(directory / "model.safetensors").keys() <= TARGETS_OWN
    config = json.loads((directory / "config.json").read_text())
    layers = config["eagle_aux_hidden_state_layer_ids"] or [2, 4, 5]
    assert model.config.eagle_aux_hidden_state_layer_ids == layers
    wanted = sorted(name for name in ours if name.startswith("logits."))
    logits = eagle3_logits(model, ours["states"], ours["ids"][1:], len(wanted))
    # The window of its later passes lies around the row; here and in servers around the drafted token.
    rows = [min(len(part), span(model) - j if j else 2**62) for j, part in enumerate(logits)]
    ours |= {name: ours[name][:count] for name, count in zip(wanted, rows, strict=True)}
    theirs = {name: part[:count] for name, part, count in zip(wanted, logits, rows, strict=True)}
    assert_close(f"speculators {case}", ours, **theirs)


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind in BLOCKS for case in cases(kind, "speculators")])
@torch.inference_mode()
def test_an_exported_block_drafter_computes_in_speculators_what_it_does_here(kind, case):
    place = HEADS.parent / kind / case
    model, ours = load(BLOCKS[kind], place / "speculators"), load_file(place / "ours.safetensors")
    assert_held(model, place / "speculators")
    # The embedding is in no file, nor a whole lm_head: it takes those of the target that config.json names.
    assert torch.equal(model.embed_tokens.weight, ours["embed_tokens"])
    assert torch.equal(model.lm_head.weight, ours.get("state.lm_head.weight", ours["lm_head"]))
    logits, places = block_logits(model, ours["states"], ours["ids"])
    # Its window lies before the anchor for all slots of a block; here and in servers before each slot.
    near = places + 1 + int(not model.config.sample_from_anchor) < span(model)
    wanted = {name: ours[name][places[near] - 1] for name in ("logits.0", "logits.1")}
    theirs = {f"logits.{j}": logits[near, j] for j in (0, 1)}
    # The candidates of a selector are the same, bit by bit, and each has the same score.
    finite = {name: part.isfinite() for name, part in wanted.items()}
    assert all(torch.equal(theirs[name].isfinite(), own) and own.any() for name, own in finite.items())
    wanted, theirs = ({name: part[finite[name]] for name, part in own.items()} for own in (wanted, theirs))
    assert_close(f"speculators {kind} {case}", wanted, **theirs)


def test_dflash2_learns_by_their_loss():
    """Total variation of the slots and the selector's cross-entropy, the target put in its candidates where it is none,
    by place in the block. Their mean is over tokens and ours over blocks, of weights that add up to 1."""
    path = HEADS.parent / "dflash2" / "block"
    model, ours = load(DFlash2DraftModel, path / "speculators"), load_file(path / "ours.safetensors")
    model.verifier_norm = nn.Identity()  # of states that are normed already
    ids, mask = ours["ids"][None], torch.ones(1, len(ours["ids"]), dtype=torch.long)
    mask[:, 0] = 0
    with torch.no_grad():
        _, loss, metrics = model(
            ours["states"][None], ids, mask, ours["final"][None], torch.zeros_like(ids), gamma=4.0,
            max_anchors=ids.shape[1] - 1 - model.block_size, loss_config={"tv": (tv_loss, 1.0)}, tv_loss_fn=tv_loss,
            selector_loss_alpha=0.7,
        )  # fmt: skip
    assert 0 < metrics["unary_candidate_recall_at_5_sum"] < metrics["unary_candidate_recall_at_5_total"]
    weights = torch.exp(-torch.arange(model.block_size - 1) / 4.0)
    torch.testing.assert_close(loss, ours["loss"] * weights.mean(), rtol=1e-5, atol=0)
