"""`train acceptance` on labels of real rounds: inputs, weights, metrics, card."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import sklearn.metrics
import torch
from safetensors.torch import load_file
from trained_runs import fake_trainer, step_loss, validate

from draftsmith.data import acceptance as labels
from draftsmith.data.store.datasets import collate_rollouts, open_dataset
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.heads import FrozenDrafter, drafter_identity, load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.acceptance import (
    LitAcceptance,
    RolloutReader,
    StoredDataset,
    collate_stored,
    make_head,
    num_loss_tokens,
)
from draftsmith.train.acceptance_fitting import predicted
from draftsmith.train.command import run
from draftsmith.train.config import TrainAcceptanceConfig
from draftsmith.train.data import MicroBatch, SampleKey, Samples

# Of the labels: conftest.py.
DEPTH = 4
QUICK = {"lr": 5e-3, "max_steps": 8, "batch_size": 6, "val_share": 0.25, "loggers": ("csv",)}


@pytest.fixture(scope="module")
def eagle(artifacts, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    target = load_lm(str(artifacts.target))
    head = EagleHead(EagleConfig.for_target(target.config))
    return save_head(tmp_path_factory.mktemp("eagle") / "head", head, {"target": target.info.identity}, "card")


def config(artifacts, rollouts, output: Path, **changes) -> TrainAcceptanceConfig:
    return TrainAcceptanceConfig(data=rollouts, output=output, **{"draft": str(artifacts.draft), **QUICK, **changes})


@pytest.fixture(scope="module")
def trained(artifacts, rollouts, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "run"
    run(config(artifacts, rollouts, output))
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


def a_module(artifacts, rollouts, tmp_path) -> LitAcceptance:
    settings = config(artifacts, rollouts, tmp_path)
    head = make_head(settings, 32)
    reader = RolloutReader(FrozenDrafter(load_lm(str(artifacts.draft)), {}), head.config, DEPTH)
    module = LitAcceptance(head, reader, settings)
    module.trainer = fake_trainer(open_dataset(rollouts))
    return module


def a_part(module: LitAcceptance, rollouts, rows) -> MicroBatch:
    """Return a batch of answers, as in validation."""
    samples = Samples(open_dataset(rollouts), rows)
    answers = StoredDataset(module.reader.store(samples, "rows"), samples, None)
    batch = collate_stored([answers.item(number, 0) for number in range(len(rows))])
    tokens = num_loss_tokens(batch)
    return MicroBatch(batch, tuple(SampleKey(0, row) for row in rows), tuple(answers.lengths), tokens)


def test_the_loss_is_the_weighted_mean_and_reaches_every_weight(artifacts, rollouts, tmp_path):
    module = a_module(artifacts, rollouts, tmp_path)
    part = a_part(module, rollouts, (0, 1))
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


def test_accumulating_gives_the_same_weights(artifacts, rollouts, tmp_path, trained):
    """Though parts have other sums of weights than their numbers of tokens."""
    run(config(artifacts, rollouts, tmp_path / "run", accumulate=4))
    ours = load_file(trained / "last" / "model.safetensors")
    theirs = load_file(tmp_path / "run" / "last" / "model.safetensors")
    # As for mixed labels: 8 AdamW steps of 5e-3 on gradients that differ by 1e-7 of their size.
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4, rtol=0) for name in ours)


def test_validation_weighs_tokens_by_how_often_they_are_reached(artifacts, rollouts, tmp_path):
    module = a_module(artifacts, rollouts, tmp_path)
    parts = [a_part(module, rollouts, rows) for rows in ((0, 1), (2, 4, 5))]
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


def test_config_and_card_name_the_heads_inputs_and_labels(artifacts, trained):
    written = json.loads((trained / "best" / "config.json").read_text())
    assert (written["labels"], written["mode"], written["drafter"]) == ("rollout", "sampling", "draft")
    assert written["sampling"]["temperature"] == [0.5, 1.0]
    head = load_head(trained / "best", load_lm(str(artifacts.draft)), kind="acceptance")
    assert (head.config.state, head.config.num_blocks, head.config.w_rej) == ("before", 0, 1.0)
    assert (head.config.activation, head.config.standardize, head.config.width) == ("relu", True, 128)
    assert head.config.features == ("log_q", "logit_q", "depth", "repeat", "temperature")
    assert head.config.calibration != (1.0, 0.0)
    card = (trained / "best" / "README.md").read_text()
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
    settings = config(artifacts, made, tmp_path / "run", **models, max_steps=2)
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


def test_training_starts_from_a_head_of_its_shape(artifacts, rollouts, trained, tmp_path):
    head = make_head(config(artifacts, rollouts, tmp_path, init=trained / "best"), 32)
    expected = dataclasses.replace(load_head(trained / "best").config, calibration=(1.0, 0.0))
    assert head.config == expected
    torch.manual_seed(0)
    published = save_head(tmp_path / "published", AcceptanceHead(AcceptanceHeadConfig(32)), {}, "card")
    late = make_head(config(artifacts, rollouts, tmp_path, init=published), 32)
    assert (late.config.state, late.config.features, late.config.num_blocks) == ("after", (), 3)
    with pytest.raises(InputError, match=r"init: found state before asked of .*expected state after"):
        make_head(config(artifacts, rollouts, tmp_path, init=published, state="before"), 32)


def test_options_that_do_not_fit_the_labels_are_errors(artifacts, rollouts, tmp_path):
    wrong = [
        (rollouts, {"mix": 0.1}, r"mix: found 0.1, expected labels of mixed text"),
        (rollouts, {"max_length": 20}, r"max_length: found 20.*label shorter responses"),
        (artifacts.acceptance, {"state": "before"}, r"data: found acceptance labels of mixed text.*--labels rollout"),
        (artifacts.acceptance, {"features": ("log_q",)}, r"data: found .*--labels rollout"),
    ]
    for data, changes, message in wrong:
        with pytest.raises(InputError, match=message):
            run(config(artifacts, data, tmp_path / "run", **changes))
