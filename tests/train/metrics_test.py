"""Means over ranks, and numbers that are not finite: the run ends and names whose they are, and in which samples."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from trainings import a_module, fake_trainer, micro_batch, texts, validate

from draftsmith.data.store.datasets import collate_acceptance, collate_features, open_dataset
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.pretrained.heads import FrozenDrafter
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import LossOutput
from draftsmith.train import acceptance, metrics
from draftsmith.train.acceptance import LitAcceptance, Reader
from draftsmith.train.config import TrainAcceptanceConfig
from draftsmith.train.data import MicroBatch
from draftsmith.train.metrics import BadSteps, Means


def test_ranks_add_up_what_each_has(monkeypatch):
    """No answer of the second rank is as long as a draft; the third has no sample."""
    ranks = [Means(), Means(), Means()]
    added = [{"loss": (6.0, 2.0), "known": (9.0, 3.0)}, {"loss": (1.0, 5.0)}]
    for means, sums in zip(ranks, added, strict=False):
        values = [{name: torch.tensor(pair[side]) for name, pair in sums.items()} for side in (0, 1)]
        means.add(LossOutput(torch.zeros(()), *values))
    own = [means.state() for means in ranks]
    monkeypatch.setattr(metrics, "gathered", lambda mine: own)
    for means in ranks:
        assert means.take() == {"loss": 7.0 / 7.0, "known": 9.0 / 3.0}


def acceptance_module(artifacts, tmp_path) -> LitAcceptance:
    settings = TrainAcceptanceConfig(data=artifacts.acceptance, head=str(artifacts.draft), output=tmp_path)
    reader = Reader(FrozenDrafter(load_lm(str(artifacts.draft)), {}))
    module = LitAcceptance(acceptance.make_head(settings, 32), reader, settings)
    module.trainer = fake_trainer(open_dataset(artifacts.acceptance))
    return module


def part_of(batch) -> MicroBatch:
    return micro_batch(batch, int(batch.loss_mask.sum()))


def acceptance_part(artifacts, count: int) -> MicroBatch:
    data = open_dataset(artifacts.acceptance)
    return part_of(collate_acceptance([data.item(i, 0) for i in range(count)]))


class Spoiled:
    """A model with NaN in its states, in the second row."""

    def __init__(self, lm):
        self._lm = lm

    def __getattr__(self, name):
        return getattr(self._lm, name)

    def features(self, input_ids, position_ids=None, aux_layers=()):
        states = self._lm.features(input_ids, position_ids, aux_layers).clone()
        states[1, :, 0] = math.nan
        return states


def end_of_step(module, part) -> tuple[bool, float]:
    """Return whether a step of this part is bad."""
    inputs, states = module.read(part)
    output = module.loss(inputs, module.train_step(part))
    module.state.bad_steps.add(output.loss, part.samples, states)
    return module.state.bad_steps.agree(None, lambda index: f"sample {index}")


def named(module, part):
    """A training step's error."""
    with pytest.raises(NonFinite) as caught:
        end_of_step(module, part)
    return caught.value


def test_a_target_that_reads_nan_ends_the_training_and_the_validation(artifacts, tmp_path):
    data, module = texts(artifacts), a_module(artifacts, tmp_path, noise=0.0)
    part = part_of(collate_features([data[i] for i in range(3)]))
    assert end_of_step(module, part) == (False, 0.0)
    module.source.target = Spoiled(module.target)
    error = named(module, part)
    assert error.model == "target" and error.prompt == "sample 0, sample 1, sample 2"
    with pytest.raises(NonFinite, match="hidden states of prompt 0000000, 0000001, 0000002"):
        validate(module, [part])


def test_a_draft_that_reads_nan_ends_the_training_of_its_acceptance_head(artifacts, tmp_path):
    module, part = acceptance_module(artifacts, tmp_path), acceptance_part(artifacts, 3)
    module.reader = Reader(dataclasses.replace(module.reader.drafter, lm=Spoiled(module.reader.drafter.lm)))
    error = named(module, part)
    assert error.model == "draft" and error.prompt == "sample 0, sample 1, sample 2"


def test_only_a_loss_that_nothing_given_explains_is_a_bad_step():
    steps, finite, broken = BadSteps(frozen="draft"), torch.ones(4, 3), torch.full((4, 3), math.inf)
    steps.add(torch.tensor(math.nan), range(2), finite)
    assert steps.agree(None, str)[0] and steps.count == 1 and steps.samples == ["0", "1"]
    # What was not finite and did not reach the loss is no error.
    steps.add(torch.tensor(1.0), range(2, 3), broken)
    assert not steps.agree(None, str)[0]
    # Of several parts those count whose own loss is none; samples are named up to a few.
    for number, states in enumerate([finite, broken]):
        steps.add(torch.tensor(math.nan), range(10 * number, 10 * number + 9), states, begins_step=number == 0)
    with pytest.raises(NonFinite, match="10, 11, 12, 13, 14 and 4 more") as caught:
        steps.agree(None, str)
    assert caught.value.model == "draft" and steps.count == 1
