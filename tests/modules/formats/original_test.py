"""A head that was trained on, written back as its files came: names, order of rows, types, tables and copies.

`tests/makers.py` reads such directories by the trainers' own classes.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from foreign_heads import D2T, EAGLE3, TARGET, H, changed, llama, written

from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.block.net import layers_like
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.original import Original
from draftsmith.modules.pretrained.heads import stored_tensors
from draftsmith.modules.types import InputError


def written_block() -> Package:
    """Export a random DSpark head for SGLang."""
    torch.manual_seed(4)
    made = head_class("dspark")
    head = made(made.Config(layers_like(llama(), 2), (2, 5, 9), 4, 17, markov_rank=3, confidence=True))
    return formats()["sglang", "dspark"].write(head.config, stored_tensors(head), torch.float32, TARGET)


ORDER = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
EAGLE = written("sglang", torch.bfloat16)
SHUFFLED = changed(
    EAGLE, {}, {"d2t": D2T[ORDER] - torch.arange(len(D2T)), "lm_head.weight": EAGLE.tensors["lm_head.weight"][ORDER]}
)
PREFIXED = Package(
    SHUFFLED.config,
    {name if "lm_head" in name else f"model.{name}": tensor for name, tensor in SHUFFLED.tensors.items()}
    | {"model.embed_tokens.weight": TARGET.embed_tokens, "model.rotary_emb.inv_freq": torch.rand(2)},
)
BLOCK = written_block()
STATE_ALONE = {"confidence_head.proj.weight": BLOCK.tensors["confidence_head.proj.weight"][:, :H]}
CASES = {
    "shuffled, with a prefix, the embedding and a buffer": (PREFIXED, "sglang", "eagle3", 1.0),
    "ids for offsets": (changed(EAGLE, {}, {"d2t": D2T}), "sglang", "eagle3", 1.0),
    "a layer more, own embedding": (
        written("speculators", llama_config=llama(num_layers=2), own_embedding=True), "speculators", "eagle3", 1.0,
    ),
    "neighbors": (changed(BLOCK, {"rope_is_neox_style": False}), "sglang", "dspark", 1.0),
    "confidence of the state": (
        changed(BLOCK, {"confidence_head_with_markov": False}, STATE_ALONE), "sglang", "dspark", 1.0,
    ),
    "scaled": (BLOCK, "sglang", "dspark", 0.25),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_from_written_files_is_the_head_that_was_trained_on(case):
    package, name, kind, scale = CASES[case]
    format, target = formats()[name, kind], dataclasses.replace(TARGET, scale=scale)
    read = format.read(package, target)
    original = Original.of(format, package, read, target, {"weights": "a"})
    again = original.write(format, read.state, target, {"weights": "a"})
    assert again.config == package.config and again.tensors.keys() == package.tensors.keys()
    for tensor, wanted in ((again.tensors[name], wanted) for name, wanted in package.tensors.items()):
        assert tensor.dtype == wanted.dtype
        torch.testing.assert_close(tensor, wanted, rtol=0 if scale == 1 else 1e-6, atol=0)

    torch.manual_seed(1)
    more = {key: t + torch.rand_like(t) if t.is_floating_point() else t for key, t in read.state.items()}
    back = format.read(original.write(format, more, target, {"weights": "a"}), target)
    assert back.config == read.config
    for key, tensor in more.items():
        torch.testing.assert_close(back.state[key], tensor, rtol=0 if scale == 1 else 1e-6, atol=0)


def test_files_with_a_norm_by_both_names_are_not_written_back():
    """Only one of the two copies would hold the trained norm."""
    package, format = written("vllm", llama_config=llama(num_layers=2)), EAGLE3["vllm"]
    assert Original.of(format, package, format.read(package, TARGET), TARGET, {}) is None


def test_weights_without_a_place_are_refused_and_another_target_is_named():
    package = changed(written("speculators", reduced=False), {}, {"lm_head.weight": None})
    format = EAGLE3["speculators"]
    read = format.read(package, TARGET)
    original = Original.of(format, package, read, TARGET, {"weights": "a"})
    moved = original.write(format, read.state, dataclasses.replace(TARGET, path="other"), {"weights": "b"})
    assert moved.config["speculators_config"]["verifier"]["name_or_path"] == "other"
    with pytest.raises(InputError, match=r"lm_head\.weight: found trained weights, expected none"):
        original.write(format, {**read.state, "lm_head.weight": read.state["lm_head.weight"] + 1}, TARGET, {})
