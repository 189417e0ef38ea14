"""`draftsmith refresh`: a head onto a target that has changed, measured before and after; killed and continued."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from tiny_models import tiny_llama_dir

from draftsmith.data import prompts, responses
from draftsmith.data.heads.directory import head_config, kind_at, load_head, save_head
from draftsmith.data.heads.moved import check_fits, move_head
from draftsmith.data.models.hub import resolve_model
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.manifest import file_sha256
from draftsmith.eval.refresh import RefreshConfig, overall
from draftsmith.launch import refresh
from draftsmith.launch.steps import PipelineStep
from draftsmith.modules.drafters.eagle3.head import Eagle3Head, Eagle3Settings
from draftsmith.modules.types import InputError

TEMPERATURES, NUM_PROMPTS = [0.0, 1.0], 4


def changed(source: Path, output: Path, scale: float = 0.05) -> Path:
    """A target whose weights are disturbed, as a fine-tuning would."""
    shutil.copytree(source, output)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.data.add_(scale * weight.data.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(output)
    return output


@pytest.fixture(scope="module")
def world(artefacts, eagle_run, tmp_path_factory) -> SimpleNamespace:
    """An EAGLE head, the target that its own has become, what that answers, and prompts that it was not asked."""
    root = tmp_path_factory.mktemp("refresh")
    target = changed(artefacts.target, root / "target")
    texts = artefacts.responses.parent / "prompts"
    asked = responses.ResponsesConfig(texts, str(target), root / "answers", max_new_tokens=16, num_threads=1)
    responses.run(asked)
    held_out = root / "held-out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"def sub{i}(b):"}) + "\n" for i in range(NUM_PROMPTS)))
    return SimpleNamespace(root=root, head=eagle_run / "best", target=target, data=root / "answers", prompts=held_out)


def settings(world, name: str, **changes: Any) -> RefreshConfig:
    given = {"head": world.head, "target": str(world.target), "data": world.data, "prompts": str(world.prompts),
             "output": world.root / name, "k": 3, "max_new_tokens": 8, "max_steps": 6, **changes}  # fmt: skip
    return RefreshConfig(**given)


def read(output: Path, name: str = "refresh.json") -> dict[str, Any]:
    return json.loads((output / name).read_text())


@pytest.fixture(scope="module")
def refreshed(world) -> Path:
    return refresh.run(settings(world, "whole"))


def test_the_old_head_is_the_head_with_another_identity(world, refreshed):
    was, now = (load_file(path / "model.safetensors") for path in (world.head, refreshed / "old"))
    assert was.keys() == now.keys() and all(torch.equal(was[name], now[name]) for name in was)
    target = load_lm(str(world.target))
    assert head_config(refreshed / "old")["target"] == target.info.identity != head_config(world.head)["target"]
    with pytest.raises(InputError, match="another model"):
        load_head(world.head, target)
    load_head(refreshed / "old", target)
    assert str(world.head) in (refreshed / "old" / "README.md").read_text()


def test_the_training_is_the_heads_own_with_the_recipe(world, refreshed):
    own, now = (read(path, "manifest.json") for path in (world.head, refreshed / "training" / "best"))
    assert now["inputs"]["init"] == file_sha256(world.head / "model.safetensors")
    assert now["target"] == load_lm(str(world.target)).info.identity
    config, before = now["config"], own["config"]
    assert config["lr"] == pytest.approx(0.5 * before["lr"]) and config["max_steps"] == 6
    kept = ("batch_size", "token_weight", "feature_weight", "val_share", "optimizer", "unroll")
    assert {name: config[name] for name in kept} == {name: before[name] for name in kept}
    assert (config["schedule"], config["unroll_after"]) == ("linear", 0.0)  # of configs/refresh.yaml
    # A head that was trained on already keeps its rate; one of which nothing is known takes its kind's.
    again = refresh.recipe_of(settings(world, "x", head=refreshed / "training" / "best"), "eagle")
    assert again["lr"] == config["lr"]
    assert refresh.recipe_of(settings(world, "x", head=refreshed / "old"), "eagle")["lr"] == config["lr"]


def test_the_figures_are_those_of_both_runs(world, refreshed):
    found = read(refreshed)
    assert [row["temperature"] for row in found["modes"]] == TEMPERATURES and found["method"] == "eagle:k=3"
    for row in found["modes"]:
        for name in ("before", "after"):
            table = pq.read_table(refreshed / name / "prompts.parquet").to_pylist()
            own = [r for r in table if (r["method"], r["temperature"]) == ("eagle:k=3", row["temperature"])]
            assert len(own) == row["prompts"] == NUM_PROMPTS
            tokens, calls = (sum(r[key] for r in own) for key in ("tokens", "num_target_calls"))
            assert row[f"tau_{name}"] == tokens / calls
            rounds = [step for r in own for step in r["rounds"]]
            kept = sum(step["num_accepted"] > 0 for step in rounds)
            assert row["accepted"][0][name] == kept / sum(step["num_drafted"] > 0 for step in rounds)
            ar = [r for r in table if (r["method"], r["temperature"]) == ("ar", row["temperature"])]
            if row["temperature"] == 0:  # it is lossless
                assert [r["token_ids"] for r in ar] == [r["token_ids"] for r in own]
    assert found["verdict"] == overall([row["verdict"] for row in found["modes"]]) == "cannot tell"
    assert found["recommended"] == str(refreshed / "old") and kind_at(found["recommended"]) == "eagle"
    cost = found["cost"]
    assert cost["steps"] == 6 and cost["cpu_s"] > 0 and cost["tokens"] > 6 * 8 * 16


def test_a_finished_refresh_says_it_again_and_does_nothing(world, refreshed, capsys):
    before = {path: path.stat().st_mtime_ns for path in refreshed.rglob("*.*") if path.is_file()}
    refresh.run(settings(world, "whole"))
    said = capsys.readouterr().out
    assert "Cannot tell with so few prompts (4" in said and "Cost: 6 steps" in said and "Recommended" in said
    assert before == {path: path.stat().st_mtime_ns for path in refreshed.rglob("*.*") if path.is_file()}
    with pytest.raises(InputError, match=r"output: found .*begun with max_steps 6"):
        refresh.run(settings(world, "whole", max_steps=7))


@pytest.mark.parametrize("verdict", ["worth it", "worse", "not worth it", "cannot tell"])
def test_only_a_head_that_is_worth_it_is_recommended(world, refreshed, monkeypatch, capsys, verdict):
    rows = [{**row, "verdict": verdict} for row in read(refreshed)["modes"]]
    monkeypatch.setattr("draftsmith.eval.refresh.gains", lambda *_: rows)
    config = settings(world, "whole")
    found = refresh.outcome(config, "eagle:k=3", set())
    place = "training/best" if verdict == "worth it" else "old"
    assert found["verdict"] == verdict and found["recommended"] == str(refreshed / place)
    refresh.report(found, config)
    said = capsys.readouterr().out
    assert ("keep the head as it was" in said.lower()) == (verdict != "worth it") and f"{place}." in said


def test_the_cost_adds_up_over_starts_and_is_unknown_of_another_command(tmp_path, monkeypatch):
    step, file = PipelineStep("Training", ("train", "eagle"), tmp_path / "training.json"), tmp_path / "cost.json"

    def work(step: PipelineStep) -> None:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        if not file.exists() and not step.done.exists():
            raise SystemExit(143)
        step.done.write_text("{}")

    monkeypatch.setattr(refresh, "execute", work)
    with pytest.raises(SystemExit):
        refresh.train(step, file)
    first = refresh.read_cost(file)
    assert first["cpu_s"] >= 0.05 and not first["finished"]
    refresh.train(step, file)
    whole = refresh.read_cost(file)
    assert whole["finished"] and whole["cpu_s"] >= first["cpu_s"] + 0.05 and whole["wall_s"] >= first["wall_s"] + 0.05
    refresh.train(step, file)  # it is done
    assert refresh.read_cost(file) == whole
    file.unlink()
    refresh.train(step, file)
    assert not file.exists() and not refresh.read_cost(file)["finished"]


def killed(config: RefreshConfig) -> None:
    """Dies in the training, once its first checkpoint is there."""
    import draftsmith.train.callbacks as callbacks

    real = callbacks.BetweenSteps._save_last

    def die(self: Any, *args: Any) -> None:
        real(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    callbacks.BetweenSteps._save_last = die
    refresh.run(config)


def test_a_killed_refresh_goes_on_and_comes_to_the_same(world, refreshed, tmp_path):
    recipe = yaml.safe_load((refreshed / "recipe.yaml").read_text())
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "save_every": 3}))  # all else as it was
    config = settings(world, "killed", recipe=tmp_path / "recipe.yaml", max_steps=0)
    process = multiprocessing.get_context("fork").Process(target=killed, args=(config,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (config.output / "before" / "results.json").exists() and not (config.output / "refresh.json").exists()
    assert [path.name for path in (config.output / "training" / "checkpoints").iterdir()] == ["step-00000003"]
    measured = (config.output / "before" / "results.json").stat().st_mtime_ns
    refresh.run(config)
    assert (config.output / "before" / "results.json").stat().st_mtime_ns == measured
    whole, own = (load_file(path / "training" / "last" / "model.safetensors") for path in (refreshed, config.output))
    assert all(torch.equal(whole[name], own[name]) for name in whole)
    for one, other in zip(read(refreshed)["modes"], read(config.output)["modes"], strict=True):
        same = ("tau_before", "tau_after", "gain", "gain_ci95", "accepted", "verdict")
        assert {name: one[name] for name in same} == {name: other[name] for name in same}


def test_prompts_that_the_data_answers_are_left_out(world, artefacts, tmp_path):
    held_out, trained_on = world.prompts.read_text(), json.dumps({"prompt": "def add1(a, b): a + "}) + "\n"
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(trained_on + held_out + json.dumps({"prompt": "too long " * 300}) + "\n")  # which the bench names
    config = settings(world, "mixed", prompts=str(mixed), temperatures="0", max_steps=1, max_new_tokens=4)
    found = read(refresh.run(config))
    assert found["prompts_left_out"] == 1 and found["modes"][0]["prompts"] == NUM_PROMPTS
    mixed.write_text(trained_on)
    with pytest.raises(InputError, match="prompts: found 1, all of which are in the data"):
        refresh.run(settings(world, "seen", prompts=str(mixed)))


def test_an_eagle3_head_of_the_embedded_target(tmp_path):
    """Random weights, and a target with disturbed ones: everything runs on the real shapes. The lm_head, which was
    never trained, is the new target's afterwards."""
    source = Path(resolve_model("embedded:target"))
    target = changed(source, tmp_path / "target", scale=0.01)
    lm = load_lm("embedded:target")
    head = Eagle3Head(Eagle3Head.shape(Eagle3Settings(draft_vocab=0), lm.config))
    head.use_draft_vocabulary(head.d2t, lm.model.lm_head.weight)
    of_lm = {"target": lm.info.identity, "of_target": ["lm_head.weight"]}
    save_head(tmp_path / "head", head, of_lm, "card")
    columns = {"columns": "prompt=prompt,answer=answer", "supervised": True, "split": "train", "limit": 12}
    texts = prompts.PromptsConfig("embedded:prompts", str(target), tmp_path / "texts", task="sort_imports", **columns)
    config = RefreshConfig(
        tmp_path / "head", str(target), prompts.run(texts), "embedded:prompts", tmp_path / "out", split="test", limit=2,
        keep_tasks="sort_imports", max_new_tokens=6, max_steps=1, k=2, temperatures="1",
    )  # fmt: skip
    found = read(refresh.run(config))
    assert found["method"] == "eagle3:k=2" and found["modes"][0]["tau_before"] >= 1
    assert found["training"]["lr"] == pytest.approx(0.5 * 1e-4)  # of its kind: nothing is known of its own training
    assert "passes_after" in found["training"] and "unroll_after" not in found["training"]
    old, best = (load_head(tmp_path / "out" / name) for name in ("old", "training/best"))
    assert torch.equal(old.lm_head.weight, lm.model.lm_head.weight)
    assert torch.equal(best.lm_head.weight, load_lm(str(target)).model.lm_head.weight)
    assert not torch.equal(best.lm_head.weight, old.lm_head.weight)
    for name in ("old", "training/best"):
        assert read(tmp_path / "out" / name, "manifest.json")["of_target"] == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden": 16}, "head: found .* of width 32, expected width 16"),
        ({"vocab": 301}, "head: found .* of vocabulary"),
        ({"layers": 1}, "head: found .* reads layers 0, 1, 2, expected layers up to 1"),
    ],
)
def test_a_target_that_the_head_cannot_draft_for_is_refused(tmp_path, changes, expected):
    was = load_lm(str(tiny_llama_dir(tmp_path / "was", layers=3)))
    head = Eagle3Head(Eagle3Head.shape(Eagle3Settings(draft_vocab=0, layers=(0, 1, 2)), was.config))
    save_head(tmp_path / "head", head, {"target": was.info.identity}, "card")
    other = str(tiny_llama_dir(tmp_path / "other", **{"layers": 3, **changes}))
    with pytest.raises(InputError, match=expected):
        move_head(tmp_path / "head", load_lm(other), other, tmp_path / "moved")
    assert not (tmp_path / "moved").exists()


def test_a_target_of_another_tokenizer_is_refused(world, tmp_path):
    other = Path(shutil.copytree(world.target, tmp_path / "other"))
    file = json.loads((other / "tokenizer.json").read_text())
    first, second = [token for token, number in file["model"]["vocab"].items() if number in (100, 101)]
    file["model"]["vocab"] |= {first: file["model"]["vocab"][second], second: file["model"]["vocab"][first]}
    (other / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(InputError, match=r"head: found .* trained with another tokenizer"):
        check_fits(world.head, load_lm(str(other)), str(other))
