"""Time every method on every prompt: group by group, at every temperature, turn by turn, with a journal to resume from.

Turns stay paired: in a later turn every method is asked the conversation with the answers that `ar` gave to the earlier
ones, in this run and at this temperature. Every method answers from the same distribution (greedily with the same
tokens), so it could have had this conversation itself, and all methods are timed on the same prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.data.console import log_note, progress_bar
from draftsmith.data.text.template import RowError
from draftsmith.eval.bench.prompts import BenchPrompt, next_turn
from draftsmith.eval.bench.results import BASELINE, Row, row_of
from draftsmith.eval.bench.runner import Runner
from draftsmith.eval.clock import rotated, wall_time
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.stop import learned_state, load_learned_state, snapshot_learned_state
from draftsmith.modules.finite import name_nonfinite
from draftsmith.modules.pretrained.files import append, cut, write_text
from draftsmith.modules.pretrained.provenance import differences, flatten
from draftsmith.modules.pretrained.reading import check_shape, read_lines
from draftsmith.modules.types import InputError

TURN_SEED = 1_000_003  # far from the seeds of other prompts

JOURNAL = "journal.jsonl"
REMEDY = "Delete it and measure again."

# What a prompt may make a method raise: ValueError of what refuses it (InputError, transformers), RuntimeError of torch
# (shapes, memory of the device). Other errors are defects of this program, and stop the run.
REFUSALS = (ValueError, RuntimeError)


class PromptFailed(Exception):
    """A method did not answer a prompt; `__cause__` is the error that it raised."""


def measure_group(
    runners: Mapping[str, Runner],
    group: Sequence[BenchPrompt],
    number: int,
    temperature: float,
    max_new_tokens: int,
    repeats: int,
    seeds: Sequence[int],
) -> list[Row]:
    """Measure every method on a group of prompts, interleaved, so that a slower machine slows all methods alike.

    Tokens and counts are those of the first repeat. The order of methods rotates with the group and with the repeat.

    number: of the group. seeds: one a prompt; repeats redo the same work, and methods share their random numbers.

    Raises:
        PromptFailed: a method did not answer.
    """
    # What a method learns from a prompt helps on the next prompt, but not on the same one again.
    restore = {label: snapshot_learned_state(runner) for label, runner in runners.items()}
    prompts = [prompt.prompt_ids for prompt in group]
    answers: dict[str, list[Generation]] = {}
    seconds: dict[str, list[tuple[float, float]]] = {label: [] for label in runners}  # wall, CPU of all threads
    for repeat in range(repeats):
        for label in rotated(list(runners), number + repeat):
            restore[label]()
            try:
                with name_nonfinite([prompt.id for prompt in group]):
                    wall, cpu = wall_time(), time.process_time()
                    generations = runners[label](prompts, max_new_tokens, seeds)
                    seconds[label].append((wall_time() - wall, time.process_time() - cpu))
            except REFUSALS as error:
                together = f" (with {len(group) - 1} others)" if len(group) > 1 else ""
                message = f"{label}{together}: {type(error).__name__}: {' '.join(str(error).split())}"
                raise PromptFailed(message) from error
            answers.setdefault(label, generations)
    rows = []
    for label, runs in seconds.items():
        wall_s, cpu_s = ([run[clock] / len(group) for run in runs] for clock in (0, 1))
        for prompt, answer in zip(group, answers[label], strict=True):
            rows.append(row_of(prompt, number, label, temperature, answer, wall_s, cpu_s))
    return rows


def prompt_seed(seed: int, number: int, turn: int) -> int:
    """Return the seed of a prompt by the run's seed, its number and its turn."""
    return seed + number + TURN_SEED * (turn - 1)


class Journal:
    """Journal of an unfinished run, so that the same command resumes it behind a kill.

    JSON lines: the first holds what the run depends on, each later one the rows of a group of prompts. A line is synced
    to the disk before the next group begins.

    entries: lines of an earlier start. times: measured for `auto` by the first start, empty if there was none.
    """

    def __init__(self, directory: Path):
        self.path = Path(directory) / JOURNAL
        lines = []
        if self.path.exists():
            # A torn last line is what a kill leaves: cut it off, and its group is measured again.
            cut(self.path, self.path.read_bytes().rfind(b"\n") + 1)
            lines = list(read_lines(self.path, {}, REMEDY))
        if lines:
            check_shape(self.path, lines[0], {"settings": dict, "auto": dict}, REMEDY, "line 1")
        self._first: dict[str, Any] = lines[0] if lines else {}
        self.times: dict[str, Any] = self._first.get("auto", {})
        self.entries = lines[1:]

    def start(self, depends_on: Mapping[str, Any], times: Mapping[str, Any]) -> None:
        """Write the first line, or check that it is the same.

        depends_on: all that a measurement depends on, as JSON values.

        Raises:
            InputError: the directory holds an unfinished run of something else.
        """
        # As JSON reads it back: tuples become lists, and keys text.
        settings = json.loads(json.dumps(depends_on))
        if not self._first:
            write_text(self.path, json.dumps({"settings": settings, "auto": times}) + "\n")
        elif differing := differences(flatten(self._first["settings"]), flatten(settings)):
            listed = "; ".join(f"{key} {theirs} there, {ours} here" for key, theirs, ours in differing)
            found = f"an unfinished run of other settings in {self.path.parent} ({listed})"
            remedy = f"Go on with its own settings, pass another --output, or delete {self.path}."
            raise InputError("output", found, "none, or one of these settings", remedy)

    def add(self, entry: Any) -> None:
        """Append a line, synced to the disk."""
        append(self.path, json.dumps(entry) + "\n")


@dataclass(frozen=True)
class PromptRunner:
    """Measurement of all prompts by all methods.

    runners: temperature -> label -> method. tokenizer: the target's, with its chat template, for later turns. context:
    of the target. room: tokens that the methods' caches hold for a prompt with its answer.
    """

    runners: Mapping[float, Mapping[str, Runner]]
    tokenizer: Any
    context: int
    room: int
    max_new_tokens: int
    repeats: int
    seed: int

    def run_all(self, files: Sequence[Sequence[BenchPrompt]], batch_size: int, journal: Journal) -> list[Row]:
        """Measure all prompts at all temperatures, but for those that the journal holds. Return the rows of all.

        Consecutive prompts of one file are a group. Methods first load what they had learned when the journal ended.

        Raises:
            InputError: no prompt could be measured.
        """
        # Restore what was measured and learned before an interruption.
        groups = [file[start : start + batch_size] for file in files for start in range(0, len(file), batch_size)]
        for entry in journal.entries:
            for label, states in entry["learned"].items():
                load_learned_state(self.runners[entry["temperature"]][label], states)
        kept = {(entry["group"], entry["temperature"]): entry["rows"] for entry in journal.entries}
        total, done = sum(map(len, files)) * len(self.runners), sum(len(groups[number]) for number, _ in kept)
        if done:
            log_note(f"draftsmith: resuming: {done} of {total} prompts are measured ({journal.path})")
        if done < total:
            self.warm_up([prompt for file in files for prompt in file], batch_size)
        # Measure the rest, and journal every group at once.
        rows: list[Row] = []
        with progress_bar("measuring", total, "prompts", done, moving=False) as progress:
            for number, group in enumerate(groups):
                for temperature, runners in self.runners.items():
                    if (number, temperature) not in kept:
                        measured = kept[number, temperature] = self.run(group, number, temperature)
                        learned = {label: states for label in runners if (states := learned_state(runners[label]))}
                        journal.add({"group": number, "temperature": temperature, "rows": measured, "learned": learned})
                        progress(len(group))
                    rows += kept[number, temperature]
        # Nothing to resume: the same command would fail again.
        if all(row["error"] is not None for row in rows):
            journal.path.unlink()
            found = f"none that could be measured; the last one: {rows[-1]['error']}"
            raise InputError("prompts", found, "at least one", "Correct them.")
        # In the order of the methods, whatever order they were measured in.
        labels = [(temperature, label) for temperature, own in self.runners.items() for label in own]
        order = {place: number for number, place in enumerate(labels)}
        return sorted(rows, key=lambda row: (order[row["temperature"], row["method"]], row["prompt"], row["turn"]))

    def warm_up(self, prompts: Sequence[BenchPrompt], batch_size: int) -> None:
        """Run every method once, uncounted, on the first prompt that is not too long: a first run pays for set-up."""
        group = [prompt for prompt in prompts if not self.too_long(prompt)][:1] * batch_size
        restore = [snapshot_learned_state(runner) for own in self.runners.values() for runner in own.values()]
        seeds = range(self.seed, self.seed + batch_size)
        try:
            for temperature, runners in self.runners.items() if group else ():
                measure_group(runners, group, 0, temperature, self.max_new_tokens, 1, seeds)
        except PromptFailed:
            pass  # reported when the prompt is measured
        finally:
            for load in restore:
                load()

    def run(self, group: Sequence[BenchPrompt], number: int, temperature: float) -> list[Row]:
        """Measure all turns of a group. Rows of failed prompts hold the error; their later turns are not asked."""
        runners = self.runners[temperature]
        rows: list[Row] = []

        def fail(prompt: BenchPrompt, error: str) -> None:
            if prompt.later:
                error += f"; so turns up to {prompt.turn + len(prompt.later)} were not asked"
            rows.extend(row_of(prompt, number, label, temperature, error=error) for label in runners)

        # One turn after the other.
        while group:
            fitting: list[BenchPrompt] = []
            for prompt in group:
                if error := self.too_long(prompt):
                    fail(prompt, error)
                else:
                    fitting.append(prompt)
            if not fitting:
                break
            seeds = [prompt_seed(self.seed, prompt.number, prompt.turn) for prompt in fitting]
            # A failure of one method leaves the prompt out for all: they are compared on the same prompts.
            try:
                turn = measure_group(runners, fitting, number, temperature, self.max_new_tokens, self.repeats, seeds)
            except PromptFailed as failure:
                for prompt in fitting:
                    fail(prompt, str(failure))
                break
            rows += turn

            # The next turn follows the answers of ar.
            answers = [row["token_ids"] for row in turn if row["method"] == BASELINE]
            group = []
            for prompt, answer in zip(fitting, answers, strict=True):
                if prompt.later:
                    try:
                        group.append(next_turn(self.tokenizer, prompt, answer))
                    except RowError as error:
                        refused = replace(prompt, prompt_ids=[], later=prompt.later[1:], turn=prompt.turn + 1)
                        fail(refused, str(error))
        return rows

    def too_long(self, prompt: BenchPrompt) -> str | None:
        """Return why a prompt cannot be asked, None if it can."""
        length = len(prompt.prompt_ids)
        if length >= self.context:
            return f"{length} tokens leave no room for an answer in the target's context of {self.context}"
        if length + min(self.max_new_tokens, self.context - length) > self.room:
            return f"{length} tokens, with an answer more than the {self.room} that were planned for"
        return None
