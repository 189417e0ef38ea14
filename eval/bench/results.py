"""prompts.parquet of a bench: what was measured of every prompt, from which all else can be worked out again.

One row for each method, temperature, prompt and turn. Columns:

    method, temperature   what answered, and how it sampled
    prompt, turn          number of the question in the run, from 0; turn of its conversation, from 1
    group                 questions that were answered, and timed, together (single ones at batch size 1)
    id, task              as in the prompts' file
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.store.files import write_table
from draftsmith.eval.bench.measure import BenchPrompt, Measured
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, pool
from draftsmith.modules.types import InputError

PER_PROMPT = "prompts.parquet"
BASELINE = "ar"
COUNTS = ("num_target_calls", "num_draft_tokens", "num_accepted", "num_discarded", "draft_calls")
Row = dict[str, Any]


STEP = {field.name: int for field in dataclasses.fields(DecodeStep)}
# Of a row in a journal, as JSON holds it.
SHAPE: dict[str, Any] = {
    "method": str,
    "temperature": float,
    **{name: int for name in ("prompt", "turn", "group", "prompt_tokens", "tokens", *COUNTS)},
    "id": str,
    "task": (str, None),
    "prompt_ids": ([int], None),
    "ended": bool,
    **{name: float for name in ("wall_s", "cpu_s")},
    **{name: [float] for name in ("wall_s_runs", "cpu_s_runs")},
    **{name: int for name in ("prefill_emitted", "prefill_calls")},
    "token_ids": [int],
    "rounds": [STEP],
    "error": (str, None),
}


def measured_row(item: Measured, method: str, temperature: float) -> Row:
    """One row, as JSON and Parquet hold it."""
    totals = pool([item.trace])
    return {
        **_head(item.prompt, item.group, method, temperature),
        "tokens": totals.num_tokens,
        "ended": item.ended,
        "wall_s": item.wall_s,
        "cpu_s": item.cpu_s,
        "wall_s_runs": list(item.wall_s_runs),
        "cpu_s_runs": list(item.cpu_s_runs),
        **{name: getattr(totals, name) for name in COUNTS},
        "prefill_emitted": item.trace.prefill_emitted,
        "prefill_calls": item.trace.prefill_calls,
        "token_ids": item.tokens,
        "rounds": [dataclasses.asdict(step) for step in item.trace.steps],
        "error": None,
    }


def failed_row(prompt: BenchPrompt, group: int, method: str, temperature: float, error: str) -> Row:
    """The row of a prompt that was not measured."""
    nothing = Measured(prompt, group, [], DecodeTrace(prefill_calls=0), False, 0.0, 0.0)
    return {**measured_row(nothing, method, temperature), "error": error}


def _head(prompt: BenchPrompt, group: int, method: str, temperature: float) -> Row:
    return {
        "method": method,
        "temperature": temperature,
        "prompt": prompt.number,
        "turn": prompt.turn,
        "group": group,
        "id": prompt.id,
        "task": prompt.task,
        "prompt_tokens": len(prompt.prompt_ids),
        "prompt_ids": prompt.prompt_ids if method == BASELINE else None,
    }


def measured_of(row: Mapping[str, Any]) -> Measured:
    """What `measured_row` was given; the prompt without its tokens where the row has none."""
    prompt = BenchPrompt(row["id"], list(row["prompt_ids"] or []), row["task"], turn=row["turn"], number=row["prompt"])
    steps = [DecodeStep(**step) for step in row["rounds"]]
    trace = DecodeTrace(steps, row["prefill_emitted"], row["prefill_calls"])
    runs = tuple(row["wall_s_runs"]), tuple(row["cpu_s_runs"])
    return Measured(
        prompt, row["group"], list(row["token_ids"]), trace, row["ended"], row["wall_s"], row["cpu_s"], *runs
    )


def of_methods(rows: Sequence[Mapping[str, Any]], temperature: float) -> dict[str, list[Measured]]:
    """Method -> what was measured of it at this temperature; failed prompts left out."""
    found: dict[str, list[Measured]] = {}
    for row in rows:
        if row["temperature"] == temperature:
            own = found.setdefault(row["method"], [])
            if row["error"] is None:
                own.append(measured_of(row))
    return found


def failures_of(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Each prompt that was not measured once: its number, id, task, turn, temperature and why."""
    keys = ("prompt", "id", "task", "turn", "temperature", "error")
    return [{key: row[key] for key in keys} for row in rows if row["error"] is not None and row["method"] == BASELINE]


def schema() -> Any:
    """Arrow schema of the file."""
    import pyarrow as pa

    ints, seconds = pa.list_(pa.int32()), pa.list_(pa.float64())
    step = pa.struct([(field.name, pa.int32()) for field in dataclasses.fields(DecodeStep)])
    return pa.schema(
        [
            ("method", pa.string()),
            ("temperature", pa.float64()),
            *((name, pa.int32()) for name in ("prompt", "turn", "group")),
            ("id", pa.string()),
            ("task", pa.string()),
            ("prompt_tokens", pa.int32()),
            ("prompt_ids", ints),
            ("tokens", pa.int32()),
            ("ended", pa.bool_()),
            *((name, pa.float64()) for name in ("wall_s", "cpu_s")),
            *((name, seconds) for name in ("wall_s_runs", "cpu_s_runs")),
            *((name, pa.int32()) for name in (*COUNTS, "prefill_emitted", "prefill_calls")),
            ("token_ids", ints),
            ("rounds", pa.list_(step)),
            ("error", pa.string()),
        ]
    )


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whole or not at all."""
    import pyarrow as pa

    write_table(path, pa.Table.from_pylist(list(rows), schema()), compression="zstd")


def read_rows(directory: Path) -> list[Row]:
    """The rows of a run.

    Raises:
        InputError: the run has none, or they are damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(directory) / PER_PROMPT
    if not path.exists():
        remedy = "Measure it again: runs of earlier versions have other rows."
        raise InputError(str(directory), f"no {PER_PROMPT}", "a run of `draftsmith eval bench`", remedy)
    try:
        return pq.read_table(path, schema=schema()).to_pylist()
    except (pa.ArrowException, KeyError, OSError) as error:
        found = f"unreadable ({' '.join(str(error).split())})"
        raise InputError(str(path), found, "rows of `draftsmith eval bench`", "Measure it again.") from error
