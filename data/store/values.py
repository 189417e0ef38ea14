"""Values of an artefact's rows, checked where they are read: a hash says that a file is as it was written, and not
that what was written can be learned from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from draftsmith.data.store.manifest import Manifest
from draftsmith.modules.types import InputError, whole_number

IDS = ("input_ids", "prompt_ids", "draft_ids")
TEXTS = ("input_ids", "prompt_ids")  # never empty
PROBABILITIES = ("accept_prob", "overlap", "reached")


class Fault(NamedTuple):
    """A wrong value in a row of a batch."""

    column: str
    row: int
    found: str
    expected: str


def check_values(table: pa.Table, directory: Path, manifest: Manifest, first: int, vocab_size: int | None) -> None:
    """Check the columns of a table that are there.

    Token ids lie in the vocabulary, probabilities in [0, 1], and no number is NaN. Lists have the length that the
    manifest gives them, and rows with answers have some.

    first: number of the table's first row. vocab_size: of the model that reads them; None if it is not known.

    Raises:
        InputError: names the first fault and its row.
    """
    for batch in table.to_batches():
        for fault in _faults(batch, manifest, vocab_size):
            named = f" ({batch['id'][fault.row].as_py()})" if "id" in batch.schema.names else ""
            found = f"{fault.found} in row {first + fault.row}{named}"
            remedy = f"Make it again with another output: {manifest.command}"
            raise InputError(f"{directory}, {fault.column}", found, fault.expected, remedy)
        first += batch.num_rows


def _faults(batch: pa.RecordBatch, manifest: Manifest, vocab_size: int | None) -> Iterator[Fault]:
    lists = {name: batch[name] for name in batch.schema.names if pa.types.is_list(batch[name].type)}
    for name, column in lists.items():
        for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[:1].tolist():
            yield Fault(name, row, "null", "a list")
        yield from _wrong_values(name, column, column.flatten().is_null().to_numpy(zero_copy_only=False), "values")
    yield from _wrong_lengths(batch, lists, manifest)
    most, known = (np.inf, "") if vocab_size is None else (vocab_size, f" below {vocab_size}, the model's vocabulary")
    for name, column in lists.items():
        values = column.flatten().to_numpy(zero_copy_only=False)
        if name in IDS:
            yield from _wrong_values(name, column, ~((values >= 0) & (values < most)), f"token ids{known}")
        elif name in PROBABILITIES:
            yield from _wrong_values(name, column, ~((values >= 0) & (values <= 1)), "probabilities in [0, 1]")
        elif values.dtype.kind == "f":
            yield from _wrong_values(name, column, np.isnan(values), "numbers")
    if "starts" in lists and "input_ids" in lists:  # where drafts hang off a text
        begins, lengths = lists["starts"], _lengths(lists["input_ids"])
        places, ends = begins.flatten().to_numpy(), lengths.repeat(_lengths(begins))
        yield from _wrong_values("starts", begins, (places < 1) | (places > ends), "places in its row's input_ids")


def _wrong_lengths(batch: pa.RecordBatch, lists: dict[str, pa.ListArray], manifest: Manifest) -> Iterator[Fault]:
    """Compare lists with the lengths of their row: T tokens, R of them in answers, S drafts of K tokens."""
    sizes: dict[str, np.ndarray] = {}
    if "input_ids" in lists:
        sizes["T"] = _lengths(lists["input_ids"])
        if "loss_mask" in lists:
            answered = lists["loss_mask"].flatten().to_numpy(zero_copy_only=False).astype(bool)
            totals = np.concatenate([[0], answered.cumsum()])
            ends = _lengths(lists["loss_mask"]).cumsum()
            sizes["R"] = np.diff(totals[ends], prepend=0)
        elif "prompt_length" in batch.schema.names:  # of earlier versions: one answer, behind the prompt
            sizes["R"] = sizes["T"] - batch["prompt_length"].to_numpy().clip(0)
    if "starts" in lists:
        depth = manifest.config.get("depth")
        whole_number("manifest.json, config.depth", depth, 1, 2**16)
        sizes["S"] = _lengths(lists["starts"])
        sizes["S*K"] = sizes["S"] * depth
    for row in np.flatnonzero(sizes.get("R", np.ones(1)) < 1)[:1].tolist():
        marks = "loss_mask" if "loss_mask" in lists else "prompt_length"
        yield Fault(marks, row, "no answer token", "at least one")
    shapes = {spec.name: spec.shape[0] for spec in manifest.fields if spec.shape}
    for name, column in lists.items():
        lengths, symbol = _lengths(column), shapes.get(name, "")
        for row in np.flatnonzero(lengths != sizes.get(symbol, lengths))[:1].tolist():
            yield Fault(name, row, f"{lengths[row]} values", f"{sizes[symbol][row]}, by its other columns")
        for row in np.flatnonzero(lengths == 0)[:1].tolist() if name in TEXTS else ():
            yield Fault(name, row, "no tokens", "at least one")


def _lengths(column: pa.ListArray) -> np.ndarray:
    return column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)


def _wrong_values(name: str, column: pa.ListArray, wrong: np.ndarray, expected: str) -> Iterator[Fault]:
    """The first value of a column that is wrong. wrong: bool, of all values of all rows."""
    for at in np.flatnonzero(wrong)[:1].tolist():
        row = int(np.searchsorted(_lengths(column).cumsum(), at, side="right"))
        yield Fault(name, row, str(column.flatten()[at].as_py()), expected)
