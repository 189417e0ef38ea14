"""Heads with weights of 8 bits: written, checked, read again, and refused where a system would not read them."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.launch.export.settings import ExportConfig, ImportConfig
from draftsmith.modules.pretrained.heads import load_head
from draftsmith.modules.types import InputError


@pytest.mark.parametrize(("format", "scheme"), [("vllm", "int8"), ("sglang", "fp8"), ("speculators", "int8")])
def test_a_head_of_8_bits_is_checked_measured_and_read_again(
    exchange, checked, tmp_path, format, scheme, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")
    there, head, target = tmp_path / "there", exchange.head("eagle3"), exchange.target("eagle3")
    assert export(ExportConfig(format=format, head=head, target=target, output=there, weights=scheme)) == 0
    shown = re.search(r"tau ([\d.]+) \(([\d% ]+)\), tau ([\d.]+) \(([\d% ]+)\)", capsys.readouterr().out)
    assert shown and float(shown[1]) > 2 and abs(float(shown[1]) - float(shown[3])) < 0.1
    card = (there / "README.md").read_text()
    assert "acceptance before and after" in card and f"in {scheme}" in card

    stored = load_file(there / "model.safetensors")
    eight = {name for name, tensor in stored.items() if tensor.dtype in (torch.int32, torch.float8_e4m3fn)}
    # The embedded target's down_proj has 352 columns, which no kernel of 8 bits takes.
    assert {name.split(".")[-2] for name in eight} == {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up")}
    assert {tensor.dtype for name, tensor in stored.items() if name.startswith(("fc", "lm_head", "norm"))} == {
        torch.bfloat16
    }
    for given in ({}, {"head": head}):
        code, said = checked(there, "auto", "eagle3", **given)
        assert code == 0 and "nothing differs" in said
    import_head(ImportConfig(directory=str(there), output=tmp_path / "back", target=target))
    ours, back = load_head(head), load_head(tmp_path / "back")
    weight, again = (one.layer.self_attn.q_proj.weight for one in (ours, back))
    assert 0 < (weight - again).abs().max() < (0.005 if scheme == "int8" else 0.05) * weight.abs().max()

    # A scale of another row is another head.
    name = next(name for name in stored if name.endswith("o_proj.weight_scale"))
    save_file({**stored, name: stored[name].flip(0).contiguous()}, there / "model.safetensors", {"format": "pt"})
    code, said = checked(there, format, "eagle3")
    assert code == 1 and "o_proj.weight is not what was exported" in said


def test_a_config_of_quantized_weights_beside_plain_ones_is_refused(exchange, checked, copy_of):
    """SGLang would leave layers random, and say nothing."""
    path = copy_of("sglang", "eagle3") / "config.json"
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"]}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    with pytest.raises(InputError, match="files without quantized weights"):
        checked(path.parent, "sglang", "eagle3")


def test_quantized_layers_that_a_system_reads_in_16_bits_are_named(exchange, checked, tmp_path):
    """SGLang's fc is a plain layer: the weights would stay random, and it says nothing."""
    there, target = tmp_path / "there", exchange.target("eagle3")
    config = ExportConfig(format="vllm", head=exchange.head("eagle3"), target=target, output=there, weights="fp8")
    assert export(config) == 0
    stored = load_file(there / "model.safetensors")
    stored["fc.weight_scale"] = torch.full((128, 1), 0.01)
    stored["fc.weight"] = (stored["fc.weight"] / 0.01).to(torch.float8_e4m3fn)
    save_file(stored, there / "model.safetensors", {"format": "pt"})
    (there / "draftsmith.json").unlink()
    with pytest.raises(InputError, match=r"fc\.weight quantized, which it leaves out"):
        checked(there, "vllm", "eagle3")
    raw = json.loads((there / "config.json").read_text())
    raw["quantization_config"]["ignore"].remove("re:.*fc$")
    (there / "config.json").write_text(json.dumps(raw))
    assert "fc.weight SGLang reads it in 16 bits" in checked(there, "sglang", "eagle3")[1]
    assert "16 bits" not in checked(there, "vllm", "eagle3")[1]


def test_files_that_their_own_config_contradicts_are_refused(exchange, checked, tmp_path):
    """vLLM would take codes for weights, or refuses layers that it joins."""
    there, target = tmp_path / "there", exchange.target("eagle3")
    config = ExportConfig(format="vllm", head=exchange.head("eagle3"), target=target, output=there, weights="fp8")
    assert export(config) == 0
    stored, raw = load_file(there / "model.safetensors"), json.loads((there / "config.json").read_text())
    q_proj = next(name for name in stored if name.endswith("q_proj.weight"))
    plain = {name: tensor for name, tensor in stored.items() if name != q_proj.replace("weight", "weight_scale")}
    plain[q_proj] = stored[q_proj].bfloat16()
    lm_head = {"lm_head.weight_scale": torch.ones(len(stored["lm_head.weight"]), 1)}
    lm_head["lm_head.weight"] = stored["lm_head.weight"].to(torch.float8_e4m3fn)
    ignored = [name for name in raw["quantization_config"]["ignore"] if "lm_head" not in name]
    for tensors, ignore, words in (
        (stored, [*ignored, r"re:.*q_proj$"], "q_proj.weight quantized, which it leaves out"),
        (plain, ignored, "q_proj.weight in torch.bfloat16, which it does not leave out"),
        ({**stored, **lm_head}, ignored, "lm_head.weight quantized, which it leaves out"),
        (stored, [*ignored, "re:*"], "a pattern that is none"),
    ):
        raw["quantization_config"]["ignore"] = ignore
        (there / "config.json").write_text(json.dumps(raw))
        save_file(tensors, there / "model.safetensors", {"format": "pt"})
        with pytest.raises(InputError, match=words):
            checked(there, "vllm", "eagle3")


def test_weights_of_8_bits_are_refused_where_nothing_would_read_them(exchange, tmp_path):
    for format, kind, message in (
        ("eagle", "eagle3", "SafeAILab/EAGLE reads no quantized weights. Choose --format .*vllm"),
        ("llamacpp", "eagle3", "a type of GGUF, of which q8_0 has 8 bits"),
        ("vllm", "eagle", "int8 for layers of other sizes"),  # 48 wide
    ):
        head, out = exchange.head(kind), tmp_path / "out"
        with pytest.raises(InputError, match=message):
            export(ExportConfig(format=format, head=head, target=exchange.target(kind), output=out, weights="int8"))
        assert not out.exists()
