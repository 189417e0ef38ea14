"""ZeRO on one GPU: one rank over NCCL, and two ranks that share the device over gloo, against one process without it.

Not a test of speed: whether the stages run on a GPU at all, and end with the weights of a plain training. NCCL refuses
two ranks on one device. `python -m draftsmith.benchmarks.gpu_zero BACKEND TRAINING...` is one rank of a launch: it runs
the trainings, each a command line, one after the other.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draftsmith.benchmarks.measured import Measured
from draftsmith.launch.cli import main

STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
# An EAGLE head: stage 3 partitions its weights too. Two ranks read half of each batch.
TRAINING = "train eagle --config eagle-embedded --optimizer adamw --lr 2e-3 --schedule constant --precision 32 "
TRAINING += "--max-steps {steps} --batch-size 8 --val-every {steps} --tau-prompts 0 --loggers csv"
STEPS, PROMPTS = 8, 48
# Of the differences of weights from the plain training's: this share lies below the aim, which is 1/200 of a step.
SHARE, AIM = 0.999, "< 1e-5"


def zero(output: Path, device: str) -> Iterator[Measured]:
    """Train without a strategy, on one rank and on two, side by side; compare the weights. device: cuda or cpu."""
    data = f"--target embedded:target --output {output}"
    for words in (
        f"data prompts --source embedded:prompts --split train --limit {PROMPTS} {data}/prompts",
        f"data responses --data {output}/prompts --max-new-tokens 24 --device {device} {data}/responses",
    ):
        if main(words.split()):
            raise RuntimeError(words)
    strategies = {0: ("auto",), 1: STAGES, 2: ("ddp", *STAGES)}
    backends = {0: "", 1: "nccl" if device == "cuda" else "gloo", 2: "gloo"}
    launches = {ranks: launch(output, device, ranks, backends[ranks], names) for ranks, names in strategies.items()}
    plain, failed = dict[str, torch.Tensor](), list[str]()
    # Two ranks come last, and may hang.
    for ranks, processes in launches.items():
        failed += [f"{ranks} ranks, rank {rank}" for rank, process in enumerate(processes) if process.wait()]
        for name in strategies[ranks]:
            if not (path := trained(output, ranks, name)).exists():
                failed.append(f"{name}, {ranks} ranks")
                continue
            weights = load_file(path)
            plain = plain or weights
            if ranks:
                apart = torch.cat([(weights[key].float() - plain[key].float()).abs().flatten() for key in plain])
                what = f"{name}, {ranks} rank{'s' * (ranks > 1)}: weights apart from the plain training's"
                yield Measured(what, float(apart.quantile(SHARE)), "", AIM)
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def trained(output: Path, ranks: int, strategy: str) -> Path:
    return output / f"{strategy}-{ranks}" / "last" / "model.safetensors"


def launch(output: Path, device: str, ranks: int, backend: str, strategies: Sequence[str]) -> list[subprocess.Popen]:
    """Start the ranks of a launch, or one process without one for 0. Ranks are machines of one device each, so that
    two use the same one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    training = TRAINING.format(steps=STEPS) + f" --data {output}/responses --target embedded:target --device {device}"
    commands = [f"{training} --strategy {name} --output {output}/{name}-{ranks}" for name in strategies]
    processes = []
    for rank in range(max(1, ranks)):
        # Products in TF32 would hide what is compared.
        environment: dict[str, Any] = {**os.environ, "NVIDIA_TF32_OVERRIDE": 0}
        if ranks:
            environment |= {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            environment |= {"GROUP_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = [sys.executable, "-m", "draftsmith.benchmarks.gpu_zero", backend, *commands]
        processes.append(subprocess.Popen(words, env={name: str(value) for name, value in environment.items()}))
    return processes


def run_rank(backend: str, commands: Sequence[str]) -> int:
    """Run the trainings of a rank; return how many failed."""
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    from draftsmith.train import deepspeed

    deepspeed.KEPT_WHOLE = 0  # stage 3 partitions even the smallest tensors
    if backend:
        for strategy in (DDPStrategy, DeepSpeedStrategy):
            use_backend(strategy, backend)
    failed = 0
    for words in commands:
        started = time.monotonic()
        try:
            code = main(words.split())
        except Exception:
            traceback.print_exc()
            code = 1
        failed += code != 0
        print(f"rank {os.environ.get('RANK', '-')}: exit code {code}, {time.monotonic() - started:.1f} s: {words}")
    return failed


def use_backend(strategy: Any, backend: str) -> None:
    """Let all strategies of a class communicate over this backend."""
    original = strategy.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "process_group_backend": backend})

    strategy.__init__ = init


if __name__ == "__main__":
    number = run_rank(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(number)  # DeepSpeed's stage 3 sometimes aborts while Python shuts down
