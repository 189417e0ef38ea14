"""Draws docs/resume.svg: the loss of a training that was killed and went on with other ranks and another strategy.

    python docs/resume_curve.py runs/demo/quick/features docs/resume.svg

Two ranks under ZeRO-2 with two accumulated parts are killed with SIGKILL; one rank without DeepSpeed goes on from their
checkpoint. Beside it the same training, never stopped, on one rank. Needs the extras `deepspeed` and `docs`.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, KILLED_AFTER = 120, 55
OPTIONS = {
    "config": "eagle-embedded", "target": "embedded:target", "optimizer": "adamw", "lr": "2e-3", "max_steps": STEPS,
    "tokens_per_batch": 2048, "log_every": 1, "save_every": 10, "val_every": STEPS, "tau_prompts": 0,
    "loggers": ("csv",), "accelerator": "cpu", "num_threads": 1, "val_share": 0.02,
}  # fmt: skip


def command(data: Path, output: Path, *more: str) -> list[str]:
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    train = ["train", "eagle", *words, "--data", str(data), "--output", str(output)]
    return [sys.executable, "-m", "draftsmith", *train, *more]


def losses(output: Path) -> dict[int, float]:
    with (output / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}


def newest_checkpoint(output: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-" + "[0-9]" * 8))


def kill_after(step: int, output: Path, words: list[str]) -> None:
    """Start in a group of its own, so that every process of the job is killed at once."""
    process = subprocess.Popen(words, start_new_session=True)
    while not (output / "metrics.csv").exists() or max(losses(output), default=0) < step:
        if process.poll() is not None:
            raise SystemExit(f"the training ended before step {step}, with exit code {process.returncode}")
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(data: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with tempfile.TemporaryDirectory() as directory:
        unbroken, broken = Path(directory, "unbroken"), Path(directory, "broken")
        subprocess.run(command(data, unbroken), check=True)
        two = ("--devices", "2", "--strategy", "deepspeed_stage_2", "--accumulate", "2")
        kill_after(KILLED_AFTER, broken, command(data, broken, *two))
        before, saved = losses(broken), newest_checkpoint(broken)
        subprocess.run(command(data, broken), check=True)
        whole, after = losses(unbroken), losses(broken)
    resumed = {step: loss for step, loss in after.items() if step > saved}
    difference = max(abs(after[step] - whole[step]) for step in whole)
    print(f"{STEPS} steps, killed after step {max(before)}, gone on from step {saved}")
    print(f"largest difference of a step's loss from the unbroken run's: {difference:.1e}")
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot(list(whole), list(whole.values()), color="0.75", linewidth=5, label="never stopped: 1 rank")
    axes.plot(list(before), list(before.values()), color="C0", label="2 ranks, ZeRO-2, 2 parts a step, until SIGKILL")
    axes.plot(list(resumed), list(resumed.values()), color="C3", label="gone on: 1 rank, no DeepSpeed")
    axes.axvline(max(before), color="0.4", linewidth=0.8, linestyle=":")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None})
    print(f"picture: {picture}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(f"usage: {sys.argv[0]} FEATURES_DIRECTORY PICTURE.svg")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
