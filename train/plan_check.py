"""`python -m draftsmith.train.plan_check`: a plan's memory beside the peak of the same training, at two sizes.

Targets are random ones, written as checkpoints; the training is the real command in a process of its own, whose peak
the system reports.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.models import load_lm
from draftsmith.data.progress import say
from draftsmith.train import synthetic
from draftsmith.train.eagle import TrainEagleConfig
from draftsmith.train.plan import plan_of

# Hidden size and layers of a Llama over 32,000 tokens: about 90 and 300 million parameters.
SHAPES = {"90m": (640, 10), "300m": (1024, 19)}
VOCAB = 32_000
HEADINGS = ("target", "features", "predicted MB", "measured MB", "predicted / measured")


@dataclass(frozen=True)
class PlanCheckConfig:
    """Compares a plan's memory with the peak of the training it is of, on this CPU.

    Attributes:
        shapes: 90m, 300m, or both, separated by a comma.
        tokens: In a batch.
        steps: To train; the peak is there after a few.
        documents: Made up for it, with the lengths of dialogues.
    """

    shapes: str = "90m,300m"
    tokens: int = 4096
    steps: int = 3
    documents: int = 40


@dataclass(frozen=True)
class Checked:
    """Bytes that were planned for a training, and its peak."""

    name: str
    features: str
    predicted: int
    measured: int
    phase: str

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = f"{self.predicted / 1e6:,.0f}", f"{self.measured / 1e6:,.0f}", f"{self.ratio:.2f}"
        return self.name, self.features, *numbers


def run(config: PlanCheckConfig) -> int:
    """Print a row a training; 1 where a plan is off by more than 20 %."""
    import_training_base = base_memory()
    say(" | ".join(HEADINGS))
    worst = 0.0
    for shape in config.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="draftsmith-plan-") as folder:
            for checked in check(shape, config, Path(folder), import_training_base):
                say(" | ".join(checked.cells))
                worst = max(worst, abs(checked.ratio - 1))
    return int(worst > 0.2)


def base_memory() -> int:
    """Of a process that has imported what a training imports and read nothing."""
    code = (
        "from draftsmith.launch.cli import COMMANDS; from draftsmith.launch.arguments import parse; "
        "import draftsmith.train.plan as p, draftsmith.train.estimate as e; from draftsmith.train.eagle import "
        "TrainEagleConfig; parse('x', TrainEagleConfig, ['--target=x', '--data=x', '--output=x'], (), ''); "
        "p.import_training(TrainEagleConfig(target='x', data='x', output='x')); print(e.own_memory())"
    )
    return int(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()[-1]
    )


def check(shape: str, config: PlanCheckConfig, folder: Path, base: int) -> Iterator[Checked]:
    hidden, layers = SHAPES[shape]
    target = synthetic.write_target(folder / "target", synthetic.raw_config(hidden, layers, VOCAB))
    identity = load_lm(str(target), "bfloat16").info.identity
    lengths = synthetic.dialogue_lengths(config.documents)
    data = synthetic.write_features(folder / "features", identity, lengths, hidden, VOCAB)
    settings = TrainEagleConfig(
        target=str(target),
        data=data,
        output=folder / "head",
        max_steps=config.steps,
        tokens_per_batch=config.tokens,
        tau_prompts=0,
        num_threads=1,
        wandb="off",
        accelerator="cpu",
    )
    plan = plan_of(settings, base)
    measured = train(settings)
    yield Checked(shape, "stored", plan.own.peak, measured, plan.own.phase)


def train(config: TrainEagleConfig) -> int:
    """Run the training's own command; its peak in bytes.

    Raises:
        RuntimeError: it failed.
    """
    shown = ("target", "data", "output", "max_steps", "tokens_per_batch", "tau_prompts", "num_threads", "wandb")
    words = [f"--{name}={getattr(config, name)}" for name in (*shown, "accelerator")]
    command = [sys.executable, "-m", "draftsmith", "train", "eagle", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output[-2000:]}")
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    sys.argv[1:1] = ["plan", "check"]
    runpy.run_module("draftsmith", run_name="__main__", alter_sys=True)
