"""Samples depend on (seed, epoch, row) only; collating pads at the right and masks the padding; rows of any shard."""

from __future__ import annotations

import itertools
import pickle
import shutil
from collections import Counter

import pytest
import torch
from forked import forked
from torch.utils.data import DataLoader

from draftsmith.data.store.datasets import collate_features, open_dataset, pack_features
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.types import FeatureBatch, InputError


@pytest.fixture(scope="module")
def labels(chain):
    return Rows(Manifest.read(chain.directory("acceptance"))).read(0, 99)


@pytest.mark.parametrize("mix", [0.5, 0.0])
def test_only_drafted_tokens_count_and_carry_labels(chain, labels, mix):
    data = open_dataset(chain.directory("acceptance"), mix=mix)
    seen = set()
    for item, row in zip(data, labels, strict=True):
        for t, token in enumerate(item["z_ids"].tolist()):
            j = t - row["loss_mask"].index(True)
            counted = bool(item["loss_mask"][t])
            seen.add((j >= 0, counted))
            assert token == (row["draft_ids"][j] if counted else row["input_ids"][t])
            for name in ("accept_prob", "log_q"):
                assert item[name][t] == pytest.approx(row[name][j] if counted else 0.0)
    assert seen == {(False, False), (True, True)} | ({(True, False)} if mix else set())


def test_the_share_of_target_tokens_is_the_mix(chain, labels):
    positions = sum(len(row["draft_ids"]) for row in labels)
    data, drafted, epochs = open_dataset(chain.directory("acceptance"), mix=0.15, seed=2), 0, 60
    for epoch in range(epochs):
        drafted += sum(int(data.item(i, epoch)["loss_mask"].sum()) for i in range(len(data)))
    total = epochs * positions
    # Four standard deviations of a binomial count.
    assert abs(drafted - 0.85 * total) < 4 * (0.15 * 0.85 * total) ** 0.5
    with pytest.raises(InputError, match="mix: found 1"):
        open_dataset(chain.directory("acceptance"), mix=1)


def test_masks_depend_on_seed_epoch_and_row_only(chain):
    def masks(data, epoch=0, order=None) -> list[list[bool]]:
        by_row = {i: data.item(i, epoch)["loss_mask"].tolist() for i in order or range(len(data))}
        return [by_row[i] for i in range(len(data))]

    data = open_dataset(chain.directory("acceptance"), mix=0.5, seed=1)
    first = masks(data)
    assert masks(data, order=[*reversed(range(len(data)))]) == first
    assert masks(data, epoch=1) != first
    assert masks(data) == first
    assert masks(open_dataset(chain.directory("acceptance"), mix=0.5, seed=2)) != first
    assert masks(pickle.loads(pickle.dumps(data))) == first


def test_features_collate_to_a_feature_batch(chain):
    data = open_dataset(chain.directory("features"))
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
    data = open_dataset(chain.directory("features"))
    first = data[0]  # opens a file in this process
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(next(iter(loader))["features"], first["features"])
    assert torch.equal(pickle.loads(pickle.dumps(data))[0]["features"], first["features"])


@pytest.mark.parametrize("overlap", [0, 2])
def test_pieces_count_every_token_once_and_begin_at_position_0(chain, overlap):
    whole = open_dataset(chain.directory("responses"))
    size = int(whole.lengths.min()) + 3
    pieces = whole.in_pieces(size, overlap)
    items = [pieces.item(i, 0) for i in range(len(pieces))]
    assert pieces.lengths.tolist() == [len(item["input_ids"]) for item in items] and max(pieces.lengths) == size
    for positions, length in zip(collate_features(items).position_ids, pieces.lengths.tolist(), strict=True):
        assert positions.tolist() == [*range(length), *[0] * (size - length)]
    assert torch.cat([torch.arange(length) for length in pieces.lengths]).equal(pack_features(items).position_ids[0])

    # With an overlap of two, the first two tokens of a piece are never predicted (drafters/eagle.py, shift).
    # Pieces of a row share its number; the prompts are longer than the overlap.
    counted = [t for item in items for t in item["input_ids"][overlap:][item["loss_mask"][overlap:]].tolist()]
    expected = [token for item in whole for token in item["input_ids"][item["loss_mask"]].tolist()]
    assert counted == expected
    assert pieces.rows.tolist() == sorted(pieces.rows) and set(pieces.rows) == set(range(len(whole)))
    assert pieces.answer_lengths(range(len(pieces))).tolist() == whole.answer_lengths(range(len(whole))).tolist()
    assert pieces.token_counts([0, 1], 4096).equal(whole.token_counts(sorted({*pieces.rows[:2].tolist()}), 4096))
    assert whole.in_pieces(int(whole.lengths.max()), overlap) is whole


def test_pairs_are_counted_where_the_second_token_is_of_an_answer(chain):
    data, expected = open_dataset(chain.directory("responses")), Counter[tuple[int, int]]()
    for number in (0, 3):
        ids, mask = (data[number][name].tolist() for name in ("input_ids", "loss_mask"))
        expected.update(pair for pair, counts in zip(itertools.pairwise(ids), mask[1:], strict=True) if counts)
    counts = data.pair_counts([0, 3], 4096)
    found = dict(zip(zip(*counts.indices().tolist(), strict=True), counts.values().tolist(), strict=True))
    assert found == expected and len(found) > 10


def test_rows_are_found_across_shards(chain):
    table = Rows(Manifest.read(chain.directory("prompts")), ["id"])
    assert [row["id"] for row in table.read(2, 8)] == [f"row-{i}" for i in range(2, 8)]
    assert len(table) == 11 and len(table.read(9, 99)) == 2
    assert table.table()["id"].to_pylist() == [f"row-{i}" for i in range(11)]


@pytest.mark.parametrize(("stage", "column"), [("prompts", "prompt_ids"), ("acceptance", "draft_ids")])
def test_an_id_beyond_the_readers_vocabulary_is_refused(chain, stage, column):
    directory = chain.directory(stage)
    manifest = Manifest.read(directory)
    largest = max(max(ids) for ids in Rows(manifest).table()[column].to_pylist())
    assert len(Rows(manifest, [column], vocab_size=largest + 1).read(0, 99)) == 11
    with pytest.raises(InputError, match=f"{column}: found {largest}, expected token ids below {largest}"):
        Rows(manifest, [column], vocab_size=largest).read(0, 99)


@pytest.mark.parametrize("change", ["cut", "rewritten"])
def test_states_that_change_while_they_are_read_are_one_line(chain, tmp_path, change):
    """Of a mapped file that is cut, the system ends the process that reads on."""
    directory = shutil.copytree(chain.directory("features"), tmp_path / "features")
    data, shard = open_dataset(directory), directory / "shard-00000.safetensors"

    def read_on() -> None:
        kept = data[0]["features"]
        content = shard.read_bytes()
        shard.write_bytes(content[:-100] if change == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
        assert kept.isfinite().all()
        with pytest.raises(InputError, match=r"shard-00000\.safetensors: found another content"):
            data.item(1, 0)

    process = forked(read_on)
    process.join()
    assert process.exitcode == 0


def test_a_shard_that_is_replaced_before_it_is_opened_is_one_line(chain, tmp_path):
    directory = shutil.copytree(chain.directory("features"), tmp_path / "features")
    data = open_dataset(directory)
    (directory / "shard-00001.safetensors").write_bytes((directory / "shard-00000.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"shard-00001\.safetensors: found another content"):
        data.item(3, 0)
