"""Reads what an offline Weights & Biases run has written, without the client: its records, history and config."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, PREFIX = 32768, 7


@dataclass
class OfflineRun:
    """directory: what `wandb sync` takes. history: one dictionary a logged row, in order. artifacts: their
    records. best: name of a metric -> max or min, where the summary keeps that of it."""

    directory: Path
    run_id: str = ""
    record: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[Any] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    best: dict[str, str] = field(default_factory=dict)


def records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: a 7-byte header, then LevelDB log blocks of 32 KiB. A piece there has a checksum, its
    length and its kind: 1 is a whole record, 2, 3 and 4 the first, a middle and the last piece of one."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, whole = path.read_bytes(), PREFIX, b""
    assert content[:4] == b":W&B"
    while position + PREFIX <= len(content):
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < PREFIX:
            position += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + PREFIX])
        whole += content[position + PREFIX : position + PREFIX + length]
        position += PREFIX + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def offline_runs(output: Path) -> list[OfflineRun]:
    """The offline runs under output/wandb, oldest first, each once it is complete: another process writes them."""
    found = []
    for directory in sorted((output / "wandb").glob("offline-run-*")):
        (file,) = directory.glob("run-*.wandb")
        deadline = time.monotonic() + 60
        while not any(record.HasField("exit") for record in records(file)):
            assert time.monotonic() < deadline, f"{file} has no end"
            time.sleep(0.05)
        found.append(_read(directory, file))
    return found


def _read(directory: Path, file: Path) -> OfflineRun:
    run = OfflineRun(directory)
    for record in records(file):
        kind = record.WhichOneof("record_type")
        run.kinds.add(kind)
        if kind == "run":
            run.record, run.run_id = record.run, record.run.run_id
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            run.history.append({name: value for name, value in items.items() if not name.startswith("_")})
        elif kind == "metric" and (record.metric.summary.max or record.metric.summary.min):
            run.best[record.metric.name] = "max" if record.metric.summary.max else "min"
        elif kind == "artifact" or (kind == "request" and record.request.HasField("log_artifact")):
            run.artifacts.append(record.artifact if kind == "artifact" else record.request.log_artifact.artifact)
    return run
