"""Heads from one card in so many minutes, on a CPU at tiny shapes: every stage, and those that fail alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worlds import tiny_llama_dir

from draftsmith.benchmarks import gpu_head

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
def test_every_stage_is_timed_and_both_heads_are_measured(tmp_path):
    found, shown = make_heads(tmp_path)
    stages = {stage["stage"]: stage["outcome"] for stage in found["stages"]}
    assert set(stages) == {"prompts", "pilot", "answers", "train eagle3", "train dspark", "bench"}
    assert set(stages.values()) == {"ok"}
    assert [row["method"] for row in found["methods"]] == ["ar", "eagle3:k=3", "eagle3:k=5", "dspark"]
    assert all(row["tau"] >= 1 for row in found["methods"]) and "eagle3:k=5" in shown


def test_a_stage_that_fails_or_takes_too_long_is_named(tmp_path, capfd):
    stages = gpu_head.Stages(tmp_path, 10)
    with capfd.disabled():  # a stage writes to the descriptors of its process
        assert not stages.run("bad", f"data inspect {tmp_path / 'nowhere'}", 60)
        assert not stages.run("slow", lambda: time.sleep(60) or 0, 1.0)
        assert stages.run("good", lambda: 0, 60)
    assert [stage["outcome"] for stage in stages.done] == ["failed (512)", "stopped after 1 s", "ok"]
    assert "nowhere: found" in (tmp_path / "log.txt").read_text()
