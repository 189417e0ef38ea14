"""Users of other trainers need neither Lightning nor W&B nor DeepSpeed, and have a report for an issue."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# A module that is None cannot be imported, as one that is not installed.
SCRIPT = """
import json, sys
for name in ("lightning", "pytorch_lightning", "lightning_fabric", "wandb", "deepspeed", "peft"):
    sys.modules[name] = None
from draftsmith.launch.cli import main
print(json.dumps([main(line.split()) for line in sys.argv[1:]]))
"""


@pytest.mark.slow
def test_heads_are_read_checked_corrected_and_written_without_the_packages_of_training(exchange, tmp_path):
    directory, target = exchange.export("sglang", "eagle3"), "--target embedded:target"
    prompts = tmp_path / "prompts"
    lines = [
        f"import {directory} {target} --output {tmp_path}/head",
        f"export --format vllm --head {tmp_path}/head {target} --output {tmp_path}/vllm",
        f"check {directory} {target}",
        f"data prompts --source embedded:prompts --split train --limit 4 {target} --output {prompts}",
        f"diagnose {directory} {target} --data {prompts} --max-new-tokens 16 --write {tmp_path}/repaired",
        f"check {directory}",
        f"train eagle3 --data {prompts} {target} --output {tmp_path}/trained",
    ]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *lines], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    # Four answers may be too few to be sure of a head; there is no target; nothing trains.
    assert codes[:4] == [0, 0, 0, 0] and codes[4] in (0, 1) and codes[5:] == [2, 2], done.stderr
    assert "pip install 'draftsmith[train]'" in done.stderr
    assert "error: target: found none" in done.stderr
