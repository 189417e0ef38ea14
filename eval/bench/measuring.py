"""Time every method on every prompt, at every temperature, turn by turn, with a journal to resume from.

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


def measure_prompt(
    runners: Mapping[str, Runner],
    prompt: BenchPrompt,
    number: int,
    temperature: float,
    max_new_tokens: int,
    repeats: int,
    seed: int,
) -> list[Row]:
    """Measure every method on a prompt, interleaved, so that a slower machine slows all methods alike.

    Tokens and counts are those of the first repeat. The order of methods rotates with the number and with the repeat.
    Repeats redo the same work, and methods share their random numbers.

    Raises:
        PromptFailed: a method did not answer.
    """
    # What a method learns from a prompt helps on the next prompt, but not on the same one again.
    restore = {label: snapshot_learned_state(runner) for label, runner in runners.items()}
    answers: dict[str, Generation] = {}
    seconds: dict[str, list[tuple[float, float]]] = {label: [] for label in runners}  # wall, CPU of all threads
    for repeat in range(repeats):
        for label in rotated(list(runners), number + repeat):
            restore[label]()
            try:
                with name_nonfinite([prompt.id]):
                    wall, cpu = wall_time(), time.process_time()
                    answer = runners[label](prompt.prompt_ids, max_new_tokens, seed)
                    seconds[label].append((wall_time() - wall, time.process_time() - cpu))
            except REFUSALS as error:
                raise PromptFailed(f"{label}: {type(error).__name__}: {' '.join(str(error).split())}") from error
            answers.setdefault(label, answer)
    return [
        row_of(prompt, label, temperature, answers[label], [wall for wall, _ in runs], [cpu for _, cpu in runs])
        for label, runs in seconds.items()
    ]


def prompt_seed(seed: int, number: int, turn: int) -> int:
    """Return the seed of a prompt by the run's seed, its number and its turn."""
    return seed + number + TURN_SEED * (turn - 1)


class Journal:
    """Journal of an unfinished run, so that the same command resumes it behind a kill.

    JSON lines: the first holds what the run depends on, each later one the rows of a prompt with its turns. A line is
    synced to the disk before the next prompt begins.

    entries: lines of an earlier start. times: measured for `auto` by the first start, empty if there was none.
    """

    def __init__(self, directory: Path):
        self.path = Path(directory) / JOURNAL
        lines = []
        if self.path.exists():
            # A torn last line is what a kill leaves: cut it off, and its prompt is measured again.
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

    def run_all(self, prompts: Sequence[BenchPrompt], journal: Journal) -> list[Row]:
        """Measure all prompts at all temperatures, but for those that the journal holds. Return the rows of all.

        Methods that learn first load the state that the journal ends with.

        Raises:
            InputError: no prompt could be measured.
        """
        # Restore what was measured and learned before an interruption.
        for entry in journal.entries:
            for label, states in entry["learned"].items():
                load_learned_state(self.runners[entry["temperature"]][label], states)
        kept = {(entry["prompt"], entry["temperature"]): entry["rows"] for entry in journal.entries}
        total, done = len(prompts) * len(self.runners), len(kept)
        if done:
            log_note(f"draftsmith: resuming: {done} of {total} prompts are measured ({journal.path})")
        if done < total:
            self.warm_up(prompts)
        # Measure the rest, and journal every prompt at once.
        rows: list[Row] = []
        with progress_bar("measuring", total, "prompts", done, moving=False) as progress:
            for number, prompt in enumerate(prompts):
                for temperature, runners in self.runners.items():
                    if (number, temperature) not in kept:
                        measured = kept[number, temperature] = self.run(prompt, number, temperature)
                        learned = {label: states for label in runners if (states := learned_state(runners[label]))}
                        journal.add(
                            {"prompt": number, "temperature": temperature, "rows": measured, "learned": learned}
                        )
                        progress(1)
                    rows += kept[number, temperature]
        # Nothing to resume: the same command would fail again.
        if all(row["error"] is not None for row in rows):
            journal.path.unlink()
            found = f"none that could be measured; the last one: {rows[-1]['error']}"
            raise InputError("data", found, "at least one", "Correct them.")
        # In the order of the methods, whatever order they were measured in.
        labels = [(temperature, label) for temperature, own in self.runners.items() for label in own]
        order = {place: number for number, place in enumerate(labels)}
        return sorted(rows, key=lambda row: (order[row["temperature"], row["method"]], row["prompt"], row["turn"]))

    def warm_up(self, prompts: Sequence[BenchPrompt]) -> None:
        """Run every method once, uncounted, on the first prompt that is not too long: a first run pays for set-up."""
        first = next((prompt for prompt in prompts if not self.too_long(prompt)), None)
        if first is None:
            return
        restore = [snapshot_learned_state(runner) for own in self.runners.values() for runner in own.values()]
        try:
            for temperature, runners in self.runners.items():
                measure_prompt(runners, first, 0, temperature, self.max_new_tokens, 1, self.seed)
        except PromptFailed:
            pass  # reported when the prompt is measured
        finally:
            for load in restore:
                load()

    def run(self, prompt: BenchPrompt, number: int, temperature: float) -> list[Row]:
        """Measure all turns of a prompt. Rows of a failed turn hold the error; later turns are not asked then."""
        runners, rows, asked = self.runners[temperature], list[Row](), prompt

        def failed(turn: BenchPrompt, error: str) -> list[Row]:
            if turn.later:
                error += f"; so turns up to {turn.turn + len(turn.later)} were not asked"
            return [row_of(turn, label, temperature, error=error) for label in runners]

        while True:
            if error := self.too_long(asked):
                return [*rows, *failed(asked, error)]
            # A failure of one method leaves the prompt out for all: they are compared on the same prompts.
            seed = prompt_seed(self.seed, asked.number, asked.turn)
            how = number, temperature, self.max_new_tokens, self.repeats, seed
            try:
                measured = measure_prompt(runners, asked, *how)
            except PromptFailed as failure:
                return [*rows, *failed(asked, str(failure))]
            rows += measured
            if not asked.later:
                return rows

            # The next turn follows the answer of ar.
            answer = next(row["token_ids"] for row in measured if row["method"] == BASELINE)
            try:
                asked = next_turn(self.tokenizer, asked, answer)
            except RowError as refusal:
                refused = replace(asked, prompt_ids=[], later=asked.later[1:], turn=asked.turn + 1)
                return [*rows, *failed(refused, str(refusal))]

    def too_long(self, prompt: BenchPrompt) -> str | None:
        """Return why a prompt cannot be asked, None if it can."""
        length = len(prompt.prompt_ids)
        if length >= self.context:
            return f"{length} tokens leave no room for an answer in the target's context of {self.context}"
        if length + min(self.max_new_tokens, self.context - length) > self.room:
            return f"{length} tokens, with an answer more than the {self.room} that were planned for"
        return None
