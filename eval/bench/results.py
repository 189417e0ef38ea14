"""Files that a run of `eval bench` leaves, and the numbers in them (tables.py shows them).

results.json holds `meta`, which says what the numbers hold for, and a row a method (`summarize`). prompts.parquet holds
what was measured of every prompt, one row for each method, temperature, prompt and turn:

    method, temperature   what answered, and how it sampled
    prompt, turn          number of the question in the run, from 0; turn of its conversation, from 1
    id, task              as in the prompts' file
    labels                values of the columns that `--by` names
    prompt_tokens         length of the prompt, chat template and earlier turns included
    prompt_ids            its tokens, in the rows of `ar`: all methods read the same
    tokens, token_ids     what was emitted; ended: the last one is an end token
    wall_s, cpu_s         medians over repeats; wall_s_runs, cpu_s_runs: every repeat, in the order taken
    num_target_calls, num_draft_tokens, num_accepted, num_discarded, draft_calls    counts of `DecodeTrace`
    prefill_emitted, prefill_calls, rounds    the trace itself, one struct a round
    error                 why the prompt was not measured; then the measures are zero and empty
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from draftsmith.data.text.answers import Repetition, distinct_4grams
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.clock import ClockName
from draftsmith.eval.settings import DIVISIONS
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, Totals, pool
from draftsmith.modules.pretrained.files import write_table
from draftsmith.modules.pretrained.reading import regular
from draftsmith.modules.types import InputError

PER_PROMPT = "prompts.parquet"  # beside results.json
BASELINE = "ar"
COUNTS = ("num_target_calls", "num_draft_tokens", "num_accepted", "num_discarded", "draft_calls")
Row = dict[str, Any]
Floats = NDArray[np.float64]
NUM_RESAMPLES = 2000  # of the bootstrap

INT, FLOAT, TEXT, INTS = pa.int32(), pa.float64(), pa.string(), pa.list_(pa.int32())
STEP = pa.struct([(spec.name, INT) for spec in dataclasses.fields(DecodeStep)])
SCHEMA = pa.schema(
    {
        "method": TEXT,
        "temperature": FLOAT,
        **dict.fromkeys(("prompt", "turn"), INT),
        **dict.fromkeys(("id", "task"), TEXT),
        "labels": pa.map_(TEXT, TEXT),
        "prompt_tokens": INT,
        "prompt_ids": INTS,
        "tokens": INT,
        "ended": pa.bool_(),
        **dict.fromkeys(("wall_s", "cpu_s"), FLOAT),
        **dict.fromkeys(("wall_s_runs", "cpu_s_runs"), pa.list_(FLOAT)),
        **dict.fromkeys((*COUNTS, "prefill_emitted", "prefill_calls"), INT),
        "token_ids": INTS,
        "rounds": pa.list_(STEP),
        "error": TEXT,
    }
)
PLACES = 16  # of a draft that are counted
NOT_ANSWERED = Generation([], DecodeTrace(prefill_calls=0), False)


def row_of(
    prompt: BenchPrompt,
    method: str,
    temperature: float,
    answer: Generation = NOT_ANSWERED,
    wall_s: Sequence[float] = (),
    cpu_s: Sequence[float] = (),
    error: str | None = None,
) -> Row:
    """Build the row of one method on one prompt.

    wall_s, cpu_s: of every repeat, in the order taken. error: why the prompt was not measured.
    """
    # Only rows of ar hold the prompt: all methods read the same.
    totals = pool([answer.trace])
    return {
        "method": method,
        "temperature": temperature,
        "prompt": prompt.number,
        "turn": prompt.turn,
        "id": prompt.id,
        "task": prompt.task,
        "labels": dict(prompt.labels),
        "prompt_tokens": len(prompt.prompt_ids),
        "prompt_ids": prompt.prompt_ids if method == BASELINE else None,
        "tokens": totals.num_tokens,
        "ended": answer.ended,
        "wall_s": statistics.median(wall_s or [0.0]),
        "cpu_s": statistics.median(cpu_s or [0.0]),
        "wall_s_runs": list(wall_s),
        "cpu_s_runs": list(cpu_s),
        **{name: getattr(totals, name) for name in COUNTS},
        "prefill_emitted": answer.trace.prefill_emitted,
        "prefill_calls": answer.trace.prefill_calls,
        "token_ids": answer.tokens,
        "rounds": [dataclasses.asdict(step) for step in answer.trace.steps],
        "error": error,
    }


def of_methods(rows: Sequence[Row], temperature: float) -> dict[str, list[Row]]:
    """Return the rows at a temperature by their method, without failed prompts."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        if row["temperature"] == temperature:
            own = by_method.setdefault(row["method"], [])
            if row["error"] is None:
                own.append(row)
    return by_method


def failures_of(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return each failed prompt once, with its number, id, task, turn, temperature and error."""
    keys = ("prompt", "id", "task", "turn", "temperature", "error")
    return [{key: row[key] for key in keys} for row in rows if row["error"] is not None and row["method"] == BASELINE]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write prompts.parquet, whole or not at all."""
    write_table(path, pa.Table.from_pylist(list(rows), SCHEMA), compression="zstd")


def read_rows(directory: Path) -> list[Row]:
    """Read the rows of a run; InputError if they are missing or damaged."""
    path = Path(directory) / PER_PROMPT
    try:
        rows = pq.read_table(regular(path), schema=SCHEMA).to_pylist()
    except (pa.ArrowException, KeyError, OSError) as error:
        found = f"unreadable ({' '.join(str(error).split())})"
        raise InputError(str(path), found, "rows of `draftsmith eval bench`", "Measure it again.") from error
    # Arrow's maps are lists of pairs.
    return [{**row, "labels": dict(row["labels"] or ())} for row in rows]


def totals_of(rows: Sequence[Row]) -> Totals:
    """Sum the counts of rows."""
    sums = {name: sum(row[name] for row in rows) for name in COUNTS}
    return Totals(prompts=len(rows), num_tokens=sum(row["tokens"] for row in rows), **sums)


def tokens_per_s(rows: Sequence[Row], clock: ClockName) -> float:
    """Return emitted tokens by seconds, both summed over prompts."""
    return sum(row["tokens"] for row in rows) / max(sum(row[f"{clock}_s"] for row in rows), 1e-12)


def speedup(rows: Sequence[Row], baseline: Sequence[Row], clock: ClockName) -> float:
    return tokens_per_s(rows, clock) / tokens_per_s(baseline, clock)


class Resamples:
    """Bootstrap resamples of owners, each with all its values: prompts, or groups that were timed together.

    owners: [N] the owner of each value, anything that can be sorted. num_values: N.
    """

    def __init__(self, owners: Sequence[Any], seed: int):
        _, self._owner = np.unique(np.asarray(owners), return_inverse=True)
        self.num_values = len(self._owner)
        self._count = int(self._owner.max()) + 1 if len(owners) else 0
        # All statistics use the same draws, so that ratios of them are paired.
        self._picks = np.random.default_rng(seed).integers(max(self._count, 1), size=(NUM_RESAMPLES, self._count))

    def sums(self, values: ArrayLike) -> Floats:
        """Sum values [N] over each resample: [NUM_RESAMPLES]."""
        return np.bincount(self._owner, np.asarray(values, np.float64), self._count)[self._picks].sum(1)

    def interval(self, statistic: Floats) -> list[float] | None:
        """Return the 95 % interval of a statistic of `sums`, [NUM_RESAMPLES]; None for fewer than two owners."""
        if self._count < 2:
            return None
        low, high = np.percentile(statistic, [2.5, 97.5])
        return [float(low), float(high)]


class MeasuredResamples(Resamples):
    """Bootstrap resamples of measured prompts, each with all its turns."""

    def __init__(self, rows: Sequence[Row], seed: int):
        super().__init__([row["prompt"] for row in rows], seed)

    def ratio(self, rows: Sequence[Row], above: str, below: str) -> Floats:
        """Return the sum of one column by that of another, in each resample."""
        above_sums, below_sums = (self.sums([row[name] for row in rows]) for name in (above, below))
        return above_sums / np.maximum(below_sums, 1e-12)

    def tokens_per_s(self, rows: Sequence[Row], clock: ClockName) -> Floats:
        return self.ratio(rows, "tokens", f"{clock}_s")

    def tau(self, rows: Sequence[Row]) -> Floats:
        return self.ratio(rows, "tokens", "num_target_calls")


def summarize(
    measured: Mapping[str, Sequence[Row]],
    clock: ClockName,
    seed: int,
    compare: bool,
    temperature: float = 0.0,
    by: Sequence[str] = DIVISIONS,
) -> list[dict[str, Any]]:
    """Summarize each method at one temperature, in the order measured (`of_methods`).

    A method's own numbers are pooled: ratios of sums over all prompts. `by` holds a list of classes for each division:
    answers of a turn, a task or a column's value, with all numbers of a method. `macro_speedup` and `macro_tau` are
    means over tasks, each of which counts alike, as papers print them.

    compare: greedy in float32, where equality with ar is a fair test.
    """
    baseline = measured[BASELINE]
    summaries = []
    for label, rows in measured.items():
        numbers = summary_row(rows, baseline, clock, seed, compare)
        numbers["by"] = {}
        for name in by:
            for value in values_of(baseline, name):
                own, base = ([row for row in part if label_of(row, name) == value] for part in (rows, baseline))
                part = {"name": value, **summary_row(own, base, clock, seed, compare)}
                numbers["by"].setdefault(name, []).append(part)
        if tasks := numbers["by"].get("task"):
            numbers |= {f"macro_{name}": statistics.fmean(part[name] for part in tasks) for name in ("speedup", "tau")}
        summaries.append({"method": label, "temperature": temperature, **numbers})
    return summaries


NO_VALUE = "none"


def label_of(row: Mapping[str, Any], name: str) -> str:
    """Return an answer's turn, its task, or its value of a column; `none` without one."""
    return str((row[name] if name in DIVISIONS else row["labels"].get(name)) or NO_VALUE)


def values_of(rows: Sequence[Row], name: str) -> list[str]:
    """Return the values of a division of answers, as they come; none where no answer has one."""
    values = list(dict.fromkeys(label_of(row, name) for row in rows))
    return [] if values == [NO_VALUE] else values


def summary_row(
    rows: Sequence[Row], baseline: Sequence[Row], clock: ClockName, seed: int, compare: bool
) -> dict[str, Any]:
    """Summarize one method over some prompts. compare: as of `summarize`."""
    totals, resamples = totals_of(rows), MeasuredResamples(rows, seed)
    pairs = list(zip(rows, baseline, strict=True))
    differing = sum(row["token_ids"] != other["token_ids"] for row, other in pairs)
    # Only rows of ar hold the prompt.
    texts = [(other["prompt_ids"], row["token_ids"]) for row, other in pairs]
    copied = Repetition.of(
        ([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)) for prompt, answer in texts
    )
    return {
        "prompts": totals.prompts,
        "tokens": totals.num_tokens,
        "wall_s": sum(row["wall_s"] for row in rows),
        "cpu_s": sum(row["cpu_s"] for row in rows),
        "tokens_per_s": tokens_per_s(rows, clock),
        "speedup": speedup(rows, baseline, clock),
        "speedup_ci95": resamples.interval(
            resamples.tokens_per_s(rows, clock) / resamples.tokens_per_s(baseline, clock)
        ),
        "tau": totals.tau,
        "tau_ci95": resamples.interval(resamples.tau(rows)),
        **{name: getattr(totals, name) for name in COUNTS},
        "acceptance_rate": totals.acceptance_rate if totals.num_draft_tokens else None,
        "discard_rate": totals.discard_rate,
        "accepted_by_place": accepted_by_place(rows),
        "verification_rate": totals.verification_rate,
        "matches_ar": differing == 0 if compare else None,
        "num_differing": differing if compare else None,
        "ended": sum(row["ended"] for row in rows),
        "distinct_4grams": distinct_4grams(row["token_ids"] for row in rows),
        # Shares of the tokens that continue a repetition of their prompt or of the answer itself.
        "copied_prompt": copied.from_prompt,
        "copied_answer": copied.from_answer,
    }


def accepted_by_place(rows: Sequence[Row]) -> list[float]:
    """Return for n = 1, 2, ... the share of the rounds that drafted n tokens or more in which n or more were accepted:
    servers' acceptance rate per position."""
    steps = [(step["num_drafted"], step["num_accepted"]) for row in rows for step in row["rounds"]]
    shares = []
    for place in range(1, min(PLACES, max((drafted for drafted, _ in steps), default=0)) + 1):
        reached = [accepted >= place for drafted, accepted in steps if drafted >= place]
        shares.append(sum(reached) / len(reached))
    return shares
