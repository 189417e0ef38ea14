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
    kinds                 what each round's first token is part of: thinking, call, code or prose (kinds.py)
    error                 why the prompt was not measured; then the measures are zero and empty
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from draftsmith.data.text.answers import Repetition, distinct_4grams
from draftsmith.data.text.kinds import KINDS, PROMPT_TOKENS, Kind, kinds_of
from draftsmith.eval.bench.prompts import BenchPrompt, detect_language
from draftsmith.eval.clock import ClockName
from draftsmith.eval.settings import DIVISIONS
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, Totals, pool, tau
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
        "kinds": pa.list_(TEXT),
        "error": TEXT,
    }
)
PLACES = 16  # of a draft that are counted
# Where classes of numbers begin: tokens before a round, and the turn of its conversation.
EDGES = {"context": tuple(2**power for power in range(8, 24)), "turn": (1, 2, 3, 5, 9, 17, 33, 65)}
OF_ROUNDS = ("context", "turn", "kind")  # divisions of rounds; others are of whole answers
FEWEST_PROMPTS = 5  # of a class with an interval
FEWEST_ROUNDS = 30  # of a class that is shown
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
        "kinds": [],
        "error": error,
    }


def add_kinds(rows: Sequence[Row], tokenizer: Any) -> None:
    """Set `kinds` of each measured row: the kind of the token that each of its rounds begins with; and the labels that
    are detected, of all methods those of ar's answer."""
    text_of: Any = functools.cache(lambda token: tokenizer.decode([token]))
    asked = {_asked(row): row for row in rows if row["prompt_ids"] is not None}
    prompts = {key: tokenizer.decode(row["prompt_ids"][-PROMPT_TOKENS:]) for key, row in asked.items()}
    answers = ((tokenizer.decode(row["token_ids"]), prompts[key]) for key, row in asked.items())
    detect_language([row["labels"] for row in asked.values()], answers)
    for row in rows:
        row["labels"], prompt = asked[_asked(row)]["labels"], prompts[_asked(row)]
        kinds = kinds_of([text_of(token) for token in row["token_ids"]], prompt)
        emitted = itertools.accumulate((step["num_emitted"] for step in row["rounds"]), initial=row["prefill_emitted"])
        # A round whose tokens were all cut stands behind the last one.
        row["kinds"] = [kinds[min(place, len(kinds) - 1)] for place, _ in zip(emitted, row["rounds"], strict=False)]


def _asked(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["temperature"], row["prompt"], row["turn"]


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

    def num_owners(self, values: Floats) -> int:
        """Return how many owners have any of the values [N] above 0."""
        return np.unique(self._owner[values > 0]).size

    def interval(self, statistic: Floats) -> list[float] | None:
        """Return the 95 % interval of a statistic of `sums`, [NUM_RESAMPLES]; None for fewer than two owners."""
        if self._count < 2:
            return None
        low, high = np.percentile(statistic, [2.5, 97.5])
        return [float(low), float(high)]

    def simultaneous(
        self, estimates: Sequence[float], statistics: Sequence[Floats], weights: Sequence[Floats]
    ) -> list[list[float] | None]:
        """Return 95 % intervals that hold for all of C statistics at once, so that the best and worst of many may be
        named: max-t bootstrap, widened as Student's t. None, and not counted, with fewer than FEWEST_PROMPTS owners.

        estimates: [C]. statistics: [C] of `sums`, each [NUM_RESAMPLES]. weights: [C], each [N], positive for the values
        that a statistic depends on.
        """
        owners = np.array([self.num_owners(weight) for weight in weights])
        enough, degrees = owners >= FEWEST_PROMPTS, np.maximum(owners - 1.0, FEWEST_PROMPTS - 1)
        draws, center = np.stack(statistics), np.asarray(estimates, np.float64)
        spread = draws.std(1)
        distances = np.abs(draws - center[:, None]) / np.where(enough & (spread > 0), spread, np.inf)[:, None]
        z = np.percentile(distances.max(0), 95)
        # Beyond t lies as much as beyond z of a normal distribution (Gaver and Kafadar 1984).
        t = np.sqrt(degrees * np.expm1(z**2 * (degrees - 1.5) / (degrees - 1) ** 2))
        half = t * spread * np.sqrt((degrees + 1) / degrees)
        ends = np.stack([center - half, center + half], 1).tolist()
        return [own if kept else None for own, kept in zip(ends, enough, strict=True)]


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
    rounds of a context length, turn or kind of token (`acceptance`), or answers of a task or of a column's value, with
    all numbers of a method. `macro_speedup` and `macro_tau` are means over tasks, each of which counts alike, as papers
    print them.

    compare: greedy in float32, where equality with ar is a fair test.
    """
    baseline = measured[BASELINE]
    summaries = []
    for label, rows in measured.items():
        numbers = summary_row(rows, baseline, clock, seed, compare)
        resamples = MeasuredResamples(rows, seed)
        classes = classes_of_rounds(Rounds.of(rows), resamples, by)
        for name in (name for name in by if name not in OF_ROUNDS):
            classes[name] = []
            for value in values_of(baseline, name):
                own, base = ([row for row in part if label_of(row, name) == value] for part in (rows, baseline))
                part = {"name": value, **summary_row(own, base, clock, seed, compare)}
                classes[name].append(part)
        numbers["by"] = {name: classes[name] for name in by if classes.get(name)}
        if tasks := numbers["by"].get("task"):
            numbers |= {f"macro_{name}": statistics.fmean(part[name] for part in tasks) for name in ("speedup", "tau")}
        summaries.append({"method": label, "temperature": temperature, **numbers})
    return summaries


NO_VALUE = "none"


def label_of(row: Mapping[str, Any], name: str) -> str:
    """Return an answer's task, or its value of a column; `none` without one."""
    return (row["task"] if name == "task" else row["labels"].get(name)) or NO_VALUE


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
        "accepted_by_place": Rounds.of(rows).by_place(),
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
    accepted, emitted: [R] numbers of tokens, or their means. long, reached: [R, P] whether, or how probably, 1, 2, .. P
    tokens were drafted, and accepted, or more. context: [R] tokens before it. turn: [R] of its conversation. kind: [R]
    of its first token, its number in KINDS.
    """

    answer: NDArray[np.int64]
    weight: Floats
    drafted: Floats
    accepted: Floats
    emitted: Floats
    long: Floats
    reached: Floats
    context: NDArray[np.int64]
    turn: NDArray[np.int64]
    kind: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rounds:
        """Collect the rounds that rows hold, without the prefill."""
        steps = [step for row in rows for step in row["rounds"]]
        counts = np.array([[step[name] for name in STEP_COUNTS] for step in steps], float).reshape(-1, 3)
        drafted, accepted, emitted = counts.T
        context, kinds = list[int](), list[Kind]()
        for row in rows:
            emitted_by_round = (step["num_emitted"] for step in row["rounds"])
            first = row["prompt_tokens"] + row["prefill_emitted"]
            context += list(itertools.accumulate(emitted_by_round, initial=first))[:-1]
            kinds += row["kinds"] or ["prose"] * len(row["rounds"])
        answer = np.repeat(np.arange(len(rows)), [len(row["rounds"]) for row in rows])
        return cls(
            answer,
            np.ones(len(steps)),
            drafted,
            np.minimum(accepted, emitted),
            emitted,
            (drafted[:, None] > np.arange(PLACES)).astype(float),
            (accepted[:, None] > np.arange(PLACES)).astype(float),
            np.array(context, np.int64),
            np.array([row["turn"] for row in rows], np.int64)[answer],
            np.array([KINDS.index(kind) for kind in kinds], np.int64),
        )

    def by_place(self, mask: NDArray[np.bool_] | None = None) -> list[float]:
        """Return for n = 1, 2, ... the share of the rounds that drafted n tokens or more in which n or more were
        accepted: servers' acceptance rate per position. mask: [R] of the rounds that count."""
        weight = self.weight if mask is None else self.weight * mask
        places = int((weight @ self.long > 0).sum())
        return ((weight @ self.reached)[:places] / (weight @ self.long)[:places]).tolist()

    def classes(self, name: str) -> Iterator[tuple[dict[str, Any], NDArray[np.bool_]]]:
        """Yield the classes of one of OF_ROUNDS: each one's `name`, and all numbers `from` one up to before the next
        (`to`) where it is of numbers; and which rounds [R] are of it."""
        values = getattr(self, name)
        edges = EDGES.get(name)
        numbers = values if edges is None else np.searchsorted(edges, values, "right")
        for number in np.unique(numbers).tolist():
            low = 0 if edges is None or not number else edges[number - 1]
            high = None if edges is None or number == len(edges) else edges[number]
            if edges is None:
                about: dict[str, Any] = {"name": KINDS[number]}
            elif name == "turn":
                span = f"{low}" if high == low + 1 else f"{low}+" if high is None else f"{low}-{high - 1}"
                about = {"name": span, "from": low, "to": high}
            else:
                about = {"name": f"{low:,}+" if low else f"below {high:,}", "from": low, "to": high}
            yield about, numbers == number

    def sums(self, mask: NDArray[np.bool_], num_answers: int) -> tuple[Floats, Floats]:
        """Return the emitted tokens and target calls [N] of some rounds by their answers."""
        weight = self.weight * mask
        parts = (np.bincount(self.answer, own, num_answers) for own in (weight * self.emitted, weight))
        emitted, calls = (np.asarray(part, np.float64) for part in parts)
        return emitted, calls


def classes_of_rounds(rounds: Rounds, resamples: Resamples, by: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the classes of rounds of one method's drafts; none of a method without any. resamples: of the answers."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in (name for name in by if name in OF_ROUNDS and rounds.drafted.any()):
        found[name] = []
        for about, mask in rounds.classes(name):
            emitted, calls = rounds.sums(mask, resamples.num_values)
            if not calls.any():
                continue
            weight = rounds.weight * mask
            drafted = weight @ rounds.drafted
            # Of fewer prompts, some resamples would hold none.
            enough = np.count_nonzero(calls) >= FEWEST_PROMPTS
            taus = resamples.sums(emitted) / resamples.sums(calls).clip(min=1)
            found[name].append({
                **about,
                "rounds": round(calls.sum()),
                "tau": tau(float(emitted.sum()), float(calls.sum())),
                "tau_ci95": resamples.interval(taus) if enough else None,
                "acceptance_rate": float(weight @ rounds.accepted / drafted) if drafted else None,
                "accepted_by_place": rounds.by_place(mask),
            })  # fmt: skip
    return found


def counts_by_answer(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return what a server counts of each answer: `drafts`, the rounds with one, [N]; and `accepted`, how many of these
    had n tokens or more accepted, [N, K], also behind the end of the answer."""
    rounds = Rounds.of(rows)
    places = int(rounds.drafted.max(initial=0))
    sums = [
        np.bincount(rounds.answer, own, len(rows)).astype(int).tolist()
        for own in (rounds.drafted > 0, *rounds.reached[:, :places].T)
    ]
    return {"drafts": sums[0], "accepted": [list(own) for own in zip(*sums[1:], strict=True)]}


def sums_by(rows: Sequence[Row], name: str) -> dict[str, tuple[Floats, Floats]]:
    """Return the emitted tokens and target calls [N] of the answers in each class of a division; all are `none` if no
    answer has a value."""
    if name in OF_ROUNDS:
        rounds = Rounds.of(rows)
        return {about["name"]: rounds.sums(mask, len(rows)) for about, mask in rounds.classes(name)}
    tokens, calls = (np.array([row[column] for row in rows], np.float64) for column in ("tokens", "num_target_calls"))
    masks = {
        value: np.array([label_of(row, name) == value for row in rows]) for value in values_of(rows, name) or [NO_VALUE]
    }
    return {value: (tokens * mask, calls * mask) for value, mask in masks.items()}


def shown_classes(row: Mapping[str, Any], name: str) -> list[Row]:
    """Return the classes of a division that are shown: those of rounds have enough of them."""
    parts = (row.get("by") or {}).get(name) or ()
    return [part for part in parts if part.get("rounds", FEWEST_ROUNDS) >= FEWEST_ROUNDS]
