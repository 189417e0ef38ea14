"""Every method on every prompt, timed: group by group, at every temperature, turn by turn. A prompt that fails does not
lose the others.

Turns stay paired: what every method is asked in a later turn is the conversation with the answers that `ar` has given
to the earlier ones, in this run and at this temperature. A lossless method answers from the same distribution (greedily
with the same tokens), so this is a conversation that it could have had itself, and all are timed on the same prompts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from draftsmith.data.console import log_note, progress_bar
from draftsmith.data.models.loading import name_nonfinite
from draftsmith.data.text.template import RowError
from draftsmith.eval.bench.journal import Journal
from draftsmith.eval.bench.prompts import BenchPrompt, Chat
from draftsmith.eval.bench.results import BASELINE, Row, row_of
from draftsmith.eval.bench.runner import Runner
from draftsmith.eval.clock import rotated, wall_time
from draftsmith.modules.decoding.learner import learned_state, load_learned_state, snapshot_learned_state
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
        with name_nonfinite([prompt.id for prompt in group]):
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
    temperature: float,
    max_new_tokens: int,
    repeats: int,
    seeds: Sequence[int],
) -> list[Row]:
    """Rows of every method on a group of prompts, interleaved: a machine that slows down slows all methods down alike.
    Tokens and counts are those of the first repeat.

    number: of the group. The order of methods rotates with it and with the repeat. seeds: of the prompts: repeats redo
    the same work, and methods share their random numbers.

    Raises:
        Failed: a method did not answer.
    """
    # What one prompt teaches a method serves the next, not the same one again.
    restore = {label: snapshot_learned_state(runner) for label, runner in runners.items()}
    runs: dict[str, list[Run]] = {label: [] for label in runners}
    for repeat in range(repeats):
        for label in rotated(list(runners), number + repeat):
            restore[label]()
            runs[label].append(answered(label, runners[label], group, max_new_tokens, seeds))
    rows = []
    for label, own in runs.items():
        walls, cpus = [run[1] / len(group) for run in own], [run[2] / len(group) for run in own]
        for prompt, made in zip(group, own[0][0], strict=True):
            rows.append(row_of(prompt, number, label, temperature, made, walls, cpus))
    return rows


def seed_of(prompt: BenchPrompt, seed: int) -> int:
    """A prompt's seed in a run of this one depends on its number and turn only."""
    return seed + prompt.number + TURN_SEED * (prompt.turn - 1)


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
                        restore = snapshot_learned_state(runner)
                        seeds = range(self.seed, self.seed + batch_size)
                        answered(label, runner, [prompt] * batch_size, self.max_new_tokens, seeds)
                        restore()
                return
            except Failed as failure:
                last = failure
        raise every_prompt_failed(str(last) if last else "too long for the target's context") from last

    def too_long(self, prompt: BenchPrompt) -> str | None:
        """Why a prompt cannot be asked."""
        length = len(prompt.prompt_ids)
        if length >= self.context:
            return f"{length} tokens leave no room for an answer in the target's context of {self.context}"
        if length + min(self.max_new_tokens, self.context - length) > self.room:
            return f"{length} tokens, with an answer more than the {self.room} that were planned for"
        return None

    def run(self, group: Sequence[BenchPrompt], number: int, temperature: float) -> list[Row]:
        """Rows of all turns of a group; those of failed prompts say why, and are not asked further."""
        runners = self.runners[temperature]
        rows: list[Row] = []

        def failed(prompt: BenchPrompt, why: str) -> None:
            left = f"; so turns up to {prompt.turn + len(prompt.later)} were not asked" if prompt.later else ""
            rows.extend(row_of(prompt, number, label, temperature, error=why + left) for label in runners)

        while group:
            reasons = [self.too_long(prompt) for prompt in group]
            for prompt, why in zip(group, reasons, strict=True):
                if why:
                    failed(prompt, why)
            group = [prompt for prompt, why in zip(group, reasons, strict=True) if not why]
            if not group:
                break
            limits = (self.max_new_tokens, self.repeats, [seed_of(prompt, self.seed) for prompt in group])
            try:
                found = measure_group(runners, group, number, temperature, *limits)
            except Failed as failure:
                for prompt in group:
                    failed(prompt, str(failure))
                break
            rows += found
            answers = [row["token_ids"] for row in found if row["method"] == BASELINE]
            asked, group = group, []
            for prompt, answer in zip(asked, answers, strict=True):
                if prompt.later:
                    try:
                        group.append(self.chat.next_turn(prompt, answer))
                    except RowError as error:
                        refused = replace(prompt, prompt_ids=[], later=prompt.later[1:], turn=prompt.turn + 1)
                        failed(refused, str(error))
        return rows

    def run_all(self, files: Sequence[Sequence[BenchPrompt]], batch_size: int, journal: Journal) -> list[Row]:
        """Rows of all prompts at all temperatures: those that the journal holds, and those it still lacks, which are
        run by methods that know what they knew when it ended. Consecutive prompts of one file are a group.

        Raises:
            InputError: no prompt could be measured; a journal of other groups.
        """
        groups = [file[start : start + batch_size] for file in files for start in range(0, len(file), batch_size)]
        for entry in journal.entries:
            if entry["group"] not in range(len(groups)) or entry["temperature"] not in self.runners:
                found = f"group {entry['group']} at temperature {entry['temperature']:g}, which there is not"
                raise InputError(str(journal.path), found, "groups of this run", "Delete it and measure again.")
            for label, states in entry.get("learned", {}).items():
                load_learned_state(self.runners[entry["temperature"]][label], states)
        kept = {(entry["group"], entry["temperature"]): entry["rows"] for entry in journal.entries}
        total, done = sum(map(len, files)) * len(self.runners), sum(len(groups[number]) for number, _ in kept)
        if done:
            about = f"{done} of {total} prompts are measured ({journal.path})"
            log_note(f"draftsmith: going on with an interrupted run: {about}")
        if done < total:
            self.warm_up([prompt for file in files for prompt in file], batch_size)
        rows: list[Row] = []
        with progress_bar("measuring", total, "prompts", done, moving=False) as progress:
            for number, group in enumerate(groups):
                for temperature, runners in self.runners.items():
                    if (number, temperature) not in kept:
                        own = kept[number, temperature] = self.run(group, number, temperature)
                        learned = {label: states for label in runners if (states := learned_state(runners[label]))}
                        journal.add({"group": number, "temperature": temperature, "rows": own, "learned": learned})
                        progress(len(group))
                    rows += kept[number, temperature]
        if all(row["error"] is not None for row in rows):
            journal.remove()
            raise every_prompt_failed(rows[-1]["error"])
        places = [(temperature, label) for temperature, own in self.runners.items() for label in own]
        by_method = {place: number for number, place in enumerate(places)}
        return sorted(rows, key=lambda row: (by_method[row["temperature"], row["method"]], row["prompt"], row["turn"]))


def every_prompt_failed(why: str) -> InputError:
    return InputError("prompts", f"none that could be measured; the last one: {why}", "at least one", "Correct them.")
