"""prompts.parquet and the journal of a run, as they are documented."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from draftsmith.eval.bench.measuring import Journal
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import PER_PROMPT, read_rows, row_of, schema, write_rows
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.types import InputError

STEP = pa.struct([(name, pa.int32()) for name in ("num_drafted", "num_accepted", "num_emitted", "draft_calls")])
ROW = {
    "method": "ar", "temperature": 0.0, "prompt": 3, "turn": 1, "group": 2, "id": "p", "task": "edit",
    "prompt_tokens": 2, "prompt_ids": [5, 6], "tokens": 3, "ended": True, "wall_s": 0.5, "cpu_s": 0.25,
    "wall_s_runs": [0.5], "cpu_s_runs": [0.25], "num_target_calls": 2, "num_draft_tokens": 2, "num_accepted": 1,
    "num_discarded": 1, "draft_calls": 2, "prefill_emitted": 1, "prefill_calls": 1, "token_ids": [7, 8, 9],
    "rounds": [{"num_drafted": 2, "num_accepted": 1, "num_emitted": 2, "draft_calls": 2}], "error": None,
}  # fmt: skip


def test_a_row_is_written_and_read_as_it_was_measured(tmp_path):
    answer = Generation([7, 8, 9], DecodeTrace([DecodeStep(2, 1, 2, 2)], prefill_emitted=1), True)
    row = row_of(BenchPrompt("p", [5, 6], "edit", number=3), 2, "ar", 0.0, answer, [0.5], [0.25])
    assert row == ROW
    write_rows(tmp_path / PER_PROMPT, [row])
    assert read_rows(tmp_path) == [ROW]
    assert schema().field("rounds").type == pa.list_(STEP) and set(schema().names) == set(ROW)
    (tmp_path / PER_PROMPT).write_bytes(b"nonsense")
    with pytest.raises(InputError, match="unreadable"):
        read_rows(tmp_path)


def test_a_journal_is_resumed(tmp_path):
    entry = {"group": 2, "temperature": 0.0, "rows": [{**ROW, "task": None}], "learned": {"online": [{"w": [0.5]}]}}
    settings = {"settings": {"seed": 0}}
    Journal(tmp_path, settings, {}).add(entry)
    assert Journal(tmp_path, settings, {}).entries == [json.loads(json.dumps(entry))]
