"""A training that starts from trained weights: these are best/ until a validation is better."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import run_on_ranks
from safetensors.torch import load_file
from tiny_configs import random_model, tiny_config
from trainings import Clock, config, losses
from worlds import tiny_tokenizer

import draftsmith
from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import load_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.stitch import mtp_state, stitch
from draftsmith.modules.types import InputError
from draftsmith.train import callbacks
from draftsmith.train.checkpoints import FOLDER, all_in, step_of
from draftsmith.train.command import run
from draftsmith.train.config import TrainAcceptanceConfig, drafter_config
from draftsmith.train.module import LitDrafter
from draftsmith.train.optimizers import TimeLimit, lr_share

# Steps that make a head worse, or leave it as good as it was; only the last one is validated.
HARM: dict[str, Any] = {"lr": 0.3, "max_steps": 3, "val_every": 100, "batch_size": 8, "loggers": ("csv",)}
TIE = HARM | {"lr": 1e-12}


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def fitted(head: Any, target: Any, rows: Any, settings: Any) -> Path:
    """Train a head as a script does."""
    return draftsmith.fit(LitDrafter(head, target, settings), draftsmith.HeadDataModule(rows, None, settings))


def qwen(root: Path, ships: bool) -> Path:
    """Write a Qwen3.5, with an MTP module in its files or without."""
    tokenizer = tiny_tokenizer()
    model = random_model(tiny_config("qwen3_5_text", vocab_size=len(tokenizer), max_position_embeddings=160))
    model.save_pretrained(root / "plain")
    tokenizer.save_pretrained(root / "plain")
    if not ships:
        return root / "plain"
    plain, target = Checkpoint(root / "plain"), root / "target"
    target.mkdir()
    stitch(plain, target, MtpHead(MtpHead.new_config(MtpSettings(), plain.shape)).state_dict())
    return target


def shipped_module(artifacts: Any, root: Path) -> tuple[Any, Path]:
    """Train on from the module in the target's files, which no option names."""
    target, settings = load_lm(str(qwen(root, True))), draftsmith.settings("mtp", output=root / "run", **TIE)
    rows = [{"input_ids": torch.arange(5, 25) + n, "loss_mask": torch.arange(20) > 6} for n in range(16)]
    best = fitted(draftsmith.new_head(settings, target), target, rows, settings)
    return mtp_state(Checkpoint(root / "target")), best


def loaded_head(artifacts: Any, root: Path) -> tuple[Any, Path]:
    """Train on a head that a script has loaded."""
    path = run(config(artifacts, root / "before", tau_prompts=0, max_steps=40)).with_name("last")
    head, target = load_head(path).requires_grad_(True).train(), load_lm(str(artifacts.target))
    settings = draftsmith.settings("eagle", output=root / "run", tau_prompts=0, **HARM)
    return weights_of(path), fitted(head, target, str(artifacts.features), settings)


def draft_model(artifacts: Any, root: Path) -> tuple[Any, Path]:
    named = {"data": artifacts.responses, "target": str(artifacts.target), "init": str(artifacts.draft)}
    best = run(drafter_config("draft")(output=root / "run", **named, **TIE))
    before, after = weights_of(artifacts.draft), weights_of(best)
    return {name: tensor for name, tensor in before.items() if name in after}, best


def acceptance_head(artifacts: Any, root: Path) -> tuple[Any, Path]:
    named = {"data": artifacts.acceptance, "head": str(artifacts.draft), "val_share": 0.25}
    start = run(TrainAcceptanceConfig(output=root / "before", **named, **HARM | {"lr": 1e-3}))
    return weights_of(start), run(TrainAcceptanceConfig(output=root / "run", init=start, **named, **HARM))


@pytest.mark.parametrize("train", [shipped_module, loaded_head, draft_model, acceptance_head])
def test_weights_that_nothing_later_beats_are_kept_bit_for_bit(artifacts, tmp_path, capsys, train):
    begun, best = train(artifacts, tmp_path)
    kept = weights_of(best)
    assert begun and all(torch.equal(kept[name], tensor) for name, tensor in begun.items())
    steps = [json.loads((tmp_path / "run" / name / "manifest.json").read_text())["step"] for name in ("best", "last")]
    finished = json.loads((tmp_path / "run" / "training.json").read_text())
    assert steps == [0, 3] and finished["best"]["step"] == 0
    assert "no validation was better than the head it began with (" in capsys.readouterr().out
    assert "0 steps" in (best / "README.md").read_text()


@pytest.mark.parametrize(("ships", "lr"), [(True, 2e-5), (False, 1e-4)])
def test_a_trained_module_has_a_lower_rate_than_a_new_one(artifacts, tmp_path, monkeypatch, ships, lr):
    """As the command resolves it, before anything is loaded, and in a script."""
    target = qwen(tmp_path, ships)
    settings = drafter_config("mtp")(data=artifacts.responses, target=str(target), output=tmp_path / "run")
    monkeypatch.setattr("draftsmith.train.command.train", lambda config, *_: config)
    assert run(settings).lr == lr and run(dataclasses.replace(settings, lr=1e-3)).lr == 1e-3
    lm = load_lm(str(target))
    assert LitDrafter(draftsmith.new_head(settings, lm), lm, settings).config.lr == lr


@pytest.fixture(scope="module")
def start(artifacts, tmp_path_factory) -> str:
    """A head that training with HARM makes worse by every metric."""
    return str(run(config(artifacts, tmp_path_factory.mktemp("start") / "run", tau_prompts=0, max_steps=40)))


def test_a_signal_in_the_first_validation_leaves_it_for_the_resumed_run(artifacts, tmp_path, monkeypatch, start):
    settings = config(artifacts, tmp_path / "run", init=start, **HARM)
    true = LitDrafter.validation_step

    def interrupted(self: Any, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        true(self, *args)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        patch.setattr(LitDrafter, "validation_step", interrupted)
        run(settings)
    assert [step_of(path) for path in all_in(tmp_path / "run" / FOLDER)] == [0]
    best = run(settings)
    assert all(torch.equal(tensor, weights_of(Path(start))[name]) for name, tensor in weights_of(best).items())
    assert len(losses(tmp_path / "run", "val/top1")) == 2


@pytest.mark.parametrize(("before", "after"), [(3, 2), (0, 3), (3, 0)])
def test_a_run_resumed_with_other_prompts_compares_what_both_have(artifacts, tmp_path, start, before, after):
    settings = config(artifacts, tmp_path / "run", init=start, **HARM, keep=9, tau_prompts=before)
    run(settings)
    for path in all_in(tmp_path / "run" / FOLDER)[1:]:
        shutil.rmtree(path)
    (tmp_path / "run" / "training.json").unlink()
    # Tensors and plain values, as a resumed training reads them.
    state = torch.load(all_in(tmp_path / "run" / FOLDER)[0] / "state.pt", weights_only=True)
    # Of these prompts it says nothing.
    if before and after:
        state["train_state"]["best"]["tau"] = 1e-3
    best = run(dataclasses.replace(settings, tau_prompts=after))
    assert json.loads((best / "manifest.json").read_text())["step"] == 0


def test_a_start_that_cannot_be_saved_ends_the_run(artifacts, tmp_path, monkeypatch, start):
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(callbacks, "save_head", full)
    with pytest.raises(InputError, match=r"output: found no room for best/ \(No space left"):
        run(config(artifacts, tmp_path / "run", init=start, **HARM))


def test_a_training_by_the_clock_names_no_number_of_steps_before_the_first(artifacts, tmp_path, capsys, start):
    run(config(artifacts, tmp_path / "run", init=start, **HARM | {"max_steps": 0, "minutes": 0.02}))
    said = capsys.readouterr().err
    assert re.search(r"^step 0: ", said, re.M) and re.search(r"^step [1-9]\d*/\d{1,6}: ", said, re.M)


def test_a_validation_before_the_first_step_does_not_end_the_warm_up():
    clock = Clock()
    limit = TimeLimit(60.0, since=clock(), clock=clock)
    limit.begin()
    clock.now += 30
    limit.pause(30)
    shares = []
    for done in range(20):
        total = limit.total_steps(done)
        shares.append(lr_share(done, total, "cosine", 0.1))
        clock.now += 1
    # Of 3,500 steps these are the first, of which a tenth warms up.
    assert shares[-1] < 0.1


@pytest.mark.slow
def test_two_ranks_keep_the_start(artifacts, tmp_path, start):
    options = HARM | {"data": str(artifacts.features), "target": str(artifacts.target), "init": start, "tau_prompts": 3}
    options |= {"val_share": 0.25, "device": "cpu", "num_threads": 1, "output": str(tmp_path / "run")}
    said, _ = run_on_ranks([{"head": "eagle", "config": options}], 2, tmp_path)
    assert "no validation was better than the head it began with (tau" in said
    kept = weights_of(tmp_path / "run" / "best")
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights_of(Path(start)).items())
