"""`draftsmith eval load`: methods, or servers, under many requests at once."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from draftsmith.data.heads.measured import WEIGHTS
from draftsmith.data.models.identity import config_hash
from draftsmith.data.models.loading import read_config
from draftsmith.data.models.naming import naming
from draftsmith.data.progress import bar
from draftsmith.data.screen import note, show
from draftsmith.data.store.files import write_json, write_table
from draftsmith.data.store.manifest import file_sha256
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.tables import plain
from draftsmith.data.text.template import context_length
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.eval.bench.command import decided_by, heads_of
from draftsmith.eval.bench.journal import Journal, unfinished_auto
from draftsmith.eval.bench.load import load_run
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence, read_prompts
from draftsmith.eval.bench.results import BASELINE, RESULTS, arrow_type, describe
from draftsmith.eval.bench.runner import check_rows
from draftsmith.eval.cost.auto import times_of_run
from draftsmith.eval.cost.clock import rotated
from draftsmith.eval.load.ours import CLOCKS, serve
from draftsmith.eval.load.requests import BLOCK, REQUEST, Block, Load, Plan, Request, block_of
from draftsmith.eval.load.server import LoadedServer
from draftsmith.eval.load.settings import LoadConfig, check
from draftsmith.eval.load.summary import answered, compared, equality, paying, summarise
from draftsmith.eval.load.tables import load_tables, numbers
from draftsmith.eval.report.tables import to_json
from draftsmith.modules.decoding.loop import RowAnswer, RowPool, Setup, asked
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import Session
from draftsmith.modules.types import InputError

PER_REQUEST = "requests.parquet"
ALONE = Load("closed", 1)
ENTRY = {"method": str, "load": str, "value": float, "repeat": int, "block": BLOCK}  # of the journal
Key = tuple[str, Load, int]  # method or server, load, repeat
Measure = Callable[[str, Load, int], Block]


def run(config: LoadConfig) -> int:
    """Measure, print the tables and write `output`/results.json, which is there only when the run is complete. Returns
    1 where requests failed, else 0."""
    results = measure(config)
    for table in results["shown"]:
        show(table)
    failed = sum(row["failed"] for row in results["points"])
    if failed:
        print(f"draftsmith: failed: {failed} requests, such as {results['failures'][0]}", file=sys.stderr)
    note(f"Written to {config.output / RESULTS}; `draftsmith eval report {config.output}` draws it")
    return 1 if failed else 0


@sole_writer()
def measure(config: LoadConfig) -> dict[str, Any]:
    """What results.json holds, and the tables as `shown`. Writes it too.

    Raises:
        InputError: bad settings, models, prompts or servers; an unfinished run of other settings in `output`.
    """
    check(config)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit, "last")
    prompts = random.Random(config.seed).sample(prompts, min(config.requests, len(prompts)))
    subject = Servers(config, prompts) if config.server is not None else Methods(config, prompts)
    meta = describe(
        "load", config, subject.identity, prompts, config.prompts, subject.smaller, clock=config.clock, **subject.more
    )
    journal = Journal(config.output, {**decided_by(meta, prompts), **subject.more}, ENTRY, subject.auto)
    blocks = run_blocks(config, subject.labels, subject.block, journal)
    compare = config.sampling.greedy and subject.exact
    points = summarise_points(config, subject.labels, blocks, compare)
    pays = paying(points)
    tables = load_tables(points, pays, config.goals_text, note_of(config))
    failures = sorted({r.error for block in blocks.values() for r in block.requests if r.error is not None})
    results = {
        "meta": meta,
        "tables": to_json(tables),
        "points": plain(points),
        "paying": plain(pays),
        "summary": plain(numbers(points)),
        "failures": failures,
    }
    (config.output / RESULTS).unlink(missing_ok=True)  # one always belongs to the rows beside it
    write_requests(config.output / PER_REQUEST, blocks, prompts)
    write_json(config.output / RESULTS, results)
    journal.remove()
    return {**results, "shown": [table for table in tables if table.columns]}


def run_blocks(config: LoadConfig, labels: Sequence[str], measured: Measure, journal: Journal) -> dict[Key, Block]:
    """All blocks: those that the journal holds, and those that it lacks. Under a load methods take turns, in rotating
    order: a machine that slows down slows all down alike."""
    found: dict[Key, Block] = {}
    for entry in journal.entries:
        load = Load(entry["load"], entry["value"])
        found[entry["method"], load, entry["repeat"]] = block_of(entry["block"])
    keys = list(block_keys(config, labels))
    if found:
        note(f"draftsmith: going on with an interrupted run: {len(found)} of {len(keys)} blocks")
    with bar("measuring", len(keys), "blocks", len(found), moving=False) as progress:
        for key in keys:
            if key not in found:
                label, load, repeat = key
                block = found[key] = measured(label, load, repeat)
                if not answered([block]):
                    raise InputError(label, f"no answer: {block.requests[0].error}", "answers", "Read its log.")
                own = {"method": label, "load": load.kind, "value": load.value, "repeat": repeat}
                journal.add({**own, "block": dataclasses.asdict(block)})
                progress(1)
    return found


def block_keys(config: LoadConfig, labels: Sequence[str]) -> Iterator[Key]:
    """In the order in which they are measured. First `ar` alone, whose answers are what all answers are compared with,
    unless it is measured anyway."""
    if BASELINE in labels and ALONE not in config.loads:
        yield BASELINE, ALONE, 0
    for place, load in enumerate(config.loads):
        for repeat in range(config.repeats):
            for label in rotated(list(labels), place + repeat):
                yield label, load, repeat


def plan_of(config: LoadConfig, count: int, load: Load, repeat: int) -> Plan:
    """The requests of a block, the same for all methods. count: of the prompts."""
    order = random.Random(f"{config.seed}/{load}/{repeat}").sample(range(count), count)
    users = int(load.value) if load.kind == "closed" else 0
    return Plan(order, max(config.warmup, users), config.requests)


def summarise_points(
    config: LoadConfig, labels: Sequence[str], blocks: Mapping[Key, Block], compare: bool
) -> list[dict[str, Any]]:
    """A row for each load and method."""
    alone: dict[int, Request] = {}
    if compare and (BASELINE, ALONE, 0) in blocks:
        alone = {request.prompt: request for request in answered([blocks[BASELINE, ALONE, 0]])}
    rows = []
    for load in config.loads:
        of = {label: [blocks[label, load, repeat] for repeat in range(config.repeats)] for label in labels}
        for label, own in of.items():
            row = summarise(label, load, own, config.goals, config.seed)
            if BASELINE in of:
                compared(row, answered(own), answered(of[BASELINE]), config.seed)
            rows.append(row | equality(answered(own), alone))
    return rows


def note_of(config: LoadConfig) -> str:
    """How it was measured, in a sentence or two."""
    what = "CPU time of this process" if config.clock == "cpu" else "wall time"
    repeats = f" in each of {config.repeats} blocks" if config.repeats > 1 else ""
    where = config.server or f"{config.dtype} on {config.device}, {config.num_threads} thread(s)"
    return (
        f"{config.requests} requests{repeats}, up to {config.max_new_tokens} tokens each, {where}, {what}. Requests "
        "before and behind those that count keep the load full, and are not counted."
    )


def write_requests(path: Path, blocks: Mapping[Key, Block], prompts: Sequence[BenchPrompt]) -> None:
    """A row for every request that counts, whole or not at all."""
    own = {"method": str, "load": str, "value": float, "repeat": int, "id": str, "task": str, "prompt_tokens": int}
    schema = pa.schema([(name, arrow_type(shape)) for name, shape in {**own, **REQUEST}.items()])
    rows = []
    for (label, load, repeat), block in blocks.items():
        of = {"method": label, "load": load.kind, "value": load.value, "repeat": repeat}
        for request in block.requests:
            prompt = prompts[request.prompt]
            about = {"id": prompt.id, "task": prompt.task, "prompt_tokens": len(prompt.prompt_ids)}
            rows.append({**of, **about, **dataclasses.asdict(request)})
    write_table(path, pa.Table.from_pylist(rows, schema), compression="zstd")


class Methods:
    """This engine's methods, as what is measured. exact: answers can be compared with those of `ar` alone."""

    def __init__(self, config: LoadConfig, prompts: Sequence[BenchPrompt]):
        self._config, self._prompts = config, prompts
        self._named = {item.label: item.method for item in config.named}
        self.labels = list(self._named)
        models = load_run(config, config.named, prompts, config.max_new_tokens, config.sampling)
        for role, lm in (("target", models.target), ("draft", models.draft)):
            check_rows(role, lm)
        models.times.load_state_dict(
            unfinished_auto(config.output) or (times_of_run(config.costs) if config.costs else {})
        )
        self._models: Models = models
        self._longest = longest_sequence(prompts, config.max_new_tokens, models.target.info.max_position)
        self._sessions: dict[tuple[int, tuple[int, ...]], Session] = {}
        for rows in {self._rows(load) for load in config.loads}:  # what they ask of the machine, before it is timed
            for method in self._named.values():
                method.build(models, rows)
        paths = heads_of(config.named, config.paths)
        heads = {flag: {"path": path, "sha256": file_sha256(Path(path) / WEIGHTS)} for flag, path in paths.items()}
        self.identity, self.smaller = models.target, {"draft": models.draft, "mid": models.mid}
        self.exact, self.auto = models.target.dtype == torch.float32, models.times.state_dict()
        self.more: dict[str, Any] = {
            "methods": {label: dataclasses.asdict(method) for label, method in self._named.items()},
            "heads": heads,
            "eos_ids": list(models.ends),
            **self.auto,
        }

    def _rows(self, load: Load) -> int:
        return int(load.value) if load.kind == "closed" else self._config.max_rows

    def _session(self, rows: int, capture: tuple[int, ...]) -> Session:
        """A session of so many rows, made once: a GPU's graphs are worth keeping. Those of other loads are let go."""
        self._sessions = {key: own for key, own in self._sessions.items() if key[0] == rows}
        if (rows, capture) not in self._sessions:
            self._sessions[rows, capture] = self._models.target.session(rows, self._models.capacity, capture)
        return self._sessions[rows, capture]

    def block(self, label: str, load: Load, repeat: int) -> Block:
        config, models, rows = self._config, self._models, self._rows(load)
        drafter = self._named[label].build(models, rows)
        setup = Setup(session=self._session(rows, () if drafter is None else drafter.capture))
        pool = RowPool(models.target, drafter, config.sampling, rows, self._longest, setup)
        plan = plan_of(config, len(self._prompts), load, repeat)

        def ask(request: Request) -> RowAnswer:
            source = TorchSource(config.seed + request.prompt)
            ids = self._prompts[request.prompt].prompt_ids
            return asked(models.target.info, ids, config.max_new_tokens, source, models.ends, request.number)

        with naming(paths=config.paths):
            return serve(pool, load.arrivals(config.seed + repeat), plan, ask, CLOCKS[config.clock]())


class Servers:
    """Servers, as what is measured."""

    exact, auto = True, dict[str, Any]()

    def __init__(self, config: LoadConfig, prompts: Sequence[BenchPrompt]):
        self._config, self._prompts = config, prompts
        context = context_length(config.target)
        if context is not None:
            longest_sequence(prompts, config.max_new_tokens, context)  # raises for one that does not fit
        settings = AnswerSettings(config.target, config.sampling, config.max_new_tokens, config.ignore_eos, config.seed)
        ids = [prompt.prompt_ids for prompt in prompts]
        self._servers = {name: LoadedServer(url, settings, ids, config.dialect) for name, url in config.servers.items()}
        self.labels = list(self._servers)
        self.identity, self.smaller = {"config": config_hash(read_config(config.target))}, dict[str, Any]()
        about = {name: dataclasses.asdict(server.about) for name, server in self._servers.items()}
        self.more: dict[str, Any] = {"servers": about, "heads": {}}

    def block(self, label: str, load: Load, repeat: int) -> Block:
        plan = plan_of(self._config, len(self._prompts), load, repeat)
        return self._servers[label].block(load.arrivals(self._config.seed + repeat), plan)
