"""Files that a run of `eval bench` leaves, and the numbers in them (tables.py shows them).

results.json holds `meta`, which says what the numbers hold for, and a row a method (`summarize`); results.csv has those
rows for a data frame, intervals as two numbers. prompts.parquet holds what was measured of every prompt, one row for
each method, temperature, prompt and turn:

    method, temperature   what answered, and how it sampled
    prompt, turn          number of the question in the run, from 0; turn of its conversation, from 1
    id, task              as in the prompts' file
    prompt_tokens         length of the prompt, chat template and earlier turns included
    prompt_ids            its tokens, in the rows of `ar`: all methods read the same
    tokens, token_ids     what was emitted; ended: the last one is an end token
    wall_s, cpu_s         medians over repeats; wall_s_runs, cpu_s_runs: every repeat, in the order taken
    num_target_calls, num_draft_tokens, num_accepted, num_discarded, draft_calls    counts of `DecodeTrace`
    prefill_emitted, prefill_calls, rounds    the trace itself, one struct a round
    kinds                 what each round's first token is part of: thinking, call, code or prose (kinds.py)
    error                 why the prompt was not measured; then the measures are zero and empty
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from draftsmith.data.text.answers import Repetition, distinct_4grams
from draftsmith.eval.bench.kinds import KINDS, Kind
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bootstrap import Floats, Resamples
from draftsmith.eval.clock import ClockName
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, Totals, pool
from draftsmith.modules.pretrained.files import write_table, write_text
from draftsmith.modules.pretrained.reading import regular
from draftsmith.modules.types import InputError

PER_PROMPT, NUMBERS = "prompts.parquet", "results.csv"  # beside results.json
BASELINE = "ar"
COUNTS = ("num_target_calls", "num_draft_tokens", "num_accepted", "num_discarded", "draft_calls")
Row = dict[str, Any]

INT, FLOAT, TEXT, INTS = pa.int32(), pa.float64(), pa.string(), pa.list_(pa.int32())
STEP = pa.struct([(spec.name, INT) for spec in dataclasses.fields(DecodeStep)])
SCHEMA = pa.schema(
    {
        "method": TEXT,
        "temperature": FLOAT,
        **dict.fromkeys(("prompt", "turn"), INT),
        **dict.fromkeys(("id", "task"), TEXT),
        "prompt_tokens": INT,
        "prompt_ids": INTS,
        "tokens": INT,
        "ended": pa.bool_(),
        **dict.fromkeys(("wall_s", "cpu_s"), FLOAT),
        **dict.fromkeys(("wall_s_runs", "cpu_s_runs"), pa.list_(FLOAT)),
        **dict.fromkeys((*COUNTS, "prefill_emitted", "prefill_calls"), INT),
        "token_ids": INTS,
        "rounds": pa.list_(STEP),
        "kinds": pa.list_(TEXT),
        "error": TEXT,
    }
)
PLACES = 16  # of a draft that are counted
# Where classes of rounds begin: tokens before the round, and the turn of its conversation.
CONTEXTS = tuple(2**power for power in range(8, 24))
TURNS = (1, 2, 3, 5, 9, 17, 33, 65)
FEWEST_PROMPTS = 5  # of a class with an interval
FEWEST_ROUNDS = 30  # of a class that is shown
CLASSES = ("by_context", "by_turn", "by_kind")
STEP_COUNTS = ("num_drafted", "num_accepted", "num_emitted")
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
        "kinds": [],
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


def write_numbers(path: Path, methods: Sequence[Row]) -> None:
    """Write results.csv (`numbers_of`)."""
    import pandas

    lines = [line for row in methods for line in numbers_of(row)]
    write_text(path, pandas.DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n"))


def read_rows(directory: Path) -> list[Row]:
    """Read the rows of a run; InputError if they are missing or damaged."""
    path = Path(directory) / PER_PROMPT
    try:
        return pq.read_table(regular(path), schema=SCHEMA).to_pylist()
    except (pa.ArrowException, KeyError, OSError) as error:
        found = f"unreadable ({' '.join(str(error).split())})"
        raise InputError(str(path), found, "rows of `draftsmith eval bench`", "Measure it again.") from error


def totals_of(rows: Sequence[Row]) -> Totals:
    """Sum the counts of rows."""
    sums = {name: sum(row[name] for row in rows) for name in COUNTS}
    return Totals(prompts=len(rows), num_tokens=sum(row["tokens"] for row in rows), **sums)


def tokens_per_s(rows: Sequence[Row], clock: ClockName) -> float:
    """Return emitted tokens by seconds, both summed over prompts."""
    return sum(row["tokens"] for row in rows) / max(sum(row[f"{clock}_s"] for row in rows), 1e-12)


def speedup(rows: Sequence[Row], baseline: Sequence[Row], clock: ClockName) -> float:
    return tokens_per_s(rows, clock) / tokens_per_s(baseline, clock)


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
    contexts: Sequence[int] = CONTEXTS,
) -> list[dict[str, Any]]:
    """Summarize each method at one temperature, in the order measured (`of_methods`).

    A method's own numbers are pooled: ratios of sums over all prompts. `macro_speedup` and `macro_tau` beside `by_task`
    are means over tasks, each of which counts alike, as papers print them. Rows have `by_task` where prompts carry
    tasks.

    compare: greedy in float32, where equality with ar is a fair test. contexts: where classes of context lengths begin.
    """
    baseline = measured[BASELINE]
    tasks = list(dict.fromkeys(row["task"] for row in baseline if row["task"]))
    summaries = []
    for label, rows in measured.items():
        summary: dict[str, Any] = {"method": label, "temperature": temperature}
        summary |= summary_row(rows, baseline, clock, seed, compare, contexts)
        if tasks:
            summary["by_task"] = by_task = {}
            for task in tasks:
                own, base = ([row for row in part if row["task"] == task] for part in (rows, baseline))
                by_task[task] = summary_row(own, base, clock, seed, compare, contexts)
            for name in ("speedup", "tau"):
                summary[f"macro_{name}"] = statistics.fmean(part[name] for part in by_task.values())
        summaries.append(summary)
    return summaries


def summary_row(
    rows: Sequence[Row],
    baseline: Sequence[Row],
    clock: ClockName,
    seed: int,
    compare: bool,
    contexts: Sequence[int] = CONTEXTS,
) -> dict[str, Any]:
    """Summarize one method over some prompts. compare, contexts: as of `summarize`."""
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
        **acceptance(Rounds.of(rows, contexts), resamples, contexts),
        "verification_rate": totals.verification_rate,
        "matches_ar": differing == 0 if compare else None,
        "num_differing": differing if compare else None,
        "ended": sum(row["ended"] for row in rows),
        "distinct_4grams": distinct_4grams(row["token_ids"] for row in rows),
        # Shares of the tokens that continue a repetition of their prompt or of the answer itself.
        "copied_prompt": copied.from_prompt,
        "copied_answer": copied.from_answer,
    }


@dataclass(frozen=True)
class Rounds:
    """R rounds of answers, or places where a round may begin.

    answer: [R] number of each one's answer. weight: [R] how often it counts; 1 where rounds were decoded. drafted,
    accepted, emitted: [R] numbers of tokens, or their means. reached: [R, P] whether, or how probably, 1, 2, .. P
    drafted tokens were accepted or more. classes: [R] of each of CLASSES.
    """

    answer: NDArray[np.int64]
    weight: Floats
    drafted: Floats
    accepted: Floats
    emitted: Floats
    reached: Floats
    classes: Mapping[str, NDArray[np.int64]]

    @classmethod
    def of(cls, rows: Sequence[Row], contexts: Sequence[int] = CONTEXTS) -> Rounds:
        """Collect the rounds that rows hold, without the prefill."""
        steps = [step for row in rows for step in row["rounds"]]
        counts = np.array([[step[name] for name in STEP_COUNTS] for step in steps], float).reshape(-1, 3)
        drafted, accepted, emitted = counts.T
        places, kinds, turns = list[int](), list[Kind](), list[int]()
        for row in rows:
            emitted_by_round = (step["num_emitted"] for step in row["rounds"])
            first = row["prompt_tokens"] + row["prefill_emitted"]
            places += list(itertools.accumulate(emitted_by_round, initial=first))[:-1]
            kinds += row["kinds"] or ["prose"] * len(row["rounds"])
            turns += [row["turn"]] * len(row["rounds"])
        answer = np.repeat(np.arange(len(rows)), [len(row["rounds"]) for row in rows])
        reached = (accepted[:, None] > np.arange(PLACES)).astype(float)
        kept = np.minimum(accepted, emitted)
        return cls(
            answer, np.ones(len(steps)), drafted, kept, emitted, reached, classes_of(places, turns, kinds, contexts)
        )


def classes_of(
    places: Sequence[int], turns: Sequence[int], kinds: Sequence[Kind], contexts: Sequence[int]
) -> dict[str, NDArray[np.int64]]:
    """Return the class of each round in each of CLASSES: numbers of edges up to it, and of its kind.

    places: tokens before each round.
    """
    numbers = [KINDS.index(kind) for kind in kinds]
    found = (np.searchsorted(contexts, places, "right"), np.searchsorted(TURNS, turns, "right"), numbers)
    return {name: np.asarray(own, np.int64) for name, own in zip(CLASSES, found, strict=True)}


def acceptance(rounds: Rounds, resamples: Resamples, contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """Return what results.json holds of one method's drafts; empty for a method without any.

    accepted_by_place: of the rounds that drafted n tokens or more, the share in which n or more were accepted (servers'
    acceptance rate per position). by_context, by_turn, by_kind: acceptance of the rounds of each class, which has a
    `name`, and all numbers `from` one up to before the next (`to`) where classes are of numbers.

    resamples: of the answers.
    """
    if not rounds.drafted.any():
        return {}

    def by_place(weight: Floats) -> list[float]:
        shares = []
        for n, reached in enumerate(rounds.reached.T, 1):
            long = weight * (rounds.drafted >= n)
            if not long.any():
                break
            shares.append(float(long @ reached / long.sum()))
        return shares

    def part(weight: Floats) -> dict[str, Any]:
        calls, emitted = (
            np.bincount(rounds.answer, own, resamples.num_values) for own in (weight, weight * rounds.emitted)
        )
        drafted = weight @ rounds.drafted
        # Of fewer prompts, some resamples would hold none.
        enough = np.count_nonzero(calls) >= FEWEST_PROMPTS
        taus = resamples.sums(emitted) / resamples.sums(calls).clip(min=1)
        return {
            "rounds": round(calls.sum()),
            "tau": float(emitted.sum() / max(calls.sum(), 1)),
            "tau_ci95": resamples.interval(taus) if enough else None,
            "acceptance_rate": float(weight @ rounds.accepted / drafted) if drafted else None,
            "accepted_by_place": by_place(weight),
        }

    found: dict[str, Any] = {"accepted_by_place": by_place(rounds.weight)}
    for (name, classes), edges in zip(rounds.classes.items(), (contexts, TURNS, None), strict=True):
        own = [(owner, rounds.weight * (classes == owner)) for owner in np.unique(classes).tolist()]
        found[name] = [{**named(owner, edges), **part(weight)} for owner, weight in own if weight.any()]
    return found


def named(owner: int, edges: Sequence[int] | None) -> dict[str, Any]:
    """Return the name of a class of rounds: of a kind (edges: None), or of the numbers between two edges."""
    if edges is None:
        return {"name": KINDS[owner]}
    low, high = edges[owner - 1] if owner else 0, edges[owner] if owner < len(edges) else None
    if edges is TURNS:
        name = f"{low}" if high == low + 1 else f"{low}+" if high is None else f"{low}-{high - 1}"
    else:
        name = f"{low:,}+" if low else f"below {high:,}"
    return {"name": name, "from": low, "to": high}


def shown_classes(row: Mapping[str, Any], name: str) -> list[Row]:
    """Return the classes of one of CLASSES that have enough rounds to be shown."""
    return [part for part in row.get(name) or () if part["rounds"] >= FEWEST_ROUNDS]


def with_ends(row: Row, names: Sequence[str]) -> dict[str, Any]:
    """Return some numbers of a summary, and the ends of the intervals of its speed-up and tau."""
    numbers = {name: row.get(name) for name in names}
    for name in ("speedup", "tau"):
        numbers[f"{name}_low"], numbers[f"{name}_high"] = row.get(f"{name}_ci95") or (None, None)
    return numbers


def numbers_of(row: Row) -> Iterator[dict[str, Any]]:
    """Yield the lines of results.csv for one method: all prompts, each task, each class of rounds.

    Intervals are two numbers. Speeds belong to whole answers, and classes of rounds have none.
    """
    names = ("rounds", "prompts", "tokens", "tokens_per_s", "speedup", "tau", "acceptance_rate", "matches_ar")
    parts = [("all", row), *((f"task {task}", own) for task, own in (row.get("by_task") or {}).items())]
    parts += [
        (f"{name.removeprefix('by_')} {own['name']}", own)
        for name in (*CLASSES, "by_length")
        for own in row.get(name) or ()
    ]
    for part, own in parts:
        shares = dict(enumerate(own.get("accepted_by_place") or (), start=1))
        places = {f"accepted_{n}": shares.get(n) for n in range(1, PLACES + 1)}
        yield {
            "method": row["method"],
            "temperature": row["temperature"],
            "part": part,
            **with_ends(own, names),
            **places,
        }
