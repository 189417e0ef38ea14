"""`python benchmarks/plan_check.py`: a plan's memory beside the peak of the same training, at two sizes.

Targets are random ones, written as checkpoints; the training is the real command in a process of its own, whose peak
the system reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.benchmarks import training_data
from draftsmith.benchmarks.training_data import dialogue_lengths, write_responses
from draftsmith.data.console import say
from draftsmith.data.models.loading import load_lm
from draftsmith.launch.cli import main_of
from draftsmith.modules.types import InputError

# Hidden size and layers of a Llama over 32,000 tokens: about 90 and 300 million parameters.
SHAPES = {"90m": (640, 10), "300m": (1024, 19)}
VOCAB = 32_000
TOLERANCE = 0.1
HEADINGS = ("target", "features", "predicted MB", "measured MB", "predicted / measured")


@dataclass(frozen=True)
class PlanCheckConfig:
    """Compares a plan's memory with the peak of the training it is of, on this CPU.

    Attributes:
        shapes: 90m, 300m, or both, separated by a comma.
        features: stored, online, or both: whether the target runs in the training process.
        tokens: In a batch.
        steps: To train; the peak is there after a few.
        documents: Made up for it, with the lengths of dialogues.
        settings: More of the training's, as name=value: precision=bf16, unroll=2, accumulate=2.
    """

    shapes: str = "90m,300m"
    features: str = "stored,online"
    tokens: int = 4096
    steps: int = 2
    documents: int = 20
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, known in {"shapes": set(SHAPES), "features": {"stored", "online"}}.items():
            if unknown := set(getattr(self, name).split(",")) - known:
                expected = f"some of {', '.join(sorted(known))}, separated by a comma"
                raise InputError(name, ", ".join(sorted(unknown)), expected, "Correct it.")


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
    """Print a row a training; 1 where a plan is off by more than 10 %."""
    say(" | ".join(HEADINGS))
    worst = 0.0
    for shape in config.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="draftsmith-plan-") as folder:
            for checked in checked_plans(shape, config, Path(folder)):
                say(" | ".join(checked.cells))
                worst = max(worst, abs(checked.ratio - 1))
    return int(worst > TOLERANCE)


def checked_plans(shape: str, config: PlanCheckConfig, folder: Path) -> Iterator[Checked]:
    """Checks of plans with stored features, and with those that the target makes in the training process."""
    hidden, layers = SHAPES[shape]
    target = training_data.write_target(folder / "target", training_data.raw_config(hidden, layers, VOCAB))
    lengths = dialogue_lengths(config.documents)
    identity = load_lm(str(target), "bfloat16").info.identity
    made = {
        "stored": training_data.write_features(folder / "stored", identity, lengths, hidden, VOCAB),
        "online": write_responses(folder / "online", str(target), lengths, VOCAB),
    }
    for features in config.features.split(","):
        settings = {
            "target": target,
            "data": made[features],
            "output": folder / f"head-{features}",
            "max_steps": config.steps,
            "tokens_per_batch": config.tokens,
            "tau_prompts": 0,
            "num_threads": 1,
            "wandb": "off",
            "accelerator": "cpu",
        } | dict(setting.split("=", 1) for setting in config.settings)
        numbers = folder / f"{features}.json"
        draftsmith("plan", settings | {"json": numbers})
        planned = json.loads(numbers.read_text())["memories"]["alone"]
        yield Checked(shape, features, planned["peak"], draftsmith("train", settings), planned["phase"])


def draftsmith(group: str, settings: dict[str, Any]) -> int:
    """Run `draftsmith GROUP eagle` in a process of its own; its peak in bytes.

    Raises:
        RuntimeError: it failed.
    """
    words = [f"--{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "draftsmith", group, "eagle", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output[-2000:]}")
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main_of(PlanCheckConfig, run))
