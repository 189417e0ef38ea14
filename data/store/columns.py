"""The columns of an artefact as one Arrow table: a large one's are mapped from a file, not read into every process.

Parquet is compressed, so it cannot be mapped: what a training reads of a large artefact is written once, uncompressed,
into `.columns-KEY.arrow` beside the shards. Its pages belong to the operating system, which shares them between the
ranks of a machine and drops them where memory is short. KEY is of the manifest's digest: an artefact that has changed
has another file, and the old one is deleted when that is made. Ranks that come at once each make it, and the last one's
takes the name; a file counts once its record is there and its hash is right.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from draftsmith.data.console import log_note
from draftsmith.data.store.files import CannotWrite, write_batches, write_json
from draftsmith.data.store.manifest import Manifest, file_sha256
from draftsmith.data.store.reading import read_object
from draftsmith.data.store.shards import Rows
from draftsmith.data.store.values import check_values
from draftsmith.modules.types import InputError

FORMAT = 1
MAPPED_BYTES = 2**24  # of Parquet; less is read as soon as its file would be checked
# Of Arrow in a chunk: what is looked at together. Its lists are far from the 2^31 items that one can hold, and a set of
# 10^9 tokens has some hundred chunks.
CHUNK_BYTES = 2**24
LEFTOVER_S = 3600.0  # older temporary files are of killed processes
RECORD = {"bytes": int, "sha256": str}


def open_columns(directory: Path, manifest: Manifest, names: Sequence[str], vocab_size: int | None = None) -> pa.Table:
    """Columns of all rows of an artefact that `open_artefact` has looked at. vocab_size: as of `check_values`."""
    rows = Rows(directory, manifest, list(names), vocab_size=vocab_size)
    if sum(entry.bytes for entry in manifest.files if entry.name.endswith(".parquet")) < MAPPED_BYTES:
        return rows.table()
    key = hashlib.sha256(json.dumps([FORMAT, manifest.digest, *names]).encode()).hexdigest()[:16]
    path = Path(directory) / f".columns-{key}.arrow"
    table = _mapped(path)
    if table is None:
        try:
            _make(path, rows)
        except CannotWrite as error:
            log_note(f"warning: {error} Every process holds the columns in its own memory.")
            return rows.table()
        table = _mapped(path)
    if table is None:  # another program is at work on it
        return rows.table()
    check_values(table, directory, manifest, 0, vocab_size)
    return table


def _mapped(path: Path) -> pa.Table | None:
    """The file's table, without reading it; None where it is not there, or not whole and as it was written."""
    try:
        record = read_object(_record(path), RECORD)
        if path.stat().st_size != record["bytes"] or file_sha256(path) != record["sha256"]:
            return None
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, InputError, pa.ArrowException):
        return None


def _make(path: Path, rows: Rows) -> None:
    """Files first, then the record that they are whole."""
    for old in path.parent.glob(".columns-*"):
        leftover = ".tmp-" in old.name
        with suppress(OSError):  # another rank was quicker
            if _age(old) > LEFTOVER_S if leftover else not old.name.startswith(path.stem):
                old.unlink(missing_ok=True)
    log_note(f"{path.parent}: writing its columns to a file that every process maps")
    write_batches(path, _chunks(rows))
    pa.default_memory_pool().release_unused()
    write_json(_record(path), {"bytes": path.stat().st_size, "sha256": file_sha256(path)})


def _chunks(rows: Rows) -> Iterator[pa.RecordBatch]:
    """All shards, as many together as CHUNK_BYTES take."""
    parts: list[pa.Table] = []
    for table in rows.tables():
        parts.append(table)
        if sum(part.nbytes for part in parts) >= CHUNK_BYTES:
            yield from pa.concat_tables(parts).combine_chunks().to_batches()
            parts = []
    if parts:
        yield from pa.concat_tables(parts).combine_chunks().to_batches()


def _record(path: Path) -> Path:
    return path.with_suffix(".json")


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime
