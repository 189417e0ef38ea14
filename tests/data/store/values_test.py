"""Rows whose hashes are right and whose values are not: one line that names the column and the row."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pytest

from draftsmith.data.mixed_text import MixedTextLabels
from draftsmith.data.responses import FIELDS as RESPONSES
from draftsmith.data.rollouts import FIELDS as ROLLOUTS
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.shards import ARROW
from draftsmith.data.store.values import check_values
from draftsmith.modules.types import InputError

V, DEPTH = 60, 2
TEXT = {"id": ["a", "b"], "input_ids": [[1, 2, 59], [4, 5]], "prompt_length": [1, 1]}
MASK = {"loss_mask": [[False, True, True], [False, True]]}
MIXED = TEXT | MASK | {name: [[0.5, 1.0], [0.0]] for name in ("accept_prob", "overlap", "log_q", "log_p")}
MIXED["draft_ids"] = [[0, 59], [3]]
MIXED["log_p"] = [[-math.inf, 0.0], [-1.0]]  # what the target never says
DRAFTS = TEXT | MASK | {"starts": [[2, 3], [2]], "temperature": [[0.0, 1.0], [1.0]]}
DRAFTS |= {name: [[0.5] * 4, [0.5] * 2] for name in ("accept_prob", "overlap", "reached", "log_q")}
DRAFTS["draft_ids"] = [[1] * 4, [2] * 2]
FIELDS = {"responses": RESPONSES, "acceptance": MixedTextLabels.fields, "rollouts": ROLLOUTS}
GOOD = {"responses": TEXT | MASK, "acceptance": MIXED, "rollouts": DRAFTS}
OLD = {"acceptance": {name: values for name, values in MIXED.items() if name != "loss_mask"}}


def check(kind: str, columns: dict, vocab_size: int | None = V) -> None:
    types = {spec.name: ARROW[spec.dtype] for spec in FIELDS[kind]}
    table = pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})
    # In two batches, of which the second is a slice: rows are counted over both.
    table = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    manifest = Manifest(kind, {"depth": DEPTH}, fields=FIELDS[kind], command="draftsmith data again")
    check_values(table, Path("made"), manifest, 100, vocab_size)


@pytest.mark.parametrize("kind", GOOD)
def test_good_rows_pass_with_a_vocabulary_and_without(kind):
    check(kind, GOOD[kind])
    check(kind, GOOD[kind], None)
    check("acceptance", OLD["acceptance"])


@pytest.mark.parametrize(
    ("kind", "column", "values", "says"),
    [
        ("responses", "input_ids", [1, 60], "input_ids: found 60 in row 101 .b., expected token ids below 60"),
        ("responses", "input_ids", [1, -1], "found -1"),
        ("responses", "input_ids", [], "found no tokens|expected 0"),
        ("responses", "input_ids", [1, None], "found None"),
        ("responses", "input_ids", None, "found null"),
        ("responses", "loss_mask", [True], "loss_mask: found 1 values in row 101 .b., expected 2"),
        ("responses", "loss_mask", [False, False], "no answer token"),
        ("acceptance", "draft_ids", [60], "draft_ids: found 60"),
        ("acceptance", "draft_ids", [1, 2], "draft_ids: found 2 values in row 101 .b., expected 1"),
        ("acceptance", "accept_prob", [1.7], "accept_prob: found 1.7.* in row 101 .b., expected probabilities"),
        ("acceptance", "accept_prob", [math.nan], "found nan"),
        ("acceptance", "overlap", [-0.1], "overlap: found -0.1"),
        ("acceptance", "log_q", [math.nan], "log_q: found nan"),
        ("rollouts", "reached", [0.5, math.inf], "reached: found inf"),
        ("rollouts", "accept_prob", [0.5] * 3, "found 3 values in row 101 .b., expected 2"),
        ("rollouts", "starts", [3], "starts: found 3 in row 101 .b., expected places"),
        ("rollouts", "starts", [0], "starts: found 0"),
        ("rollouts", "temperature", [1.0, 1.0], "temperature: found 2 values"),
    ],
)
def test_a_wrong_value_is_named_with_its_row(kind, column, values, says):
    columns = {**GOOD[kind], column: [GOOD[kind][column][0], values]}
    with pytest.raises(InputError, match=says) as error:
        check(kind, columns)
    assert "draftsmith data again" in str(error.value) and "\n" not in str(error.value)


def test_an_answer_of_no_tokens_of_an_earlier_version_is_found():
    with pytest.raises(InputError, match="prompt_length: found no answer token in row 101"):
        check("acceptance", OLD["acceptance"] | {"prompt_length": [1, 2]})
