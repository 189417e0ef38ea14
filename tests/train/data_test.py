"""Batches of a training: the same samples for any ranks, parts and resumption; and artifacts by their directory."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import draftsmith
from draftsmith.data.prompts import run as run_prompts
from draftsmith.data.stages import PromptsConfig
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.modules.types import FeatureBatch, InputError
from draftsmith.train import data
from draftsmith.train.config import TrainConfig
from draftsmith.train.data import (
    HeadDataModule,
    MicroBatch,
    Order,
    Samples,
    held_out,
    rank_keys,
    train_and_val,
    with_spans,
)

LENGTHS = [5 + (i * 37) % 50 for i in range(103)]


class Numbers:
    """Samples that know their number and, like mixed tokens, change with the epoch."""

    lengths = LENGTHS

    def __len__(self) -> int:
        return len(LENGTHS)

    def item(self, row: int, epoch: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([row, epoch]), "loss_mask": torch.ones(2, dtype=torch.bool)}


def keys_of_step(order: Order, step: int, num_ranks: int, accumulate: int):
    parts = []
    for rank in range(num_ranks):
        parts += list(rank_keys(order, step, step + 1, rank, num_ranks, accumulate))
    return parts


def config(**changes) -> TrainConfig:
    return TrainConfig(data=Path("."), output=Path("."), batch_size=8, **changes)


BUDGETS = [{}, {"tokens_per_batch": 240}, {"tokens_per_batch": 55}]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_an_epoch_holds_every_sample_once(budget):
    order = Order(LENGTHS, 0, 8, **budget)
    for epoch in (0, 1):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        seen = [order.step(step) for step in steps]
        assert {e for e, _ in seen} == {epoch}
        assert sorted(itertools.chain(*(batch for _, batch in seen))) == list(range(103))
    assert order.step(0)[1] != order.step(order.steps_per_epoch)[1]
    assert Order(LENGTHS, 1, 8).step(5) == Order(LENGTHS, 1, 8).step(5) != Order(LENGTHS, 2, 8).step(5)


@pytest.mark.parametrize(("num_ranks", "accumulate", "budget"), [(1, 4, 0), (2, 1, 1), (3, 3, 1)])
def test_a_step_holds_the_same_samples_however_it_is_shared_out(budget, num_ranks, accumulate):
    order = Order(LENGTHS, 3, 8, **BUDGETS[budget])
    for step in range(2 * order.steps_per_epoch):
        parts = keys_of_step(order, step, num_ranks, accumulate)
        assert len(parts) == num_ranks * accumulate and all(parts)
        real = [key.index for part in parts for key in part if not key.filler]
        assert sorted(real) == sorted(order.step(step)[1])


def test_like_lengths_share_a_batch():
    order = Order(LENGTHS, 0, 8)
    for step in range(order.steps_per_epoch):
        lengths = [LENGTHS[i] for i in order.step(step)[1]]
        assert max(lengths) - min(lengths) < 10  # of lengths from 5 to 54


def test_steps_by_tokens_are_of_equal_size_give_or_take_a_sample():
    order = Order(LENGTHS, 0, 8, tokens_per_batch=240)
    assert order.steps_per_epoch == math.ceil(sum(LENGTHS) / 240)
    tokens = [sum(LENGTHS[i] for i in order.step(step)[1]) for step in range(order.steps_per_epoch)]
    mean = sum(LENGTHS) / order.steps_per_epoch
    assert all(abs(count - mean) < max(LENGTHS) for count in tokens)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_has_as_many_spans_of_whole_texts_or_parts_of_one(ranks, monkeypatch):
    order, most = Order([3, 9, 31, 2, 8, 5, 12], 0, 7), 10
    spans = []
    for number in range(ranks):
        monkeypatch.setattr(data, "num_ranks", lambda: ranks)
        parts = [
            MicroBatch(None, keys, tuple(int(order.lengths[key.index]) for key in keys))
            for keys in rank_keys(order, 0, 1, number, ranks, accumulate=2)
        ]
        cut = with_spans(parts, order, 0, most)
        spans.append([len(part.spans) for part in cut])
        for part in cut:
            edges = {0, *itertools.accumulate(part.lengths)}
            own = [(0, sum(part.lengths))] if part.spans == (None,) else list(dict.fromkeys(part.spans))
            assert [start for start, _ in own] == [0, *(stop for _, stop in own[:-1])] and own[-1][1] == max(edges)
            for start, stop in own:
                assert stop - start <= most
                # Whole texts, or inside of one.
                assert {start, stop} <= edges or not any(start < edge < stop for edge in edges)
    assert all(own == spans[0] for own in spans) and max(spans[0]) >= 4


def test_a_filler_counts_nothing():
    order = Order([5], 0, 4)
    (keys,) = rank_keys(order, 0, 1, own_rank=1, ranks=2, accumulate=1)
    assert len(keys) == 1 and keys[0].filler
    samples = Samples(Numbers(), [7])
    samples.collate, samples.count = collate, count
    batch = samples[keys]
    assert batch.real_lengths == [] and batch.lengths == (LENGTHS[7],)
    data = batch.data
    assert data.input_ids.tolist() == [[7, 0]] and not data.loss_mask.any()


def collate(items):
    ids = torch.stack([item["input_ids"] for item in items])
    mask = torch.stack([item["loss_mask"] for item in items])
    return FeatureBatch(ids, torch.zeros(len(items), 2, 1), mask, ids)


def count(batch: FeatureBatch) -> int:
    return int(batch.loss_mask.sum())


class FakeTrainer:
    """What the data module asks of Lightning's trainer."""

    global_step = 0


def parts_from(start: int, num_workers: int = 0) -> list[MicroBatch]:
    samples = Samples(Numbers(), range(103))
    settings = config(accumulate=2, max_steps=30, num_workers=num_workers)
    module = HeadDataModule(samples, samples, settings, collate, count)
    module.trainer = FakeTrainer()  # type: ignore[assignment]
    loader = module.train_dataloader()
    assert len(loader) == 30
    loader.load_state_dict({"step": start})
    steps = list(loader)
    assert [len(step) for step in steps] == [2] * (30 - start)
    return [part for step in steps for part in step]


def test_a_continued_run_gets_the_rest_of_the_epoch():
    whole, rest = parts_from(0), parts_from(17)
    assert [p.keys for p in rest] == [p.keys for p in whole[34:]]
    assert {int(p.data.input_ids[0, 1]) for p in whole} == {0, 1, 2}  # samples as they are in their epoch


def test_reader_processes_change_nothing():
    ours, theirs = parts_from(20), parts_from(20, num_workers=2)
    assert [p.keys for p in ours] == [p.keys for p in theirs]
    assert all(torch.equal(a.data.input_ids, b.data.input_ids) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("budget", BUDGETS[:2], ids=str)
def test_validation_sees_each_sample_once_over_the_ranks(budget, monkeypatch):
    samples = Samples(Numbers(), range(103))
    module = HeadDataModule(samples, samples, config(**budget), collate, count)
    monkeypatch.setattr(data, "num_ranks", lambda: 3)
    seen = []
    for rank in range(3):
        monkeypatch.setattr(data, "rank", lambda rank=rank: rank)
        seen += [key.index for part in module.val_dataloader() for key in part.keys]
    assert sorted(seen) == list(range(103))


def drawn(count: int, seed: int) -> np.ndarray:
    """Hashes as those of texts."""
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def test_a_conversation_keeps_its_side_whatever_is_beside_it():
    hashes = drawn(1000, 0)
    train, val = held_out(hashes, 0.1)
    assert sorted([*train, *val]) == list(range(1000)) and 70 < len(val) < 130  # 100 +- 3 standard deviations of 9.5
    sides = set(hashes[val].tolist())
    # Joined, repeated and shuffled; then filtered.
    more = np.random.default_rng(1).permutation(np.concatenate([hashes, hashes, drawn(500, 2)]))
    assert sides == set(more[held_out(more, 0.1)[1]].tolist()) & set(hashes.tolist())
    few = hashes[::3]
    assert sides & set(few.tolist()) == set(few[held_out(few, 0.1)[1]].tolist())


def test_one_conversation_is_held_out_at_least_and_said(capsys):
    hashes = drawn(10, 3).repeat(2)
    train, val = held_out(hashes, 1e-6)
    assert len(train) == 18 and hashes[val].tolist() == [hashes.min()] * 2
    assert "held out: 1 of 10 different prompts; too few for --val-share 1e-06" in capsys.readouterr().err
    with pytest.raises(InputError, match="found 1 different first prompts, expected at least 2"):
        held_out(hashes[:2], 0.5)


def test_copies_train_together_and_are_validated_once(artifacts):
    settings = draftsmith.settings("eagle", val_share=0.3, output="unused")
    one, two = (HeadDataModule(data, None, settings) for data in (artifacts.responses, [f"{artifacts.responses}*2"]))

    def texts(samples: Samples) -> list[tuple[int, ...]]:
        return sorted(tuple(samples.text(i).tolist()) for i in range(len(samples)))

    assert texts(two.val) == texts(one.val) and texts(two.train) == sorted(2 * texts(one.train))
    # Other answers to the held-out prompts are held out, too.
    assert len(one.val) > 1
    rows = draftsmith.open_dataset(artifacts.responses)
    starts = [row["loss_mask"].tolist().index(True) for row in rows]
    shorter = [
        {"input_ids": row["input_ids"][: start + 1], "loss_mask": row["loss_mask"][: start + 1]}
        for row, start in zip(rows, starts, strict=True)
    ]
    assert [text[:-1] for text in texts(HeadDataModule(shorter, None, settings).val)] == sorted(
        tuple(row["input_ids"][:start].tolist())
        for row, start in zip(rows, starts, strict=True)
        if tuple(row["input_ids"].tolist()) in texts(one.val)
    )
    # Rows in memory have the sides of the artifact's.
    listed = HeadDataModule(draftsmith.open_dataset(artifacts.responses), None, settings)
    assert texts(listed.val) == texts(one.val)


def test_prompts_that_are_trained_on_and_validated_are_counted(artifacts, capsys):
    settings = draftsmith.settings("eagle", data=artifacts.responses, output="unused")
    whole = open_dataset(artifacts.responses)
    train_and_val(settings, whole, open_dataset(artifacts.responses), 4096)
    assert (
        f"{len(whole)} of {len(whole)} samples of --val begin with a prompt that is trained" in capsys.readouterr().err
    )


def test_turns_of_a_session_in_memory_stay_on_one_side_in_any_order():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for session in range(30):
        ids = torch.randint(5, 90, (20,), generator=generator)
        for turn, name in ((1, f"s{session}"), (2, f"s{session}/turn-2"), (3, f"s{session}/turn-3")):
            mask = torch.arange(6 * turn) >= 6 * turn - 2
            rows.append({"input_ids": ids[: 6 * turn], "loss_mask": mask, "id": name, "turn": turn})
    settings = draftsmith.settings("eagle", val_share=0.3, output="unused")

    module = HeadDataModule(rows, None, settings)
    train, val = (
        {tuple(samples.text(i)[:6].tolist()) for i in range(len(samples))} for samples in (module.train, module.val)
    )
    assert not train & val and len(train) + len(val) == 30
    turned = HeadDataModule(rows[::-1], None, settings)
    assert {tuple(turned.val.text(i)[:6].tolist()) for i in range(len(turned.val))} == val


@pytest.mark.parametrize("name", ["prompts", "responses", "features", "acceptance", "rollouts"])
def test_an_artifact_opens_as_a_data_set_of_its_rows(artifacts, rollouts, name):
    directory = {"rollouts": rollouts, "prompts": artifacts.responses.parent / "prompts"}.get(name)
    directory = directory or getattr(artifacts, name)
    data = draftsmith.open_dataset(directory)
    columns = Rows(Manifest.read(directory)).table().to_pylist()
    assert data.with_format(None).to_list() == columns and len(data.to_pandas()) == len(columns)
    ids = "prompt_ids" if name == "prompts" else "input_ids"
    assert torch.equal(data[len(data) - 1][ids], torch.tensor(columns[-1][ids]))
    # Rows that are chosen and changed stay rows.
    chosen = data.filter(lambda row: row["id"] != columns[0]["id"]).select([0]).map(lambda row: {"task": "mine"})
    assert chosen[0]["task"] == "mine" and chosen.with_format(None)[0][ids] == columns[1][ids]


def test_rows_of_an_artifact_are_batches_and_train_as_they_do(artifacts):
    data, samples = draftsmith.open_dataset(artifacts.features), open_dataset(artifacts.features)
    batch, expected = draftsmith.collate([data[0], data[3]]), draftsmith.collate([samples[0], samples[3]])
    assert torch.equal(batch.features, expected.features) and torch.equal(batch.loss_mask, expected.loss_mask)
    assert "features" not in data.select_columns(["input_ids"])[0]
    settings = draftsmith.settings("eagle", val_share=0.2, output="unused")
    listed, opened = (draftsmith.HeadDataModule(rows, None, settings) for rows in (data, str(artifacts.features)))
    assert (
        listed.train.lengths.sum() + listed.val.lengths.sum()
        == samples.lengths.sum()
        == (opened.train.lengths.sum() + opened.val.lengths.sum())
    )


def test_another_kind_is_refused(tmp_path):
    Manifest("results").write(tmp_path)
    with pytest.raises(InputError, match="kind results"):
        draftsmith.open_dataset(tmp_path)
    with pytest.raises(InputError):
        draftsmith.open_dataset(tmp_path / "nowhere")


def test_the_bench_measures_the_prompts_that_a_training_on_their_answers_holds_out(artifacts, tmp_path):
    # Answers have the hashes of their prompts.
    assert np.array_equal(open_dataset(artifacts.prompts).hashes, open_dataset(artifacts.responses).hashes)
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"id": f"{i}", "prompt": f"Sort {i} numbers"}) + "\n" for i in range(150)))
    target = str(artifacts.target)
    prompts = run_prompts(PromptsConfig(source=str(source), target=target, output=tmp_path / "prompts"))
    held = {f"{i}" for i in held_out(open_dataset(prompts).hashes, TrainConfig.val_share)[1]}
    assert 1 < len(held) < 20
    measured = {split: read_prompts(str(prompts), target, split=split) for split in ("val", "train", "none")}
    assert {prompt.id for prompt in measured["val"]} == held
    assert len(measured["train"]) == 150 - len(held) and len(measured["none"]) == 150
