"""Exports: refusals, files, and heads that come back as they were trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf_models import write_gguf_model
from safetensors.torch import load_file
from worlds import quick_eagle3_head, tiny_llama_dir

from draftsmith.launch.export.export import expected_gain, num_drafted
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.launch.export.import_head import tied_to_target
from draftsmith.launch.export.settings import ExportConfig, ImportConfig
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.formats.base import ImportedHead
from draftsmith.modules.pretrained.card import model_card
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import head_fields, load_head, save_head, stored_tensors
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

ROUND_TRIPS = [
    ("eagle", "vllm"), ("eagle", "sglang"), ("eagle3", "sglang"), ("eagle3", "speculators"), ("dflash", "vllm"),
    ("dflash", "llamacpp"), ("dspark", "sglang"), ("dspark", "speculators"), ("dspark", "llamacpp"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "format"), ROUND_TRIPS)
def test_a_head_comes_back_as_it_was(exchange, checked, tmp_path, kind, format):
    directory, target = exchange.export(format, kind), exchange.target("block" if kind[0] == "d" else kind)
    code, shown = checked(directory, format, kind, head=exchange.head(kind))
    assert code == 0 and "nothing differs" in shown, shown
    import_head(ImportConfig(directory=str(directory), output=tmp_path / "back", target=target))
    head, back = load_head(exchange.head(kind)), load_head(tmp_path / "back")
    assert head.config == back.config and getattr(head.config, "reduced", True)
    assert all(torch.equal(tensor, stored_tensors(back)[name]) for name, tensor in stored_tensors(head).items())


def test_weights_may_be_written_in_another_type(exchange, tmp_path):
    assert (
        export(ExportConfig(format="vllm", head=exchange.head("eagle"), output=tmp_path / "out", weights="bfloat16"))
        == 0
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_the_config_names_the_type_of_the_target_which_servers_run_the_head_in(exchange, tmp_path):
    """SGLang runs each model in the type that its config names; a head beside its target has to run as that does."""
    target = tmp_path / "target"
    shutil.copytree(exchange.target("eagle"), target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    lm = load_lm(str(target), "float32")
    save_head(tmp_path / "head", load_head(exchange.head("eagle")), {"target": lm.info.identity}, "card")
    out = tmp_path / "out"
    how = {"target": str(target), "dtype": "float32"}
    assert export(ExportConfig(format="sglang", head=tmp_path / "head", output=out, **how)) == 0
    written = json.loads((out / "config.json").read_text())
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"


def test_an_export_has_a_card_with_the_command_that_serves_it(exchange):
    card = (exchange.export("vllm", "eagle") / "README.md").read_text()
    assert "vllm serve" in card and '"method": "eagle"' in card
    assert "at most 0.0001" in card  # the check that was run


def test_what_safeailabs_code_needs_is_said_and_written(exchange, tmp_path, capsys):
    """Its tree counts the root, and a target in one file needs an index, which the export holds; the target's directory
    stays as it was."""
    before = sorted(path.name for path in Path(exchange.target("eagle")).iterdir())
    assert export(ExportConfig(format="eagle", head=exchange.head("eagle"), output=tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert "eagle-tree:nodes=59:depth=5:topk=10" in said and "copy target-index.json" in said
    index = json.loads((tmp_path / "out" / "target-index.json").read_text())
    assert index["weight_map"]["model.embed_tokens.weight"] == "model.safetensors"
    assert sorted(path.name for path in Path(exchange.target("eagle")).iterdir()) == before
    assert not (exchange.export("vllm", "eagle") / "target-index.json").exists()


def test_a_head_with_a_bias_of_fc_is_refused_with_the_reason(exchange, tmp_path):
    lm = load_lm(exchange.target("eagle"))
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(lm.config, fc_bias=True))
    save_head(tmp_path / "head", head, {"target": lm.info.identity}, "card")
    config = ExportConfig(
        format="vllm", head=tmp_path / "head", output=tmp_path / "out", target=exchange.target("eagle")
    )
    with pytest.raises(InputError, match=r"fc.*bias.*drop"):
        export(config)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_imported_head_is_exported_again_without_naming_its_target(exchange, tmp_path):
    import_head(
        ImportConfig(
            directory=str(exchange.export("sglang", "eagle")), target=exchange.target("eagle"), output=tmp_path / "head"
        )
    )
    config = ExportConfig(format="vllm", head=tmp_path / "head", output=tmp_path / "out", license="apache-2.0")
    assert export(config) == 0
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(exchange.export("vllm", "eagle") / "model.safetensors").keys()
    )
    assert "license: apache-2.0" in (tmp_path / "out" / "README.md").read_text()


def test_a_head_is_only_checked_on_its_own_target(exchange, tmp_path):
    other = tiny_llama_dir(tmp_path / "other", seed=5, layers=2, hidden=48)
    with pytest.raises(InputError, match="trained for another model"):
        export(ExportConfig(format="vllm", head=exchange.head("eagle"), output=tmp_path / "out", target=str(other)))


def test_the_command_drafts_whole_blocks_and_no_more(exchange, tmp_path, capsys, monkeypatch):
    export(ExportConfig(format="vllm", head=exchange.head("dflash"), output=tmp_path / "vllm"))
    assert '"method": "dflash"' in (shown := capsys.readouterr().out) and '"num_speculative_tokens": 4' in shown
    # Before any model is read.
    monkeypatch.setattr("draftsmith.launch.export.export.state_source", lambda *_: pytest.fail("read a model"))
    with pytest.raises(InputError, match="num_drafted: found 5, expected at most 4"):
        export(ExportConfig(format="vllm", head=exchange.head("dflash"), output=tmp_path / "more", num_drafted=5))


def test_the_command_drafts_what_the_heads_own_measurements_make_worth_it():
    kind, rows = "eagle3", [("eagle3:k=2", 1.1), ("eagle3:k=4", 1.3), ("pld", 2.0)]
    measured = {"methods": [{"method": method, "speedup": speedup} for method, speedup in rows]}
    assert num_drafted(measured, kind, tau=1.2) == 4
    assert [num_drafted(None, kind, tau=tau) for tau in (None, 1.0, 1.2, 2.6, 9.0)] == [3, 1, 1, 3, 5]
    assert num_drafted(None, "dflash", 7, 1.2) == 7  # a block is drafted at once
    said = [expected_gain(Path("head"), m, "eagle3", t) for m, t in ((measured, 1.2), (None, 1.2), (None, 2.0))]
    assert ["diagnose head" in "".join(lines) for lines in said] == [False, True, False]
    assert "1.30 times" in said[0][0] and "2.00 tokens" in said[2][0]
    assert "nor tau was measured" in expected_gain(Path("h"), None, "x", None)[0]


def test_the_command_of_a_target_in_gguf_names_files_that_servers_read(tmp_path, capsys):
    target, head = tmp_path / "target.gguf", tmp_path / "head"
    write_gguf_model(target, Checkpoint(tiny_llama_dir(tmp_path / "model", layers=8)))
    lm = load_lm(str(target))
    net = quick_eagle3_head(lm, [list(range(5, 30))], 0)
    save_head(head, net, {"target": lm.info.identity, "metrics": {"tau": 1.1}}, "card")
    assert export(ExportConfig(format="vllm", head=head, output=tmp_path / "out", target=str(target))) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"vllm serve {target}.dequantized --spec" in shown and '"num_speculative_tokens": 1' in shown
    assert "vLLM reads no GGUF" in shown and "Expect no gain from this head" in shown


def test_the_card_proposes_the_formats_that_hold_the_head(exchange, tmp_path):
    fields = head_fields(load_head(exchange.head("eagle3")))

    def proposed(**changes: bool) -> set[str]:
        card = model_card("eagle3", {"head": {**fields, **changes}})
        return {name for name in ("eagle", "vllm", "sglang", "speculators") if f"--format {name} " in card}

    assert proposed() == {"eagle", "vllm", "sglang", "speculators"}
    assert proposed(fc_norm=True, norm_output=True) == {"vllm", "sglang", "speculators"}
    assert proposed(norm_before_residual=True) == {"vllm", "speculators"}
    expected = r"an eagle3 head, expected an acceptance head, which specdec_pp holds\. Choose"
    with pytest.raises(InputError, match=expected):
        export(ExportConfig(format="specdec_pp", head=exchange.head("eagle3"), output=tmp_path / "out"))


def test_an_import_knows_whether_the_lm_head_is_the_targets():
    target, ids = torch.randn(20, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 4, 9])
    own, rows = target.clone(), {"d2t": ids, "lm_head.weight": target[ids]}
    own[3, 5] += 1e-6
    states = [{"lm_head.weight": target}, rows, {"d2t": ids, "lm_head.weight": target[ids].bfloat16()},
              {"lm_head.weight": own}, {**rows, "d2t": ids + 1}, {}]  # fmt: skip
    assert [tied_to_target(ImportedHead(None, state), target) for state in states] == [["lm_head.weight"]] * 3 + [
        []
    ] * 3
    assert tied_to_target(ImportedHead(None, rows), None) == []  # no target is named
