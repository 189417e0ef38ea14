"""What the benchmark of the losses compares is one function, and its numbers are ratios of its runs."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.benchmarks import loss_cost
from draftsmith.benchmarks.loss_cost import BASELINE, LossCostConfig, eagle3_losses, eagle_losses


@pytest.mark.parametrize("drafted", [0, 5])
def test_both_forms_have_one_gradient(tmp_path, drafted):
    torch.manual_seed(0)
    config = LossCostConfig(tmp_path, tokens=7, hidden=4, vocab=11, drafted=drafted)
    for calls in (eagle_losses(config), eagle3_losses(config)):
        plain = calls.pop(BASELINE)()
        assert plain.abs().max() > 1e-3
        for call in calls.values():
            torch.testing.assert_close(call(), plain, rtol=1e-4, atol=1e-5)


def test_its_numbers_are_ratios_of_its_own_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_cost, "medians", lambda calls, *_, **__: dict(zip(calls, (6.0, 3.0, 2.0), strict=True)))
    numbers = json.loads(loss_cost.run(LossCostConfig(tmp_path, tokens=2, hidden=4, vocab=5)).read_text())
    assert numbers[f"EAGLE-3, {BASELINE} / logged steps"] == 2 and numbers[f"EAGLE, {BASELINE} / other steps"] == 3
