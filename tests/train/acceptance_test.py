"""Training of an acceptance head on labels of mixed text and of real rounds: inputs, start, loss, metrics, card."""

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
import sklearn.metrics
import torch
from safetensors.torch import load_file
from trainings import fake_trainer, losses, micro_batch, step_loss, validate

from draftsmith.data import acceptance as labels
from draftsmith.data.store.datasets import collate_acceptance, collate_rollouts, open_dataset
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.heads import FrozenDrafter, drafter_identity, load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.acceptance import (
    BLOCK,
    LEAST_WEIGHT,
    LitAcceptance,
    MixedText,
    RolloutReader,
    StoredDataset,
    collate_stored,
    initialize_head,
    make_head,
    num_loss_tokens,
    predicted,
    prepare,
)
from draftsmith.train.checkpoints import FOLDER
from draftsmith.train.command import run
from draftsmith.train.config import TrainAcceptanceConfig
from draftsmith.train.data import MicroBatch, SampleKey, Samples

# A learning rate and a number of steps at which a 32-wide head learns something.
QUICK = {"lr": 5e-3, "max_steps": 12, "batch_size": 8, "val_share": 0.25, "val_every": 6, "log_every": 3}
QUICK |= {"loggers": ("csv",)}


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
    settings = {"draft": str(artifacts.draft), "lr": 5e-3, "max_steps": 8, "batch_size": 6, "val_share": 0.25}
    return TrainAcceptanceConfig(data=rollouts, output=output, **{**settings, "loggers": ("csv",), **changes})


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


@pytest.fixture(scope="module")
def eagle(artifacts, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    target = load_lm(str(artifacts.target))
    head = EagleHead(EagleConfig.for_target(target.config))
    return save_head(tmp_path_factory.mktemp("eagle") / "head", head, {"target": target.info.identity}, "card")


@pytest.fixture(scope="module")
def trained_on_rounds(artifacts, rollouts, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "run"
    run(a_config(artifacts, rollouts, output))
    return output


def a_batch(rollouts: Path, rows=(0, 3, 5)):
    data = open_dataset(rollouts)
    return collate_rollouts([data[row] for row in rows])


def drafts_of(batch):
    """Yield the number of every draft and the text before it."""
    number = 0
    for text, starts in zip(batch.texts, batch.starts, strict=True):
        for start in starts:
            yield number, text[:start]
            number += 1


@pytest.mark.parametrize("state", ["before", "after"])
def test_states_equal_those_of_each_draft_read_alone(artifacts, rollouts, state):
    draft = load_lm(str(artifacts.draft))
    head = AcceptanceHeadConfig(32, state=state, features=("log_q", "depth", "temperature", "entropy"))
    batch = a_batch(rollouts)
    reader = RolloutReader(FrozenDrafter(draft, {}), head, DEPTH)
    found = reader.read_rollouts(batch)
    embeds = reader.read(found).batch.embeds
    states, numbers, weights, accept = [], [], [], []
    for number, text in drafts_of(batch):
        hidden = draft.features(torch.tensor([[*text, *batch.draft_ids[number].tolist()]]))[0]
        reach = 1.0
        for place in range(DEPTH):
            prob = float(batch.accept_prob[number, place])
            at = len(text) + place
            states.append(hidden[at] if state == "after" else hidden[at - 1])
            # The label's distribution: warped at the draft's own temperature.
            distribution = (draft.lm_head(hidden[at - 1]) / batch.temperature[number]).softmax(-1)
            token = batch.draft_ids[number, place]
            entropy = -(distribution * distribution.log()).sum()
            log_q = distribution[token].log()
            numbers.append([log_q, torch.tensor(place + 1.0).log(), batch.temperature[number], entropy])
            weights.append(reach)
            accept.append(prob)
            reach *= prob * (int(token) not in draft.info.eos_ids)
    kept = torch.tensor(weights) > 0
    assert torch.allclose(found.hidden, torch.stack(states)[kept], atol=1e-5)
    assert torch.allclose(found.features, torch.tensor(numbers)[kept], atol=1e-4)
    assert torch.allclose(found.weight, torch.tensor(weights)[kept], atol=1e-6)
    assert torch.equal(found.accept_prob, torch.tensor(accept)[kept])
    assert torch.equal(found.log_q, found.features[:, 0])
    if state == "before":
        assert torch.equal(embeds, draft.embed(batch.draft_ids[batch.loss_mask]))
    else:
        assert embeds is None
    assert not found.hidden.is_inference()


@pytest.mark.parametrize("state", ["before", "after"])
def test_a_draft_of_one_token_is_read_too(artifacts, rollouts, state):
    draft, batch = load_lm(str(artifacts.draft)), a_batch(rollouts)
    batch = dataclasses.replace(batch, draft_ids=batch.draft_ids[:, :1])
    found = RolloutReader(FrozenDrafter(draft, {}), AcceptanceHeadConfig(32, state=state), 1).states(batch)
    for number, text in drafts_of(batch):
        read = [*text, int(batch.draft_ids[number, 0])]
        hidden = draft.features(torch.tensor([read]))[0]
        assert found[number].shape == (1, 32)
        assert torch.allclose(found[number, 0], hidden[-2 if state == "before" else -1], atol=1e-5)


def test_an_eagle_heads_states_are_those_over_the_targets_features(artifacts, rollouts, eagle):
    target = load_lm(str(artifacts.target))
    head = load_head(eagle, target)
    batch = a_batch(rollouts, rows=(1, 2))
    found = RolloutReader(FrozenDrafter(target, {}, head), AcceptanceHeadConfig(32, state="before"), DEPTH).states(
        batch
    )
    for number, text in drafts_of(batch):
        ids = torch.tensor([text])
        rows = head(target.embed(ids[:, 1:]), target.features(ids)[:, :-1])[0]
        assert torch.allclose(found[number, 0], rows[-1], atol=1e-5)


def rounds_module(artifacts, rollouts, tmp_path) -> LitAcceptance:
    settings = a_config(artifacts, rollouts, tmp_path)
    head = make_head(settings, 32)
    reader = RolloutReader(FrozenDrafter(load_lm(str(artifacts.draft)), {}), head.config, DEPTH)
    module = LitAcceptance(head, reader, settings)
    module.trainer = fake_trainer(open_dataset(rollouts))
    return module


def answers_part(module: LitAcceptance, rollouts, rows) -> MicroBatch:
    """Return a batch of answers, as in validation."""
    samples = Samples(open_dataset(rollouts), rows)
    answers = StoredDataset(module.reader.store(samples, "rows"), samples, None)
    batch = collate_stored([answers.item(number, 0) for number in range(len(rows))])
    tokens = num_loss_tokens(batch)
    return MicroBatch(batch, tuple(SampleKey(0, row) for row in rows), tuple(answers.lengths), tokens)


def test_the_loss_is_the_weighted_mean_and_reaches_every_weight(artifacts, rollouts, tmp_path):
    module = rounds_module(artifacts, rollouts, tmp_path)
    part = answers_part(module, rollouts, (0, 1))
    output = step_loss(module, part)
    batch = module.reader.read(part.data).batch
    prob, label = torch.sigmoid(predicted(module.head, batch).detach().double()), batch.accept_prob.double()
    each = -(label * prob.log() + (1 - label) * (1 - prob).log())
    expected = float((batch.weight * each).sum() / batch.weight.sum())
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert part.tokens == pytest.approx(float(output.counts["loss"]), rel=1e-6)
    # At the start a block's weights are zero, and so is what the layer before it could learn through them.
    for weight in module.head.parameters():
        weight.data.normal_(std=0.1)
    step_loss(module, part).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in module.head.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in module.reader.drafter.lm.model.parameters())


def test_accumulating_gives_the_same_weights(artifacts, rollouts, tmp_path, trained_on_rounds):
    """Though parts have other sums of weights than their numbers of tokens."""
    run(a_config(artifacts, rollouts, tmp_path / "run", accumulate=4))
    ours = load_file(trained_on_rounds / "last" / "model.safetensors")
    theirs = load_file(tmp_path / "run" / "last" / "model.safetensors")
    # As for mixed labels: 8 AdamW steps of 5e-3 on gradients that differ by 1e-7 of their size.
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4, rtol=0) for name in ours)


def test_validation_weighs_tokens_by_how_often_they_are_reached(artifacts, rollouts, tmp_path):
    module = rounds_module(artifacts, rollouts, tmp_path)
    parts = [answers_part(module, rollouts, rows) for rows in ((0, 1), (2, 4, 5))]
    found = validate(module, parts)
    batches = [module.reader.read(part.data, with_log_q=True) for part in parts]
    prob = torch.cat([torch.sigmoid(predicted(module.head, tokens.batch)) for tokens in batches]).detach().double()
    label, weight = (torch.cat([getattr(t.batch, n) for t in batches]).double() for n in ("accept_prob", "weight"))
    log_q = torch.cat([tokens.log_q for tokens in batches])
    positive, share = torch.cat([torch.ones_like(label), torch.zeros_like(label)]), torch.cat([label, 1 - label])
    share *= weight.repeat(2)
    assert found["brier"] == pytest.approx(float((weight * (prob - label) ** 2).sum() / weight.sum()), abs=1e-6)
    for name, score in (("auc", prob), ("auc_q", log_q)):
        expected = sklearn.metrics.roc_auc_score(positive, score.repeat(2), sample_weight=share)
        assert found[name] == pytest.approx(expected, abs=1e-6)


def test_config_and_card_name_the_heads_inputs_and_labels(artifacts, trained_on_rounds):
    written = json.loads((trained_on_rounds / "best" / "config.json").read_text())
    assert (written["labels"], written["mode"], written["drafter"]) == ("rollout", "sampling", "draft")
    assert written["sampling"]["temperature"] == [0.5, 1.0]
    head = load_head(trained_on_rounds / "best", load_lm(str(artifacts.draft)), kind="acceptance")
    assert (head.config.state, head.config.num_blocks, head.config.w_rej) == ("before", 0, 1.0)
    assert (head.config.activation, head.config.standardize, head.config.width) == ("relu", True, 128)
    assert head.config.features == ("log_q", "logit_q", "depth", "repeat", "temperature")
    assert head.config.calibration != (1.0, 0.0)
    card = (trained_on_rounds / "best" / "README.md").read_text()
    assert "ece_platt" in card and "--method online:head=on" in card
    assert "tokens of labeled drafts" in card


def test_heads_of_eagle_chains_are_trained(artifacts, eagle, tmp_path):
    models = {"target": str(artifacts.target), "draft": str(eagle)}
    made = labels.run(
        labels.AcceptanceConfig(
            responses=artifacts.responses,
            target=str(artifacts.target),
            draft=str(eagle),
            output=tmp_path / "labels",
            labels="rollout",
            temperature=(0.0,),
            depth=3,
            limit=12,
            num_threads=1,
        )
    )
    settings = a_config(artifacts, made, tmp_path / "run", **models, max_steps=2)
    best = run(settings)
    identity = drafter_identity(eagle, load_lm(str(artifacts.target)))
    head = load_head(best, load_lm(str(artifacts.target)), kind="acceptance", identity=identity)
    assert "temperature" not in head.config.features
    written = json.loads((best / "config.json").read_text())
    assert (written["target"], written["drafter"], written["mode"]) == (identity, "eagle", "greedy")
    assert "--method online:head=on:drafter=eagle" in (best / "README.md").read_text()
    with pytest.raises(InputError, match="target: found none"):
        run(dataclasses.replace(settings, target=None, output=tmp_path / "other"))
    with pytest.raises(InputError, match=r"made with another draft\.eagle"):
        chain = EagleHead(EagleConfig.for_target(load_lm(str(artifacts.target)).config))
        other = save_head(tmp_path / "other-eagle", chain, {}, "card")
        run(dataclasses.replace(settings, draft=str(other), output=tmp_path / "other"))


def test_training_starts_from_a_head_of_its_shape(artifacts, rollouts, trained_on_rounds, tmp_path):
    head = make_head(a_config(artifacts, rollouts, tmp_path, init=trained_on_rounds / "best"), 32)
    expected = dataclasses.replace(load_head(trained_on_rounds / "best").config, calibration=(1.0, 0.0))
    assert head.config == expected
    torch.manual_seed(0)
    published = save_head(tmp_path / "published", AcceptanceHead(AcceptanceHeadConfig(32)), {}, "card")
    late = make_head(a_config(artifacts, rollouts, tmp_path, init=published), 32)
    assert (late.config.state, late.config.features, late.config.num_blocks) == ("after", (), 3)
    with pytest.raises(InputError, match=r"init: found state before asked of .*expected state after"):
        make_head(a_config(artifacts, rollouts, tmp_path, init=published, state="before"), 32)


def test_options_that_do_not_fit_the_labels_are_errors(artifacts, rollouts, tmp_path):
    wrong = [
        (rollouts, {"mix": 0.1}, r"mix: found 0.1, expected labels of mixed text"),
        (rollouts, {"max_length": 20}, r"max_length: found 20.*label shorter responses"),
        (artifacts.acceptance, {"state": "before"}, r"data: found acceptance labels of mixed text.*--labels rollout"),
        (artifacts.acceptance, {"features": ("log_q",)}, r"data: found .*--labels rollout"),
    ]
    for data, changes, message in wrong:
        with pytest.raises(InputError, match=message):
            run(a_config(artifacts, data, tmp_path / "run", **changes))
