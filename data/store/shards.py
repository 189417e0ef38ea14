"""Run a data stage in numbered shards: resumable, and the same on any number of ranks.

Shard i covers input rows [i * rows_per_shard, (i + 1) * rows_per_shard) and belongs to rank i mod world. Its files are
written atomically, and `shard-NNNNN.done.json` with their sizes and hashes comes after them, so a shard is there whole
or not at all. Rank 0 writes the manifest when every shard is there.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from draftsmith.data.console import Advance, log_done, log_note, print_text, progress_bar
from draftsmith.data.ranks import place
from draftsmith.data.store.manifest import (
    FILE_SHAPE,
    MANIFEST,
    STARTED,
    Field,
    FileEntry,
    Manifest,
    command_line,
    decisive,
    resolved,
)
from draftsmith.data.store.rows import ARROW
from draftsmith.data.store.writer import LOCK
from draftsmith.modules.pretrained.files import make_directory, write_json, write_table, write_tensors
from draftsmith.modules.pretrained.provenance import changes, file_sha256, flatten, git_commit, package_versions
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError

# Suffix of counts of dropped rows; the reason stands before it.
DROPPED = "_dropped"
# Count of table rows that input rows have beyond their first.
SPLIT = "rows_split"
DONE = {"files": [FILE_SHAPE], "counts": {"rows": int, "*": int}}
# How long rank 0 waits for other ranks without any progress.
WAIT_S = 3600.0
# Shards that are written at a time, beside the one that is made.
WRITERS = 3
# Between two looks, and 5 ms per shard more: a look costs one stat for each.
POLL_S = 0.1


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
    """Content of one shard.

    rows: of the table, by the plan's fields. counts: add up over shards; input rows without a table row are counted as
        REASON_dropped, table rows beyond the first of an input row as rows_split.
    tensors: for a safetensors file beside the table; None if the stage writes none.
    """

    rows: list[dict[str, Any]]
    counts: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class StagePlan:
    """Everything about a run of a stage except how one shard is made.

    stage: the command, `data responses`. config: its configuration, which has `output` and `rows_per_shard`.
    fields: of the table; those whose dtype is not in ARROW describe tensors.
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
    teacher: dict[str, Any] | None = None

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
    """Make this rank's missing shards, then write the manifest (rank 0) or wait for it.

    make_shard must depend on nothing but the shard, and calls `advance` with the rows it has done.

    Raises:
        InputError: no rows, an output that another configuration began, or ranks that never delivered.
    """
    here, directory = place(), plan.directory
    rank, world = here.rank, here.world
    if plan.num_rows == 0:
        raise InputError(f"{plan.stage}: input", "no rows", "at least one", "Check the input and its filters.")
    begin(plan)

    def num_missing() -> int:
        return sum(read_done(directory, shard) is None for shard in plan.shards)

    # A stage that is complete is not run again, unless somebody changed one of its files.
    if (directory / MANIFEST).exists() and not num_missing():
        forget_changed(plan)
        if not num_missing():
            log_done(plan.stage, directory)
            return Manifest.read(directory)

    # Shards are dealt out to the ranks in turn; finished ones are kept.
    rank_shards = plan.shards[rank::world]
    missing = [shard for shard in rank_shards if read_done(directory, shard) is None]
    total, left = (sum(s.stop - s.start for s in shards) for shards in (rank_shards, missing))
    if rank == 0 and world > 1:
        log_note(f"{plan.kind}: {total:,} of {plan.num_rows:,} rows here, the others by {world - 1} more")
    progress = progress_bar(plan.kind, total, "rows", total - left, enabled=rank == 0)
    with progress as advance, ThreadPoolExecutor(WRITERS, "shards") as writers:
        # Threads write and hash shards while the next one is made. A failed write is raised after a later shard.
        writing: deque[Future[None]] = deque()
        for shard in missing:
            content = make_shard(shard, advance)
            while writing and (writing[0].done() or len(writing) == WRITERS):
                writing.popleft().result()
            writing.append(writers.submit(write_shard, plan, shard, content))
        for write in writing:
            write.result()

    # The manifest comes last: with it the artifact is complete. Rank 0 writes it when all shards are there.
    before, deadline = None, 0.0
    while (now := num_missing() + (rank > 0 and not (directory / MANIFEST).exists())) > 0:
        if now != before:
            before, deadline = now, time.monotonic() + WAIT_S
        elif time.monotonic() > deadline:
            found = f"{now} shards of other ranks missing after {WAIT_S:.0f} s"
            raise InputError("ranks", found, "all of them", f"Continue, on any number of ranks: {plan.command}")
        time.sleep(POLL_S + 0.005 * len(plan.shards))
    return _finish(plan) if rank == 0 else Manifest.read(directory)


def begin(plan: StagePlan) -> None:
    """Claim the output directory for this configuration, or check that the same one began it.

    Raises:
        InputError: another configuration began it and finished a shard (every differing key is listed), or it holds
            something else.
    """
    directory = make_directory(plan.directory)
    settings = {"config": decisive(plan.config), "inputs": plan.inputs, "identity": plan.identity}
    state = flatten({"rows": plan.num_rows, "kind": plan.kind, **settings})
    path = directory / STARTED
    record = {"command": plan.command, "state": state}
    if not path.exists():
        # STARTED too: another rank may just have written it.
        strange = sorted(p.name for p in directory.iterdir() if ".tmp-" not in p.name and p.name not in (STARTED, LOCK))
        if strange:
            found = f"{directory}, which holds {strange[0]}"
            raise InputError("output", found, "a new directory, or one that this stage began", "Choose another.")
        write_json(path, record)
        return
    begun = read_object(path, {"state": dict}, "Delete the directory and run the stage again.")["state"]
    changed = changes(state, begun)
    if changed and place().world == 1 and not any(directory.glob("*.done.json")):
        log_note(f"{plan.kind}: {directory} has no finished shard yet, and is begun anew with another {changed}")
        write_json(path, record)
    elif changed:
        found = f"{directory}, begun with another {changed}"
        remedy = "Choose another directory or delete it."
        raise InputError("output", found, "the configuration it was begun with", remedy)


def read_done(directory: Path, shard: Shard) -> dict[str, Any] | None:
    """Return the record of a finished shard; None if there is none or its files are gone or of another size."""
    try:
        done = read_object(directory / f"{shard.name}.done.json", DONE)
        intact = all((directory / f["name"]).stat().st_size == f["bytes"] for f in done["files"])
    except OSError:
        return None
    return done if intact else None


def forget_changed(plan: StagePlan) -> None:
    """Remove the records of finished shards whose files no longer hold what was written."""
    for shard in plan.shards:
        done = read_done(plan.directory, shard)
        if done and any(file_sha256(plan.directory / entry["name"]) != entry["sha256"] for entry in done["files"]):
            log_note(f"{plan.kind}: {shard.name} was changed since it was written, and is made again")
            (plan.directory / f"{shard.name}.done.json").unlink(missing_ok=True)


def write_shard(plan: StagePlan, shard: Shard, content: ShardContent) -> None:
    """Write a shard's files and, last, the record that they are whole."""
    directory = plan.directory
    # Fields with other dtypes describe tensors.
    schema = pa.schema([(f.name, ARROW[f.dtype]) for f in plan.fields if f.dtype in ARROW])
    names = [f"{shard.name}.parquet"]
    write_table(directory / names[0], pa.Table.from_pylist(content.rows, schema=schema))
    if content.tensors is not None:
        names.append(f"{shard.name}.safetensors")
        write_tensors(directory / names[1], content.tensors)

    # Every input row is kept or dropped for a counted reason.
    num_rows = len(content.rows)
    num_kept, num_dropped = num_rows - content.counts.get(SPLIT, 0), sum(dropped(content.counts).values())
    assert num_kept + num_dropped == shard.stop - shard.start, "rows that are neither kept nor dropped"
    # The record comes last: with it the shard is finished.
    files = [FileEntry(n, (directory / n).stat().st_size, file_sha256(directory / n), num_rows) for n in names]
    record = {"files": [asdict(entry) for entry in files], "counts": {"rows": num_rows, **content.counts}}
    write_json(directory / f"{shard.name}.done.json", record)


def _finish(plan: StagePlan) -> Manifest:
    """Write the manifest and print what the stage made."""
    counts: Counter[str] = Counter({"shards": len(plan.shards), "read": plan.num_rows})
    files: list[FileEntry] = []
    for shard in plan.shards:
        done = read_done(plan.directory, shard)
        assert done is not None
        counts.update(done["counts"])
        files += [FileEntry(**entry) for entry in done["files"]]
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
        packages=package_versions(),
        git_commit=git_commit(),
        teacher=plan.teacher,
        directory=plan.directory.resolve(),
    )
    manifest.write(plan.directory)

    # Print counts that the account of rows does not contain.
    size = sum(entry.bytes for entry in files)
    accounted = {"rows", "read", SPLIT, *(name + DROPPED for name in dropped(counts))}
    more = {name: value for name, value in counts.items() if value and name not in accounted}
    numbers = "".join(f", {value:,} {name.replace('_', ' ')}" for name, value in more.items())
    print_text(f"{plan.kind}: {account(counts)}; {size / 1e6:,.1f} MB{numbers} in {plan.directory}")
    return manifest


def dropped(counts: Mapping[str, int]) -> dict[str, int]:
    """Return reason -> number of input rows that a stage dropped for it."""
    return {name.removesuffix(DROPPED): value for name, value in counts.items() if name.endswith(DROPPED) and value}


def account(counts: Mapping[str, int]) -> str:
    """Return `read 1,000, kept 980, dropped 20: invalid 15, overlong 5`."""
    reasons, split = dropped(counts), counts.get(SPLIT, 0)
    listed = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in reasons.items())
    rows = f" in {counts['rows']:,} rows" if split else ""
    lost = f"{sum(reasons.values()):,}: {listed}" if reasons else "0"
    return f"read {counts['read']:,}, kept {counts['rows'] - split:,}{rows}, dropped {lost}"


def row_uniforms(stage: str, seed: int, row: int, count: int) -> np.ndarray:
    """Return `count` uniforms in [0, 1), float64, that depend on the row alone, not on its batch, shard or rank.

    stage: part of the stream's name. Two stages must not share a stream: labels drawn with the uniforms that drew the
    text would agree with it far too often.
    """
    return row_generator(stage, seed, row).random(count)


def row_generator(stage: str, seed: int, row: int) -> np.random.Generator:
    """Return the random generator of one row in one stage."""
    name = hashlib.sha256(f"{stage}/{seed}/{row}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(name[:16], "little")))
