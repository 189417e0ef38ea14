"""Training of an acceptance head: its labels, its start, the loss and what it saves."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import sklearn.linear_model
import torch
from safetensors.torch import load_file
from trained_runs import fake_trainer, losses, micro_batch

from draftsmith.data.store.datasets import collate_acceptance, collate_rollouts, open_dataset
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.pretrained.heads import FrozenDrafter, load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.acceptance import (
    BLOCK,
    LEAST_WEIGHT,
    LitAcceptance,
    MixedText,
    RolloutReader,
    StoredDataset,
    TrainAcceptanceConfig,
    collate_stored,
    make_head,
    num_loss_tokens,
    prepare,
)
from draftsmith.train.acceptance_fitting import initialize_head, predicted
from draftsmith.train.checkpoints import FOLDER
from draftsmith.train.command import run
from draftsmith.train.data import MicroBatch, Samples

# A learning rate and a number of steps at which a 32-wide head learns something.
QUICK = {
    "lr": 5e-3,
    "max_steps": 12,
    "batch_size": 8,
    "val_share": 0.25,
    "val_every": 6,
    "log_every": 3,
    "loggers": ("csv",),
}


def config(artifacts, output: Path, **changes) -> TrainAcceptanceConfig:
    settings = {"data": artifacts.acceptance, "draft": str(artifacts.draft), "output": output, **QUICK, **changes}
    return TrainAcceptanceConfig(**settings)


def rows_of(output: Path) -> list[dict[str, str]]:
    with (output / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(artifacts, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("acceptance") / "run"
    run(config(artifacts, output))
    return output


def a_part(artifacts, count: int = 6) -> MicroBatch:
    data = open_dataset(artifacts.acceptance)
    batch = collate_acceptance([data.item(i, 0) for i in range(count)])
    return micro_batch(batch, num_loss_tokens(batch))


def a_module(artifacts, tmp_path, greedy: bool = False) -> LitAcceptance:
    settings = config(artifacts, tmp_path)
    reader = MixedText(FrozenDrafter(load_lm(str(artifacts.draft)), {}), greedy)
    module = LitAcceptance(make_head(settings, 32), reader, settings)
    module.trainer = fake_trainer(open_dataset(artifacts.acceptance))
    return module


def test_validation_logs_all_metrics_and_the_loss_falls(trained):
    reported = [row for row in rows_of(trained) if row.get("val/kl")]
    assert [row["step"] for row in reported] == ["6", "12"]
    for name in ("kl", "brier", "ece", "ece_platt", "auc", "auc_q", "loss"):
        assert math.isfinite(float(reported[-1][f"val/{name}"])), name
    losses = [float(row["train/loss"]) for row in rows_of(trained) if row.get("train/loss")]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_best_and_last_are_heads_with_a_card_and_a_manifest(trained, artifacts):
    draft = load_lm(str(artifacts.draft))
    for name in ("best", "last"):
        head = load_head(trained / name, draft, kind="acceptance")
        assert head.config.num_blocks == 3 and head.config.w_rej == 6.0
        manifest = json.loads((trained / name / "manifest.json").read_text())
        assert manifest["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        assert manifest["inputs"]["data"] == open_dataset(artifacts.acceptance).manifest.digest
        assert f"| auc | {manifest['metrics']['auc']:.4g} |" in (trained / name / "README.md").read_text()


def test_the_fitted_calibration_is_saved_with_the_head(trained, artifacts):
    head = load_head(trained / "best", load_lm(str(artifacts.draft)))
    scale, shift = head.config.calibration
    assert (scale, shift) != (1.0, 0.0)
    logit = torch.tensor([0.3])
    assert torch.allclose(head.calibrated(logit), scale * (logit + math.log(6)) + shift)


def test_greedy_labels_are_compared_with_the_drafts_probability_at_temperature_one(artifacts, tmp_path):
    reader, data = a_module(artifacts, tmp_path, greedy=True).reader, a_part(artifacts, 2).data
    expected = reader.lm.lm_head(reader.lm.features(data.z_ids)).log_softmax(-1)
    expected = expected[:, :-1].gather(-1, data.z_ids[:, 1:, None])[..., 0][data.loss_mask[:, 1:]]
    found = reader.read(data, with_log_q=True)
    assert torch.allclose(found.log_q, expected, atol=1e-6) and found.row.unique().tolist() == [0, 1]


def test_a_run_with_other_settings_is_not_resumed(artifacts, trained, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(trained / "started.json", tmp_path / "run")
    shutil.copytree(trained / FOLDER, tmp_path / "run" / FOLDER)
    with pytest.raises(InputError, match=r"config.lr: 0.1, begun with 0.005.*config.seed: 7, begun with 0"):
        run(config(artifacts, tmp_path / "run", lr=0.1, seed=7))


def test_separate_validation_labels_must_share_the_sampling(artifacts, tmp_path):
    from draftsmith.data.acceptance import AcceptanceConfig
    from draftsmith.data.acceptance import run as label

    labels = AcceptanceConfig(
        responses=artifacts.responses,
        target=str(artifacts.target),
        draft=str(artifacts.draft),
        output=tmp_path / "greedy",
        temperature=(0.0,),
    )
    with pytest.raises(InputError, match=r"val: found.*'temperature': 0.0.*labels made with.*'temperature': 1.0"):
        run(config(artifacts, tmp_path / "run", val=label(labels)))
    same = dataclasses.replace(config(artifacts, tmp_path / "run"), val=artifacts.acceptance)
    assert run(same) == tmp_path / "run" / "best"


def saved_head(directory: Path, width: int = 32, seed: int = 3, **settings) -> Path:
    """Save a head of another draft."""
    torch.manual_seed(seed)
    head = AcceptanceHead(AcceptanceHeadConfig(width, **settings))
    for weight in head.parameters():
        weight.data.normal_(std=0.1)
    return save_head(directory, head, {"target": {"config": "other", "lm_head": "other"}}, "card")


def test_training_starts_from_a_given_head(artifacts, tmp_path):
    start = saved_head(tmp_path / "start", num_blocks=2, tied=True, w_rej=1.0, calibration=(2.0, 1.0))
    head = make_head(config(artifacts, tmp_path / "run", init=start), 32)
    assert all(torch.equal(head.state_dict()[n], w) for n, w in load_file(start / "model.safetensors").items())
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in head.parameters())
    # Its blocks; the loss weights of this training; no calibration, which was fitted to other outputs.
    assert head.config == AcceptanceHeadConfig(32, num_blocks=2, tied=True, w_rej=6.0)

    run(config(artifacts, tmp_path / "run", init=start, lr=1e-6))
    trained = load_file(tmp_path / "run" / "last" / "model.safetensors")
    moved = [(trained[name] - weight).abs().max() for name, weight in load_file(start / "model.safetensors").items()]
    # 12 steps of AdamW move a weight by at most 12 lr, up to rounding of weights of about 0.1: it started there.
    assert all(0 < float(distance) < 2e-5 for distance in moved)


@pytest.mark.parametrize(
    ("settings", "changes", "found"),
    [
        ({}, {"num_blocks": 2}, "num_blocks 2 asked of .*expected num_blocks 3, as that head has"),
        ({"tied": True}, {"tied": False}, "tied False asked of .*expected tied True"),
        ({"width": 16}, {}, "of width 16, expected width 32"),
    ],
)
def test_a_start_that_does_not_fit_is_one_error(artifacts, tmp_path, settings, changes, found):
    start = saved_head(tmp_path / "start", **settings)
    with pytest.raises(InputError, match=f"init: found .*{found}"):
        make_head(config(artifacts, tmp_path / "run", init=start, **changes), 32)


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
def reader(artifacts) -> RolloutReader:
    return RolloutReader(FrozenDrafter(load_lm(str(artifacts.draft)), {}), LEAN, DEPTH)


@pytest.fixture(scope="module")
def samples(rollouts) -> Samples:
    data = open_dataset(rollouts)
    return Samples(data, [3, 0, *range(5, len(data))])


@pytest.fixture(scope="module")
def tokens(samples, reader):
    return reader.store(samples, "train")


def a_config(artifacts, rollouts, output: Path, **changes) -> TrainAcceptanceConfig:
    settings = {"draft": str(artifacts.draft), "lr": 5e-3, "batch_size": 4, "val_share": 0.25, "loggers": ("csv",)}
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


def test_a_head_starts_as_the_logistic_of_its_standardized_features(reader, tokens):
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


def test_the_hidden_layer_has_128_units_unless_a_width_is_given(artifacts, rollouts, tmp_path):
    for number, (changes, width) in enumerate((({}, 128), ({"width": 4}, 4))):
        config = a_config(artifacts, rollouts, tmp_path / str(number), **changes)
        assert prepare(config)[0].head.config.width == width


def test_best_stays_the_logistic_if_training_makes_it_worse(artifacts, rollouts, tmp_path):
    output = tmp_path / "run"
    best = run(a_config(artifacts, rollouts, output, max_steps=6, lr=3.0, clip=0.0))
    found = losses(output, "val/kl")
    assert found[0] < min(found[1:])
    assert json.loads((output / "training.json").read_text())["best"]["step"] == 0
    assert not load_head(best).out.weight.any()
