"""Hydra heads from a head directory to their published one and back, by the commands."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from draftsmith.data.export.check import CheckConfig
from draftsmith.data.export.check import run as check
from draftsmith.data.export.export import ExportConfig
from draftsmith.data.export.export import run as export
from draftsmith.data.export.import_head import ImportConfig
from draftsmith.data.export.import_head import run as import_head
from draftsmith.data.heads.directory import load_head, save_head, stored_tensors
from draftsmith.data.models.loading import load_lm
from draftsmith.modules.drafters.hydra import HydraHead, HydraSettings


@pytest.mark.parametrize("plus", [False, True], ids=["hydra", "hydra++"])
def test_heads_come_back_as_they_were_and_a_mixed_up_layout_is_told(tiny_target, tmp_path, capsys, plus):
    lm = load_lm(str(tiny_target))
    settings = HydraSettings(lm_head="own", num_heads=3, num_layers=3 if plus else 1, prefix_attention=plus)
    torch.manual_seed(0)
    head = HydraHead(HydraHead.shape(settings, lm.config))
    for weight in head.parameters():
        weight.data.add_(0.05 * torch.randn(weight.shape))
    manifest = {"target": lm.info.identity, "config": {"target": str(tiny_target)}}
    head_dir, out = save_head(tmp_path / "head", head, manifest, "card"), tmp_path / "out"
    assert export(ExportConfig(format="hydra", head=head_dir, output=out)) == 0
    assert {file.name for file in out.iterdir()} >= {"hydra_lm_head.pt", "config.json"}
    config = json.loads((out / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_target) and config["grounded_heads"]
    capsys.readouterr()
    assert check(CheckConfig(directory=out, target=str(tiny_target))) == 0
    assert "as hydra reads it" in " ".join(capsys.readouterr().out.split())
    import_head(ImportConfig(directory=str(out), output=tmp_path / "back", target=str(tiny_target)))
    back = load_head(tmp_path / "back", lm)
    unscaled = back.config.llama.rope_scaling  # says a length that nothing is scaled from
    assert unscaled.kind == "default"
    llama = dataclasses.replace(head.config.llama, rope_scaling=unscaled)
    assert dataclasses.replace(head.config, llama=llama) == back.config
    assert all(torch.equal(tensor, stored_tensors(back)[name]) for name, tensor in stored_tensors(head).items())
    other = "mlp" if plus else "prefix-mlp"
    (out / "config.json").write_text(json.dumps({**config, "hydra_head_arch": other}))
    capsys.readouterr()
    assert check(CheckConfig(directory=out, target=str(tiny_target))) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert ("of prefix-mlp, and this is mlp?" if plus else "prefix_embeding_layer.norm.weight") in shown
