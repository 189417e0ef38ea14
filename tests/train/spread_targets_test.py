"""Targets that transformers spreads over devices give the features, and train the head, of one that is not."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from online_cases import config, curve

from draftsmith.data import features
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams
from draftsmith.train.command import run

JOB = Path(__file__).with_name("spread_job.py")


def command_line(words: list[str], settings: Any) -> list[str]:
    """The command line that gives these settings."""
    argv = list(words)
    for spec in dataclasses.fields(settings):
        value = getattr(settings, spec.name)
        if value is not None and value != spec.default:
            argv += [f"--{spec.name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return argv


def assert_the_same_features(directory: Path, expected: Path) -> None:
    found, oracle = open_dataset(directory), open_dataset(expected)
    assert len(found) == len(oracle)
    for row, other in zip(found, oracle, strict=True):
        # Sums in another order, then rounded to bf16: the last bit of its 8 may differ.
        torch.testing.assert_close(row["features"], other["features"], rtol=2**-7, atol=1e-4)


def test_a_device_map_is_the_same_target(artefacts, tmp_path):
    target, plain = (load_lm(str(artefacts.target), engine="hf", parallel=p) for p in ("device_map", "none"))
    assert target.info == plain.info
    prompt = [5, 6, 7, 8, 9]
    answers = [generate_one(lm, None, prompt, SamplingParams(), 12, TorchSource(0)).tokens for lm in (target, plain)]
    assert answers[0] == answers[1]
    made = features.FeaturesConfig(artefacts.responses, str(artefacts.target), tmp_path / "features")
    features.run(dataclasses.replace(made, target_parallel="device_map", num_threads=1))
    assert_the_same_features(tmp_path / "features", artefacts.features)


@pytest.mark.slow
def test_ranks_that_are_one_target_write_its_features_and_train_its_head(artefacts, tmp_path):
    """Two processes over gloo: `data features`, and a training of 8 steps with validation and tau."""
    stage = features.FeaturesConfig(
        artefacts.responses, str(artefacts.target), tmp_path / "features", rows_per_shard=20, target_parallel="tensor"
    )
    # 48 sequences, 5 held out: the ranks have unequally many batches to validate.
    settings = {"max_steps": 8, "val_every": 4, "accelerator": "cpu", "val_share": 0.1, "batch_size": 6}
    job = config(artefacts, tmp_path / "two", **settings, target_parallel="tensor")
    cached = config(artefacts, tmp_path / "cached", **settings, target_parallel="tensor", features="cache")
    # Its lm_head starts as the target's, which every rank has whole.
    few = {**settings, "kind": "eagle3", "layers": (0, 1), "passes": 2, "max_steps": 4, "tau_prompts": 0}
    eagle3 = config(artefacts, tmp_path / "two-3", **few, target_parallel="tensor")
    jobs = [command_line(["data", "features"], stage)]
    jobs += [command_line(["train", made.kind], made) for made in (job, cached, eagle3)]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0"]
    started = subprocess.run(
        [sys.executable, *launcher, str(JOB), str(tmp_path / "jobs.json")], capture_output=True, text=True, check=False
    )
    assert started.returncode == 0, started.stdout + started.stderr
    assert Manifest.read(stage.output).counts["shards"] == 3
    assert_the_same_features(stage.output, artefacts.features)
    run(config(artefacts, tmp_path / "one", **settings))
    for name in ("train/loss", "val/loss", "val/tau"):
        # Sums in another order in every layer of the target, and over ranks.
        assert curve(job.output, name) == pytest.approx(curve(tmp_path / "one", name), rel=1e-4), name
        # The cache rounds to bf16.
        assert curve(cached.output, name) == pytest.approx(curve(tmp_path / "one", name), rel=4e-3), name

    run(config(artefacts, tmp_path / "one-3", **few))
    for name in ("train/loss", "val/chain_length"):
        assert curve(eagle3.output, name) == pytest.approx(curve(tmp_path / "one-3", name), rel=1e-4), name


def test_what_cannot_be_spread_is_said(artefacts, monkeypatch, tmp_path):
    path = str(artefacts.target)
    with pytest.raises(InputError, match="devices: found 2, expected 1 with --target-parallel tensor"):
        config(artefacts, tmp_path, target_parallel="tensor", devices=2)
    with pytest.raises(InputError, match="device_map on the lean engine"):
        load_lm(path, engine="lean", parallel="device_map")
    with pytest.raises(InputError, match=r"tensor with 1 processes.*torchrun"):
        load_lm(path, parallel="tensor")
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InputError, match="found device_map with 3 processes"):
        load_lm(path, parallel="device_map")
    with pytest.raises(InputError, match="a divisor of the 2 key/value heads"):
        load_lm(path, parallel="tensor")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(InputError, match="several processes on one machine"):
        load_lm(path, parallel="tensor")
