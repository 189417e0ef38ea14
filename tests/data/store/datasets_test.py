"""What a sample is depends on (seed, epoch, row) only; collating pads to the right and masks the padding."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from draftsmith.data.store.datasets import (
    AcceptanceDataset,
    FeatureDataset,
    Lists,
    collate_acceptance,
    collate_features,
    in_pieces,
    pack_features,
)
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.shards import Rows
from draftsmith.modules.types import FeatureBatch, InputError


@pytest.fixture(scope="module")
def labels(chain):
    return Rows(chain.directory("acceptance"), Manifest.read(chain.directory("acceptance"))).read(0, 99)


def test_a_token_is_the_targets_or_the_drafts_and_only_the_drafts_count(chain, labels):
    data = AcceptanceDataset(chain.directory("acceptance"), mix=0.5)
    seen = set()
    for item, row in zip((data[i] for i in range(len(data))), labels, strict=True):
        for t, token in enumerate(item["z_ids"].tolist()):
            j = t - row["prompt_length"]
            counted = bool(item["loss_mask"][t])
            seen.add((j >= 0, counted))
            assert token == (row["draft_ids"][j] if counted else row["input_ids"][t])
            for name in ("accept_prob", "log_q", "overlap"):
                assert item[name][t] == pytest.approx(row[name][j] if counted else 0.0)
    assert seen == {(False, False), (True, False), (True, True)}


def test_the_share_of_target_tokens_is_the_mix(chain, labels):
    positions = sum(len(row["draft_ids"]) for row in labels)
    data, kept, epochs = AcceptanceDataset(chain.directory("acceptance"), mix=0.15, seed=2), 0, 60
    for epoch in range(epochs):
        kept += sum(int(data.item(i, epoch)["loss_mask"].sum()) for i in range(len(data)))
    total = epochs * positions
    # Four standard deviations of a binomial count.
    assert abs(kept - 0.85 * total) < 4 * (0.15 * 0.85 * total) ** 0.5


def test_without_mixing_every_response_token_is_the_drafts(chain, labels):
    data = AcceptanceDataset(chain.directory("acceptance"), mix=0)
    for item, row in zip((data[i] for i in range(len(data))), labels, strict=True):
        assert item["z_ids"][row["prompt_length"] :].tolist() == row["draft_ids"]


def masks(data: AcceptanceDataset, epoch=0, order=None) -> list[list[bool]]:
    found = {i: data.item(i, epoch)["loss_mask"].tolist() for i in order or range(len(data))}
    return [found[i] for i in range(len(data))]


def test_masks_depend_on_seed_epoch_and_row_only(chain):
    directory = chain.directory("acceptance")
    data = AcceptanceDataset(directory, mix=0.5, seed=1)
    first = masks(data)
    assert masks(data, order=[*reversed(range(len(data)))]) == first
    assert masks(data, epoch=1) != first
    assert masks(data) == first
    assert masks(AcceptanceDataset(directory, mix=0.5, seed=2)) != first
    assert masks(pickle.loads(pickle.dumps(data))) == first


def test_collating_pads_to_the_right(chain):
    data = AcceptanceDataset(chain.directory("acceptance"))
    items = [data[i] for i in range(3)]
    batch = collate_acceptance(items)
    width = max(data.lengths[:3])
    assert batch.z_ids.shape == (3, width) and batch.loss_mask.dtype == torch.bool
    for i, length in enumerate(data.lengths[:3]):
        assert batch.attention_mask[i].tolist() == [True] * length + [False] * (width - length)
        assert torch.equal(batch.z_ids[i, :length], items[i]["z_ids"])
        assert not batch.loss_mask[i, length:].any() and not batch.z_ids[i, length:].any()
        assert torch.equal(batch.accept_prob[i, :length], items[i]["accept_prob"])


def test_features_collate_to_a_feature_batch(chain):
    data = FeatureDataset(chain.directory("features"))
    items = [data[0], data[3]]
    batch = collate_features(items)
    assert isinstance(batch, FeatureBatch) and batch.features.dtype == torch.bfloat16
    for i, item in enumerate(items):
        length = len(item["input_ids"])
        assert torch.equal(batch.features[i, :length], item["features"])
        assert torch.equal(batch.position_ids[i, :length], torch.arange(length))
        assert not batch.loss_mask[i, length:].any() and not batch.attention_mask[i, length:].any()
    assert data.lengths[0] == len(items[0]["input_ids"])


def test_features_are_read_by_other_processes_too(chain):
    data = FeatureDataset(chain.directory("features"))
    first = data[0]  # opens a file in this process
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(next(iter(loader))["features"], first["features"])
    assert torch.equal(pickle.loads(pickle.dumps(data))[0]["features"], first["features"])


def test_a_mix_that_is_no_probability_is_refused(chain):
    with pytest.raises(InputError, match="mix: found 1"):
        AcceptanceDataset(chain.directory("acceptance"), mix=1)


class Counting:
    """Rows that hold 100 * row + position, and count from position 3 on."""

    manifest = None
    lengths = [5, 40, 16, 17, 3, 31]

    def __len__(self) -> int:
        return len(self.lengths)

    def item(self, row: int, epoch: int) -> dict[str, torch.Tensor]:
        positions = torch.arange(self.lengths[row])
        return {"input_ids": 100 * row + positions, "loss_mask": positions >= 3}


@pytest.mark.parametrize("overlap", [0, 2])
def test_pieces_count_every_token_once_and_begin_at_position_0(overlap):
    whole = Counting()
    pieces = in_pieces(whole, 16, overlap)
    items = [pieces.item(i, 0) for i in range(len(pieces))]
    assert pieces.lengths.tolist() == [len(item["input_ids"]) for item in items] and max(pieces.lengths) == 16
    for item, row in zip(collate_features(items).position_ids, items, strict=True):
        length = len(row["input_ids"])
        assert item.tolist() == [*range(length), *[0] * (16 - length)]
    assert torch.cat([torch.arange(length) for length in pieces.lengths]).equal(pack_features(items).position_ids[0])
    # With an overlap of two the first two tokens of a piece are never predicted (drafters/eagle/head.py, shift).
    counted = [t for item in items for t in item["input_ids"][overlap:][item["loss_mask"][overlap:]].tolist()]
    expected = [100 * row + i for row, length in enumerate(whole.lengths) for i in range(3, length)]
    assert counted == expected
    assert pieces.rows.tolist() == sorted(pieces.rows) and set(pieces.rows) == set(range(len(whole)))


def test_samples_that_fit_are_left_alone():
    whole = Counting()
    assert in_pieces(whole, 40, 2) is whole


def test_more_than_two_billion_tokens_in_one_set(tmp_path):
    """Arrow's lists count in 32 bits: in one chunk this column would overflow. Its items are those of a sparse file,
    which takes no room but for its last ones."""
    long, last = 2**30, [3, 1, 4, 1, 5]
    with (tmp_path / "sparse").open("wb") as file:
        file.seek(4 * long)
        file.write(np.array(last, dtype=np.int32).tobytes())
    items = pa.memory_map(str(tmp_path / "sparse")).read_buffer()
    values = pa.Array.from_buffers(pa.int32(), long + len(last), [None, items])
    chunk = pa.ListArray.from_arrays(pa.array([0, long, long + len(last)], pa.int32()), values)
    column = pa.chunked_array([chunk, chunk, chunk])
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        column.combine_chunks()
    lists = Lists(column)
    assert lists.lengths.dtype == np.int64 and lists.lengths.sum() == 3 * (long + 5) > 2**31
    assert lists.lengths.tolist() == [long, 5] * 3
    assert [lists[row].tolist() for row in (1, 3, 5)] == [last] * 3 and len(lists[4]) == long


def test_rows_of_several_shards_are_where_they_were():
    """Chunks, one of them a slice of another array, as Parquet files and `take` leave them."""
    rows = [[1, 2], [], [3], [4, 5, 6], [7]]
    sliced = pa.array([[9], *rows[3:], [8]], pa.list_(pa.int32())).slice(1, 2)
    lists = Lists(pa.chunked_array([pa.array(rows[:3], pa.list_(pa.int32())), sliced]))
    assert [lists[i].tolist() for i in range(5)] == rows
    assert lists.lengths.tolist() == [2, 0, 1, 3, 1]
