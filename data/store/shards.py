"""Numbered shards over a fixed partition of the input: resumable, the same on any number of ranks.

Shard i covers input rows [i * rows_per_shard, (i + 1) * rows_per_shard) and belongs to rank i mod world. Its files are
written under a temporary name, synced and renamed; `shard-NNNNN.done.json` with their sizes and hashes comes after
them, so a shard is there whole or not at all. Rank 0 writes the manifest once every shard is there.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from draftsmith.data.console import Advance, log_note, print_text, progress_bar
from draftsmith.data.ranks import place
from draftsmith.data.store.files import make_directory, write_json, write_table, write_tensors
from draftsmith.data.store.manifest import (
    FILE,
    MANIFEST,
    STARTED,
    Field,
    FileEntry,
    Manifest,
    changes,
    command_line,
    decisive,
    file_sha256,
    flatten,
    git_commit,
    package_versions,
    resolved,
)
from draftsmith.data.store.reading import read_object
from draftsmith.data.store.values import check_values
from draftsmith.data.store.writer import HOLDER, LOCK
from draftsmith.modules.types import InputError

ARROW = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "bool": pa.bool_(),
    "list<int32>": pa.list_(pa.int32()),
    "list<float32>": pa.list_(pa.float32()),
    "list<bool>": pa.list_(pa.bool_()),
}
DROPPED = "_dropped"  # behind the reason, in counts
SPLIT = "rows_split"  # in counts: rows of the table that an input row has beyond its first
DONE = {"files": [FILE], "counts": {"rows": int, "*": int}}
BEGIN_AGAIN = "Delete the directory and run the stage again."
WAIT_S = 3600.0  # for other ranks, without any progress
POLL_S = 0.1  # and 5 ms a shard: looking costs one stat for each


@dataclass(frozen=True)
class Shard:
    """Input rows [start, stop)."""

    index: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"shard-{self.index:05d}"


@dataclass(frozen=True)
class ShardContent:
    """What a stage makes of one shard: table rows by the plan's fields, counts that add up over shards, and tensors
    [name -> Tensor] for a safetensors file beside the table (None: the stage writes no tensors). Input rows that have
    no row in the table are counted as REASON_dropped, and the rows beyond the first of those that have several as
    rows_split."""

    rows: list[dict[str, Any]]
    counts: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class StagePlan:
    """Everything about a run of a stage except how one shard is made.

    stage: the command, `data responses`. config: its configuration dataclass, which has `output` and `rows_per_shard`.
    fields: of the table; those whose dtype is not in ARROW describe tensors. alone: this process makes all shards,
    whatever its rank; the others only help it.
    other_packages: versions of what is not in this environment, asked once all shards are there.
    """

    kind: str
    stage: str
    config: Any
    num_rows: int
    fields: tuple[Field, ...]
    inputs: dict[str, str]
    identity: dict[str, Any]
    sampling: dict[str, Any] | None = None
    seed: int | None = None
    alone: bool = False
    other_packages: Callable[[], Mapping[str, str | None]] = dict

    @property
    def directory(self) -> Path:
        return Path(self.config.output)

    @property
    def shards(self) -> list[Shard]:
        step, total = self.config.rows_per_shard, self.num_rows
        return [Shard(i, start, min(start + step, total)) for i, start in enumerate(range(0, total, step))]

    @property
    def command(self) -> str:
        return command_line(self.stage, self.config)


def run_stage(plan: StagePlan, make_shard: Callable[[Shard, Advance], ShardContent]) -> Manifest:
    """Make the shards of this rank that are not there, then (rank 0) the manifest; others wait for it.

    make_shard must depend on nothing but the shard, and call `advance` with the rows it has done. While it makes one, a
    thread writes the one before: two are in memory at a time, and what goes wrong with a write is raised after the next
    one is made.

    Raises:
        InputError: no rows, an output that another configuration began, or ranks that never delivered.
    """
    here = place()
    rank, world = (0, 1) if plan.alone else (here.rank, here.world)
    directory = plan.directory
    if plan.num_rows == 0:
        raise InputError(f"{plan.stage}: input", "no rows", "at least one", "Check the input and its filters.")
    begin(plan)
    if (directory / MANIFEST).exists() and not _unfinished(plan):
        log_note(f"{plan.kind}: already complete in {directory}")
        return Manifest.read(directory)
    own = [shard for shard in plan.shards if shard.index % world == rank]
    todo = [shard for shard in own if read_done(directory, shard) is None]
    total, left = (sum(s.stop - s.start for s in shards) for shards in (own, todo))
    if rank == 0 and world > 1:
        log_note(f"{plan.kind}: {total:,} of {plan.num_rows:,} rows here, the others by {world - 1} more")
    with progress_bar(plan.kind, total, "rows", total - left, enabled=rank == 0) as advance:
        _write_all(plan, ((shard, make_shard(shard, advance)) for shard in todo))
    if rank == 0:
        _wait(plan, lambda: _unfinished(plan), "shards of other ranks")
        return _finish(plan)
    _wait(plan, lambda: _unfinished(plan) + (not (directory / MANIFEST).exists()), "shards or the manifest")
    return Manifest.read(directory)


def begin(plan: StagePlan) -> None:
    """Claim the output directory for this configuration, or see that it was begun with the same one.

    Raises:
        InputError: it was begun with another (every differing key is listed), or holds something else.
    """
    directory = plan.directory
    make_directory(directory)
    made_of = {"config": decisive(plan.config), "inputs": plan.inputs, "identity": plan.identity}
    state = flatten({"rows": plan.num_rows, "kind": plan.kind, **made_of})
    path = directory / STARTED
    if not path.exists():
        own = (STARTED, LOCK, HOLDER)
        strange = [p.name for p in directory.iterdir() if ".tmp-" not in p.name and p.name not in own]
        if strange:
            found = f"{directory}, which holds {sorted(strange)[0]}"
            raise InputError("output", found, "a new directory, or one that this stage began", "Choose another.")
        write_json(path, {"command": plan.command, "state": state})
        return
    begun = read_object(path, {"state": dict}, BEGIN_AGAIN)["state"]
    if changed := changes(path, state, begun):
        found = f"{directory}, begun with another {changed}"
        remedy = "Choose another directory or delete it."
        raise InputError("output", found, "the configuration it was begun with", remedy)


def read_done(directory: Path, shard: Shard) -> dict[str, Any] | None:
    """The record of a finished shard; None where it is not finished or its files are gone or of another size."""
    path = directory / f"{shard.name}.done.json"
    try:
        done = read_object(path, DONE)
        intact = all((directory / f["name"]).stat().st_size == f["bytes"] for f in done["files"])
    except OSError:
        return None
    return done if intact else None


def write_shard(plan: StagePlan, shard: Shard, content: ShardContent) -> None:
    """Files first, then the record that they are whole."""
    directory = plan.directory
    for leftover in directory.glob(f"{shard.name}.*.tmp-*"):
        leftover.unlink(missing_ok=True)  # of a killed run
    schema = pa.schema([(f.name, ARROW[f.dtype]) for f in plan.fields if f.dtype in ARROW])
    table = pa.Table.from_pylist(content.rows, schema=schema)
    names = [f"{shard.name}.parquet"]
    remedy = f"Free some space, then continue: {plan.command}"
    write_table(directory / names[0], table, remedy)
    if content.tensors is not None:
        names.append(f"{shard.name}.safetensors")
        write_tensors(directory / names[1], content.tensors, remedy=remedy)
    num_rows = len(content.rows)
    kept, lost = num_rows - content.counts.get(SPLIT, 0), sum(dropped(content.counts).values())
    assert kept + lost == shard.stop - shard.start, "rows that nobody accounts for"
    files = [FileEntry(n, (directory / n).stat().st_size, file_sha256(directory / n), num_rows) for n in names]
    record = {"files": [asdict(entry) for entry in files], "counts": {"rows": num_rows, **content.counts}}
    write_json(directory / f"{shard.name}.done.json", record)


def _write_all(plan: StagePlan, made: Iterator[tuple[Shard, ShardContent]]) -> None:
    """Write shards as they come. Whatever ends it, the one that is being written then is waited for."""
    with ThreadPoolExecutor(1, "shards") as writer:
        before: Future[None] | None = None
        for shard, content in made:
            if before is not None:
                before.result()
            before = writer.submit(write_shard, plan, shard, content)
        if before is not None:
            before.result()


def _unfinished(plan: StagePlan) -> int:
    return sum(read_done(plan.directory, shard) is None for shard in plan.shards)


def _wait(plan: StagePlan, left: Callable[[], int], what: str) -> None:
    """Wait until left() is 0; the deadline moves on while it falls."""
    before, deadline = left(), time.monotonic() + WAIT_S
    while before:
        time.sleep(POLL_S + 0.005 * len(plan.shards))
        now = left()
        if now < before:
            before, deadline = now, time.monotonic() + WAIT_S
        elif time.monotonic() > deadline:
            found = f"{now} {what} missing after {WAIT_S:.0f} s"
            raise InputError("ranks", found, "all of them", f"Continue, on any number of ranks: {plan.command}")


def _finish(plan: StagePlan) -> Manifest:
    counts: Counter[str] = Counter({"shards": len(plan.shards), "read": plan.num_rows})
    files: list[FileEntry] = []
    for shard in plan.shards:
        done = read_done(plan.directory, shard)
        assert done is not None
        counts.update(done["counts"])
        files += map(FileEntry.of, done["files"])
    if counts["rows"] == 0:
        remedy = "Check the filters and what was dropped."
        raise InputError(f"{plan.stage}: output", f"no rows left ({account(counts)})", "at least one", remedy)
    manifest = Manifest(
        kind=plan.kind,
        config=resolved(plan.config),
        inputs=plan.inputs,
        identity=plan.identity,
        sampling=plan.sampling,
        fields=plan.fields,
        counts=dict(counts),
        files=tuple(files),
        seed=plan.seed,
        command=plan.command,
        packages={**package_versions(), **plan.other_packages()},
        git_commit=git_commit(),
    )
    manifest.write(plan.directory)
    size = sum(entry.bytes for entry in files)
    told = {"rows", "read", SPLIT, *(name + DROPPED for name in dropped(counts))}
    more = {name: value for name, value in counts.items() if value and name not in told}
    numbers = "".join(f", {value:,} {name.replace('_', ' ')}" for name, value in more.items())
    print_text(f"{plan.kind}: {account(counts)}; {size / 1e6:,.1f} MB{numbers} in {plan.directory}")
    return manifest


def dropped(counts: Mapping[str, int]) -> dict[str, int]:
    """Reason -> input rows that a stage dropped for it, of its counts."""
    return {name.removesuffix(DROPPED): value for name, value in counts.items() if name.endswith(DROPPED) and value}


def account(counts: Mapping[str, int]) -> str:
    """`read 1,000, kept 980, dropped 20: invalid 15, overlong 5`."""
    reasons = dropped(counts)
    because = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in reasons.items())
    lost = f"{sum(reasons.values()):,}: {because}" if reasons else "0"
    extra = counts.get(SPLIT, 0)
    rows = f" in {counts['rows']:,} rows" if extra else ""
    return f"read {counts['read']:,}, kept {counts['rows'] - extra:,}{rows}, dropped {lost}"


class Rows:
    """The table of an opened artefact by global row number, one shard in memory at a time."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        columns: list[str] | None = None,
        limit: int = 0,
        vocab_size: int | None = None,
    ):
        """columns: of all. limit: only the first so many rows; 0 takes all. vocab_size: as of `check_values`."""
        self._directory, self._manifest, self._vocab_size = directory, manifest, vocab_size
        files = [entry for entry in manifest.files if entry.name.endswith(".parquet")]
        self._paths, self._columns = [Path(directory) / entry.name for entry in files], columns
        self._ends = list(itertools.accumulate(entry.rows for entry in files))
        total = self._ends[-1] if files else 0
        self._num_rows = min(limit, total) if limit else total
        self._shard: tuple[int, pa.Table] | None = None

    def __len__(self) -> int:
        return self._num_rows

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows [start, stop) as dictionaries of Python values."""
        return list(self.iterate(start, stop))

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        row, stop = start, len(self) if stop is None else min(stop, len(self))
        while row < stop:
            index = bisect.bisect_right(self._ends, row)
            if self._shard is None or self._shard[0] != index:
                self._shard = (index, self._read(index))
            table = self._shard[1]
            here = table.num_rows - (self._ends[index] - row)
            part = table.slice(here, stop - row)
            yield from part.to_pylist()
            row += part.num_rows

    def table(self) -> pa.Table:
        """All rows at once, a chunk a shard: in one, lists would end at 2^31 items."""
        return pa.concat_tables(self.tables())

    def tables(self) -> Iterator[pa.Table]:
        """Each shard's."""
        return map(self._read, range(len(self._paths)))

    def _read(self, index: int) -> pa.Table:
        path = self._paths[index]
        remedy = "Delete it and run its stage again, which rebuilds just this shard."
        try:
            table = pq.read_table(path, columns=self._columns, partitioning=None)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise InputError(str(path), f"unreadable ({error})", "a Parquet shard", remedy) from error
        first = self._ends[index - 1] if index else 0
        if table.num_rows != self._ends[index] - first:
            raise InputError(str(path), f"{table.num_rows} rows", f"{self._ends[index] - first}, as recorded", remedy)
        types = {spec.name: ARROW[spec.dtype] for spec in self._manifest.fields if spec.dtype in ARROW}
        for column in table.schema:
            if column.type != types.get(column.name, column.type):
                found = f"{column.name} of {column.type}"
                raise InputError(str(path), found, f"{types[column.name]}, as recorded", remedy)
        check_values(table, self._directory, self._manifest, first, self._vocab_size)
        return table
