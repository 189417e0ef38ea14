"""Medusa and Hydra heads as their repositories write them, against classes rebuilt from their description.

The prefix layer of Hydra++ is transformers' Llama.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig as HFConfig
from transformers import LlamaModel as HFModel

from draftsmith.data.export.directory import read_package
from draftsmith.data.heads.directory import build_head
from draftsmith.modules.drafters.hydra import HydraConfig
from draftsmith.modules.drafters.medusa import MedusaConfig
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import ForeignHead, HeadTrial, Package, Probe, TargetFacts
from draftsmith.modules.formats.detect import detect
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.types import InputError

H, V, POSITIONS, INTER = 12, 40, 64, 20
RAW = {
    "hidden_size": H, "vocab_size": V, "max_position_embeddings": POSITIONS, "num_attention_heads": 3,
    "num_key_value_heads": 1, "intermediate_size": INTER, "num_hidden_layers": 5, "rms_norm_eps": 1e-5,
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(9)
EMBEDDING, LM_HEAD = torch.randn(2, V, H, generator=GENERATOR)
FACTS = TargetFacts(RAW, EMBEDDING, LM_HEAD)
MEDUSA, HYDRA = formats()["medusa", "medusa"], formats()["hydra", "hydra"]


class Block(nn.Module):
    """A linear layer and SiLU, with a linear way around it if sizes differ."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * H, H)
        self.res_connection = nn.Linear(parts * H, H) if parts > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


def medusa_heads(own: bool, layers: int) -> nn.ModuleList:
    """Return five heads; each repeats one block object."""
    torch.manual_seed(layers)
    ends = [[nn.Linear(H, V, bias=False)] if own else [] for _ in range(5)]
    return nn.ModuleList(nn.Sequential(*[Block()] * layers, *end) for end in ends).requires_grad_(False)


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
    x, ids = torch.randn(6, H), torch.arange(6)
    logits = MEDUSA.forward(head, HeadTrial(FACTS, [Probe(ids, 2, ids, x)]))[0]
    for found, theirs in zip(logits, published, strict=True):
        assert torch.equal(found, theirs(x[:-1]) if own else theirs(x[:-1]) @ LM_HEAD.T)


def medusa_package(own: bool = True, layers: int = 1, **fields: object) -> Package:
    state = {name: tensor.clone() for name, tensor in medusa_heads(own, layers).state_dict().items()}
    return Package({"medusa_num_heads": 5, **fields}, state)


def changed(package: Package, **tensors: Tensor | None) -> Package:
    """Return a copy with other tensors, `__` for a dot in names; None removes one."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    state = {name: tensor for name, tensor in {**package.tensors, **named}.items() if tensor is not None}
    return Package(package.config, state)


def refused(package: Package, words: str, target: TargetFacts | None = FACTS) -> None:
    with pytest.raises(InputError, match=words) as error:
        detect(ForeignHead.of(package)).read(package, target)
    assert "\n" not in str(error.value)


def test_medusa_heads_that_ours_cannot_be_are_refused():
    one, two = medusa_package(), medusa_package(layers=2)
    refused(changed(one, **{"3__0__linear__bias": None}), "3.0.linear.bias is missing")
    refused(changed(one, **{"3__1__weight": None}), "3.1.weight is missing")
    refused(changed(one, **{"2__0__linear__bias": torch.zeros(3)}), r"2.0.linear.bias is \[3\] in place of \[12\]")
    refused(changed(one, extra=torch.zeros(3)), "extra is unknown")
    refused(
        changed(two, **{"1__1__linear__bias": torch.ones(H)}), "1.1.linear.bias, which differs from 1.0.linear.bias"
    )
    refused(medusa_package(version="2"), "config.json, version")
    refused(one, "no file of theirs says its sizes", None)
    refused(one, "no file of theirs says its sizes", TargetFacts({"vocab_size": V}))


class PublishedHydra(nn.Module):
    """hydra_head of grounded heads. The embedding is the target's module; later blocks are one object repeated."""

    def __init__(self, prefix: bool, layers: int) -> None:
        super().__init__()
        torch.manual_seed(layers)
        self.input_embed_fn = nn.Embedding(V, H, _weight=EMBEDDING.clone())
        drop = [nn.Dropout(0.2)] if prefix else []
        if prefix:
            self.prefix_embeding_layer = HFModel(HFConfig(**{**RAW, "num_hidden_layers": 1}))
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(*drop, Block(2 + i), *([*drop, Block()] * (layers - 1))) for i in range(3)
        )
        outs = [nn.Linear(H, V) for _ in range(3)]
        self.hydra_lm_head = nn.ModuleList(nn.Sequential(*drop, out) if prefix else out for out in outs)
        self.eval().requires_grad_(False)
        for weight in self.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape))

    def forward(self, states: Tensor, ids: Tensor) -> list[Tensor]:
        """Logits of every head; states [T, H], ids [T]; roll and cut, as the training does."""
        if hasattr(self, "prefix_embeding_layer"):
            states = self.prefix_embeding_layer(inputs_embeds=states[None]).last_hidden_state[0]
        embeds, outputs, count = self.input_embed_fn(ids), [], len(ids)
        for i, (mlp, out) in enumerate(zip(self.hydra_mlp, self.hydra_lm_head, strict=True)):
            inputs = [states, *(torch.roll(embeds, -(j + 1), 0) for j in range(i + 1))]
            outputs.append(out(mlp(torch.cat(inputs, -1)))[: count - 1 - i])
        return outputs


def hydra_package(prefix: bool = False, layers: int = 1, **fields: object) -> Package:
    arch = {"hydra_num_heads": 3, "hydra_num_layers": layers, "hydra_head_arch": "prefix-mlp" if prefix else "mlp"}
    state = {name: tensor.clone() for name, tensor in PublishedHydra(prefix, layers).state_dict().items()}
    return Package({**arch, "grounded_heads": True, **fields}, state)


@pytest.mark.parametrize(("prefix", "layers"), [(False, 1), (True, 4)])
@torch.no_grad()
def test_hydra_heads_are_read_and_compute_the_same(prefix, layers):
    package = hydra_package(prefix, layers)
    assert detect(ForeignHead.of(package)) is HYDRA
    imported = HYDRA.read(package, FACTS)
    llama = LlamaConfig(V, H, INTER, int(prefix), 3, 1, 4, POSITIONS, 1e-5)
    assert imported.config == HydraConfig(llama, 3, layers, True)
    first = 1 if prefix else 0
    assert torch.equal(imported.state["heads.2.skip.bias"], package.tensors[f"hydra_mlp.2.{first}.res_connection.bias"])
    head = build_head("hydra", imported.config, imported.state)
    ids, x = torch.randint(V, (9,), generator=GENERATOR), torch.randn(9, H, generator=GENERATOR)
    trial = HeadTrial(FACTS, [Probe(ids, 2, ids, x)])
    for ours, theirs in zip(HYDRA.forward(head, trial)[0], PublishedHydra(prefix, layers)(x, ids), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)  # float32, in products of other numbers of rows


def test_hydra_heads_that_ours_cannot_be_are_refused():
    plain, deep = hydra_package(), hydra_package(layers=3)
    refused(changed(plain, hydra_mlp__1__0__linear__bias=None), "hydra_mlp.1.0.linear.bias is missing")
    refused(changed(plain, hydra_lm_head__1__bias=torch.ones(3)), r"hydra_lm_head.1.bias is \[3\]")
    refused(changed(plain, hydra_mlp__9=torch.ones(3)), "hydra_mlp.9 is unknown")
    refused(
        changed(deep, hydra_mlp__1__2__linear__bias=torch.ones(H)), "copies of hydra_mlp.1.1.linear.bias that differ"
    )
    refused(changed(plain, input_embed_fn__weight=torch.ones(V, H)), "another embedding than the target's")
    refused(hydra_package(grounded_heads=False), "grounded_heads: found False")
    refused(hydra_package(hidden_state_offset=1), "hidden_state_offset: found 1")
    refused(
        Package({**hydra_package(True).config, "hydra_head_arch": "mlp"}, hydra_package(True).tensors), "is missing"
    )
    refused(plain, "no file of theirs says its sizes", None)
