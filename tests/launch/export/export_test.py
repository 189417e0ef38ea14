"""Exports: refusals, files, and tau of an exported head, which is that of the trained one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_hub import fake_hub
from safetensors.torch import load_file
from slow_eagle import Counts, SlowEagle

from draftsmith.eval.bench.command import BenchConfig, bench
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bench.results import read_rows
from draftsmith.eval.check.states import PROMPTS
from draftsmith.launch.cli import main
from draftsmith.launch.export.export import ExportConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import ImportConfig
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.heads import load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

K, NEW_TOKENS = 3, 40


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Those that the head knows the answers of."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def measured(tiny_target, prompts, tmp_path) -> Callable[[Path], tuple[float, list[list[int]]]]:
    """What `eval bench` says of a head: tau of greedy chains in float32, and the answers."""

    def run(head: Path) -> tuple[float, list[list[int]]]:
        config = BenchConfig(
            target=str(tiny_target), prompts=str(prompts), draft=str(head), methods=f"eagle:k={K}", repeats=1,
            max_new_tokens=NEW_TOKENS, packed=False, output=tmp_path / "bench",
        )  # fmt: skip
        rows = {row["method"]: row for row in bench(config)["methods"]}
        lines = read_rows(config.output)
        return rows[f"eagle:k={K}"]["tau"], [line["token_ids"] for line in lines if line["method"] == f"eagle:k={K}"]

    return run


@pytest.mark.parametrize("format", ["eagle", "vllm", "sglang"])
def test_tau_of_an_exported_and_imported_head_is_that_of_the_original(
    exported, eagle_dir, tiny_target, measured, tmp_path, format
):
    import_head(ImportConfig(directory=str(exported(format)), target=str(tiny_target), output=tmp_path / "head"))
    assert load_head(eagle_dir).config == load_head(tmp_path / "head").config
    assert measured(eagle_dir) == measured(tmp_path / "head")


def test_tau_is_that_of_a_plain_loop_over_transformers_and_the_exported_directory(
    exported, eagle_dir, tiny_target, prompts, measured
):
    tau, answers = measured(eagle_dir)
    slow, counts = SlowEagle(tiny_target, exported("vllm")), Counts()
    eos = set(load_lm(str(tiny_target)).info.eos_ids)
    rows = read_prompts(str(prompts), str(tiny_target))
    assert [slow.decode(list(row.prompt_ids), K, NEW_TOKENS, eos, counts) for row in rows] == answers
    assert counts.tau == tau > 1.2  # drafts are accepted, and others are not


def test_weights_may_be_written_in_another_type(eagle_dir, tmp_path):
    assert export(ExportConfig(format="vllm", head=eagle_dir, output=tmp_path / "out", weights="bfloat16")) == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_the_config_names_the_type_of_the_target_which_servers_run_the_head_in(eagle_dir, tiny_target, tmp_path):
    """SGLang runs each model in the type that its config names; a head beside its target has to run as that does."""
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    lm = load_lm(str(target), "float32")
    save_head(tmp_path / "head", load_head(eagle_dir), {"target": lm.info.identity}, "card")
    out = tmp_path / "out"
    how = {"target": str(target), "dtype": "float32"}
    assert export(ExportConfig(format="sglang", head=tmp_path / "head", output=out, **how)) == 0
    written = json.loads((out / "config.json").read_text())
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"


def test_an_export_has_a_card_with_the_command_that_serves_it(exported):
    card = (exported("vllm") / "README.md").read_text()
    assert "vllm serve" in card and '"method": "eagle"' in card
    assert "at most 0.0001" in card  # the check that was run


def test_what_safeailabs_code_needs_is_said_and_written(exported, tiny_target, eagle_dir, tmp_path, capsys):
    """Its tree counts the root, and a target in one file needs an index, which the export holds; the target's directory
    stays as it was."""
    before = sorted(path.name for path in Path(tiny_target).iterdir())
    assert export(ExportConfig(format="eagle", head=eagle_dir, output=tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert "eagle-tree:nodes=59:depth=5:topk=10" in said and "copy target-index.json" in said
    index = json.loads((tmp_path / "out" / "target-index.json").read_text())
    assert index["weight_map"]["model.embed_tokens.weight"] == "model.safetensors"
    assert sorted(path.name for path in Path(tiny_target).iterdir()) == before
    assert not (exported("vllm") / "target-index.json").exists()


def test_an_export_is_uploaded_with_its_card(eagle_dir, tmp_path, monkeypatch, capsys):
    """To a hub on this machine: a private repository with every file of the directory; without a login at once no."""
    from huggingface_hub import constants

    words = ["export", "--format", "vllm", "--head", str(eagle_dir), "--push", "me/head", "--output"]
    with fake_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert main([*words, str(tmp_path / "out")]) == 0
        assert f"Uploaded to {hub.url}/me/head" in capsys.readouterr().out
        here = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
        assert hub.created == {"me/head": here} and {"README.md", "config.json", "model.safetensors"} <= set(here)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main([*words, str(tmp_path / "gone")]) == 2  # the hub is gone, the directory is complete
    assert "hf upload me/head" in capsys.readouterr().err and (tmp_path / "gone" / "README.md").exists()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert main([*words, str(tmp_path / "never")]) == 2 and not (tmp_path / "never").exists()


def test_a_head_with_a_bias_of_fc_is_refused_with_the_reason(tiny_target, tmp_path):
    lm = load_lm(str(tiny_target))
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(lm.config, fc_bias=True))
    save_head(tmp_path / "head", head, {"target": lm.info.identity}, "card")
    config = ExportConfig(format="vllm", head=tmp_path / "head", output=tmp_path / "out", target=str(tiny_target))
    with pytest.raises(InputError, match=r"fc.*bias.*drop"):
        export(config)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_imported_head_is_exported_again_without_naming_its_target(exported, tiny_target, tmp_path):
    import_head(ImportConfig(directory=str(exported("sglang")), target=str(tiny_target), output=tmp_path / "head"))
    config = ExportConfig(format="vllm", head=tmp_path / "head", output=tmp_path / "out", license="apache-2.0")
    assert export(config) == 0
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(exported("vllm") / "model.safetensors").keys()
    )
    assert "license: apache-2.0" in (tmp_path / "out" / "README.md").read_text()


def test_a_head_is_only_checked_on_its_own_target(eagle_dir, tmp_path):
    from tiny_models import tiny_llama_dir

    other = tiny_llama_dir(tmp_path / "other", seed=5, layers=2, hidden=48)
    with pytest.raises(InputError, match="trained for another model"):
        export(ExportConfig(format="vllm", head=eagle_dir, output=tmp_path / "out", target=str(other)))
