"""Acceptance heads for SpecDec_pp, from the command's settings to the files."""

from __future__ import annotations

import json

import pytest
import torch
from worlds import tiny_llama_dir, varied_acceptance_head

from draftsmith.eval.check.check import run as check
from draftsmith.eval.settings import CheckConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.launch.export.settings import ExportConfig, ImportConfig
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.heads import drafter_identity, load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("draft")))


@pytest.fixture(scope="module")
def tied(draft, tmp_path_factory):
    """A head of three tied blocks, as `train acceptance --tied` saves it, with opinions that differ."""
    torch.manual_seed(3)
    head = AcceptanceHead(AcceptanceHeadConfig(32, num_blocks=3, tied=True)).requires_grad_(False)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    identity = load_lm(draft).info.identity
    return save_head(tmp_path_factory.mktemp("tied") / "head", head, {"target": identity}, "card")


def test_a_tied_acceptance_head_comes_back_from_specdec_pp_as_it_was(tied, draft, tmp_path, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    assert export(ExportConfig(format="specdec_pp", head=tied, draft=draft, target="big", output=there)) == 0
    assert "--model_name big" in capsys.readouterr().out
    import_head(ImportConfig(directory=str(there), output=back, draft=draft, w_rej=6.0))
    head, again = load_head(tied), load_head(back)
    assert head.config == again.config and again.config.w_rej == 6
    states = torch.randn(50, 32)
    assert torch.equal(head(states), again(states))


def test_an_acceptance_head_loads_in_specdec_pps_own_environment(tied, draft, tmp_path):
    """By the rule of PyTorchModelHubMixin before huggingface_hub 0.18: `pytorch_model.bin` alone is read, into a class
    whose blocks are one object."""
    there = tmp_path / "there"
    assert export(ExportConfig(format="specdec_pp", head=tied, draft=draft, output=there)) == 0
    state = torch.load(there / "pytorch_model.bin", map_location="cpu", weights_only=True)
    size, count = (json.loads((there / "config.json").read_text())[name] for name in ("hidden_size", "num_layers"))
    block = torch.nn.ModuleDict({"linear": torch.nn.Linear(size, size)})
    theirs = torch.nn.ModuleDict({"model": torch.nn.Sequential(*[block] * count, torch.nn.Linear(size, 2))})
    theirs.load_state_dict(state, strict=True)
    states = torch.randn(50, size)
    hidden = states
    for _ in range(count):
        hidden = hidden + torch.nn.functional.silu(theirs["model"][0]["linear"](hidden))
    prob = theirs["model"][count](hidden).softmax(-1)[:, 1]
    assert torch.allclose(prob, load_head(tied)(states).sigmoid(), atol=1e-6)  # float32 sums in another order
    assert {path.name for path in there.iterdir()} >= {"model.safetensors", "pytorch_model.bin"}


def test_what_specdec_pp_cannot_hold_is_refused_with_the_remedy(tied, draft, tmp_path):
    with pytest.raises(InputError, match="weights: found bfloat16, expected float32"):
        export(ExportConfig(format="specdec_pp", head=tied, draft=draft, output=tmp_path / "out", weights="bfloat16"))
    assert not list(tmp_path.iterdir())


def test_a_head_that_reads_an_eagle_heads_states_is_checked_on_them(tmp_path, draft):
    target = load_lm(draft)
    eagle = save_head(tmp_path / "eagle", EagleHead(EagleConfig.for_target(target.config)), {}, "card")
    manifest = {"target": drafter_identity(eagle, target), "drafter": "eagle"}
    head = save_head(tmp_path / "head", varied_acceptance_head(32, tied=True), manifest, "card")
    there, models = tmp_path / "there", {"target": draft, "draft": str(eagle)}
    with pytest.raises(InputError, match="draft: found none"):
        export(ExportConfig(format="specdec_pp", head=head, output=there))
    assert export(ExportConfig(format="specdec_pp", head=head, output=there, **models)) == 0
    assert check(CheckConfig(directory=there, format="specdec_pp", **models)) == 0
    with pytest.raises(InputError, match=r"head: found .* an acceptance head, expected a drafter"):
        check(CheckConfig(directory=there, format="specdec_pp", target=draft, draft=str(head)))
