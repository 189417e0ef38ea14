"""Runs of earlier versions stay readable: their prompts.parquet, and their journals."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.data.store.reading import check_shape
from draftsmith.eval.bench.command import ENTRY
from draftsmith.eval.bench.journal import Journal
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import PER_PROMPT, read_rows, row_of, schema
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace

STEP = pa.struct([(name, pa.int32()) for name in ("num_drafted", "num_accepted", "num_emitted", "draft_calls")])
# As version 3 of the schema writes them.
COLUMNS = [
    ("method", pa.string()), ("temperature", pa.float64()), ("prompt", pa.int32()), ("turn", pa.int32()),
    ("group", pa.int32()), ("id", pa.string()), ("task", pa.string()), ("prompt_tokens", pa.int32()),
    ("prompt_ids", pa.list_(pa.int32())), ("tokens", pa.int32()), ("ended", pa.bool_()), ("wall_s", pa.float64()),
    ("cpu_s", pa.float64()), ("wall_s_runs", pa.list_(pa.float64())), ("cpu_s_runs", pa.list_(pa.float64())),
    ("num_target_calls", pa.int32()), ("num_draft_tokens", pa.int32()), ("num_accepted", pa.int32()),
    ("num_discarded", pa.int32()), ("draft_calls", pa.int32()), ("prefill_emitted", pa.int32()),
    ("prefill_calls", pa.int32()), ("token_ids", pa.list_(pa.int32())), ("rounds", pa.list_(STEP)),
    ("error", pa.string()),
]  # fmt: skip
ROW = {
    "method": "ar", "temperature": 0.0, "prompt": 3, "turn": 1, "group": 2, "id": "p", "task": "edit",
    "prompt_tokens": 2, "prompt_ids": [5, 6], "tokens": 3, "ended": True, "wall_s": 0.5, "cpu_s": 0.25,
    "wall_s_runs": [0.5], "cpu_s_runs": [0.25], "num_target_calls": 2, "num_draft_tokens": 2, "num_accepted": 1,
    "num_discarded": 1, "draft_calls": 2, "prefill_emitted": 1, "prefill_calls": 1, "token_ids": [7, 8, 9],
    "rounds": [{"num_drafted": 2, "num_accepted": 1, "num_emitted": 2, "draft_calls": 2}], "error": None,
}  # fmt: skip


def test_the_columns_are_those_that_were_always_written():
    assert schema() == pa.schema(COLUMNS)


def test_rows_of_an_earlier_run_are_read_and_give_back_what_was_measured(tmp_path):
    pq.write_table(pa.Table.from_pylist([ROW], pa.schema(COLUMNS)), tmp_path / PER_PROMPT)
    (row,) = read_rows(tmp_path)
    assert row == ROW
    made = Generation([7, 8, 9], DecodeTrace([DecodeStep(2, 1, 2, 2)], prefill_emitted=1), True)
    assert row_of(BenchPrompt("p", [5, 6], "edit", number=3), 2, "ar", 0.0, made, [0.5], [0.25]) == ROW


def test_the_journal_of_an_earlier_run_goes_on(tmp_path):
    entry = {"group": 2, "temperature": 0.0, "rows": [{**ROW, "task": None}], "learned": {"online": [{"w": [0.5]}]}}
    decided = {"settings": {"seed": 0}}
    Journal(tmp_path, decided, ENTRY, {}).add(entry)
    assert Journal(tmp_path, decided, ENTRY, {}).entries == [json.loads(json.dumps(entry))]
    check_shape(tmp_path, {key: entry[key] for key in ("group", "temperature", "rows")}, ENTRY, "", "")  # nor `learned`
