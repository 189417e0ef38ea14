"""Running methods on prompts, with clocks: the only timers of the project's decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from draftsmith.modules.decoding.loop import Generation, Round, generate
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.decoding.trace import DecodeTrace
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


class Runner(Protocol):
    """One method, ready to answer."""

    def __call__(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        """Generate; the same seed gives the same tokens."""


@dataclass(frozen=True)
class EngineRunner:
    """This project's loop with one drafter, or none. `on_round` is called after every round."""

    target: CausalLM
    drafter: Drafter | None
    params: SamplingParams
    eos_ids: tuple[int, ...]
    on_round: Callable[[Round], None] | None = None

    def __call__(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        source = TorchSource(seed)
        return generate(
            self.target, self.drafter, prompt, self.params, max_new_tokens, source, self.eos_ids, self.on_round
        )


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as the target reads it, chat template included."""

    id: str
    prompt_ids: list[int]
    task: str = ""


@dataclass(frozen=True)
class Measured:
    """One method on one prompt: what it emitted, what that took, and medians over repeats of both clocks [s]."""

    prompt: BenchPrompt
    tokens: list[int]
    trace: DecodeTrace
    ended: bool
    wall_s: float
    cpu_s: float


def timed(runner: Runner, prompt: Sequence[int], max_new_tokens: int, seed: int) -> tuple[Generation, float, float]:
    """One run: the generation, wall seconds, CPU seconds of this process (all its threads)."""
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    generation = runner(prompt, max_new_tokens, seed)
    synchronize()
    return generation, time.perf_counter() - wall, time.process_time() - cpu


def synchronize() -> None:
    """Wait for the GPU: its work is queued, and a clock would otherwise stop too early."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measure(
    runners: Mapping[str, Runner],
    prompts: Sequence[BenchPrompt],
    warm_up: BenchPrompt,
    max_new_tokens: int,
    repeats: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[Measured]]:
    """Every method on every prompt, interleaved: a machine that slows down slows all methods down alike.

    The order of methods rotates, so that none always follows the same one. `warm_up` runs once a method, uncounted.
    A prompt's seed depends on its number only: repeats redo the same work, and methods share their random numbers.
    """
    for runner in runners.values():
        runner(warm_up.prompt_ids, max_new_tokens, seed)
    labels = list(runners)
    measured: dict[str, list[Measured]] = {label: [] for label in labels}
    for number, prompt in enumerate(prompts):
        runs: dict[str, list[tuple[Generation, float, float]]] = {label: [] for label in labels}
        for repeat in range(repeats):
            turn = (number + repeat) % len(labels)
            for label in labels[turn:] + labels[:turn]:
                runs[label].append(timed(runners[label], prompt.prompt_ids, max_new_tokens, seed + number))
        for label in labels:
            measured[label].append(median_of(prompt, runs[label]))
        progress()
    return measured


def median_of(prompt: BenchPrompt, runs: Sequence[tuple[Generation, float, float]]) -> Measured:
    first = runs[0][0]
    return Measured(
        prompt=prompt,
        tokens=first.tokens,
        trace=first.trace,
        ended=first.ended,
        wall_s=statistics.median(run[1] for run in runs),
        cpu_s=statistics.median(run[2] for run in runs),
    )
