"""speculators' trainer beside ours: what both are told, the states that it reads, turns, and paired differences."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftsmith.benchmarks.peers import compare
from draftsmith.benchmarks.peers.compare import CompareConfig
from draftsmith.data.store.datasets import open_dataset
from draftsmith.launch.commands import configure
from draftsmith.launch.python import run
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

PACK = 1024


@pytest.fixture(scope="module")
def config(models, tmp_path_factory) -> CompareConfig:
    """Make six answers of a tiny target, and its states along them."""
    root = tmp_path_factory.mktemp("peers")
    run("data prompts", source=models["data"], target=models["target"], output=root / "prompts")
    how = {"temperature": 0.0, "max_new_tokens": 8, "limit": 6}
    run("data responses", data=root / "prompts", target=models["target"], output=root / "responses", **how)
    states = {"drafter": "eagle3", "layers": (0, 1, 2), "target": models["target"], "output": root / "features"}
    run("data features", data=root / "responses", **states)
    return CompareConfig(root / "out", models["target"], root / "features", root / "responses", limit=2)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_our_trainer_takes_its_options(config, kind):
    own = dataclasses.replace(config, kind=kind, optimizer="adamw", anchors=640)
    _, training = configure(f"train {kind}", own.ours(30, 7, Path("x")))
    assert (training.max_steps, training.seed, training.tokens_per_batch) == (30, 7, PACK)
    assert (training.optimizer, training.lr, training.betas) == ("adamw", 1e-3, (0.9, 0.999))
    if kind == "dspark":
        # As many blocks in a pack as speculators draws there.
        lengths = open_dataset(config.features).lengths
        assert training.anchors * PACK / np.mean(lengths) == pytest.approx(640, rel=0.1)
        assert training.block == 8 and training.num_layers == 5


def test_its_states_are_ours_before_the_final_norm(config, tmp_path):
    compare.write_states(config, tmp_path)
    features, target = open_dataset(config.features), load_lm(config.target)
    about = json.loads((tmp_path / "rows.json").read_text())
    assert about["texts"] == len(features) == 6
    # The training's rows come first, whatever order they have in ours.
    held_out = about["texts"] - int(about["texts"] * about["ratio"])
    assert held_out == 1
    texts = {tuple(features[index]["input_ids"].tolist()): index for index in range(len(features))}
    norm = torch.nn.RMSNorm(target.info.hidden_size, 1e-6)
    norm.weight.data = load_file(Path(config.target) / "model.safetensors")["model.norm.weight"]
    for number in range(6):
        stored = load_file(tmp_path / "hidden_states" / f"hs_{number}.safetensors")
        own = features[texts.pop(tuple(stored["token_ids"].tolist()))]["features"].float()
        states = stored["hidden_states"]
        assert torch.equal(states[:, :-1].flatten(1), own[:, : states[:, :-1].flatten(1).shape[1]])
        # bfloat16 keeps 8 bits.
        wanted = own[:, -target.info.hidden_size :]
        assert torch.allclose(norm(states[:, -1]), wanted, rtol=0.01, atol=0.01 * float(wanted.abs().max()))


def test_trainings_take_turns_and_what_is_done_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "TURN_S", 0.2)
    work = "import json, sys, time; start = time.process_time(); seen = []\n"
    work += "while time.process_time() - start < 0.6: seen.append(time.time()); time.process_time()\n"
    work += "json.dump(seen[::50], open(sys.argv[1], 'w'))"
    jobs = {tmp_path / name: [sys.executable, "-c", work, str(tmp_path / name / "record.json")] for name in "ab"}
    compare.in_turns(jobs)
    (first, second) = (compare.record_of(path) for path in jobs)
    # Each went on after the other had begun, and none of their turns overlap.
    order = [owner for _, owner in sorted([(t, 0) for t in first] + [(t, 1) for t in second])]
    assert 3 <= np.count_nonzero(np.diff(order)) < 200  # side by side they would change thousands of times
    compare.in_turns({path: ["false"] for path in jobs})
    with pytest.raises(InputError, match="exit code 1"):
        compare.in_turns({tmp_path / "c": ["false"]})


def test_the_difference_is_of_the_same_prompts_under_all_seeds(tmp_path):
    def head(name: str, calls: list[int]) -> Path:
        rows = [{"tokens": 12, "calls": count} for count in calls]
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "tau.json", rows)
        return tmp_path / name

    base = [head("base-0", [12, 6]), head("base-1", [12, 6])]
    found = compare.compared([head("own-0", [6, 4]), head("own-1", [6, 4])], base)
    assert found["tau"] == 48 / 20
    assert found["difference"] == pytest.approx(48 / 20 - 48 / 36) and (found["ahead"], found["prompts"]) == (2, 2)
    # Resamples hold the first prompt twice (2 and 1), the second twice (3 and 2), or both.
    assert found["difference_ci95"] == pytest.approx([1.0, 48 / 20 - 48 / 36])


@pytest.mark.slow
def test_one_arm_is_trained_timed_and_measured(config):
    own = dataclasses.replace(config, arms="draftsmith", steps=2, seeds="3")
    found = json.loads(compare.run(own).read_text())["rows"]
    record = compare.record_of(own.output / "runs" / "draftsmith-3-2")
    assert [row["steps"] for row in found] == [2] == [len(record["seconds"])] and min(record["seconds"]) > 0
    # An epoch is one pack here: each step reads all texts but the held-out one.
    lengths = open_dataset(config.features).lengths
    assert all(sum(lengths) - max(lengths) <= tokens <= sum(lengths) - min(lengths) for tokens in record["tokens"])
    assert 1 <= found[0]["tau"] <= 6 and found[0]["difference"] == 0 and found[0]["prompts"] == 2
    assert "| draftsmith | 3 | 2 |" in (own.output / "compare.md").read_text()
