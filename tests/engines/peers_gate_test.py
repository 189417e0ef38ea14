"""speculators' trainer beside ours (benchmarks/peers), for a few steps on tiny shapes. Run by `make test-engines`, by
our own python."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from draftsmith.benchmarks.peers import compare
from draftsmith.benchmarks.peers.compare import CompareConfig
from draftsmith.launch.python import run

PYTHON = Path(os.environ["DRAFTSMITH_ENGINE_PYTHON"])
TARGET, STEPS = "embedded:target", 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CompareConfig:
    root = tmp_path_factory.mktemp("peers")
    run("data prompts", source="embedded:prompts", split="train", limit=24, target=TARGET, output=root / "prompts")
    how = {"temperature": 0.0, "max_new_tokens": 48}
    run("data responses", data=root / "prompts", target=TARGET, output=root / "responses", **how)
    run(
        "data features", data=root / "responses", drafter="eagle3", layers=(2, 6, 9), target=TARGET,
        output=root / "features",
    )  # fmt: skip
    features, answers = root / "features", root / "responses"
    return CompareConfig(root / "out", TARGET, features, answers, PYTHON, steps=STEPS, anchors=8, limit=2)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_it_trains_so_many_steps_and_its_head_drafts_here(config, kind):
    own = dataclasses.replace(config, output=config.output / kind, states=config.output, kind=kind)
    rows = json.loads(compare.run(own).read_text())["rows"]
    assert [(row["arm"], row["steps"]) for row in rows] == [("speculators", STEPS), ("draftsmith", STEPS)]
    # Both read the same texts; in EAGLE-3 its rows have a token less each, and its packs hold no more than 1,024.
    assert all(row["tokens"] > 0 and row["peak_mb"] > 100 and 1 <= row["tau"] <= 6 for row in rows)
    theirs = own.output / "runs" / f"speculators-0-{STEPS}"
    stored, head = load_file(theirs / "theirs" / "model.safetensors"), load_file(theirs / "head" / "model.safetensors")
    assert any(stored["fc.weight"].equal(tensor) for tensor in head.values())
