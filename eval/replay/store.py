"""Rollouts on disk: a directory of Parquet files, one an answer with one row a round, so that recording can go on where
it was interrupted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.data.store.files import make_directory, write_json, write_table
from draftsmith.data.store.manifest import differences, flatten, warn_not_compared, without_unrecorded
from draftsmith.data.store.reading import read_object
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.rollouts import ChainRollouts, Rollouts, TargetAnswer, TreeRollouts, joined
from draftsmith.modules.types import InputError

SETTINGS, HEAD, META = "rollouts.json", "head:", b"draftsmith"
KINDS = {"chain": ChainRollouts, "tree": TreeRollouts}


def recorded(
    directory: Path,
    prompts: Sequence[BenchPrompt],
    settings: Mapping[str, Any],
    record: Callable[[BenchPrompt, int], Rollouts],
    progress: Callable[[int], None] = lambda count: None,
) -> Rollouts:
    """Rollouts of all prompts: answers that are in the directory are read, the others recorded and written.

    settings: JSON that says what they were made with. record: makes the rollouts of a prompt and its number.

    Raises:
        InputError: the directory holds rollouts that were made otherwise.
    """
    make_directory(directory)
    made_with = json.loads(json.dumps({**settings, "prompts": [prompt.id for prompt in prompts]}))
    path = directory / SETTINGS
    if path.exists():
        different, unrecorded = without_unrecorded(differences(flatten(read_object(path, {})), flatten(made_with)))
        warn_not_compared(str(path), unrecorded)
        if different:
            found = f"rollouts in {directory} made with another {', '.join(name for name, _, _ in different)}"
            raise InputError("output", found, "the settings of this run", "Choose another directory, or remove it.")
    else:
        write_json(path, made_with)
    parts = []
    for number, prompt in enumerate(prompts):
        file = _file(directory, number)
        if not file.exists():
            write_answer(record(prompt, number), file)
        parts.append(read_answer(file))
        progress(1)
    return joined(parts)


def _file(directory: Path, number: int) -> Path:
    return directory / f"answer-{number:05d}.parquet"


def write_answer(rollouts: ChainRollouts | TreeRollouts, path: Path) -> None:
    """One answer's rounds; the answer itself, and the arrays' shapes, go into the file's metadata."""
    assert len(rollouts.answers) == 1
    arrays: dict[str, np.ndarray] = {}
    scalars: dict[str, Any] = {}
    for item in dataclasses.fields(rollouts):
        value = getattr(rollouts, item.name)
        if isinstance(value, np.ndarray):
            arrays[item.name] = value
        elif isinstance(value, Mapping):
            arrays |= {HEAD + label: logits for label, logits in value.items()}
        elif item.name != "answers" and value is not None:
            scalars[item.name] = value
    meta = {
        "kind": next(kind for kind, cls in KINDS.items() if isinstance(rollouts, cls)),
        "answer": dataclasses.asdict(rollouts.answers[0]),
        "shapes": {name: array.shape[1:] for name, array in arrays.items()},
        "scalars": scalars,
    }
    columns = {}
    for name, array in arrays.items():
        flat = pa.array(array.reshape(-1))
        width = int(np.prod(array.shape[1:]))
        columns[name] = flat if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, width)
    table = pa.table(columns).replace_schema_metadata({META: json.dumps(meta)})
    write_table(path, table)


def read_answer(path: Path) -> Any:
    """What `write_answer` wrote.

    Raises:
        InputError: the file is something else.
    """
    try:
        return _answer(path)
    except InputError:
        raise
    except Exception as error:  # of Arrow, of JSON, or of what is not in it
        found = f"damaged ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise InputError(str(path), found, "rollouts of one answer", "Delete it: it is recorded again.") from error


def _answer(path: Path) -> Any:
    table = pq.read_table(path)
    meta = json.loads(table.schema.metadata[META])
    values: dict[str, Any] = dict(meta["scalars"])
    heads = {}
    for name, shape in meta["shapes"].items():
        column = table.column(name).combine_chunks()
        flat = column.flatten() if shape else column
        array = flat.to_numpy(zero_copy_only=False).reshape(len(table), *shape)
        if name.startswith(HEAD):
            heads[name.removeprefix(HEAD)] = array
        else:
            values[name] = array
    kind = KINDS[meta["kind"]]
    if "heads" in get_type_hints(kind):
        values["heads"] = heads
    return kind(answers=[TargetAnswer(**meta["answer"])], **values)
