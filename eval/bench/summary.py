"""The rows of results.json from measurements: sums over prompts, ratios of sums, and how sure they are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from draftsmith.data.text.repetition import NEW, Repetition, distinct_4grams, origins
from draftsmith.eval.bench.results import BASELINE, COUNTS, Row, totals_of
from draftsmith.eval.bootstrap import Floats, Resamples
from draftsmith.eval.clock import ClockName
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, pool


def tokens_per_s(rows: Sequence[Row], clock: ClockName) -> float:
    """Emitted tokens by seconds, both summed over prompts."""
    return sum(row["tokens"] for row in rows) / max(sum(row[f"{clock}_s"] for row in rows), 1e-12)


def speedup(rows: Sequence[Row], baseline: Sequence[Row], clock: ClockName) -> float:
    return tokens_per_s(rows, clock) / tokens_per_s(baseline, clock)


class MeasuredResamples(Resamples):
    """Resamples of measured prompts. What was timed together is drawn together: groups of questions, which are single
    ones at batch size 1, each with all its turns."""

    def __init__(self, rows: Sequence[Row], seed: int):
        super().__init__([row["group"] for row in rows], seed)

    def ratio(self, rows: Sequence[Row], above: str, below: str) -> Floats:
        """The sum of one column by that of another."""
        sums = self.sums([row[above] for row in rows]), self.sums([row[below] for row in rows])
        return sums[0] / np.maximum(sums[1], 1e-12)

    def tokens_per_s(self, rows: Sequence[Row], clock: ClockName) -> Floats:
        return self.ratio(rows, "tokens", f"{clock}_s")

    def tau(self, rows: Sequence[Row]) -> Floats:
        return self.ratio(rows, "tokens", "num_target_calls")


def copying(rows: Sequence[Row], baseline: Sequence[Row]) -> dict[str, float | None]:
    """Shares of the tokens that go on with a repetition of their prompt or of the answer itself; and tau of the rounds
    whose first token does, and of the others, prefills not counted: None where there are none.

    baseline: the rows with the prompts, in the same order.
    """
    sequences = []
    steps: dict[bool, list[DecodeStep]] = {True: [], False: []}
    for row, other in zip(rows, baseline, strict=True):
        prompt, answer = other["prompt_ids"], row["token_ids"]
        sequences.append(([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
        own, at = origins(*sequences[-1])[len(prompt) :], row["prefill_emitted"]
        for step in (DecodeStep(**made) for made in row["rounds"]):
            if step.num_emitted:
                steps[own[at] != NEW].append(step)
            at += step.num_emitted
    shares = Repetition.of(sequences)
    taus = {key: pool([DecodeTrace(own, prefill_calls=0)]).tau if own else None for key, own in steps.items()}
    return {
        "copied_prompt": shares.from_prompt,
        "copied_answer": shares.from_answer,
        "tau_copying": taus[True],
        "tau_new": taus[False],
    }


def speed_bench_tau(rows: Sequence[Row]) -> float:
    """Acceptance length of a category by SPEED-Bench's rule: tokens per target call of each question, over all its
    turns, and their mean over questions. Ours, `Totals.tau`, is a ratio of sums over questions."""
    questions: dict[int, list[Row]] = {}
    for row in rows:
        questions.setdefault(row["prompt"], []).append(row)
    return statistics.fmean(totals_of(turns).tau for turns in questions.values())


def summary_row(
    rows: Sequence[Row], baseline: Sequence[Row], clock: ClockName, seed: int, compare: bool
) -> dict[str, Any]:
    """The numbers of one method over some prompts. compare: greedy in float32, where equality is a fair test."""
    totals, drawn = totals_of(rows), MeasuredResamples(rows, seed)
    differing = sum(row["token_ids"] != other["token_ids"] for row, other in zip(rows, baseline, strict=True))
    return {
        "prompts": totals.prompts,
        "tokens": totals.num_tokens,
        "wall_s": sum(row["wall_s"] for row in rows),
        "cpu_s": sum(row["cpu_s"] for row in rows),
        "tokens_per_s": tokens_per_s(rows, clock),
        "speedup": speedup(rows, baseline, clock),
        "speedup_ci95": drawn.interval(lambda: drawn.tokens_per_s(rows, clock) / drawn.tokens_per_s(baseline, clock)),
        "speedup_wall": speedup(rows, baseline, "wall"),
        "speedup_cpu": speedup(rows, baseline, "cpu"),
        "tau": totals.tau,
        "tau_ci95": drawn.interval(lambda: drawn.tau(rows)),
        **{name: getattr(totals, name) for name in COUNTS},
        "discard_rate": totals.discard_rate,
        "verification_rate": totals.verification_rate,
        "matches_ar": differing == 0 if compare else None,
        "num_differing": differing if compare else None,
        "ended": sum(row["ended"] for row in rows),
        "distinct_4grams": distinct_4grams(row["token_ids"] for row in rows),
        **copying(rows, baseline),
    }


def summarise(
    measured: Mapping[str, Sequence[Row]],
    clock: ClockName,
    seed: int,
    compare: bool,
    temperature: float = 0.0,
    speed_bench: bool = False,
) -> list[dict[str, Any]]:
    """One row a method in the order measured, all at one temperature, each with `by_task` where prompts carry tasks and
    no group mixes them: the seconds of a mixed group belong to no task. measured: of `of_methods`.

    A row's own numbers are pooled: ratios of sums over all prompts. `macro_speedup` and `macro_tau` beside `by_task`
    are means over tasks, each of which counts alike, as papers print them. speed_bench: tasks are its categories; adds
    `speed_bench_tau` to every part of `by_task`, and to the row their mean.
    """
    baseline, found = measured[BASELINE], []
    mixed = len({(row["group"], row["task"]) for row in baseline}) > len({row["group"] for row in baseline})
    tasks = sorted({row["task"] for row in baseline if row["task"]})

    def numbers(rows: Sequence[Row], task: str | None = None) -> dict[str, Any]:
        own, base = ([row for row in part if task in (None, row["task"])] for part in (rows, baseline))
        return summary_row(own, base, clock, seed, compare)

    for label, rows in measured.items():
        row: dict[str, Any] = {"method": label, "temperature": temperature, **numbers(rows)}
        if tasks and not mixed:
            row["by_task"] = by_task = {task: numbers(rows, task) for task in tasks}
            for name in ("speedup", "tau"):
                row[f"macro_{name}"] = statistics.fmean(part[name] for part in by_task.values())
            if speed_bench:
                for task, part in by_task.items():
                    part["speed_bench_tau"] = speed_bench_tau([own for own in rows if own["task"] == task])
                row["speed_bench_tau"] = statistics.fmean(part["speed_bench_tau"] for part in by_task.values())
        found.append(row)
    return found
