"""Means over ranks that have other numbers to add; tests/train/ranks_test.py has real ranks, one of them with none."""

from __future__ import annotations

import torch

from draftsmith.modules.types import LossOutput
from draftsmith.train import metrics
from draftsmith.train.metrics import Means


def test_ranks_add_up_what_each_has(monkeypatch):
    """No answer of the second rank is as long as a draft; the third has no sample."""
    ranks = [Means(), Means(), Means()]
    added = [{"loss": (6.0, 2.0), "chain_length": (9.0, 3.0)}, {"loss": (1.0, 5.0)}]
    for means, sums in zip(ranks, added, strict=False):
        values = [{name: torch.tensor(pair[side]) for name, pair in sums.items()} for side in (0, 1)]
        means.add(LossOutput(torch.zeros(()), *values))
    own = [means.state() for means in ranks]
    monkeypatch.setattr(metrics, "gathered", lambda mine: own)
    for means in ranks:
        assert means.take() == {"loss": 7.0 / 7.0, "chain_length": 9.0 / 3.0}
