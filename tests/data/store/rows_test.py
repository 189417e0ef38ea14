"""Reading the rows of an artifact shard by shard."""

from __future__ import annotations

import pytest

from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.types import InputError


def test_rows_are_found_across_shards(chain):
    table = Rows(chain.directory("prompts"), Manifest.read(chain.directory("prompts")), ["id"])
    assert [row["id"] for row in table.read(2, 8)] == [f"row-{i}" for i in range(2, 8)]
    assert len(table) == 11 and len(table.read(9, 99)) == 2
    assert table.table()["id"].to_pylist() == [f"row-{i}" for i in range(11)]


@pytest.mark.parametrize(("stage", "column"), [("prompts", "prompt_ids"), ("acceptance", "draft_ids")])
def test_an_id_beyond_the_readers_vocabulary_is_refused(chain, stage, column):
    directory = chain.directory(stage)
    manifest = Manifest.read(directory)
    largest = max(max(ids) for ids in Rows(directory, manifest).table()[column].to_pylist())
    assert len(Rows(directory, manifest, [column], vocab_size=largest + 1).read(0, 99)) == 11
    with pytest.raises(InputError, match=f"{column}: found {largest}, expected token ids below {largest}"):
        Rows(directory, manifest, [column], vocab_size=largest).read(0, 99)
