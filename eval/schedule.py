"""`draftsmith eval schedule RUN`: choose how many tokens a server drafts, by the number of concurrent requests.

Tokens per round at every K come from rounds that `eval bench` recorded with one larger K; the seconds of a round come
from a file of measurements of the server (`--costs`), or are measured here (`--engine llamacpp`).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftsmith.data.console import Column, Table, format_interval, json_values, log_note, print_table, print_text
from draftsmith.data.engines.llamacpp import server_binary
from draftsmith.data.settings import check_positive
from draftsmith.data.store.manifest import command_line, resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.compare import Bench, open_bench
from draftsmith.eval.bench.results import RESULTS, SCHEMA_VERSION
from draftsmith.eval.bench.trace import TRACE
from draftsmith.eval.bootstrap import Floats, Resamples
from draftsmith.eval.costs import interpolate
from draftsmith.eval.engines.llama_bench import chain_rows, measure_costs
from draftsmith.eval.report.tables import to_json
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.block.head import BlockHead
from draftsmith.modules.drafters.methods import MODEL, FixedLengthMethod, known_methods, parse_method
from draftsmith.modules.pretrained.directory import gguf_file
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.reading import read_lines, read_object
from draftsmith.modules.types import InputError

FILES = ("vllm-T{}.json", "sglang-T{}.json")
COSTS_SHAPE = {"seconds": {"*": {"*": float}}, "machine?": str}
COSTS_EXAMPLE = '{"seconds": {"1": {"0": 0.011, "4": 0.013}, "64": {"0": 0.021, "4": 0.034}}}'
MAX_REQUESTS = 4096
SEED = 0  # of the bootstrap

KRange = tuple[int, int, int]  # first and last number of requests, and K


@dataclass(frozen=True)
class ScheduleConfig:
    """Choose how many tokens to draft at every number of concurrent requests, as files that vLLM and SGLang read; or
    for one request, as llama.cpp's --spec-draft-n-max and --spec-draft-p-min on this machine.

    Attributes:
        run: directory of a finished `draftsmith eval bench` run with a chain of a fixed length, as long as may pay.
            llama.cpp's p-min needs its --traces. Without a run: the acceptance from which llama.cpp's drafts pay.
        method: that chain, as the run names it (spec:k=8); required if the run has several.
        costs: JSON file with the seconds of a round by requests and drafted tokens:
            {"seconds": {"1": {"0": 0.011, "4": 0.013}, "64": {...}}}.
        engine: llamacpp measures the costs here, with llama-bench, in place of a file.
        target: llama.cpp's target, a GGUF file as it will be served.
        draft: llama.cpp's drafter, as for `eval served`; without it drafts cost nothing, the least that they can.
        threads: llama.cpp's threads.
        engine_path: llama-server, with llama-bench beside it. Default: that of `make engines` in this directory, or one
            on the PATH.
        output: directory that receives results.json and, for each temperature T, vllm-T.json and sglang-T.json.
    """

    run: Path | None = None
    method: str | None = None
    costs: Path | None = field(default=None, kw_only=True)
    engine: Literal["none", "llamacpp"] = field(default="none", kw_only=True)
    target: Path | None = field(default=None, kw_only=True)
    draft: Path | None = field(default=None, kw_only=True)
    threads: int = field(default=1, kw_only=True)
    engine_path: Path | None = field(default=None, kw_only=True)
    output: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        check_positive(self, "threads")


@dataclass(frozen=True)
class RoundTimes:
    """Measured seconds of a round, by number of requests and drafted tokens per request.

    One request and 0 drafted tokens are always among them. `source` says where they were measured.
    """

    seconds: Mapping[int, Mapping[int, float]]
    source: str

    def at(self, requests: int, k: int) -> float:
        """Interpolate linearly between measurements."""
        return interpolate({size: interpolate(curve, k) for size, curve in self.seconds.items()}, requests)


@dataclass(frozen=True)
class RoundCounts:
    """Expected rounds of A recorded answers at every K.

    Attributes:
        owners: [A], the prompt of each answer.
        tokens: [A], tokens after the first one, which the prefill gives.
        rounds: [A, K+1], expected rounds for these tokens with 0 to K drafted tokens.
    """

    owners: Sequence[int]
    tokens: Floats
    rounds: Floats


@dataclass(frozen=True)
class Schedule:
    """Chosen K by number of requests, at one temperature.

    Attributes:
        lengths: [B], the best K for 1 to B requests.
        drafting: [B], the best K of at least 1.
        single: the best K for all numbers of requests.
        rows: one dict per number of requests that was timed.
        advice: up to how many requests drafting pays.
    """

    temperature: float
    lengths: Sequence[int]
    drafting: Sequence[int]
    single: int
    rows: Sequence[dict[str, Any]]
    advice: str


@sole_writer()
def run(config: ScheduleConfig) -> None:
    """Choose the schedule of each temperature, print it, and write results.json and the servers' files.

    Raises:
        InputError: the run or the costs cannot be used.
    """
    if config.engine == "llamacpp":
        return schedule_llamacpp(config)
    if config.run is None or config.costs is None:
        found, expected = f"run {config.run}, costs {config.costs}", "a run and --costs, or --engine llamacpp"
        raise InputError("costs", found, expected, f"Measure the server: {COSTS_EXAMPLE}.")
    bench = open_bench(str(config.run))
    label, method = recorded_chain(bench, config.method)
    times = read_times(config.costs)
    schedules = [
        choose(temperature, count_rounds(rows[label], method.length), times)
        for temperature, rows in bench.methods.items()
        if any(row["rounds"] for row in rows[label])
    ]
    if not schedules:
        raise InputError("run", f"no rounds of {label}", "answers of more than one token", "Measure it again.")

    make_directory(config.output)
    # An earlier run may have had other temperatures, or drafts that paid.
    for path in (path for form in FILES for path in config.output.glob(form.format("*"))):
        path.unlink()
    written = [RESULTS]
    for schedule in schedules:
        if any(schedule.lengths):
            vllm, sglang = (config.output / name.format(f"{schedule.temperature:g}") for name in FILES)
            # A vLLM server whose schedule went to K = 0 fell from 232 to 24-157 tokens/s (vllm#49548).
            write_json(vllm, vllm_config(ranges(schedule.drafting)), indent=None)
            write_json(sglang, sglang_config(ranges(schedule.lengths)), indent=None)
            written += [vllm.name, sglang.name]

    tables = [schedule_table(schedule, label, times.source) for schedule in schedules]
    meta = {
        "schema_version": SCHEMA_VERSION,
        "kind": "schedule",
        "settings": resolved(config),
        "command": command_line("eval schedule", config),
        "method": label,
        "costs": times.source,
        **{name: bench.meta[name] for name in ("target", "heads", "prompts")},
    }
    rows = [json_values({**vars(each), "ranges": ranges(each.lengths)}) for each in schedules]
    write_json(config.output / RESULTS, {"meta": meta, "tables": to_json(tables), "schedules": rows})
    for table in tables:
        print_table(table)
    log_note(f"Written to {config.output}: {', '.join(written)}")


LONGEST = 8  # draft of llama.cpp, without a run
CHAIN_COLUMNS = [
    Column("n_max", "n-max", "d"),
    Column("p_min", "p-min", "g"),
    Column("tau", "tokens/round", ".2f"),
    Column("round_ms", "ms/round", ".1f"),
    Column("speedup", "speed-up", ".2fx"),
    Column("speedup_ci", "95 % CI"),
    Column("pays", "pays above"),
]


def schedule_llamacpp(config: ScheduleConfig) -> None:
    """Measure llama.cpp's costs here, print which drafts of one request pay, and write results.json."""
    target, drafter = config.target, config.draft and gguf_file(config.draft)
    if target is None or target.suffix != ".gguf" or not target.is_file() or (config.draft and drafter is None):
        found = f"{target} and {config.draft}"
        raise InputError("target", found, "GGUF files", "Pass --target MODEL.gguf, and --draft as for `eval served`.")
    if drafter is not None and config.run is None:
        raise InputError("run", "none", "a run of the drafter", "Record one: `eval bench --methods eagle3:k=8`.")
    longest, prompts, source = LONGEST, list[list[int]](), "none recorded"
    known: dict[str, Any] = {}
    if config.run is not None:
        bench = open_bench(str(config.run))
        source, method = recorded_chain(bench, config.method)
        if not any(row["rounds"] for row in bench.methods.get(0.0, {}).get(source, [])):
            raise InputError("run", f"no greedy rounds of {source}", "--temperatures 0", "Measure it again.")
        rows, longest = bench.methods[0.0][source], method.length
        counts = count_rounds(rows, longest)
        prompts = [row["prompt_ids"] for row in bench.rows if row["prompt_ids"]]
        shape = {"method": str, "temperature": (int, float)}
        lines = read_lines(config.run / TRACE, shape) if (config.run / TRACE).is_file() else iter(())
        traced = [line for line in lines if line["method"] == source and not line["temperature"] and "q_top10" in line]
        whole = [line for line in traced if line["num_drafted"] == longest]
        known = {"owners": counts.owners, "tokens": counts.tokens, "rounds": counts.rounds, "traced": whole}
    costs = measure_costs(server_binary(config.engine_path), target, drafter, prompts, longest, config.threads)
    chains = chain_rows(costs, longest, **known)
    for row in chains:
        row["pays"] = f"{row['pays_above']:.2f}" if row["pays_above"] < row["n_max"] + 1 else "never"
        row["speedup_ci"] = format_interval(row.get("speedup_ci95"))

    plain_s = costs.at(0, 0)
    reads = ", ".join(f"{size}: {seconds / costs.verify[1]:.2f}" for size, seconds in costs.verify.items())
    text = (
        f"Pays above: tokens a round from which it is faster than plain decoding ({1e3 * plain_s:.1f} ms a token). "
        f"A call that reads several tokens, in calls of one: {reads}. "
    )
    text += f"Drafting a token takes {1e3 * costs.step_s:.1f} ms." if drafter else "Drafts as if they cost nothing."
    title = f"{target.name} in llama.cpp, threads: {config.threads}; rounds: {source}"
    columns = [column for column in CHAIN_COLUMNS if known or column.key in ("n_max", "round_ms", "pays")]
    table = Table("schedule-llamacpp", title, columns, chains, text)
    meta = {"schema_version": SCHEMA_VERSION, "kind": "schedule", "settings": resolved(config), "method": source}
    meta |= {"command": command_line("eval schedule", config), "costs": vars(costs)}
    make_directory(config.output)
    write_json(config.output / RESULTS, json_values({"meta": meta, "tables": to_json([table]), "rows": chains}))
    print_table(table)
    if known:
        best = max(chains, key=lambda row: row["speedup"])
        options = f"--spec-draft-n-max {best['n_max']} --spec-draft-p-min {best['p_min']:g}"
        pays = best["speedup"] > 1
        advice = f"Serve with {options}" if pays else f"Do not speculate here: the best, {options}, gives"
        print_text(f"{advice}: {best['speedup']:.2f}x expected." if pays else f"{advice} {best['speedup']:.2f}x.")


def recorded_chain(bench: Bench, label: str | None) -> tuple[str, FixedLengthMethod]:
    """Return the run's only chain of a fixed length, or the one with this label.

    Raises:
        InputError: there is none, or there are several, or it is a block drafter's.
    """
    labels = sorted({each for rows in bench.methods.values() for each in rows})
    parsed = {each: parse_method(each) for each in labels if each.partition(":")[0] in known_methods()}
    chains = {each: method for each, method in parsed.items() if isinstance(method, FixedLengthMethod)}
    if label is None and len(chains) == 1:
        label = next(iter(chains))
    if label is None or label not in chains:
        expected = f"one of {', '.join(chains)}" if chains else "a chain of a fixed length, such as spec:k=8"
        remedy = "Name it with --method." if chains else "Measure one with `draftsmith eval bench`."
        raise InputError("method", label or f"{len(chains)} such methods in {bench.name}", expected, remedy)
    if chains[label].drafter != MODEL and issubclass(head_class(chains[label].drafter), BlockHead):
        expected = "a drafter that draws a token after the other: a shorter block is another one, with other tokens"
        raise InputError("method", label, expected, "Measure each length, in a server with `eval served`.")
    return label, chains[label]


def read_times(path: Path) -> RoundTimes:
    """Read `{"seconds": {REQUESTS: {K: seconds}}, "machine": TEXT}`; "machine" is optional."""
    remedy = f"Write it as {COSTS_EXAMPLE}: seconds of a round by requests and drafted tokens."
    content = read_object(path, COSTS_SHAPE, remedy)
    seconds = dict[int, dict[int, float]]()
    for size, curve in content["seconds"].items():
        fits = all(name.isdecimal() for name in (size, *curve)) and "0" in curve and len(curve) > 1
        if not fits or not all(0 < value < math.inf for value in curve.values()):
            expected = "seconds above 0, of 0 and more drafted tokens"
            raise InputError(str(path), f"{json.dumps(curve)} with {size} requests", expected, remedy)
        seconds[int(size)] = {int(k): float(curve[k]) for k in sorted(curve, key=int)}
    if 1 not in seconds or 0 in seconds or max(seconds) > MAX_REQUESTS:
        found = f"{', '.join(content['seconds']) or 'no'} requests"
        raise InputError(str(path), found, f"1, and more, up to {MAX_REQUESTS:,}", remedy)
    return RoundTimes(dict(sorted(seconds.items())), content.get("machine", str(path)))


def count_rounds(rows: Sequence[Mapping[str, Any]], k: int) -> RoundCounts:
    """Compute the expected rounds of every answer with 0 to k drafted tokens, from rounds that drafted k.

    With another K rounds begin at other places of the text. A recorded round says of its accepted places that the draft
    was right there, and of the one after them that it was wrong. Nothing is known only after a fully accepted draft:
    there a token counts as accepted with the rate of a draft's last place. For a draft model, whose drafts depend on
    the preceding text alone, this is the distribution of real rounds except for those places. A head's later tokens are
    worse than its first ones: it accepts slightly more than is counted here.

    Args:
        rows: rows of prompts.parquet; answers without a round are skipped.
    """
    answers = [row for row in rows if row["rounds"]]
    rounds = [each for row in answers for each in row["rounds"]]
    reached = [each for each in rounds if each["num_drafted"] == k and each["num_accepted"] >= k - 1]
    last_rate = sum(each["num_accepted"] == k for each in reached) / max(len(reached), 1)
    probs = [accept_probs(row["rounds"], k, last_rate) for row in answers]
    expected = np.array([[expected_rounds(each, length) for length in range(k + 1)] for each in probs])
    return RoundCounts([row["prompt"] for row in answers], np.array([float(len(each)) for each in probs]), expected)


def accept_probs(rounds: Sequence[Mapping[str, int]], k: int, unknown: float) -> list[float]:
    """Return the acceptance probability of every emitted token.

    It is 1 where the token was drafted, 0 where the draft was different or had ended, and `unknown` after k accepted
    tokens.
    """
    probs = list[float]()
    for each in rounds:
        accepted = min(each["num_accepted"], each["num_emitted"])
        probs += [1.0] * accepted
        if each["num_emitted"] > accepted:
            probs.append(unknown if accepted == k else 0.0)
    return probs


def expected_rounds(accept_prob: Sequence[float], k: int) -> float:
    """Return the expected number of rounds of k drafted tokens that emit len(accept_prob) tokens."""
    count = len(accept_prob)
    begins = [1.0, *([0.0] * (count + k))]  # probability that a round begins at a place
    for place in range(count):
        alive = begins[place]  # probability that the draft is accepted up to here
        for at in range(place, place + k):
            if not alive or at >= count:
                break
            begins[at + 1] += alive * (1 - accept_prob[at])
            alive *= accept_prob[at]
        else:
            begins[place + k + 1] += alive
    return sum(begins[:count])


def choose(temperature: float, counts: RoundCounts, times: RoundTimes) -> Schedule:
    """Choose the K with the highest token rate at every number of requests.

    The choice uses all prompts; the intervals of its gains are bootstrapped over prompts.
    """
    tau: Floats = counts.tokens.sum() / counts.rounds.sum(0)  # [K+1], tokens per round: 1 without drafts
    sizes = sorted(times.seconds)
    timed = min(max(curve) for curve in times.seconds.values())  # at every number of requests
    num_lengths = min(len(tau) - 1, timed) + 1
    seconds = [[times.at(size, k) for k in range(num_lengths)] for size in range(1, sizes[-1] + 1)]
    rate: Floats = tau[:num_lengths] / np.array(seconds)  # [B, K+1] tokens per second of each request
    lengths = [int(k) for k in rate.argmax(1)]  # the smallest of equal ones
    drafting = [1 + int(k) for k in rate[:, 1:].argmax(1)]
    at_sizes = rate[[size - 1 for size in sizes]]
    single = int(np.log(at_sizes / at_sizes[:, :1]).mean(0).argmax())

    resamples = Resamples(counts.owners, SEED)
    tokens = resamples.sums(counts.tokens)
    tau_resampled = np.stack([tokens / resamples.sums(counts.rounds[:, k]) for k in range(num_lengths)], 1)
    rows = []
    for size in sizes:
        k = lengths[size - 1]
        row: dict[str, Any] = {"requests": size, "k": k, "tokens_per_round": float(tau[k])}
        for name, base in (("over_none", 0), ("over_single", single)):
            gains = tau_resampled[:, k] / tau_resampled[:, base] * times.at(size, base) / times.at(size, k) - 1
            row[name] = float(rate[size - 1, k] / rate[size - 1, base] - 1)
            row[f"{name}_ci95"] = resamples.interval(functools.partial(np.asarray, gains))
        rows.append(row)

    last = max((size for size, k in enumerate(lengths, start=1) if k), default=0)
    advice = f"Do not speculate above {last} requests at once."
    if not last:
        advice = f"Do not speculate: it pays at no number of requests up to {len(lengths)}."
    elif last == len(lengths):
        advice = f"Speculating pays up to {last} requests at once, the most that was timed."
    if max(lengths) == num_lengths - 1:
        advice += f" More than {num_lengths - 1} tokens may pay: longer drafts were not recorded, or not timed."
    return Schedule(temperature, lengths, drafting, single, rows, advice)


def ranges(lengths: Sequence[int]) -> list[KRange]:
    """Merge equal neighbors: K for 1 to B requests -> (first, last, K)."""
    merged: list[KRange] = []
    for size, k in enumerate(lengths, start=1):
        if merged and merged[-1][2] == k:
            merged[-1] = (merged[-1][0], size, k)
        else:
            merged.append((size, size, k))
    return merged


def vllm_config(k_ranges: Sequence[KRange]) -> dict[str, Any]:
    """Return a part of vLLM's --speculative-config (0.32, 0.33); above the last range its K holds."""
    longest = max(k for _, _, k in k_ranges)
    by_batch = [list(each) for each in k_ranges]
    return {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": by_batch}


def sglang_config(k_ranges: Sequence[KRange]) -> dict[str, Any]:
    """Return SGLang's --speculative-adaptive-config (0.5.23): the smallest batch size -> the allowed steps.

    With a single candidate SGLang's acceptance rates change nothing.
    """
    return {str(first): {"candidate_steps": [k]} for first, _, k in k_ranges}


def schedule_table(schedule: Schedule, label: str, source: str) -> Table:
    """Return the table of one temperature, with the advice as its note."""
    rows = [dict(row) for row in schedule.rows]
    columns = [Column("requests", "requests", "d"), Column("k", "K", "d")]
    columns.append(Column("tokens_per_round", "tokens/round", ".2f"))
    for name, base in (("over_none", 0), ("over_single", schedule.single)):
        columns += [Column(name, f"over K={base}", "+.1%"), Column(f"{name}_ci", "95 % CI")]
        for row in rows:
            ends = row[f"{name}_ci95"]
            row[f"{name}_ci"] = format_interval(ends and [100 * end for end in ends], "+.1f", " to ")
    parts = (f"{first}-{last}: {k}" if first < last else f"{first}: {k}" for first, last, k in ranges(schedule.lengths))
    text = (
        f"{schedule.advice} K by requests: {'; '.join(parts)}. K = {schedule.single} is the best single one. Expected "
        f"from rounds of {label}, intervals over prompts; times: {source}."
    )
    if any(schedule.lengths) and not all(schedule.lengths):
        text += " vLLM's file drafts at least 1 token: at K = 0 a server has stalled (vllm#49548)."
    name, title = f"schedule-T{schedule.temperature:g}", f"Drafted tokens, T={schedule.temperature:g}"
    return Table(name, title, columns, rows, text)
