"""Stored tokens of real rounds, and the initial logistic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sklearn.linear_model
import torch
from trained_runs import losses

from draftsmith.data.store.datasets import collate_rollouts, open_dataset
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.pretrained.heads import FrozenDrafter, load_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.train.acceptance import (
    BLOCK,
    LEAST_WEIGHT,
    RolloutReader,
    StoredDataset,
    TrainAcceptanceConfig,
    collate_stored,
    prepare,
)
from draftsmith.train.acceptance_fitting import initialize_head, predicted
from draftsmith.train.command import run
from draftsmith.train.data import Samples

DEPTH = 4  # of the labels: conftest.py
LEAN = AcceptanceHeadConfig(
    32,
    num_blocks=0,
    w_rej=2.0,
    state="before",
    features=("log_q", "depth"),
    width=8,
    activation="relu",
    standardize=True,
)


@pytest.fixture(scope="module")
def reader(artefacts) -> RolloutReader:
    return RolloutReader(FrozenDrafter(load_lm(str(artefacts.draft)), {}), LEAN, DEPTH)


@pytest.fixture(scope="module")
def samples(rollouts) -> Samples:
    data = open_dataset(rollouts)
    return Samples(data, [3, 0, *range(5, len(data))])


@pytest.fixture(scope="module")
def tokens(samples, reader):
    return reader.store(samples, "train")


def a_config(artefacts, rollouts, output: Path, **changes) -> TrainAcceptanceConfig:
    settings = {"draft": str(artefacts.draft), "lr": 5e-3, "batch_size": 4, "val_share": 0.25, "log": ("csv",)}
    return TrainAcceptanceConfig(data=rollouts, output=output, **{**settings, **changes})


def test_stored_tokens_equal_those_of_each_answer(samples, reader, tokens):
    for index in range(len(samples)):
        data = collate_rollouts([samples.item(index, 0)])
        read, own = reader.read_rollouts(data), tokens[tokens.owner == index]
        kept = read.weight >= LEAST_WEIGHT
        assert 0 < len(own.ids) == int(kept.sum())
        assert torch.equal(own.ids, data.draft_ids[data.loss_mask][kept])
        for name in ("hidden", "features", "log_q", "accept_prob", "weight"):
            assert torch.equal(getattr(own, name), getattr(read, name)[kept])


def test_batches_are_drawn_from_all_answers_and_hold_each_token_once(samples, tokens):
    blocks = StoredDataset(tokens, samples, seed=5)
    items = [blocks.item(index, 0) for index in range(len(blocks.lengths))]
    assert [len(item["ids"]) for item in items] == blocks.lengths and set(blocks.lengths[:-1]) == {BLOCK}
    drawn = torch.cat([item["weight"] + item["log_q"] + item["owner"] for item in items])
    assert drawn.sort().values.tolist() == (tokens.weight + tokens.log_q + tokens.owner).sort().values.tolist()
    assert len(set(items[0]["owner"].tolist())) > 20  # not answer after answer
    assert blocks.name(0) == samples.name(int(items[0]["owner"][0]))
    batch = collate_stored(items[:2])
    assert batch.owner.tolist() == [0] * BLOCK + [1] * len(items[1]["ids"])
    assert list(blocks.answer_lengths([0])) == list(samples.dataset.answer_lengths(samples.indices))


def test_a_validation_sample_is_an_answer(samples, tokens):
    answers = StoredDataset(tokens, samples, seed=None)
    assert len(answers.lengths) == len(samples) and sum(answers.lengths) == len(tokens.ids)
    for index in range(len(samples)):
        assert set(answers.item(index, 0)["owner"].tolist()) == {index}
        assert answers.name(index) == samples.name(index)


def test_a_head_starts_as_the_logistic_of_its_standardised_features(reader, tokens):
    torch.manual_seed(0)
    head = AcceptanceHead(LEAN)
    initialize_head(head, reader.batches(tokens))
    batch = reader.read(tokens).batch
    given = torch.cat([batch.hidden, reader.drafter.lm.embed(tokens.ids), batch.features], -1).double()
    np.testing.assert_allclose(head.mean.numpy(), given.mean(0).numpy(), atol=1e-5)
    np.testing.assert_allclose(head.scale.numpy(), given.std(0, correction=0).clamp_min(1e-3).numpy(), rtol=1e-4)
    # Each token as an accepted and a rejected one, by its label.
    numbers = ((given[:, -2:] - given[:, -2:].mean(0)) / given[:, -2:].std(0, correction=0)).numpy()
    label, weight = tokens.accept_prob.double().numpy(), tokens.weight.double().numpy()
    model = sklearn.linear_model.LogisticRegression(C=1e9, tol=1e-10, max_iter=1000)
    outcome = np.concatenate([np.ones_like(label), np.zeros_like(label)])
    model.fit(np.concatenate([numbers, numbers]), outcome, np.concatenate([weight * label, weight * (1 - label)]))
    expected = model.predict_proba(numbers)[:, 1]
    found = torch.sigmoid(head.corrected(predicted(head, batch))).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3)  # of some 500 tokens, and a hundredth of one that pulls to 0
    assert not head.out.weight.any() and head.join.weight.any()


def test_the_hidden_layer_has_128_units_unless_a_width_is_given(artefacts, rollouts, tmp_path):
    for number, (changes, width) in enumerate((({}, 128), ({"width": 4}, 4))):
        config = a_config(artefacts, rollouts, tmp_path / str(number), **changes)
        assert prepare(config)[0].head.config.width == width


def test_best_stays_the_logistic_if_training_makes_it_worse(artefacts, rollouts, tmp_path):
    output = tmp_path / "run"
    best = run(a_config(artefacts, rollouts, output, max_steps=6, lr=3.0, clip=0.0))
    found = losses(output, "val/kl")
    assert found[0] < min(found[1:])
    assert json.loads((output / "training.json").read_text())["best"]["step"] == 0
    assert not load_head(best).out.weight.any()
