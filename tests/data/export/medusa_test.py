"""Medusa heads from a head directory to another system's and back, by the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data.export.check import CheckConfig
from draftsmith.data.export.check import run as check
from draftsmith.data.export.export import ExportConfig
from draftsmith.data.export.export import run as export
from draftsmith.data.export.import_head import ImportConfig
from draftsmith.data.export.import_head import run as import_head
from draftsmith.data.heads.directory import load_head, save_head, stored_tensors
from draftsmith.data.models.loading import load_lm
from draftsmith.modules.drafters.medusa import MedusaHead, MedusaSettings
from draftsmith.modules.types import InputError

FILES = {
    "medusa-v1": {"medusa_lm_head.pt"},
    "medusa-v2": {"medusa_lm_head.pt", "medusa_lm_head.safetensors"},
    "modelopt": {"model.safetensors"},
}


@pytest.fixture(scope="module")
def heads(tiny_target, tmp_path_factory) -> dict[str, Path]:
    lm, root = load_lm(str(tiny_target)), tmp_path_factory.mktemp("medusa")
    manifest = {"target": lm.info.identity, "config": {"target": str(tiny_target)}}
    found = {}
    for lm_head in ("own", "target"):
        torch.manual_seed(0)
        head = MedusaHead(MedusaHead.shape(MedusaSettings(lm_head=lm_head), lm.config))
        for weight in head.parameters():
            weight.data.normal_(std=0.2)
        found[lm_head] = save_head(root / lm_head, head, manifest, "card")
    return found


@pytest.mark.parametrize("format", FILES)
def test_heads_come_back_as_they_were(heads, tiny_target, tmp_path, capsys, format):
    head_dir = heads["target" if format == "medusa-v2" else "own"]
    assert export(ExportConfig(format=format, head=head_dir, output=tmp_path / "out")) == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {name for name in names if name.endswith((".pt", ".safetensors"))} == FILES[format]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert format == "modelopt" or config["base_model_name_or_path"] == str(tiny_target)
    capsys.readouterr()
    assert check(CheckConfig(directory=tmp_path / "out", target=str(tiny_target))) == 0
    assert f"as {format} reads it" in " ".join(capsys.readouterr().out.split())
    import_head(ImportConfig(directory=str(tmp_path / "out"), output=tmp_path / "back", target=str(tiny_target)))
    head, back = load_head(head_dir), load_head(tmp_path / "back", load_lm(str(tiny_target)))
    assert head.config == back.config
    assert all(torch.equal(tensor, stored_tensors(back)[name]) for name, tensor in stored_tensors(head).items())


def test_a_v1_file_declared_as_v2_and_a_changed_copy_are_told_by_their_names(heads, tiny_target, tmp_path, capsys):
    out = tmp_path / "out"
    assert export(ExportConfig(format="medusa-v1", head=heads["own"], output=out)) == 0
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "version": "2"}))
    capsys.readouterr()
    assert check(CheckConfig(directory=out, target=str(tiny_target))) == 1
    assert "a v1 file declared as v2" in " ".join(capsys.readouterr().out.split())
    state = torch.load(out / "medusa_lm_head.pt", weights_only=True)
    state["3.1.weight"] = state["3.1.weight"].roll(1, 0)
    torch.save(state, out / "medusa_lm_head.pt")
    check(CheckConfig(directory=out, format="medusa-v1", target=str(tiny_target)))
    assert "lm_heads.3.weight is not what was exported" in " ".join(capsys.readouterr().out.split())


def test_two_files_that_differ_are_refused(heads, tmp_path, tiny_target):
    out = tmp_path / "out"
    assert export(ExportConfig(format="medusa-v2", head=heads["target"], output=out)) == 0
    state = load_file(out / "medusa_lm_head.safetensors")
    torch.save(state | {"0.0.linear.bias": state["0.0.linear.bias"] + 1}, out / "medusa_lm_head.pt")
    with pytest.raises(InputError, match="Medusa's code reads medusa_lm_head"):
        check(CheckConfig(directory=out, target=str(tiny_target)))
