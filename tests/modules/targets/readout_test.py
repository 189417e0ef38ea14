"""Readouts with every step against their formula."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.modules.targets.readout import Readout


def test_logits_are_scaled_before_they_are_bounded():
    """softcap * tanh(scale * product / softcap); no published family has both."""
    hidden, weight = torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, 0.5], [1.0, 4.0]])
    products = [2 - 1.5, 1 - 12.0]
    found = Readout("none", scale=0.25, softcap=2.0).logits(hidden, weight)
    assert found[0].tolist() == pytest.approx([2 * math.tanh(0.25 * product / 2) for product in products], rel=1e-6)
