"""Running methods on prompts, with clocks: the only timers of the project's decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from draftsmith.data.models.naming import naming
from draftsmith.eval.bench.learned import remember
from draftsmith.modules.decoding.loop import Generation, Round, generate, generate_one
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.decoding.trace import DecodeTrace
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.types import SamplingParams


class Runner(Protocol):
    """One method, ready to answer."""

    def __call__(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        """Generate; the same seed gives the same tokens."""


@dataclass(frozen=True)
class EngineRunner:
    """This project's loop with one drafter, or none. `on_round` is called after every round.

    session: the target's, used again for every prompt; None makes one for each.
    paths: flag -> what the user passed, for errors.
    """

    target: CausalLM
    drafter: Drafter | None
    params: SamplingParams
    eos_ids: tuple[int, ...]
    on_round: Callable[[Round], None] | None = None
    session: Session | None = None
    paths: Mapping[str, str | None] = field(default_factory=dict)

    def __call__(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        with naming(paths=self.paths):
            return generate_one(
                self.target,
                self.drafter,
                prompt,
                self.params,
                max_new_tokens,
                TorchSource(seed),
                self.eos_ids,
                self.on_round,
                session=self.session,
            )


class GroupRunner(Protocol):
    """One method, ready to answer several prompts."""

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        """Generate for each prompt; the same seed gives the same tokens."""


@dataclass(frozen=True)
class OneByOne:
    """Answers a group one prompt after the other."""

    runner: Runner

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        return [self.runner(prompt, max_new_tokens, seed) for prompt, seed in zip(prompts, seeds, strict=True)]


@dataclass(frozen=True)
class BatchRunner:
    """The same for a group of prompts, which is decoded together. The session may be shared by methods in turn."""

    target: CausalLM
    session: Session
    drafter: Drafter | None
    params: SamplingParams
    eos_ids: tuple[int, ...]
    paths: Mapping[str, str | None] = field(default_factory=dict)

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        with naming(paths=self.paths):
            sources = [TorchSource(seed) for seed in seeds]
            return generate(
                self.target,
                self.drafter,
                prompts,
                self.params,
                max_new_tokens,
                sources,
                self.eos_ids,
                session=self.session,
            )


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as the target reads it, chat template included.

    messages: what `prompt_ids` were made of, where the user goes on. later: what the user says in the turns that
    follow. turn: of the conversation, from 1. number: of the question in its run, from 0, the same in all its turns.
    """

    id: str
    prompt_ids: list[int]
    task: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    later: tuple[str, ...] = ()
    turn: int = 1
    number: int = 0


@dataclass(frozen=True)
class Measured:
    """One method on one prompt: what it emitted, what that took, and medians over repeats of both clocks [s].

    group: number of the questions that were answered together, turn by turn. The clocks saw the whole group; each of
        its prompts carries an equal share, so only sums over whole groups mean anything.
    wall_s_runs, cpu_s_runs: shares of every repeat, in the order taken.
    """

    prompt: BenchPrompt
    group: int
    tokens: list[int]
    trace: DecodeTrace
    ended: bool
    wall_s: float
    cpu_s: float
    wall_s_runs: tuple[float, ...] = ()
    cpu_s_runs: tuple[float, ...] = ()


class Failed(Exception):
    """A method did not answer a prompt; `__cause__` is what it raised."""


# What a prompt may make a method raise: ValueError of what refuses it (InputError, transformers), RuntimeError of torch
# (shapes, memory of the device). Other errors are defects of this program, and stop the run.
REFUSALS = (ValueError, RuntimeError)

# The generations of a group, wall seconds, CPU seconds of this process (all its threads).
Run = tuple[list[Generation], float, float]


def timed(runner: GroupRunner, group: Sequence[BenchPrompt], max_new_tokens: int, seeds: Sequence[int]) -> Run:
    """One run of a group."""
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    generations = runner([prompt.prompt_ids for prompt in group], max_new_tokens, seeds)
    synchronize()
    return generations, time.perf_counter() - wall, time.process_time() - cpu


def synchronize() -> None:
    """Wait for the GPU: its work is queued, and a clock would otherwise stop too early."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def answered(
    label: str, runner: GroupRunner, group: Sequence[BenchPrompt], max_new_tokens: int, seeds: Sequence[int]
) -> Run:
    """`timed`; raises Failed where the prompts make the method fail."""
    try:
        with naming([prompt.id for prompt in group]):
            return timed(runner, group, max_new_tokens, seeds)
    except REFUSALS as error:
        together = f" (with {len(group) - 1} others)" if len(group) > 1 else ""
        raise Failed(f"{label}{together}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def measure(
    runners: Mapping[str, GroupRunner],
    group: Sequence[BenchPrompt],
    number: int,
    max_new_tokens: int,
    repeats: int,
    seeds: Sequence[int],
) -> dict[str, list[Measured]]:
    """Every method on a group of prompts, interleaved: a machine that slows down slows all methods down alike.

    number: of the group. The order of methods rotates with it and with the repeat, so that none always follows the same
    one. seeds: of the prompts: repeats redo the same work, and methods share their random numbers.

    Raises:
        Failed: a method did not answer.
    """
    labels = list(runners)
    # What one prompt teaches a method serves the next, not the same one again.
    restore = {label: remember(runner) for label, runner in runners.items()}
    runs: dict[str, list[Run]] = {label: [] for label in labels}
    for repeat in range(repeats):
        turn = (number + repeat) % len(labels)
        for label in labels[turn:] + labels[:turn]:
            restore[label]()
            runs[label].append(answered(label, runners[label], group, max_new_tokens, seeds))
    return {label: medians_of(number, group, runs[label]) for label in labels}


def medians_of(number: int, group: Sequence[BenchPrompt], runs: Sequence[Run]) -> list[Measured]:
    """Tokens and counts of the first run, medians of the clocks."""
    walls, cpus = tuple(run[1] / len(group) for run in runs), tuple(run[2] / len(group) for run in runs)
    wall_s, cpu_s = statistics.median(walls), statistics.median(cpus)
    return [
        Measured(prompt, number, made.tokens, made.trace, made.ended, wall_s, cpu_s, walls, cpus)
        for prompt, made in zip(group, runs[0][0], strict=True)
    ]
