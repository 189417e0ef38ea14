"""Every method on every prompt, timed: group by group, at every temperature, turn by turn. A prompt that fails does not
lose the others.

Turns stay paired: what every method is asked in a later turn is the conversation with the answers that `ar` has given
to the earlier ones, in this run and at this temperature. A lossless method answers from the same distribution (greedily
with the same tokens), so this is a conversation that it could have had itself, and all are timed on the same prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from draftsmith.data.models.naming import naming
from draftsmith.data.text.template import RowError
from draftsmith.eval.bench.journal import Journal
from draftsmith.eval.bench.prompts import BenchPrompt, Chat
from draftsmith.eval.bench.results import BASELINE, MeasuredPrompt, Row, failed_row, measured_row
from draftsmith.eval.bench.runner import Runner, learned_by, remember, teach
from draftsmith.eval.cost.clock import rotated, wall_time
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.types import InputError

TURN_SEED = 1_000_003  # far from the seeds of other prompts
# What a prompt may make a method raise: ValueError of what refuses it (InputError, transformers), RuntimeError of torch
# (shapes, memory of the device). Other errors are defects of this program, and stop the run.
REFUSALS = (ValueError, RuntimeError)

# The generations of a group, wall seconds, CPU seconds of this process (all its threads).
Run = tuple[list[Generation], float, float]


class Failed(Exception):
    """A method did not answer a prompt; `__cause__` is what it raised."""


def answered(
    label: str, runner: Runner, group: Sequence[BenchPrompt], max_new_tokens: int, seeds: Sequence[int]
) -> Run:
    """One run of a group, with clocks: the only timers of the project's decoding.

    Raises:
        Failed: the prompts make the method fail.
    """
    try:
        with naming([prompt.id for prompt in group]):
            wall, cpu = wall_time(), time.process_time()
            generations = runner([prompt.prompt_ids for prompt in group], max_new_tokens, seeds)
            return generations, wall_time() - wall, time.process_time() - cpu
    except REFUSALS as error:
        together = f" (with {len(group) - 1} others)" if len(group) > 1 else ""
        raise Failed(f"{label}{together}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def measure_group(
    runners: Mapping[str, Runner],
    group: Sequence[BenchPrompt],
    number: int,
    max_new_tokens: int,
    repeats: int,
    seeds: Sequence[int],
) -> dict[str, list[MeasuredPrompt]]:
    """Every method on a group of prompts, interleaved: a machine that slows down slows all methods down alike.

    number: of the group. The order of methods rotates with it and with the repeat. seeds: of the prompts: repeats redo
    the same work, and methods share their random numbers.

    Raises:
        Failed: a method did not answer.
    """
    # What one prompt teaches a method serves the next, not the same one again.
    restore = {label: remember(runner) for label, runner in runners.items()}
    runs: dict[str, list[Run]] = {label: [] for label in runners}
    for repeat in range(repeats):
        for label in rotated(list(runners), number + repeat):
            restore[label]()
            runs[label].append(answered(label, runners[label], group, max_new_tokens, seeds))
    return {label: medians_of(number, group, runs[label]) for label in runners}


def medians_of(number: int, group: Sequence[BenchPrompt], runs: Sequence[Run]) -> list[MeasuredPrompt]:
    """Tokens and counts of the first run, medians of the clocks."""
    walls, cpus = tuple(run[1] / len(group) for run in runs), tuple(run[2] / len(group) for run in runs)
    wall_s, cpu_s = statistics.median(walls), statistics.median(cpus)
    return [
        MeasuredPrompt(prompt, number, made.tokens, made.trace, made.ended, wall_s, cpu_s, walls, cpus)
        for prompt, made in zip(group, runs[0][0], strict=True)
    ]


@dataclass(frozen=True)
class PromptRunner:
    """How prompts are run.

    runners: temperature -> label -> method. chat: writes later turns; needed where there are any. context: of the
    target. room: tokens that the methods' caches hold for a prompt with its answer.
    """

    runners: Mapping[float, Mapping[str, Runner]]
    chat: Chat
    context: int
    room: int
    max_new_tokens: int
    repeats: int
    seed: int

    def warm_up(self, candidates: Sequence[BenchPrompt], batch_size: int) -> None:
        """One uncounted run of every method, on the first prompt that all of them answer.

        Raises:
            InputError: there is none.
        """
        last: Failed | None = None
        for prompt in candidates:
            if self.too_long(prompt):
                continue
            try:
                for runners in self.runners.values():
                    for label, runner in runners.items():
                        restore = remember(runner)
                        seeds = range(self.seed, self.seed + batch_size)
                        answered(label, runner, [prompt] * batch_size, self.max_new_tokens, seeds)
                        restore()
                return
            except Failed as failure:
                last = failure
        raise every_prompt_failed(str(last) if last else "too long for the target's context") from last

    def seeds(self, group: Sequence[BenchPrompt]) -> list[int]:
        """A prompt's seed depends on its number and turn only."""
        return [self.seed + prompt.number + TURN_SEED * (prompt.turn - 1) for prompt in group]

    def too_long(self, prompt: BenchPrompt) -> str | None:
        """Why a prompt cannot be asked."""
        length = len(prompt.prompt_ids)
        if length >= self.context:
            return f"{length} tokens leave no room for an answer in the target's context of {self.context}"
        if length + min(self.max_new_tokens, self.context - length) > self.room:
            return f"{length} tokens, with an answer more than the {self.room} that were planned for"
        return None

    def run(self, group: Sequence[BenchPrompt], number: int, temperature: float) -> Iterator[Row]:
        """Rows of all turns of a group; those of failed prompts say why, and are not asked further."""
        runners = self.runners[temperature]
        failures: list[tuple[BenchPrompt, str]] = []
        while group:
            reasons = [self.too_long(prompt) for prompt in group]
            failures += [(prompt, why) for prompt, why in zip(group, reasons, strict=True) if why]
            fitting = [prompt for prompt, why in zip(group, reasons, strict=True) if not why]
            found: Mapping[str, Sequence[MeasuredPrompt]] = {}
            try:
                if fitting:
                    seeds = self.seeds(fitting)
                    found = measure_group(runners, fitting, number, self.max_new_tokens, self.repeats, seeds)
            except Failed as failure:
                failures += [(prompt, str(failure)) for prompt in fitting]
            for label, items in found.items():
                yield from (measured_row(item, label, temperature) for item in items)
            group = []
            for item in found.get(BASELINE, ()):
                if not item.prompt.later:
                    continue
                try:
                    group.append(self.chat.next_turn(item.prompt, item.tokens))
                except RowError as error:
                    later, turn = item.prompt.later[1:], item.prompt.turn + 1
                    failures.append((replace(item.prompt, prompt_ids=[], later=later, turn=turn), str(error)))
        for prompt, why in failures:
            left = f"; so turns up to {prompt.turn + len(prompt.later)} were not asked" if prompt.later else ""
            yield from (failed_row(prompt, number, label, temperature, why + left) for label in runners)

    def run_all(
        self, groups: Sequence[Sequence[BenchPrompt]], journal: Journal, progress: Callable[[int], None]
    ) -> list[Row]:
        """Rows of all groups at all temperatures: those that the journal holds, and those it still lacks, which are run
        by methods that know what they knew when it ended.

        progress: is told how many more prompts are done.
        """
        kept = {(entry["group"], entry["temperature"]): entry["rows"] for entry in journal.entries}
        for entry in journal.entries:
            for label, states in entry.get("learned", {}).items():
                teach(self.runners[entry["temperature"]][label], states)
        rows: list[Row] = []
        for number, group in enumerate(groups):
            for temperature, runners in self.runners.items():
                done = kept.get((number, temperature))
                if done is None:
                    done = list(self.run(group, number, temperature))
                    learned = {label: states for label in runners if (states := learned_by(runners[label]))}
                    journal.add({"group": number, "temperature": temperature, "rows": done, "learned": learned})
                    progress(len(group))
                rows += done
        temperatures, labels = list(self.runners), list(next(iter(self.runners.values())))
        return sorted(
            rows,
            key=lambda row: (
                temperatures.index(row["temperature"]), labels.index(row["method"]), row["prompt"], row["turn"]
            ),
        )  # fmt: skip


def every_prompt_failed(why: str) -> InputError:
    return InputError("prompts", f"none that could be measured; the last one: {why}", "at least one", "Correct them.")
