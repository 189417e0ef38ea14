"""`python benchmarks/busy_core.py`: what another program on one core costs `data responses` on all cores.

Each run is the command in a process of its own, on an idle machine or with one core kept busy, with OpenMP's threads
waiting as the command line sets them (a short spin, then asleep), always asleep, or as libgomp does by itself.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.store.files import write_json
from draftsmith.data.store.writer import sole_writer
from draftsmith.launch.cli import main_of
from draftsmith.modules.types import at_least

RESULTS = "busy_core.json"
# How OpenMP's threads wait -> environment. 300,000 spins is libgomp's default.
WAITING = {"ours": {}, "asleep": {"GOMP_SPINCOUNT": "0"}, "libgomp's": {"GOMP_SPINCOUNT": "300000"}}


@dataclass(frozen=True)
class BusyCoreConfig:
    """Measures `data responses` beside another program, by the clock on the wall. Needs an otherwise idle machine.

    Attributes:
        output: Directory that receives busy_core.json.
        target: Model directory, hub id or embedded:target.
        limit: Prompts answered.
        num_threads: CPU threads of the command; as many as there are cores.
        repeats: Runs of each kind, interleaved; medians count.
        timeout: Seconds after which a run is stopped and counted as this long.
    """

    output: Path
    target: str = "embedded:target"
    limit: int = 256
    num_threads: int = 2
    repeats: int = 3
    timeout: float = 200

    def __post_init__(self) -> None:
        for name in ("limit", "num_threads", "repeats"):
            at_least(name, getattr(self, name), 1)


@sole_writer()
def run(config: BusyCoreConfig) -> Path:
    """Measure, print seconds and ratios, write busy_core.json; returns its path."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts"
        words = ["data", "prompts", "--source", "embedded:prompts", "--split", "train", "--target", config.target]
        command([*words, "--limit", str(config.limit), "--output", str(prompts)], {}, None)
        for repeat in range(config.repeats):
            for waiting, variables in WAITING.items():
                for busy in (False, True):
                    name = f"{waiting}, one core {'busy' if busy else 'idle'}"
                    output = Path(folder) / f"{name} {repeat}"
                    words = ["data", "responses", "--prompts", str(prompts), "--target", config.target]
                    words += ["--temperature", "0", "--batch-size", "128", "--max-new-tokens", "128"]
                    words += ["--num-threads", str(config.num_threads), "--output", str(output)]
                    with busy_core(busy):
                        seconds.setdefault(name, []).append(command(words, variables, config.timeout))
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {median:.1f} s")
    ratios = {w: medians[f"{w}, one core busy"] / medians[f"{w}, one core idle"] for w in WAITING}
    ratios["idle, ours over libgomp's"] = medians["ours, one core idle"] / medians["libgomp's, one core idle"]
    for name, ratio in ratios.items():
        print(f"{name}{'' if ',' in name else ', busy over idle'}: {ratio:.2f}x")
    path = config.output / RESULTS
    write_json(path, {"seconds": seconds, "medians": medians, "ratios": ratios})
    return path


def command(words: list[str], variables: dict[str, str], timeout: float | None) -> float:
    """Run a draftsmith command with these environment variables; return its seconds."""
    environment = {**os.environ, **variables}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "draftsmith", *words, "--quiet"], env=environment, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return time.monotonic() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}")
    return time.monotonic() - started


@contextmanager
def busy_core(busy: bool) -> Iterator[None]:
    """Keep one core busy with a program that never sleeps, as another user's would."""
    if not busy:
        yield
        return
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


if __name__ == "__main__":
    sys.exit(main_of(BusyCoreConfig, run))
