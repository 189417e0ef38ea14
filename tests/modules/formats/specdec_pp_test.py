"""SpecDec++'s acceptance head against a class built by its authors' rules, on the hub mixin that they use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from foreign_heads import changed
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.formats import formats, specdec_pp
from draftsmith.modules.formats.base import Package, TargetFacts
from draftsmith.modules.types import InputError

HIDDEN = 8
FORMAT = formats()["specdec_pp", "acceptance"]
DRAFT = TargetFacts({"hidden_size": HIDDEN})


class Block(nn.Module):
    """A linear layer and SiLU, with a way around it."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return x + nn.functional.silu(self.linear(x))


class TheirHead(nn.Module, PyTorchModelHubMixin):
    """One block object, listed `num_layers` times, and two classes."""

    def __init__(self, config):
        super().__init__()
        repeated = [Block(config["hidden_size"])] * config.get("num_layers", 0)
        self.model = nn.Sequential(*repeated, nn.Linear(config["hidden_size"], 2))

    def forward(self, hidden):
        """P(accept), as their stop rule takes it."""
        return self.model(hidden.float()).softmax(-1)[..., 1]


def as_ours(imported) -> AcceptanceHead:
    head = AcceptanceHead(imported.config)
    assert {name for name, _ in head.named_parameters()} == set(imported.state)
    head.load_state_dict(imported.state, strict=False)
    return head.requires_grad_(False)


def to_directory(package: Package, directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(dict(package.config)))
    save_file(dict(package.tensors), directory / "model.safetensors")
    return directory


def from_directory(directory: Path) -> Package:
    config = json.loads((directory / "config.json").read_text())
    return Package(config, load_file(directory / "model.safetensors"))


def their_head(num_layers: int) -> TheirHead:
    torch.manual_seed(10 + num_layers)
    return TheirHead(config={"hidden_size": HIDDEN, "num_layers": num_layers}).requires_grad_(False)


def hidden_states() -> torch.Tensor:
    return 2 * torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(0))


# One rounding more or less in float32 sums of about 1.
CLOSE = {"atol": 1e-6, "rtol": 0}


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_their_repeated_block_is_reproduced_by_tied_blocks(num_layers, tmp_path):
    """safetensors, with block 0 only, as the hub mixin writes it."""
    theirs, hidden = their_head(num_layers), hidden_states()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = as_ours(FORMAT.read(from_directory(tmp_path / "theirs"), DRAFT))
    assert sum(weight.numel() for weight in ours.parameters()) == HIDDEN + 1 + (HIDDEN**2 + HIDDEN) * (num_layers > 0)
    assert torch.allclose(torch.sigmoid(ours(hidden)), theirs(hidden), **CLOSE)


def test_a_state_dict_with_every_name_of_the_block_is_the_same_head():
    """What `pytorch_model.bin` holds."""
    theirs, hidden = their_head(3), hidden_states()
    package = Package({"hidden_size": HIDDEN, "num_layers": 3}, theirs.state_dict())
    assert len(package.tensors) == 8
    imported = FORMAT.read(package, DRAFT)
    assert torch.allclose(torch.sigmoid(as_ours(imported)(hidden)), theirs(hidden), **CLOSE)
    assert imported.notes == (specdec_pp.UNCORRECTED,) and (imported.config.w_acc, imported.config.w_rej) == (1, 1)
    assert imported.problems == ()


def test_of_unequal_copies_the_last_one_counts(tmp_path):
    state = {name: tensor.clone() for name, tensor in their_head(3).state_dict().items()}
    state["model.1.linear.weight"] += 1
    state["model.2.linear.weight"] -= 1
    package = Package({"hidden_size": HIDDEN, "num_layers": 3}, state)
    theirs, hidden = TheirHead.from_pretrained(to_directory(package, tmp_path / "head")), hidden_states()
    imported = FORMAT.read(package, DRAFT)
    assert torch.allclose(torch.sigmoid(as_ours(imported)(hidden)), theirs(hidden), **CLOSE)


# Edit of config and tensors -> what the message says.
BROKEN = {
    "lost bias": ({}, {"model.0.linear.bias": None}, "model.0.linear.bias is missing"),
    "lost classifier": ({}, {"model.2.weight": None}, "model.2.weight is missing"),
    "unknown name": ({}, {"head.weight": torch.ones(1)}, "head.weight is unknown"),
    "fewer blocks": ({"num_layers": 1}, {}, "model.1.weight is missing"),
    "no width": ({"hidden_size": None}, {}, "hidden_size: found None"),
    "no number": ({"num_layers": "2"}, {}, "num_layers: found 2"),
    "another draft": ({"hidden_size": HIDDEN + 1}, {}, f"expected {HIDDEN}"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_head_is_refused_by_the_name_of_what_is_wrong(kind, tmp_path):
    config, tensors, words = BROKEN[kind]
    their_head(2).save_pretrained(tmp_path / "theirs")
    package = from_directory(tmp_path / "theirs")
    with pytest.raises(InputError, match=words):
        FORMAT.read(changed(package, config, tensors), DRAFT)
