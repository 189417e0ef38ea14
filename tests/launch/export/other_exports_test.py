"""Acceptance heads of SpecDec_pp, from the settings of `import` to the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from worlds import tiny_llama_dir

from draftsmith.eval.check.check import run as check
from draftsmith.eval.settings import CheckConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.launch.export.settings import ExportConfig, ImportConfig
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.pretrained.heads import load_head
from draftsmith.modules.types import InputError

SIZE, COUNT = 32, 3


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("draft")))


@pytest.fixture
def theirs(tmp_path) -> tuple[Path, torch.nn.ModuleDict]:
    """A head of three places of one block, as SpecDec_pp saves it, with opinions that differ."""
    torch.manual_seed(3)
    block = torch.nn.ModuleDict({"linear": torch.nn.Linear(SIZE, SIZE)})
    head = torch.nn.ModuleDict({"model": torch.nn.Sequential(*[block] * COUNT, torch.nn.Linear(SIZE, 2))})
    for weight in head.requires_grad_(False).parameters():
        torch.nn.init.normal_(weight, std=0.2)
    directory = tmp_path / "theirs"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"hidden_size": SIZE, "num_layers": COUNT}))
    save_file(dict(head.named_parameters()), directory / "model.safetensors")
    return directory, head


def test_a_head_of_specdec_pp_is_imported_with_its_loss_weight(theirs, draft, tmp_path):
    directory, head = theirs
    import_head(ImportConfig(directory=str(directory), output=tmp_path / "ours", head=draft, w_rej=6.0))
    ours, states = load_head(tmp_path / "ours"), torch.randn(50, SIZE)
    assert isinstance(ours, AcceptanceHead) and ours.config.w_rej == 6 and ours.config.tied
    hidden = states
    for _ in range(COUNT):
        hidden = hidden + torch.nn.functional.silu(head["model"][0]["linear"](hidden))
    prob = head["model"][COUNT](hidden).softmax(-1)[:, 1]
    assert torch.allclose(prob, ours(states).sigmoid(), atol=1e-6)  # float32 sums in another order
    expected = "an acceptance head, expected an? .*No format holds an acceptance head"
    with pytest.raises(InputError, match=expected):
        export(ExportConfig(format="vllm", head=tmp_path / "ours", output=tmp_path / "out"))


def test_a_head_of_specdec_pp_is_imported_with_its_draft_and_not_checked(theirs, draft, tmp_path):
    directory, _ = theirs
    for format in ("auto", "specdec_pp"):
        with pytest.raises(InputError, match=r"directory: found .* as an acceptance head, expected a head that drafts"):
            check(CheckConfig(directory=directory, format=format, target=draft))
    with pytest.raises(InputError, match="target: found"):
        import_head(ImportConfig(directory=str(directory), output=tmp_path / "ours", target=draft))
