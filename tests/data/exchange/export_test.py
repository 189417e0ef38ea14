"""Exports: what they refuse, what they leave, and that an exported head is worth what the trained one is."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from slow_eagle import Counts, SlowEagle

from draftsmith.data.exchange.export import ExportConfig
from draftsmith.data.exchange.export import run as export
from draftsmith.data.exchange.import_head import ImportConfig
from draftsmith.data.exchange.import_head import run as import_head
from draftsmith.data.exchange.probe import make_probes
from draftsmith.data.heads import load_head, save_head
from draftsmith.data.models import load_lm
from draftsmith.modules.decoding.loop import generate
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.heads.eagle import EagleConfig, EagleDrafter, EagleHead
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams

K, NEW_TOKENS = 3, 40


def tau(target, head, prompts) -> tuple[list[list[int]], float]:
    """Answers, and emitted tokens per target call, of the decoder that ships."""
    counts, answers = Counts(), []
    for prompt in prompts:
        drafter = EagleDrafter(head, target, FixedLength(K), len(prompt) + NEW_TOKENS + K + 2)
        made = generate(target, drafter, prompt, SamplingParams(), NEW_TOKENS, TorchSource(0))
        answers.append(made.tokens)
        counts.tokens += made.trace.num_tokens
        counts.target_calls += made.trace.num_target_calls
    return answers, counts.tau


@pytest.fixture(scope="module")
def prompts(tiny_target):
    lm = load_lm(str(tiny_target))
    return [probe.ids[: probe.start].tolist() for probe in make_probes(str(tiny_target), lm, lm.info.max_position)]


@pytest.mark.parametrize("format", ["eagle", "vllm", "sglang"])
def test_tau_of_an_exported_and_imported_head_is_the_originals(
    exported, eagle_dir, tiny_target, prompts, tmp_path, format
):
    import_head(ImportConfig(directory=str(exported(format)), target=str(tiny_target), output=tmp_path / "head"))
    target = load_lm(str(tiny_target))
    original, again = load_head(eagle_dir, target), load_head(tmp_path / "head", target)
    assert original.config == again.config
    assert tau(target, original, prompts) == tau(target, again, prompts)


@pytest.mark.parametrize("format", ["eagle", "vllm"])
def test_tau_is_that_of_a_plain_loop_over_transformers_and_the_exported_directory(
    exported, eagle_dir, tiny_target, prompts, format
):
    target = load_lm(str(tiny_target))
    answers, ours = tau(target, load_head(eagle_dir, target), prompts)
    slow, counts = SlowEagle(tiny_target, exported(format)), Counts()
    eos = set(target.info.eos_ids)
    assert [slow.decode(prompt, K, NEW_TOKENS, eos, counts) for prompt in prompts] == answers
    assert counts.tau == ours > 1.2  # drafts are accepted, and others are not


def test_weights_may_be_written_in_another_type(eagle_dir, tmp_path):
    from safetensors.torch import load_file

    assert export(ExportConfig(format="vllm", head=eagle_dir, output=tmp_path / "out", weights="bfloat16")) == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_the_config_names_the_type_of_the_target_which_servers_run_the_head_in(
    eagle_dir, tiny_target, tmp_path, capsys
):
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
    assert "runs head and target in bfloat16" in " ".join(capsys.readouterr().out.split())


def test_an_export_has_a_card_with_the_command_that_serves_it(exported):
    card = (exported("vllm") / "README.md").read_text()
    assert "vllm serve" in card and '"method": "eagle"' in card
    assert "at most 0.0001" in card  # the check that was run


def test_an_existing_output_is_refused(exported, eagle_dir):
    with pytest.raises(InputError, match=r"output: found .* which exists"):
        export(ExportConfig(format="vllm", head=eagle_dir, output=exported("vllm")))


def test_a_head_with_a_bias_of_fc_is_refused_with_the_reason(tiny_target, tmp_path):
    lm = load_lm(str(tiny_target))
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(lm.config, fc_bias=True))
    save_head(tmp_path / "head", head, {"target": lm.info.identity}, "card")
    config = ExportConfig(format="vllm", head=tmp_path / "head", output=tmp_path / "out", target=str(tiny_target))
    with pytest.raises(InputError, match=r"fc.*bias.*drop"):
        export(config)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_eagle_head_is_no_acceptance_head(eagle_dir, tmp_path):
    with pytest.raises(InputError, match="an eagle head, expected an acceptance head"):
        export(ExportConfig(format="specdec_pp", head=eagle_dir, output=tmp_path / "out"))


def test_a_head_is_only_checked_on_its_own_target(eagle_dir, tmp_path):
    from tiny_models import tiny_llama_dir

    other = tiny_llama_dir(tmp_path / "other", seed=5, layers=2, hidden=48)
    with pytest.raises(InputError, match="trained for another model"):
        export(ExportConfig(format="vllm", head=eagle_dir, output=tmp_path / "out", target=str(other)))
