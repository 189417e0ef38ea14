"""Asking questions group by group, at every temperature, turn by turn; a prompt that fails does not lose the others.

Turns stay paired: what every method is asked in a later turn is the conversation with the answers that `ar` has given
to the earlier ones, in this run and at this temperature. A lossless method answers from the same law (greedily with the
same tokens), so this is a conversation that it could have had itself, and all methods are timed on the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from draftsmith.data.text.template import RowError
from draftsmith.eval.bench.journal import Journal
from draftsmith.eval.bench.learned import known, remember, teach
from draftsmith.eval.bench.measure import BenchPrompt, Failed, GroupRunner, Measured, answered, measure
from draftsmith.eval.bench.results import BASELINE, Row, failed_row, measured_row
from draftsmith.eval.bench.tasks import Chat
from draftsmith.modules.types import InputError

TURN_SEED = 1_000_003  # far from the seeds of other prompts


@dataclass(frozen=True)
class Asking:
    """How questions are asked.

    runners: temperature -> label -> method. chat: writes later turns; needed where there are any. context: of the
    target. room: tokens that the methods' caches hold for a prompt with its answer.
    """

    runners: Mapping[float, Mapping[str, GroupRunner]]
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
        """Why a prompt can not be asked."""
        length = len(prompt.prompt_ids)
        if length >= self.context:
            return f"{length} tokens leave no room for an answer in the target's context of {self.context}"
        if length + min(self.max_new_tokens, self.context - length) > self.room:
            return f"{length} tokens, with an answer more than the {self.room} that were planned for"
        return None

    def ask(self, group: Sequence[BenchPrompt], number: int, temperature: float) -> Iterator[Row]:
        """Rows of all turns of a group's questions; those of failed prompts say why, and are not asked further."""
        runners = self.runners[temperature]
        failures: list[tuple[BenchPrompt, str]] = []
        while group:
            reasons = [self.too_long(prompt) for prompt in group]
            failures += [(prompt, why) for prompt, why in zip(group, reasons, strict=True) if why]
            fitting = [prompt for prompt, why in zip(group, reasons, strict=True) if not why]
            found: Mapping[str, Sequence[Measured]] = {}
            try:
                if fitting:
                    seeds = self.seeds(fitting)
                    found = measure(runners, fitting, number, self.max_new_tokens, self.repeats, seeds)
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
                    unasked = replace(
                        item.prompt, prompt_ids=[], later=item.prompt.later[1:], turn=item.prompt.turn + 1
                    )
                    failures.append((unasked, str(error)))
        for prompt, why in failures:
            left = f"; so turns up to {prompt.turn + len(prompt.later)} were not asked" if prompt.later else ""
            yield from (failed_row(prompt, number, label, temperature, why + left) for label in runners)


def ask_all(
    asking: Asking, groups: Sequence[Sequence[BenchPrompt]], journal: Journal, progress: Callable[[int], None]
) -> list[Row]:
    """Rows of all groups at all temperatures: those that the journal holds, and those it still lacks, which are asked
    by methods that know what they knew when it ended.

    progress: is told how many more prompts are done.
    """
    kept = {(entry["group"], entry["temperature"]): entry["rows"] for entry in journal.entries}
    for entry in journal.entries:
        for label, states in entry.get("learned", {}).items():
            teach(asking.runners[entry["temperature"]][label], states)
    rows: list[Row] = []
    for number, group in enumerate(groups):
        for temperature in asking.runners:
            done = kept.get((number, temperature))
            if done is None:
                done = list(asking.ask(group, number, temperature))
                every = {label: known(runner) for label, runner in asking.runners[temperature].items()}
                learned = {label: states for label, states in every.items() if states}
                journal.add({"group": number, "temperature": temperature, "rows": done, "learned": learned})
                progress(len(group))
            rows += done
    places = {temperature: place for place, temperature in enumerate(asking.runners)}
    labels = list(next(iter(asking.runners.values())))
    return sorted(
        rows, key=lambda row: (places[row["temperature"]], labels.index(row["method"]), row["prompt"], row["turn"])
    )


def every_prompt_failed(why: str) -> InputError:
    return InputError("prompts", f"none that could be measured; the last one: {why}", "at least one", "Correct them.")
