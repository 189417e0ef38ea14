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
from speculators.models.attention import create_float_mask
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from torch import Tensor, nn

HEADS = Path(os.environ["DRAFTSMITH_ENGINES"]) / "eagle3"
CASES = cases("eagle3", "speculators")


def loaded(directory: Path) -> Eagle3DraftModel:
    """The model, with attention that a CPU has for any length."""
    model = Eagle3DraftModel.from_pretrained(str(directory), dtype=torch.float32).eval()
    model._attn_impl, model._create_mask_fn = "eager", create_float_mask
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    return model


def span(model: nn.Module) -> int:
    """The first positions, which a window hides nothing from."""
    return model.sliding_window if model.uses_sliding_window_attn else 2**62


@pytest.mark.parametrize("case", CASES)
def test_an_exported_head_drafts_in_speculators_as_it_does_here(case):
    model, ours = loaded(HEADS / case / "speculators"), load_file(HEADS / case / "ours.safetensors")
    wanted = sorted(name for name in ours if name.startswith("logits."))
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    ids = ours["ids"][None, 1:]
    with torch.no_grad():
        model(ours["states"][None].clone(), ids, torch.zeros_like(ids), ttt_steps=len(wanted))
    # The window of its later passes lies around the row; here and in servers around the drafted token.
    rows = [min(len(part), span(model) - j if j else 2**62) for j, part in enumerate(logits)]
    ours |= {name: ours[name][:count] for name, count in zip(wanted, rows, strict=True)}
    theirs = {name: part[:count] for name, part, count in zip(wanted, logits, rows, strict=True)}
    assert_close(f"speculators {case}", ours, **theirs)
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


BLOCKS = {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel, "dspark": DSparkDraftModel}


def block_model(kind: str, directory: Path) -> DFlashDraftModel:
    model = BLOCKS[kind].from_pretrained(str(directory), dtype=torch.float32).eval()
    model._attn_impl, model._create_mask_fn = "eager", create_float_mask
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    return model


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind in BLOCKS for case in cases(kind, "speculators")])
def test_an_exported_block_drafter_computes_in_speculators_what_it_does_here(kind, case):
    directory, ours = (
        HEADS.parent / kind / case / "speculators",
        load_file(HEADS.parent / kind / case / "ours.safetensors"),
    )
    model = block_model(kind, directory)
    held = model.state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in load_file(directory / "model.safetensors").items())
    # The embedding is in no file, nor a whole lm_head: it takes those of the target that config.json names.
    assert torch.equal(model.embed_tokens.weight, ours["embed_tokens"])
    assert torch.equal(model.lm_head.weight, ours.get("state.lm_head.weight", ours["lm_head"]))
    if model.d2t is not None:
        assert torch.equal(model.d2t + torch.arange(len(model.d2t)), ours["d2t"])
    ids, block, first = ours["ids"][None], model.block_size, int(not model.config.sample_from_anchor)
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    count = ids.shape[1] - 1 - block
    with torch.no_grad():
        hidden, logits, *_, places = model._backbone_forward(
            ours["states"][None], ids, mask, torch.zeros(1, ids.shape[1], hidden_size(model)), torch.zeros_like(ids),
            max_anchors=count,
        )  # fmt: skip
        logits, places = logits.view(count, block, -1), places.view(count, block)
        tokens = ids[0, places]
        before = torch.cat([tokens[:, :1], tokens[:, :-1]], 1) if first else tokens
        if kind == "dflash2":
            candidates, scores = model.candidate_selector.select(logits, hidden.view(count, block, -1), before)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
        if getattr(model, "markov_head", None) is not None:
            logits = logits + model.markov_head.block_bias(
                prev_token_ids=before, hidden_states=hidden.view(count, block, -1),
                prev_emb=model.markov_head.prev_embeddings(before),
            )  # fmt: skip
    # Its window lies before the anchor for all slots of a block; here and in servers before each slot.
    near = places[:, 0] + first + 1 < span(model)
    wanted = {name: ours[name][places[near, 0] - 1] for name in ("logits.0", "logits.1")}
    theirs = {f"logits.{j}": logits[near, first + j] for j in (0, 1)}
    if kind == "dflash2":
        # The candidates are the same, bit by bit, and each has the same score.
        finite = {name: part.isfinite() for name, part in wanted.items()}
        assert all(torch.equal(theirs[name].isfinite(), own) and own.any() for name, own in finite.items())
        wanted, theirs = ({name: part[finite[name]] for name, part in own.items()} for own in (wanted, theirs))
    assert_close(f"speculators {kind} {case}", wanted, **theirs)


def test_dflash2_learns_by_their_loss():
    """Total variation of the slots and the selector's cross-entropy, the target put in its candidates where it is none,
    by place in the block. Their mean is over tokens and ours over blocks, of weights that add up to 1."""
    path = HEADS.parent / "dflash2" / "block"
    model, ours = block_model("dflash2", path / "speculators"), load_file(path / "ours.safetensors")
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


def hidden_size(model: DFlashDraftModel) -> int:
    return model.config.transformer_layer_config.hidden_size
