"""Medusa heads as their repositories write them, against classes rebuilt from their description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from foreign_heads import Block, changed
from safetensors.torch import save_file
from torch import nn

from draftsmith.modules.drafters.medusa import MedusaConfig
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package, TargetFacts
from draftsmith.modules.formats.foreign import ForeignHead, detect
from draftsmith.modules.pretrained.directory import read_package
from draftsmith.modules.pretrained.heads import build_head
from draftsmith.modules.types import InputError

H, V, POSITIONS = 12, 40, 64
RAW = {"hidden_size": H, "vocab_size": V, "max_position_embeddings": POSITIONS, "num_hidden_layers": 5}
GENERATOR = torch.Generator().manual_seed(9)
EMBEDDING, LM_HEAD = torch.randn(2, V, H, generator=GENERATOR)
FACTS = TargetFacts(RAW, EMBEDDING, LM_HEAD)
MEDUSA = formats()["medusa", "medusa"]


def medusa_heads(own: bool, layers: int) -> nn.ModuleList:
    """Return five heads; each repeats one block object."""
    torch.manual_seed(layers)
    ends = [[nn.Linear(H, V, bias=False)] if own else [] for _ in range(5)]
    return nn.ModuleList(nn.Sequential(*[Block(H)] * layers, *end) for end in ends).requires_grad_(False)


def write_medusa(directory: Path, layout: str, layers: int = 1) -> nn.ModuleList:
    """Write a directory as its producer does; configs of v1 say 2 heads, and 5 are there."""
    heads, fields = medusa_heads(layout != "v2", layers), {"medusa_num_heads": 5, "medusa_num_layers": layers}
    state = heads.state_dict()
    if layout == "modelopt":
        fields = {"medusa": {"num_medusa_heads": 5, "num_medusa_layers": 1}, "architectures": ["LlamaForCausalLM"]}
        model = {"model.embed_tokens.weight": torch.zeros(V, H), "model.layers.0.mlp.up_proj.weight": torch.zeros(4, H)}
        save_file({f"medusa_heads.{n}": t for n, t in state.items()} | model, directory / "model.safetensors")
    else:
        fields |= {"version": "2"} if layout == "v2" else {"medusa_num_heads": 2}
        if layout == "v2" and layers == 1:  # safetensors refuses shared tensors
            save_file(state, directory / "medusa_lm_head.safetensors")
        torch.save(state, directory / "medusa_lm_head.pt")
    (directory / "config.json").write_text(json.dumps(fields))
    return heads


@pytest.mark.parametrize(("layout", "layers"), [("v1", 2), ("v2", 1), ("modelopt", 1)])
def test_medusa_heads_are_read_bit_by_bit_and_compute_the_same(tmp_path, layout, layers):
    published, own = write_medusa(tmp_path, layout, layers), layout != "v2"
    package = read_package(str(tmp_path))
    assert detect(ForeignHead.of(package)) is MEDUSA
    imported = MEDUSA.read(package, FACTS)
    assert imported.config == MedusaConfig(H, V, POSITIONS, 5, layers, own)
    assert len(imported.notes) == (layout == "v1")
    head = build_head("medusa", imported.config, imported.state)
    x = torch.randn(6, H)
    readers = head.outputs(lambda hidden: hidden @ LM_HEAD.T)
    for reader, hidden, theirs in zip(readers, head(x), published, strict=True):
        assert torch.equal(reader(hidden), theirs(x) if own else theirs(x) @ LM_HEAD.T)


def medusa_package(own: bool = True, layers: int = 1, **fields: object) -> Package:
    state = {name: tensor.clone() for name, tensor in medusa_heads(own, layers).state_dict().items()}
    return Package({"medusa_num_heads": 5, **fields}, state)


def refused(package: Package, words: str, target: TargetFacts | None = FACTS) -> None:
    with pytest.raises(InputError, match=words) as error:
        detect(ForeignHead.of(package)).read(package, target)
    assert "\n" not in str(error.value)


def test_medusa_heads_that_ours_cannot_be_are_refused():
    one, two = medusa_package(), medusa_package(layers=2)
    for package, tensors, words in (
        (one, {"3.0.linear.bias": None}, "3.0.linear.bias is missing"),
        (one, {"3.1.weight": None}, "3.1.weight is missing"),
        (one, {"2.0.linear.bias": torch.zeros(3)}, r"2.0.linear.bias is \[3\] in place of \[12\]"),
        (one, {"extra": torch.zeros(3)}, "extra is unknown"),
        (two, {"1.1.linear.bias": torch.ones(H)}, "1.1.linear.bias, which differs from 1.0.linear.bias"),
    ):
        refused(changed(package, {}, tensors), words)
    refused(medusa_package(version="2"), "config.json, version")
    refused(one, "no file of theirs says its sizes", None)
    refused(one, "no file of theirs says its sizes", TargetFacts({"vocab_size": V}))
