"""What goes to a device in one transfer, and losses that ask a device for nothing: on `meta`, which has no answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import tiny_llama_dir

from draftsmith.data.store.datasets import collate_features, pack_features
from draftsmith.modules import transfer
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.transfer import to_device_together

META = torch.device("meta")
LENGTHS = (9, 2, 5)


def test_several_sets_of_numbers_travel_together(monkeypatch):
    sent: list[Tensor] = []
    monkeypatch.setattr(transfer, "to_device", lambda values, device: sent.append(values) or values)
    values = [[3, 1], [[1, 2, 3], [4, 5, 6]], [], [7]]
    found = to_device_together(values, META)
    assert len(sent) == 1 and [part.tolist() for part in found] == values
    assert [part.tolist() for part in to_device_together(values, torch.device("cpu"))] == values


def moved(batch: Any) -> Any:
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return dataclasses.replace(
        batch, **{name: value.to(META) for name, value in fields.items() if isinstance(value, Tensor)}
    )


@pytest.mark.parametrize("collate", [collate_features, pack_features])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("eagle", {"noise": 0.0}),
        ("eagle", {"noise": 0.0, "ttt_steps": 3}),
        ("eagle3", {}),
        ("eagle3", {"normalizer": "tokens", "draft_vocab": 64}),
    ],
)
def test_a_step_of_training_asks_the_device_for_nothing(tmp_path, kind, changes, collate):
    """Forward and backward; what the host has to know it counted while it had the batch."""
    lm = load_lm(str(tiny_llama_dir(tmp_path, layers=8)))
    target = LlamaLM(lm.model.to(META), lm.info)
    drafter = head_class(kind)
    settings = drafter.Settings(**changes)
    head = drafter(drafter.new_config(settings, lm.config)).to(META)
    width = len(drafter.loss_layers(head.config, 8)) or 1
    items = [
        {
            "input_ids": torch.arange(length),
            "loss_mask": torch.arange(length) > 2,
            "features": torch.zeros(length, width * lm.info.hidden_size),
        }
        for length in LENGTHS
    ]
    batch = collate(items)
    rows, count = drafter.logit_rows(batch, settings), drafter.loss_count(batch, settings)
    step = TrainStep(0, 10, LENGTHS, (1, 2, 3), logit_rows=rows, loss_count=count)
    output = head.loss(moved(batch), target, settings, step)
    output.loss.backward()
    assert output.loss.is_meta and any(parameter.grad is not None for parameter in head.parameters())
    with pytest.raises((NotImplementedError, RuntimeError)):  # a count that it does not have must be asked for
        head.loss(moved(batch), target, settings, dataclasses.replace(step, logit_rows=None))
