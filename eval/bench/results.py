"""What a run leaves: `meta` of its results.json, which says what its numbers hold for and takes them again, and
prompts.parquet, what was measured of every prompt, from which all else can be worked out.

prompts.parquet has one row for each method, temperature, prompt and turn. Columns:

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
import datetime
import hashlib
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from draftsmith.data.models.loading import tokenizer_identity
from draftsmith.data.store.files import write_table
from draftsmith.data.store.manifest import command_line, git_commit, package_versions, resolved
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, Totals, pool
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

RESULTS, PER_PROMPT = "results.json", "prompts.parquet"  # a directory of results ends with the first
SCHEMA_VERSION = 3
BASELINE = "ar"
COUNTS = ("num_target_calls", "num_draft_tokens", "num_accepted", "num_discarded", "draft_calls")
Row = dict[str, Any]
STEP = {field.name: int for field in dataclasses.fields(DecodeStep)}
# Columns of prompts.parquet in their order, and of a row in a journal.
COLUMNS: dict[str, Any] = {
    "method": str,
    "temperature": float,
    **dict.fromkeys(("prompt", "turn", "group"), int),
    "id": str,
    "task": (str, None),
    "prompt_tokens": int,
    "prompt_ids": ([int], None),
    "tokens": int,
    "ended": bool,
    **dict.fromkeys(("wall_s", "cpu_s"), float),
    **{name: [float] for name in ("wall_s_runs", "cpu_s_runs")},
    **dict.fromkeys((*COUNTS, "prefill_emitted", "prefill_calls"), int),
    "token_ids": [int],
    "rounds": [STEP],
    "error": (str, None),
}


NOT_ANSWERED = Generation([], DecodeTrace(prefill_calls=0), False)


def row_of(
    prompt: BenchPrompt,
    group: int,
    method: str,
    temperature: float,
    made: Generation = NOT_ANSWERED,
    wall_s: Sequence[float] = (),
    cpu_s: Sequence[float] = (),
    error: str | None = None,
) -> Row:
    """One method on one prompt, as JSON and Parquet hold it.

    group: number of the questions that were answered together, turn by turn. The clocks saw the whole group; each of
        its prompts carries an equal share, so only sums over whole groups mean anything.
    wall_s, cpu_s: shares of every repeat, in the order taken. error: why the prompt was not measured.
    """
    totals = pool([made.trace])
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
        "tokens": totals.num_tokens,
        "ended": made.ended,
        "wall_s": statistics.median(wall_s or [0.0]),
        "cpu_s": statistics.median(cpu_s or [0.0]),
        "wall_s_runs": list(wall_s),
        "cpu_s_runs": list(cpu_s),
        **{name: getattr(totals, name) for name in COUNTS},
        "prefill_emitted": made.trace.prefill_emitted,
        "prefill_calls": made.trace.prefill_calls,
        "token_ids": made.tokens,
        "rounds": [dataclasses.asdict(step) for step in made.trace.steps],
        "error": error,
    }


def totals_of(rows: Sequence[Row]) -> Totals:
    """Sums of the counts."""
    sums = {name: sum(row[name] for row in rows) for name in COUNTS}
    return Totals(prompts=len(rows), num_tokens=sum(row["tokens"] for row in rows), **sums)


def of_methods(rows: Sequence[Row], temperature: float) -> dict[str, list[Row]]:
    """Method -> its rows at this temperature; failed prompts left out."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["temperature"] == temperature:
            own = found.setdefault(row["method"], [])
            if row["error"] is None:
                own.append(row)
    return found


def failures_of(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Each prompt that was not measured once: its number, id, task, turn, temperature and why."""
    keys = ("prompt", "id", "task", "turn", "temperature", "error")
    return [{key: row[key] for key in keys} for row in rows if row["error"] is not None and row["method"] == BASELINE]


def arrow_type(shape: Any) -> Any:
    """Arrow's type of a column: of a type of Python, a list of one, a struct of some, or one that may be None."""
    if isinstance(shape, tuple):
        return arrow_type(shape[0])
    if isinstance(shape, list):
        return pa.list_(arrow_type(shape[0]))
    if isinstance(shape, dict):
        return pa.struct([(name, arrow_type(own)) for name, own in shape.items()])
    return {str: pa.string(), int: pa.int32(), float: pa.float64(), bool: pa.bool_()}[shape]


def schema() -> pa.Schema:
    """Arrow schema of the file."""
    return pa.schema([(name, arrow_type(shape)) for name, shape in COLUMNS.items()])


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whole or not at all."""
    write_table(path, pa.Table.from_pylist(list(rows), schema()), compression="zstd")


def read_rows(directory: Path) -> list[Row]:
    """The rows of a run.

    Raises:
        InputError: the run has none, or they are damaged.
    """
    path = Path(directory) / PER_PROMPT
    if not path.exists():
        remedy = "Measure it again: runs of earlier versions have other rows."
        raise InputError(str(directory), f"no {PER_PROMPT}", "a run of `draftsmith eval bench`", remedy)
    try:
        return pq.read_table(path, schema=schema()).to_pylist()
    except (pa.ArrowException, KeyError, OSError) as error:
        found = f"unreadable ({' '.join(str(error).split())})"
        raise InputError(str(path), found, "rows of `draftsmith eval bench`", "Measure it again.") from error


def describe(
    kind: str,
    config: Any,
    target: CausalLM | Mapping[str, Any],
    prompts: Sequence[BenchPrompt],
    source: str,
    models: Mapping[str, CausalLM | None],
    **more: Any,
) -> dict[str, Any]:
    """`meta` of a results.json.

    kind: of the results: bench, specdecpp, ... config: the command's settings, `target`, `device` and `seed` among
    them. target: or its identity, where it runs elsewhere. source: of the prompts, as the user named it. models: role
    -> the smaller models, None where there is none.
    more: what else belongs there.
    """
    asked = [[prompt.prompt_ids, *prompt.later] if prompt.later else prompt.prompt_ids for prompt in prompts]
    ids = json.dumps(asked).encode()
    identity = target if isinstance(target, Mapping) else target.info.identity
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(f"eval {kind}", config),
        "seed": config.seed,
        "settings": resolved(config),
        "target": {**identity, **tokenizer_identity(config.target)},
        "models": {role: lm.info.identity for role, lm in models.items() if lm is not None},
        "prompts": {"source": source, "count": len(prompts), "sha256": hashlib.sha256(ids).hexdigest()},
        "versions": {**package_versions(), "python": platform.python_version()},
        "git_commit": git_commit(),
        "hardware": hardware(config.device),
        **more,
    }


def hardware(device: str) -> dict[str, Any]:
    """The machine: numbers without it mean little."""
    found = {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return found


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
