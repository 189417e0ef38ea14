"""The rows of results.json from measurements: sums over prompts, ratios of sums, and how sure they are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from draftsmith.eval.bench.results import BASELINE, MeasuredPrompt
from draftsmith.eval.bootstrap import Floats, Resamples
from draftsmith.eval.cost.clock import ClockName
from draftsmith.modules.decoding.trace import pool


def seconds(item: MeasuredPrompt, clock: ClockName) -> float:
    return item.cpu_s if clock == "cpu" else item.wall_s


def tokens_per_s(items: Sequence[MeasuredPrompt], clock: ClockName) -> float:
    """Emitted tokens by seconds, both summed over prompts."""
    return sum(len(item.tokens) for item in items) / max(sum(seconds(item, clock) for item in items), 1e-12)


def speedup(items: Sequence[MeasuredPrompt], baseline: Sequence[MeasuredPrompt], clock: ClockName) -> float:
    return tokens_per_s(items, clock) / tokens_per_s(baseline, clock)


class MeasuredResamples(Resamples):
    """Resamples of measured prompts. What was timed together is drawn together: groups of questions, which are single
    ones at batch size 1, each with all its turns."""

    def __init__(self, items: Sequence[MeasuredPrompt], seed: int):
        super().__init__([item.group for item in items], seed)

    def tokens_per_s(self, items: Sequence[MeasuredPrompt], clock: ClockName) -> Floats:
        spent = self.sums([seconds(item, clock) for item in items])
        return self.sums([len(item.tokens) for item in items]) / np.maximum(spent, 1e-12)

    def tau(self, items: Sequence[MeasuredPrompt]) -> Floats:
        calls = self.sums([item.trace.num_target_calls for item in items])
        return self.sums([item.trace.num_tokens for item in items]) / np.maximum(calls, 1)


def distinct_4grams(items: Sequence[MeasuredPrompt]) -> float | None:
    """Distinct 4-grams by all 4-grams, each answer for itself: looping text, which flatters every drafter, is low."""
    grams = [list(zip(*(item.tokens[i:] for i in range(4)), strict=False)) for item in items]
    total = sum(len(g) for g in grams)
    return sum(len(set(g)) for g in grams) / total if total else None


def summary_row(
    items: Sequence[MeasuredPrompt], baseline: Sequence[MeasuredPrompt], clock: ClockName, seed: int, compare: bool
) -> dict[str, Any]:
    """The numbers of one method over some prompts. compare: greedy in float32, where equality is a fair test."""
    totals = pool(item.trace for item in items)
    drawn = MeasuredResamples(items, seed)
    differing = sum(item.tokens != other.tokens for item, other in zip(items, baseline, strict=True))
    return {
        "prompts": totals.prompts,
        "tokens": totals.num_tokens,
        "wall_s": sum(item.wall_s for item in items),
        "cpu_s": sum(item.cpu_s for item in items),
        "tokens_per_s": tokens_per_s(items, clock),
        "speedup": speedup(items, baseline, clock),
        "speedup_ci95": drawn.interval(lambda: drawn.tokens_per_s(items, clock) / drawn.tokens_per_s(baseline, clock)),
        "speedup_wall": speedup(items, baseline, "wall"),
        "speedup_cpu": speedup(items, baseline, "cpu"),
        "tau": totals.tau,
        "tau_ci95": drawn.interval(lambda: drawn.tau(items)),
        "num_target_calls": totals.num_target_calls,
        "num_draft_tokens": totals.num_draft_tokens,
        "num_accepted": totals.num_accepted,
        "num_discarded": totals.num_discarded,
        "draft_calls": totals.draft_calls,
        "discard_rate": totals.discard_rate,
        "verification_rate": totals.verification_rate,
        "matches_ar": differing == 0 if compare else None,
        "num_differing": differing if compare else None,
        "ended": sum(item.ended for item in items),
        "distinct_4grams": distinct_4grams(items),
    }


def summarise(
    measured: Mapping[str, Sequence[MeasuredPrompt]],
    clock: ClockName,
    seed: int,
    compare: bool,
    temperature: float = 0.0,
) -> list[dict[str, Any]]:
    """One row a method in the order measured, all at one temperature, each with `by_task` where prompts carry tasks and
    no group mixes them: the seconds of a mixed group belong to no task.

    A row's own numbers are pooled: ratios of sums over all prompts. `macro_speedup` and `macro_tau` beside `by_task`
    are means over tasks, each of which counts alike, as papers print them.
    """
    task_of: dict[int, str] = {}
    mixed = any(task_of.setdefault(item.group, item.prompt.task) != item.prompt.task for item in measured[BASELINE])
    baseline, rows = measured[BASELINE], []
    for label, items in measured.items():
        row: dict[str, Any] = {"method": label, "temperature": temperature}
        row |= summary_row(items, baseline, clock, seed, compare)
        tasks = sorted({item.prompt.task for item in items if item.prompt.task})
        if tasks and not mixed:
            row["by_task"] = by_task = {
                task: summary_row(
                    [item for item in items if item.prompt.task == task],
                    [item for item in baseline if item.prompt.task == task],
                    clock,
                    seed,
                    compare,
                )
                for task in tasks
            }
            for name in ("speedup", "tau"):
                row[f"macro_{name}"] = statistics.fmean(part[name] for part in by_task.values())
        rows.append(row)
    return rows
