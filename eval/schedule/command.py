"""`draftsmith eval schedule RUN`: how many tokens a server should draft, by the requests that it decodes together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.console import note, show
from draftsmith.data.store.files import write_json, write_text
from draftsmith.data.store.manifest import command_line, resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.tables import Column, Table, interval, plain
from draftsmith.eval.bench.compare import Bench, open_bench
from draftsmith.eval.bench.results import RESULTS, SCHEMA_VERSION
from draftsmith.eval.report.tables import to_json
from draftsmith.eval.schedule.choice import Schedule, choose
from draftsmith.eval.schedule.costs import RoundTimes, read_times
from draftsmith.eval.schedule.rounds import count_rounds
from draftsmith.eval.schedule.servers import for_sglang, for_vllm
from draftsmith.modules.drafters.chains import FixedK
from draftsmith.modules.drafters.methods import known_methods, parse_method
from draftsmith.modules.types import InputError

STALL = (
    "a vLLM server whose schedule went to K = 0 fell from 232 to 24-157 tokens/s as requests crossed that threshold "
    "(vllm#49548)"
)
FILES = ("vllm-T{}.json", "sglang-T{}.json")


@dataclass(frozen=True)
class ScheduleConfig:
    """Says how many tokens to draft with every number of requests that a server decodes together, as files that vLLM
    and SGLang read.

    Of rounds that `draftsmith eval bench` recorded with K drafted tokens follows how many tokens a round gives with any
    smaller K; of costs, what it takes.

    Attributes:
        run: directory of a finished run of `draftsmith eval bench` with a chain of a fixed length, as long as may pay.
        method: that chain, as the run names it (spec:k=8); needed where the run has several.
        costs: JSON file of what a round takes, seconds by requests and drafted tokens:
            {"seconds": {"1": {"0": 0.011, "4": 0.013}, "64": {...}}}.
        allow_zero: write K = 0 for vLLM too, where no drafts are best. Without it its file drafts at least 1 token:
            vLLM has stalled at K = 0 (vllm#49548).
        seed: of the bootstrap.
        output: directory that receives results.json and, for each temperature T, vllm-T.json and sglang-T.json.
    """

    run: Path
    method: str | None = None
    costs: Path = dataclasses.field(kw_only=True)
    allow_zero: bool = False
    seed: int = 0
    output: Path = dataclasses.field(kw_only=True)


@sole_writer()
def run(config: ScheduleConfig) -> None:
    """Print the tables, and write results.json and the servers' files.

    Raises:
        InputError: a run or costs that do not serve.
    """
    bench = open_bench(str(config.run))
    label, method = chain_of(bench, config.method)
    times = read_times(config.costs)
    found = {
        temperature: choose(temperature, count_rounds(own[label], method.k), times, config.seed)
        for temperature, own in bench.methods.items()
        if any(row["rounds"] for row in own[label])
    }
    if not found:
        raise InputError("run", f"no rounds of {label}", "answers of more than one token", "Measure it again.")
    tables = [table_of(own, label, times, config.allow_zero) for own in found.values()]
    for name in (RESULTS, *(path.name for form in FILES for path in config.output.glob(form.format("*")))):
        (config.output / name).unlink(missing_ok=True)
    written = [path for own in found.values() for path in write_files(config, own)]
    meta = {"schema_version": SCHEMA_VERSION, "kind": "schedule", "settings": resolved(config)}
    meta |= {"command": command_line("eval schedule", config), "method": label, "costs": times.source}
    meta |= {name: bench.meta[name] for name in ("target", "heads", "prompts")}
    schedules = [plain({**vars(own), "ranges": own.ranges, "advice": own.advice}) for own in found.values()]
    write_json(config.output / RESULTS, {"meta": meta, "tables": to_json(tables), "schedules": schedules})
    for table in tables:
        show(table)
    note(f"Written to {config.output}: {', '.join([RESULTS, *(path.name for path in written)])}")


def chain_of(bench: Bench, asked: str | None) -> tuple[str, FixedK]:
    """The chain of a fixed length that the run has, or the one asked for.

    Raises:
        InputError: there is none, or there are several.
    """
    labels = {label for own in bench.methods.values() for label in own}
    parsed = {label: parse_method(label) for label in sorted(labels) if label.partition(":")[0] in known_methods()}
    chains = {label: method for label, method in parsed.items() if isinstance(method, FixedK)}
    if asked is None and len(chains) == 1:
        asked = next(iter(chains))
    if asked is None or asked not in chains:
        expected = f"one of {', '.join(chains)}" if chains else "a chain of a fixed length, such as spec:k=8"
        remedy = "Name it with --method." if chains else "Measure one with `draftsmith eval bench`."
        raise InputError("method", asked or f"{len(chains)} such methods in {bench.name}", expected, remedy)
    return asked, chains[asked]


def table_of(found: Schedule, label: str, times: RoundTimes, allow_zero: bool) -> Table:
    def ends(own: Sequence[float] | None) -> str:
        return "" if own is None else interval([100 * end for end in own], "+.1f", " to ")

    rows = [
        {**row, "over_none_ci": ends(row["over_none_ci95"]), "over_single_ci": ends(row["over_single_ci95"])}
        for row in found.rows
    ]
    columns = [
        Column("requests", "requests", "d"), Column("k", "K", "d"), Column("tokens_per_round", "tokens/round", ".2f"),
        Column("over_none", "over K=0", "+.1%"), Column("over_none_ci", "95 % CI"),
        Column("over_single", f"over K={found.single}", "+.1%"), Column("over_single_ci", "95 % CI"),
    ]  # fmt: skip
    said = "; ".join(f"{a}-{b}: {k}" if a < b else f"{a}: {k}" for a, b, k in found.ranges)
    value, own_ends = found.over_single
    note = (
        f"{found.advice} K by requests: {said}. Tokens by time over the best single K, {found.single}, on average "
        f"{value:+.1%} ({ends(own_ends)}). "
        f"Expected of rounds of {label}, intervals over prompts; times: {times.source}."
        + zero_warning(found, allow_zero)
    )
    return Table(f"schedule-T{found.temperature:g}", f"Drafted tokens, T={found.temperature:g}", columns, rows, note)


def zero_warning(found: Schedule, allow_zero: bool) -> str:
    """Return what is known of K = 0 in a server's file; nothing where no file holds it."""
    if all(found.lengths) or not found.last:
        return ""
    if allow_zero:
        return f" Beware of K = 0 in the servers' files: {STALL}. Measure your server on both sides of it."
    return (
        f" Beware of K = 0: {STALL}. So vLLM's file drafts at least 1 token, which costs up to {found.loss:.1%} of the "
        "tokens by time here; --allow-zero writes the 0. SGLang's file holds it."
    )


def write_files(config: ScheduleConfig, found: Schedule) -> list[Path]:
    """Write the servers' files of one temperature; none where drafting never pays."""
    if not found.last:
        return []
    vllm, sglang = (config.output / name.format(f"{found.temperature:g}") for name in FILES)
    write_text(vllm, json.dumps(for_vllm(found.ranges if config.allow_zero else found.drafting_ranges)) + "\n")
    write_text(sglang, json.dumps(for_sglang(found.ranges)) + "\n")
    return [vllm, sglang]
