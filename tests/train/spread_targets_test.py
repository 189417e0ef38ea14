"""A target that transformers spreads over devices gives the answers and features of one that is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from eagle_trainings import config

from draftsmith.data import features
from draftsmith.data.store.datasets import open_dataset
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams


def assert_the_same_features(directory: Path, expected: Path) -> None:
    found, oracle = open_dataset(directory), open_dataset(expected)
    assert len(found) == len(oracle)
    for row, other in zip(found, oracle, strict=True):
        # Sums in another order, then rounded to bf16: the last bit of its 8 may differ.
        torch.testing.assert_close(row["features"], other["features"], rtol=2**-7, atol=1e-4)


def test_a_device_map_is_the_same_target(artifacts, tmp_path):
    target, plain = (load_lm(str(artifacts.target), engine="hf", device_map=spread) for spread in (True, False))
    assert target.info == plain.info
    prompt = [5, 6, 7, 8, 9]
    answers = [generate_one(lm, None, prompt, SamplingParams(), 12, TorchSource(0)).tokens for lm in (target, plain)]
    assert answers[0] == answers[1]
    made = features.FeaturesConfig(artifacts.responses, str(artifacts.target), tmp_path / "features")
    features.run(dataclasses.replace(made, device_map=True, num_threads=1))
    assert_the_same_features(tmp_path / "features", artifacts.features)


def test_what_cannot_be_spread_is_said(artifacts, monkeypatch, tmp_path):
    path = str(artifacts.target)
    with pytest.raises(InputError, match="devices: found 2, expected 1 with --device-map"):
        config(artifacts, tmp_path, device_map=True, devices=2)
    with pytest.raises(InputError, match="device_map: found the lean engine"):
        load_lm(path, engine="lean", device_map=True)
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InputError, match="found 3 processes on this machine"):
        load_lm(path, device_map=True)
