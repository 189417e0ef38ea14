"""A plan counts what the training does, and stops one that the disk is too small for."""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from worlds import tiny_llama_dir

import draftsmith
from draftsmith.data.store.datasets import pack_features
from draftsmith.launch.cli import main
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train import prepare
from draftsmith.train.command import run
from draftsmith.train.config import Strategy, TrainDrafterConfig, drafter_config
from draftsmith.train.plan import (
    FLOAT32,
    parts_in,
    plan_of,
    rank_memory,
    training_hours,
    verdict,
)
from draftsmith.train.tracking import Telemetry


def eagle_config(artifacts, output: Path, **changes) -> TrainDrafterConfig:
    settings = {"data": artifacts.responses, "epochs": 2, "batch_size": 6, "tau_prompts": 0, "loggers": ("csv",)}
    return drafter_config("eagle")(target=str(artifacts.target), output=output, **{**settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [{}, {"val_share": 0.3, "seed": 3}, {"tokens_per_batch": 128, "max_length": 40}, {"max_steps": 5, "ttt_steps": 2}],
    ids=["batches", "held out", "pieces", "steps"],
)
def test_an_eagle_plan_counts_what_the_training_does(artifacts, tmp_path, changes):
    config = eagle_config(artifacts, tmp_path / "run", **changes)
    plan = plan_of(config)
    module, data = prepare.prepare(config)
    assert plan.trained == sum(p.numel() for p in module.head.parameters())
    assert (plan.steps, plan.steps_per_epoch) == (data.total_steps, data.order.steps_per_epoch)
    assert sorted(plan.documents.lengths) == sorted(data.train.lengths)
    data.trainer = SimpleNamespace(datamodule=data, global_step=0)
    parts = list(chain.from_iterable(data.train_dataloader()))[: plan.steps_per_epoch]
    tokens = [part.data.input_ids.numel() for part in parts]
    assert plan.part_tokens >= max(tokens)


@pytest.mark.parametrize(("family", "extra"), [("llama", {"tie_word_embeddings": True}), ("qwen3", {})])
def test_frozen_parameters_equal_the_loaded_models(tmp_path, family, extra):
    directory = tiny_llama_dir(tmp_path / "model", family=family, **extra)
    config = drafter_config("eagle")(target=str(directory), data=tmp_path / "none", output=tmp_path / "run")
    loaded = load_lm(str(directory), loader="hf").model
    assert plan_of(config).frozen == sum(p.numel() for p in loaded.parameters())


def test_planned_checkpoints_are_as_large_as_written_ones(artifacts, tmp_path):
    """Files hold names, positions and settings beside their tensors: some kB."""
    config = eagle_config(artifacts, tmp_path / "run", max_steps=3, save_every=1, keep=2, loggers=("csv",))
    plan = plan_of(config)
    run(config)
    kept = list((config.output / "checkpoints").glob("*/state.pt"))
    assert len(kept) == 2
    for file in kept:
        assert plan.checkpoint_bytes < file.stat().st_size < plan.checkpoint_bytes + 32_000
    written = sum(f.stat().st_size for f in config.output.rglob("*") if f.suffix in (".pt", ".safetensors"))
    assert written < plan.disk_bytes


def test_a_disk_that_is_too_small_stops_a_training_before_it_reads_the_model(artifacts, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=2**26 + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    output = tmp_path / "run"
    monkeypatch.setattr(prepare, "load_lm", None)
    config = eagle_config(artifacts, output, max_steps=1)
    with pytest.raises(InputError, match=r"output: found 67,109,864 bytes free.*--keep"):
        run(config)
    assert not output.exists()


def test_the_command_prints_the_memory_of_the_strategy(artifacts, capsys):
    words = ["train", "eagle", "--plan", "--output", "none", "--config", "eagle-embedded", "--devices", "4"]
    words += ["--strategy", "deepspeed_stage_2"]
    words += ["--target", str(artifacts.target), "--data", str(artifacts.responses)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "with deepspeed_stage_2" in out and "optimizer" in out
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["world"] == 4 and plan["documents"]["source"] == str(artifacts.responses)
    assert plan["memory"]["libraries"] > 0 and plan["memory"]["optimizer"] < plan["process"]["optimizer"]


def test_a_plan_counts_the_flops_of_its_formula_and_of_the_steps_taken(artifacts, tmp_path):
    """6 for each weight and token, of the fusion 4, whose inputs need no gradient; 6 for each weight of lm_head and
    token that counts: its logits, the target's, and a gradient of the inputs."""
    config = eagle_config(artifacts, tmp_path / "run", data=artifacts.features, max_steps=2, batch_size=12)
    plan = plan_of(config)
    module, data = prepare.prepare(config)
    layers, fused = (sum(w.numel() for w in part.parameters() if w.ndim > 1) for part in (module.head, module.head.fc))
    vocabulary = module.target.info.vocab_size * module.target.info.hidden_size
    tokens = sum(plan.documents.lengths) / plan.steps_per_epoch
    products = tokens * (6 * layers - 2 * fused + 6 * vocabulary * plan.documents.loss_share)
    assert products < plan.step_flops < 1.35 * products  # attention, of texts longer than the head is wide
    module.telemetry = Telemetry(count_flops=True)
    draftsmith.fit(module, data)
    # On a CPU without attention, whose kernel torch's counter does not know, and with padding.
    step = module.logged["cost/tflops"] * 1e12 / module.logged["cost/steps_per_s"]
    assert 0.65 * plan.step_flops < step < plan.step_flops


def test_block_drafters_and_those_whose_features_are_read_in_the_step_are_counted(artifacts, tmp_path):
    """A target that is here reads the text: 2 for each weight and token."""
    data = {"data": artifacts.responses, "target": str(artifacts.target), "output": tmp_path, "layers": (0, 1)}
    eagle3, dspark = (plan_of(drafter_config(kind)(**data)) for kind in ("eagle3", "dspark"))
    served = plan_of(drafter_config("eagle3")(**data, server="http://127.0.0.1:9"))
    assert dspark.step_flops > 0
    tokens = sum(served.documents.lengths) / served.steps_per_epoch
    read = 2 * tokens * (eagle3.frozen - served.frozen)
    assert read < eagle3.step_flops - served.step_flops < 1.35 * read


def test_without_data_a_plan_states_its_assumption(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    shape = {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 4096}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--target", str(tmp_path), "--batch-size", "10", "--epochs", "1", "--output", str(tmp_path / "head")]
    words += ["--plan-tflops", "0.0001"]
    assert main(["train", "eagle3", "--plan", *words, "--data", str(tmp_path / "none")]) == 0
    assert not (tmp_path / "head").exists()
    out = " ".join(capsys.readouterr().out.split())
    assert f"assumed: 60,000 samples of 512 tokens, as {tmp_path / 'none'} does not exist" in out and "e+" not in out
    assert "5,700 steps" in out and f"{57_000 * 512:,} tokens" in out
    assert main(["train", "eagle3", "--plan", *words]) == 0
    assert "assumed: 60,000 samples of 512 tokens:" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("strategy", list(get_args(Strategy))[2:])
def test_what_zero_shares_out_adds_up_over_the_ranks(strategy):
    """Rajbhandari et al. 2020, figure 1: each stage shares out one more of optimizer state, gradients, weights."""
    whole, ranks = FLOAT32 * 1000, 4
    process = {"weights": whole, "gradients": whole, "optimizer": 2 * whole, "activations": 100}
    memory = rank_memory(process, strategy, ranks)
    stage, host = int(strategy.split("_")[2]), memory["host memory"]
    # A master copy of the weights and both averages.
    assert ranks * (host - whole // ranks if host else memory["optimizer"]) == 3 * whole
    # One bucket holds these few gradients.
    assert (memory["gradients"] - whole - (stage < 3) * whole) * (ranks if stage >= 2 else 1) == whole
    assert memory["weights"] == (whole + whole // ranks if stage == 3 else whole)
    assert memory["peak"] == sum(memory[part] for part in process)


@pytest.mark.parametrize(
    ("kind", "num_layers", "window"),
    [("eagle3", 1, 0), ("eagle3", 2, 256), ("dflash", 2, 0), ("dflash", 2, 256), ("dflash", 3, 256)],
)
@pytest.mark.parametrize("span", [None, (512, 1024)])
def test_the_memory_of_a_loss_is_what_autograd_keeps(kind, num_layers, window, span, tmp_path):
    """Compare two documents together, and the second half of the first one."""
    target = load_lm(str(tiny_llama_dir(tmp_path, layers=8, hidden=128, max_position_embeddings=1024)))
    settings = draftsmith.settings(kind, output=tmp_path, window=window, num_layers=num_layers)
    head, lengths = draftsmith.new_head(settings, target), (1024, 600)
    if num_layers == 3:
        head.config = dataclasses.replace(head.config, full_layers=(0,))
    ids = [torch.arange(length) % 97 for length in lengths]
    batch = pack_features([{"input_ids": own, "loss_mask": torch.arange(len(own)) % 50 >= 20} for own in ids])
    size = 128 * len(head.loss_layers(head.config, 8))
    batch = dataclasses.replace(batch, features=torch.randn(1, sum(lengths), size))
    step = TrainStep(1, 1, lengths, (0, 1), span=span)
    there = [batch.features, *target.model.parameters(), *head.parameters(), *head.buffers()]
    known, kept = {own.untyped_storage().data_ptr() for own in there}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # alive, so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head.loss(batch, target, settings, step)
    parts = parts_in(lengths, span or (0, sum(lengths)))
    planned, _ = head.loss_memory(settings, parts, 0.6, FLOAT32)
    assert planned == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.1)


def test_fine_tuning_is_planned_with_the_heads_own_shape(artifacts, tmp_path):
    """The head's sizes differ from the target's, and its context is shorter than the documents."""
    target = load_lm(str(artifacts.target))
    layer = dataclasses.replace(target.config, intermediate_size=24, num_kv_heads=4, num_layers=2, max_position=40)
    head = save_head(tmp_path / "head", EagleHead(EagleConfig(layer, fc_bias=True)), {}, "card")
    config = eagle_config(artifacts, tmp_path / "run", init=str(head))
    plan = plan_of(config)
    module, data = prepare.prepare(config)
    assert plan.trained == sum(p.numel() for p in module.head.parameters())
    assert sorted(plan.documents.lengths) == sorted(data.train.lengths) and max(plan.documents.lengths) <= 40


def test_a_plan_says_whether_a_rank_fits_and_what_would(artifacts, tmp_path):
    config = eagle_config(artifacts, tmp_path / "run")
    plan = plan_of(config)
    assert verdict(plan, config).startswith("Fits: a rank needs ")  # this machine's memory
    half = plan.memory["activations"] / 2
    small = eagle_config(artifacts, tmp_path / "run", plan_gb=(plan.peak - half) / 1e9)
    assert verdict(plan, small).startswith("Does not fit: ") and verdict(plan, small).endswith("--accumulate 2.")
    assert plan_of(dataclasses.replace(config, accumulate=2)).peak < plan.peak
    none = eagle_config(artifacts, tmp_path / "run", plan_gb=1e-9)
    assert verdict(plan, none).endswith("Its weights alone are too large.")


def test_a_plan_says_the_hours_at_a_speed_that_is_given(artifacts, tmp_path):
    config = eagle_config(artifacts, tmp_path / "run", plan_tflops=0.001, devices=4)
    plan = plan_of(config)
    hours, sentence = training_hours(plan, config)
    assert hours == pytest.approx(plan.step_flops * plan.steps / 4 / 1e9 / 3600) and "1 GFLOP/s" in sentence
    assert training_hours(plan, dataclasses.replace(config, plan_tflops=None))[0] is None
    assert training_hours(plan, dataclasses.replace(config, minutes=30.0, epochs=10))[0] == 0.5
