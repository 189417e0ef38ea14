"""Heads from one card in so many minutes, on a CPU at tiny shapes: every stage, and one that fails alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_models import tiny_llama_dir

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--minutes 0.5 --device cpu --dtype float32 --batch-size 8 --max-new-tokens 12 --tokens-per-batch 256 --limit 1"


def make_heads(folder: Path, *words: str) -> tuple[dict, str]:
    """Run the script in a process of its own, whose children must not inherit this one's threads."""
    rows = [{"id": str(i), "messages": [{"role": "user", "content": f"Add {i} and {i * i}.\u2028"}]} for i in range(12)]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    target = tiny_llama_dir(folder / "target", layers=8)
    script, out = ROOT / "benchmarks" / "gpu_head.py", folder / "out"
    command = [sys.executable, str(script), "--target", str(target), "--output", str(out), *SMALL.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    command += ["--source", str(folder / "chats.jsonl"), *words]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr + (out / "log.txt").read_text()
    return json.loads((out / "gpu_head.json").read_text()), result.stdout


@pytest.mark.slow
def test_every_stage_is_timed_and_both_heads_are_measured_and_packed(tmp_path):
    found, shown = make_heads(tmp_path)
    stages = {stage["stage"]: stage["outcome"] for stage in found["stages"]}
    assert set(stages) == {
        "prompts",
        "pilot",
        "prompts again",
        "answers",
        "train eagle3",
        "train dspark",
        "bench",
        "pack",
    }
    assert set(stages.values()) == {"ok"}
    assert [row["method"] for row in found["methods"]] == ["ar", "eagle3:k=3", "eagle3:k=5", "dspark"]
    assert all(row["tau"] >= 1 for row in found["methods"]) and "eagle3:k=5" in shown
    for kind in ("eagle3", "dspark"):
        files = sorted((tmp_path / "out" / "packed").glob(f"{kind}-*.safetensors"))
        assert files and all(path.stat().st_size < 16 * 2**20 for path in files)
        names = [name for path in files for name in safe_open(path, "pt").keys()]  # noqa: SIM118 (it is no mapping)
        assert names and not any(name.startswith("lm_head") for name in names)


@pytest.mark.slow
def test_a_stage_that_fails_leaves_the_others_alone(tmp_path):
    """No task can be measured: the heads are there all the same, and what went wrong is in the log."""
    found, _ = make_heads(tmp_path, "--tasks", str(tmp_path / "nowhere"))
    outcomes = {stage["stage"]: stage["outcome"] for stage in found["stages"]}
    assert outcomes.pop("bench").startswith("failed") and set(outcomes.values()) == {"ok"}
    assert "nowhere" in (tmp_path / "out" / "log.txt").read_text()
    assert (tmp_path / "out" / "packed" / "eagle3-0.safetensors").exists()
