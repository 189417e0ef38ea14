"""Medusa heads in the layouts of FasterDecoding and ModelOpt, against classes rebuilt from their description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftsmith.data.export.directory import read_package
from draftsmith.data.heads.directory import build_head
from draftsmith.modules.drafters.medusa import MedusaConfig, MedusaHead
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package, Probe, TargetFacts, Trial
from draftsmith.modules.formats.detect import detect
from draftsmith.modules.types import InputError

H, V, POSITIONS, HEADS = 12, 40, 64, 5
RAW = {"hidden_size": H, "vocab_size": V, "max_position_embeddings": POSITIONS}
LM_HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(9))
FACTS = TargetFacts(RAW, lm_head=LM_HEAD)
FIELDS = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
KINDS = ("medusa-v1", "medusa-v2", "modelopt")


class Block(nn.Module):
    """A linear layer, SiLU, and its input beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def published(own: bool, layers: int = 1, heads: int = HEADS) -> nn.ModuleList:
    """The list of heads; a head repeats one block."""
    torch.manual_seed(layers)
    ends = [[nn.Linear(H, V, bias=False)] if own else [] for _ in range(heads)]
    return nn.ModuleList(nn.Sequential(*[Block()] * layers, *end) for end in ends).requires_grad_(False)


def write(directory: Path, kind: str, layers: int = 1) -> nn.ModuleList:
    """As each producer writes it; configs of v1 say 2 heads, and 5 are there."""
    heads, fields = published(kind != "medusa-v2", layers), {**FIELDS, "medusa_num_layers": layers}
    fields["medusa_num_heads"] = 2 if kind == "medusa-v1" else HEADS
    state = heads.state_dict()
    if kind == "modelopt":
        fields = {"medusa": {"num_medusa_heads": HEADS, "num_medusa_layers": 1}, "architectures": ["LlamaForCausalLM"]}
        whole = {"model.embed_tokens.weight": torch.zeros(V, H), "model.layers.0.mlp.up_proj.weight": torch.zeros(4, H)}
        save_file({f"medusa_heads.{n}": t for n, t in state.items()} | whole, directory / "model.safetensors")
    elif kind == "medusa-v2":
        fields["version"] = "2"
        if layers == 1:  # shared tensors are refused
            save_file(state, directory / "medusa_lm_head.safetensors")
        torch.save(state, directory / "medusa_lm_head.pt")
    else:
        torch.save(state, directory / "medusa_lm_head.pt")
    (directory / "config.json").write_text(json.dumps(fields))
    return heads


@pytest.mark.parametrize(("kind", "layers"), [*((kind, 1) for kind in KINDS), ("medusa-v1", 2), ("medusa-v2", 2)])
def test_a_published_directory_is_read_bit_by_bit_and_computes_the_same(tmp_path, kind, layers):
    heads = write(tmp_path, kind, layers)
    package = read_package(str(tmp_path))
    format = detect(package.config, {name: tuple(tensor.shape) for name, tensor in package.tensors.items()})
    assert format is formats()[kind, "medusa"]
    parsed, reading = format.parse(package, FACTS), format.read(package, FACTS)
    own = kind != "medusa-v2"
    assert parsed.config == MedusaConfig(H, V, POSITIONS, HEADS, layers, own) and not parsed.notes
    assert not reading.errors
    ours = build_head("medusa", parsed.config, parsed.state)
    assert isinstance(ours, MedusaHead)
    for i, head in enumerate(heads):
        for j in range(layers):
            for part in ("weight", "bias"):
                name = f"heads.{i}.{j}.linear.{part}"
                stored = getattr(head[j].linear, part)
                assert torch.equal(parsed.state[name], stored) and torch.equal(reading.weights[name], stored)
        if own:
            assert torch.equal(parsed.state[f"lm_heads.{i}.weight"], head[-1].weight)
    x = torch.randn(6, H)
    wanted = [head(x) if own else head(x) @ LM_HEAD.T for head in heads]
    outputs = ours.outputs(lambda hidden: hidden @ LM_HEAD.T)
    for output, states, logits in zip(outputs, ours(x), wanted, strict=True):
        assert torch.equal(output(states), logits)
    probe = Probe(torch.arange(6), 2, torch.arange(6), x, x.flip(0))
    with torch.no_grad():
        assert format.compare(reading, ours, package, Trial(FACTS, [probe]))[0].passed


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_comes_back(kind):
    format, own = formats()[kind, "medusa"], kind != "medusa-v2"
    config = MedusaConfig(H, V, POSITIONS, HEADS, 1, own)
    state = dict(MedusaHead(config).named_parameters())
    package = format.write(config, state, torch.bfloat16, FACTS)
    reading, parsed = format.read(package, FACTS), format.parse(package, FACTS)
    assert not reading.errors and parsed.config == config
    assert all(torch.equal(parsed.state[name], weight.bfloat16()) for name, weight in state.items())
    assert not format.settings_differ({"num_heads": HEADS, "num_layers": 1, "own_lm_head": own}, reading)


def package_of(kind: str, layers: int = 1, heads: int = HEADS, **fields) -> Package:
    state = published(kind != "medusa-v2", layers, heads).state_dict()
    version = {"version": "2"} if kind == "medusa-v2" else {}
    return Package(
        {**FIELDS, "medusa_num_layers": layers, **version, **fields}, {n: t.clone() for n, t in state.items()}
    )


def without(package: Package, *names: str) -> Package:
    return Package(package.config, {n: t for n, t in package.tensors.items() if n not in names}, files=package.files)


def cut(package: Package, name: str) -> Package:
    return Package(package.config, package.tensors | {name: package.tensors[name][:-1]})


def apart() -> Package:
    package = package_of("medusa-v1", 2)
    return Package(package.config, package.tensors | {"0.1.linear.bias": torch.ones(H)})


BROKEN = {
    "a v1 file declared as v2": ("medusa-v1", package_of("medusa-v1", version="2"), "version", "declared as v2"),
    "a v1 file read as v2": ("medusa-v2", package_of("medusa-v1"), "0.1.weight", "a file of the layout v1"),
    "a v2 file read as v1": ("medusa-v1", package_of("medusa-v2"), "4.1.weight", "its lm_head is random"),
    "a v2 file declared as v1": ("medusa-v2", package_of("medusa-v2", version="1"), "version", 'only "2" says'),
    "too few heads": ("medusa-v1", package_of("medusa-v1", heads=3), "3.0.linear.weight", "does not find it"),
    "too many heads": ("medusa-v1", package_of("medusa-v1", heads=6), "5.0.linear.bias", "makes 5 heads"),
    "heads that the config leaves out": (
        "medusa-v2", package_of("medusa-v2", medusa_num_heads=3), "3.0.linear.weight", "makes 3 heads",
    ),
    "heads that the file lacks": (
        "medusa-v2", package_of("medusa-v2", heads=3, medusa_num_heads=4), "3.0.linear.bias", "does not find it",
    ),
    "another number of blocks": (
        "medusa-v1", Package({**FIELDS, "medusa_num_layers": 2}, package_of("medusa-v1").tensors), "0.2.weight",
        "its lm_head is random",
    ),
    "a lost lm_head": ("medusa-v1", without(package_of("medusa-v1"), "2.1.weight"), "2.1.weight", "lm_head is random"),
    "an lm_head that is cut": ("medusa-v1", cut(package_of("medusa-v1"), "1.1.weight"), "1.1.weight", "raises"),
    "blocks that differ": ("medusa-v1", apart(), "0.0.linear.bias", "is overwritten by 0.1.linear.bias"),
    "what the trainer writes": (
        "medusa-v2",
        Package(package_of("medusa-v2").config, package_of("medusa-v2").tensors, {}, ("medusa_lm_head.safetensors",)),
        "medusa_lm_head.pt", "torch.save the tensors of medusa_lm_head.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_copy_is_found_and_said_in_a_line(case):
    kind, package, where, text = BROKEN[case]
    errors = formats()[kind, "medusa"].read(package, FACTS).errors
    assert any(where == error.where and text in error.text for error in errors), errors
    assert not any("\n" in error.text for error in errors)


@pytest.mark.parametrize(
    ("case", "name"),
    [("heads that the file lacks", "heads.3.0.linear.weight"), ("a lost lm_head", "lm_heads.2.weight")],
)
def test_what_is_not_there_is_undefined(case, name):
    """No comparison of logits passes by chance."""
    kind, package, _, _ = BROKEN[case]
    format = formats()[kind, "medusa"]
    assert format.read(package, FACTS).weights[name].isnan().all()
    x = torch.randn(6, H)
    head = MedusaHead(MedusaConfig(H, V, POSITIONS, 5 if kind == "medusa-v1" else 4, 1, kind == "medusa-v1"))
    probe = Probe(torch.arange(6), 2, torch.arange(6), x, None)
    with torch.no_grad():
        assert not format.compare(format.read(package, FACTS), head, package, Trial(FACTS, [probe]))[0].passed


REFUSED = {
    "a v1 file as v2": ("medusa-v2", package_of("medusa-v1"), FACTS, "as the other layout, medusa-v1"),
    "a v2 file as v1": ("medusa-v1", package_of("medusa-v2"), FACTS, "as the other layout, medusa-v2"),
    "a lost lm_head": ("medusa-v1", without(package_of("medusa-v1"), "2.1.weight"), FACTS, "2.1.weight missing"),
    "a lost bias": ("medusa-v2", without(package_of("medusa-v2"), "1.0.linear.bias"), FACTS, "1.0.linear.bias missing"),
    "blocks that differ": ("medusa-v1", apart(), FACTS, "0.1.linear.bias, whose blocks differ"),
    "no target": ("medusa-v1", package_of("medusa-v1"), None, "Pass --target"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_our_heads_cannot_be_is_refused(case):
    kind, package, facts, text = REFUSED[case]
    with pytest.raises(InputError, match=text):
        formats()[kind, "medusa"].parse(package, facts)


@pytest.mark.parametrize(
    ("kind", "config", "text"),
    [
        ("medusa-v1", MedusaConfig(H, V, POSITIONS, 5), "--lm-head own"),
        ("medusa-v2", MedusaConfig(H, V, POSITIONS, 5, own_lm_head=True), "--lm-head target"),
        ("medusa-v1", MedusaConfig(H, V, POSITIONS, 4, own_lm_head=True), "the loader makes so many"),
        ("modelopt", MedusaConfig(H, V, POSITIONS, 5, 2, True), "2 blocks"),
    ],
)
def test_heads_that_a_format_cannot_hold_are_refused(kind, config, text):
    with pytest.raises(InputError, match=text):
        formats()[kind, "medusa"].check(config)


def test_blocks_of_their_own_have_no_place_in_a_class_that_repeats_one():
    config = MedusaConfig(H, V, POSITIONS, 5, 2, True)
    state = dict(MedusaHead(config).named_parameters())
    with pytest.raises(InputError, match="blocks differ"):
        formats()["medusa-v1", "medusa"].write(config, state, torch.float32)
