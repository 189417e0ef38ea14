"""Artifacts and heads whose hashes are right and whose values are not, and commands that are to learn from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from bad_input.row import Ground, Row

from draftsmith.modules.pretrained.provenance import file_sha256


def rows(name: str, column: str, change: Callable[[list], Any]) -> Callable[[Ground, Path], dict[str, object]]:
    """A copy of an artifact in which one row has another list, and the manifest the new file's hash: `{d}`."""

    def make(ground: Ground, to: Path) -> dict[str, object]:
        directory = ground.copy(name, to)
        manifest = json.loads((directory / "manifest.json").read_text())
        entry = next(entry for entry in manifest["files"] if entry["name"].endswith(".parquet"))
        file = directory / entry["name"]
        table = pq.read_table(file)
        place, values = table.column_names.index(column), table[column].to_pylist()
        values[1] = change(values[1])
        field = table.schema.field(place)
        pq.write_table(table.set_column(place, field, pa.array(values, field.type)), file)
        entry |= {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        (directory / "manifest.json").write_text(json.dumps(manifest))
        return {"d": directory}

    return make


TRAIN = "train {kind} --target {{target}} --output {{out}} --max-steps 1 --data {{d}} "
LABEL = "data acceptance --target {target} --draft {draft} --output {out} --responses {d}"
ROWS = [
    Row("train hydra: an id beyond the vocabulary", TRAIN.format(kind="hydra"),
        ("input_ids", "found 999999", "below"), rows("responses", "input_ids", lambda ids: [999999, *ids[1:]])),
    Row("data features: an id beyond the vocabulary", "data features --target {target} --output {out} --responses {d}",
        ("input_ids", "found 999999"), rows("responses", "input_ids", lambda ids: [999999, *ids[1:]])),
    Row("data responses: an id beyond the vocabulary", "data responses --target {target} --output {out} --prompts {d}",
        ("prompt_ids", "found 999999"), rows("prompts", "prompt_ids", lambda ids: [999999, *ids[1:]])),
    Row("diagnose: an id beyond the vocabulary", "diagnose --target {target} --draft {eagle} --data {d}",
        ("input_ids", "found 999999"), rows("responses", "input_ids", lambda ids: [999999, *ids[1:]])),
]  # fmt: skip
