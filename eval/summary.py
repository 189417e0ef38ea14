"""From measurements to the rows of results.json: sums over prompts, ratios of sums, and how sure they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from draftsmith.eval.measure import Measured
from draftsmith.modules.decoding.trace import pool

Clock = Literal["cpu", "wall"]
BASELINE = "ar"
NUM_RESAMPLES = 2000


def seconds(item: Measured, clock: Clock) -> float:
    return item.cpu_s if clock == "cpu" else item.wall_s


def tokens_per_s(items: Sequence[Measured], clock: Clock) -> float:
    """Emitted tokens by seconds, both summed over prompts."""
    return sum(len(item.tokens) for item in items) / max(sum(seconds(item, clock) for item in items), 1e-12)


def speedup(items: Sequence[Measured], baseline: Sequence[Measured], clock: Clock) -> float:
    return tokens_per_s(items, clock) / tokens_per_s(baseline, clock)


def speedup_interval(
    items: Sequence[Measured], baseline: Sequence[Measured], clock: Clock, seed: int
) -> list[float] | None:
    """95 % bootstrap interval of the speed-up. What was timed together is resampled together, in pairs: groups, which
    are single prompts at batch size 1. None for fewer than two groups."""
    _, owner = np.unique([item.group for item in items], return_inverse=True)
    count = owner.max() + 1
    if count < 2:
        return None
    picks = np.random.default_rng(seed).integers(count, size=(NUM_RESAMPLES, count))

    def rate(rows: Sequence[Measured]) -> Any:
        tokens = np.bincount(owner, [len(row.tokens) for row in rows])[picks].sum(1)
        return tokens / np.maximum(np.bincount(owner, [seconds(row, clock) for row in rows])[picks].sum(1), 1e-12)

    low, high = np.percentile(rate(items) / rate(baseline), [2.5, 97.5])
    return [float(low), float(high)]


def distinct_4grams(items: Sequence[Measured]) -> float | None:
    """Distinct 4-grams by all 4-grams, each answer for itself: looping text, which flatters every drafter, is low."""
    grams = [list(zip(*(item.tokens[i:] for i in range(4)), strict=False)) for item in items]
    total = sum(len(g) for g in grams)
    return sum(len(set(g)) for g in grams) / total if total else None


def summary_row(
    items: Sequence[Measured], baseline: Sequence[Measured], clock: Clock, seed: int, compare: bool
) -> dict[str, Any]:
    """The numbers of one method over some prompts. compare: greedy in float32, where equality is a fair test."""
    totals = pool(item.trace for item in items)
    differing = sum(item.tokens != other.tokens for item, other in zip(items, baseline, strict=True))
    return {
        "prompts": totals.prompts,
        "tokens": totals.num_tokens,
        "wall_s": sum(item.wall_s for item in items),
        "cpu_s": sum(item.cpu_s for item in items),
        "tokens_per_s": tokens_per_s(items, clock),
        "speedup": speedup(items, baseline, clock),
        "speedup_ci95": speedup_interval(items, baseline, clock, seed),
        "speedup_wall": speedup(items, baseline, "wall"),
        "speedup_cpu": speedup(items, baseline, "cpu"),
        "tau": totals.tau,
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
    measured: Mapping[str, Sequence[Measured]], clock: Clock, seed: int, compare: bool
) -> list[dict[str, Any]]:
    """One row a method in the order measured, each with `by_task` where prompts carry tasks and no group mixes them:
    the seconds of a mixed group belong to no task."""
    task_of: dict[int, str] = {}
    mixed = any(task_of.setdefault(item.group, item.prompt.task) != item.prompt.task for item in measured[BASELINE])
    rows = []
    for label, items in measured.items():
        baseline = measured[BASELINE]
        row = {"method": label, **summary_row(items, baseline, clock, seed, compare)}
        tasks = sorted({item.prompt.task for item in items if item.prompt.task})
        if tasks and not mixed:
            row["by_task"] = {
                task: summary_row(
                    [item for item in items if item.prompt.task == task],
                    [item for item in baseline if item.prompt.task == task],
                    clock,
                    seed,
                    compare,
                )
                for task in tasks
            }
        rows.append(row)
    return rows


def prompt_rows(measured: Mapping[str, Sequence[Measured]]) -> list[dict[str, Any]]:
    """One row for each method and prompt, for whoever fits a cost model or looks for an outlier."""
    rows = []
    for label, items in measured.items():
        for item in items:
            totals = pool([item.trace])
            rows.append(
                {
                    "method": label,
                    "id": item.prompt.id,
                    "task": item.prompt.task,
                    "group": item.group,
                    "prompt_tokens": len(item.prompt.prompt_ids),
                    "tokens": totals.num_tokens,
                    "wall_s": item.wall_s,
                    "cpu_s": item.cpu_s,
                    "num_target_calls": totals.num_target_calls,
                    "num_draft_tokens": totals.num_draft_tokens,
                    "num_accepted": totals.num_accepted,
                    "num_discarded": totals.num_discarded,
                    "draft_calls": totals.draft_calls,
                    "ended": item.ended,
                    "token_ids": item.tokens,
                }
            )
    return rows
