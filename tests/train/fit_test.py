"""Training as a process: killed and resumed, and stopped by signals."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import commanded, forked
from safetensors.torch import load_file
from trainings import config as drafter_settings

from draftsmith.launch.arguments import from_values
from draftsmith.modules.along import AlongDrafter
from draftsmith.modules.types import InputError
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.checkpoints import FOLDER, all_in, step_of
from draftsmith.train.command import run
from draftsmith.train.module import LitDrafter, LitHead

STEPS = 150
# What time and memory show in is not compared.
COST = "cost/"


def settings(artifacts, output: Path, **changes) -> dict[str, str]:
    base = {"data": artifacts.acceptance, "head": artifacts.draft, "output": output, "lr": 2e-3, "batch_size": 8}
    base |= {"val_share": 0.25, "val_every": 100, "save_every": 7, "log_every": 10, "loggers": "csv", "num_threads": 1}
    return {name: str(value) for name, value in {**base, "max_steps": STEPS, "device": "cpu", **changes}.items()}


def command(options: dict[str, str]) -> list[str]:
    return ["train", "acceptance", *(word for name, value in options.items() for word in (f"--{name}", value))]


def in_process(options: dict[str, Any]) -> Path:
    return run(from_values("draftsmith train acceptance", TrainAcceptanceConfig, options))


def state(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "last" / "model.safetensors")


def curve(output: Path) -> list[dict[str, str]]:
    with (output / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.startswith(COST)} for row in csv.DictReader(file)]


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Bit by bit: one thread adds up in one order."""
    assert all(torch.equal(tensor, state(theirs)[name]) for name, tensor in state(ours).items())
    best = [load_file(output / "best" / "model.safetensors") for output in (ours, theirs)]
    assert all(torch.equal(tensor, best[1][name]) for name, tensor in best[0].items())
    assert curve(ours) == curve(theirs)


def wait_for_a_checkpoint(output: Path, running: Callable[[], bool]) -> None:
    while not all_in(output / FOLDER):
        assert running()
        time.sleep(0.005)


@pytest.fixture(scope="module")
def unbroken(artifacts, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("unbroken") / "run"
    torch.set_num_threads(1)
    in_process(settings(artifacts, output))
    return output


def test_a_killed_training_goes_on_as_if_nothing_had_happened(artifacts, tmp_path, unbroken):
    options = settings(artifacts, tmp_path / "run")
    process = commanded(command(options), tmp_path / "log")
    wait_for_a_checkpoint(tmp_path / "run", process.is_alive)
    os.kill(process.pid, signal.SIGSTOP)  # it is there, and does not end before a second one has come
    with pytest.raises(InputError, match="where another process writes"):
        in_process(options)
    process.kill()
    process.join()
    assert not (tmp_path / "run" / "training.json").exists()
    in_process(options)
    assert_same_run(tmp_path / "run", unbroken)


def test_a_finished_training_says_so_and_nothing_changes(artifacts, unbroken, tmp_path, capsys):
    before = (unbroken / "training.json").stat().st_mtime_ns
    options = settings(artifacts, unbroken)
    assert in_process(options) == unbroken / "best"
    assert "already done: train" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"config.lr: 0.1, begun with .* choose another output"):
        in_process({**options, "lr": "0.1"})
    other = shutil.copytree(options["data"], tmp_path / "data")
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "seed": manifest["seed"] + 1}))
    with pytest.raises(InputError, match=r"inputs.data: \w+, begun with \w+"):
        in_process({**options, "data": str(other)})
    # A longer list is other data, too.
    with pytest.raises(InputError, match=r"inputs.data: .* \+ .*, begun with \w+"):
        in_process({**options, "data": [options["data"], f"{other}*2"]})
    assert (unbroken / "training.json").stat().st_mtime_ns == before


def test_a_run_of_joined_artifacts_resumes_with_the_same_ones_in_any_order(artifacts, tmp_path):
    other = shutil.copytree(artifacts.acceptance, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "seed": manifest["seed"] + 1}))
    listed = [str(artifacts.acceptance), f"{other}*1.5"]
    options = settings(artifacts, tmp_path / "whole", max_steps=9, save_every=4, val_every=3)
    in_process({**options, "data": listed})

    # Killed after its second checkpoint: begun again from there, with the list turned around.
    broken = shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    for path in ("training.json", "best", "last", *(f"{FOLDER}/{path.name}" for path in all_in(broken / FOLDER)[1:])):
        (shutil.rmtree if (broken / path).is_dir() else os.remove)(broken / path)
    assert step_of(all_in(broken / FOLDER)[0]) < 9
    in_process({**options, "output": str(broken), "data": listed[::-1]})
    ours, theirs = state(broken), state(tmp_path / "whole")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    recorded = json.loads((broken / "started.json").read_text())["inputs.data"]
    assert recorded.count(" + ") == 1 and recorded.count("*1.5") == 1
    for refused in (listed[:1], [listed[0], str(other)]):
        with pytest.raises(InputError, match=r"another inputs.data: .*, begun with "):
            in_process({**options, "output": str(broken), "data": refused})


def test_a_signal_saves_and_says_how_to_go_on(artifacts, tmp_path, unbroken):
    number = signal.SIGINT
    options, log = settings(artifacts, tmp_path / "run"), tmp_path / "log"
    process = commanded(command(options), log)
    wait_for_a_checkpoint(tmp_path / "run", process.is_alive)
    os.kill(process.pid, number)
    process.join()
    said = log.read_text()
    assert process.exitcode == 128 + number, said
    assert "draftsmith: finishing the step, then saving" in said and "again stops at once" in said
    assert f"{number.name}: saved step" in said and "Traceback" not in said
    assert f"draftsmith train acceptance --config {tmp_path}/run/config.yaml" in said
    # Any step, not only one that a checkpoint was due at.
    step = int(said.split("saved step ")[1].split(".")[0])
    assert step_of(all_in(tmp_path / "run" / FOLDER)[-1]) == step < STEPS
    in_process(options)
    assert_same_run(tmp_path / "run", unbroken)


@pytest.mark.parametrize("steps", [6, 9])
@pytest.mark.parametrize("place", ["validation", "tau"])
def test_a_signal_leaves_the_validation_and_the_resumed_run_repeats_it(artifacts, tmp_path, monkeypatch, steps, place):
    """After the sixth step, the last one or not."""
    options = {"save_every": 5, "max_steps": steps, "loggers": ("csv",), "batch_size": 1, "val_every": 3}
    unbroken, output, mark = tmp_path / "unbroken", tmp_path / "run", tmp_path / "mark"
    run(drafter_settings(artifacts, unbroken, **options))
    stalls = (LitDrafter, "validation_step") if place == "validation" else (AlongDrafter, "walk")
    true = getattr(*stalls)

    def stalling(*args, **kwargs):
        if all_in(output / FOLDER):
            with mark.open("a") as file:
                file.write(".")
            time.sleep(0.3)
        return true(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(*stalls, stalling)
        settings = drafter_settings(artifacts, output, **options)
        process = forked(_logged, run, settings, tmp_path / "log")
        while not mark.exists():
            assert process.is_alive(), (tmp_path / "log").read_text()
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGINT)
        process.join()
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 130 and len(mark.read_text()) <= 2, said  # of many batches, or answers
    assert "leaving the validation of step 6, then saving" in said and "SIGINT: saved step 6." in said
    assert [step_of(path) for path in all_in(output / FOLDER)][-1] == 6 and not (output / "training.json").exists()
    run(settings)
    assert_same_run(output, unbroken)


def _logged(work, settings, log: Path) -> None:
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    work(settings)


def test_the_error_of_a_rank_is_in_the_file_that_torchrun_shows(artifacts, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("the memory of this rank is broken")

    monkeypatch.setattr(LitHead, "train_step", broken)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    process = commanded(command(settings(artifacts, tmp_path / "run")), tmp_path / "log")
    process.join()
    assert process.exitcode == 1
    assert "RuntimeError: the memory of this rank is broken" in (tmp_path / "error.json").read_text()
