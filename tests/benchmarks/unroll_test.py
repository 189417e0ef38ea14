"""The benchmark of training-time test: both attentions are one function, and its numbers are ratios of its runs."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.benchmarks import unroll_cost
from draftsmith.benchmarks.unroll_cost import UnrollConfig, masked_attention
from draftsmith.launch.cli import main_of
from draftsmith.modules.diagonal import diagonal_attention


def test_the_masked_form_is_the_same_attention():
    query, *pairs = torch.randn(7, 2, 3, 9, 4, dtype=torch.float64).unbind(0)
    first, *own = [(pairs[i], pairs[i + 1]) for i in (0, 2, 4)]
    assert (masked_attention(query, first, own) - diagonal_attention(query, first, own)).abs().max() < 1e-12


def test_its_numbers_are_ratios_of_its_own_runs(tmp_path, monkeypatch):
    peaks = {1: 2.0e6, 3: 3.0e6, 7: 6.0e6}
    monkeypatch.setattr(unroll_cost, "in_new_process", lambda config, passes, masked: peaks[passes] * (1 + masked))
    monkeypatch.setattr(
        unroll_cost,
        "medians",
        lambda steps, *_: {name: json.loads(name)[0] * (1.0 + json.loads(name)[1]) for name in steps},
    )
    config = UnrollConfig(tmp_path, length=8, batch_size=1, hidden=32, repeats=1)
    found = json.loads(unroll_cost.run(config).read_text())
    assert found["7 passes / one, time"] == 7.0 and found["3 passes, diagonal / masked, time"] == 0.5
    assert found["7 passes / one, peak memory"] == 3.0 and found["one pass, peak MB"] == 2.0


def test_a_step_runs_in_a_process_of_its_own(tmp_path):
    assert unroll_cost.in_new_process(UnrollConfig(tmp_path, length=16, batch_size=1, hidden=32), 3, True) >= 0


@pytest.mark.parametrize("setting", ["--repeats", "--batch-size", "--length", "--hidden"])
def test_impossible_settings_are_one_line(tmp_path, capsys, setting):
    assert main_of(UnrollConfig, unroll_cost.run, ["--output", str(tmp_path), setting, "0"]) == 2
    assert "found 0" in capsys.readouterr().err
