"""Warnings about length: planted falls, flat heads, and the rounds of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainings import config, micro_batch

from draftsmith.modules.types import FeatureBatch, LossOutput
from draftsmith.train.command import run
from draftsmith.train.lengths import fall_by_length, length_warning, rounds_of


def planted(rng: np.random.Generator, texts: int, knee: int, below: float, beyond: float) -> np.ndarray:
    """Rounds of texts of 100 to 4,000 tokens, each with a level of its own, that fall behind a length."""
    rows = []
    for text in range(texts):
        context = np.arange(8, int(rng.integers(100, 4000)), 3)
        level = np.where(context < knee, below, beyond) - 1 + rng.normal(0, 0.3)
        rows.append(np.stack([np.full(len(context), text), context, 1 + rng.poisson(np.maximum(level, 0))], -1))
    return np.concatenate(rows).astype(float)


@pytest.mark.parametrize("knee", [512, 1024, 2048])
def test_a_planted_fall_is_found_where_it_is(knee):
    rounds = planted(np.random.default_rng(knee), 40, knee, 3.1, 2.2)
    fall = fall_by_length(rounds)
    assert fall is not None and fall[0] == knee
    assert fall[1:3] == pytest.approx((3.1, 2.2), abs=0.2) and fall[2] / fall[1] < fall[3] < 0.9
    said = length_warning(rounds, 4000, 8192, 0)
    assert said.startswith(f"warning: tokens per round fall from {fall[1]:.2f} below {knee:,} tokens of context to")
    assert said.endswith("Train on longer rows (--max-length), or with --window N")


def test_flat_heads_and_noise_give_no_warning():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        assert fall_by_length(planted(rng, int(rng.integers(5, 40)), 1024, 2.6, 2.6)) is None
    # A fall that is real and less than a tenth, or in too few texts to tell.
    assert fall_by_length(planted(np.random.default_rng(0), 200, 1024, 2.6, 2.45)) is None
    assert fall_by_length(planted(np.random.default_rng(0), 7, 1024, 3.1, 2.0)) is None
    assert fall_by_length(np.zeros((0, 3))) is None


def test_the_interval_is_that_of_a_bootstrap_over_texts():
    rounds = planted(np.random.default_rng(5), 60, 1024, 3.1, 2.2)
    fall, rng, ratios = fall_by_length(rounds), np.random.default_rng(0), []
    by_text = [rounds[rounds[:, 0] == text] for text in range(60)]
    for _ in range(400):
        drawn = np.concatenate([by_text[i] for i in rng.integers(60, size=60)])
        far = drawn[:, 1] >= 1024
        ratios.append(drawn[far, 2].mean() / drawn[~far, 2].mean())
    assert fall is not None and fall[3] == pytest.approx(np.percentile(ratios, 97.5), abs=0.02)


def test_contexts_far_longer_than_the_rows_are_said_to_be_untested():
    none = np.zeros((0, 3))
    assert "the longest row has 1,024 tokens and the target reads 8,192" in length_warning(none, 1024, 8192, 0)
    assert "--window" not in length_warning(none, 1024, 8192, None)
    assert length_warning(none, 1025, 8192, 0) == length_warning(none, 1024, 8192, 512) == ""


def test_a_training_whose_rounds_fall_ends_with_the_warning(artifacts, tmp_path, monkeypatch, capsys):
    """The rounds of each validation batch are planted: of a head that falls, and of a flat one."""
    for name, beyond in (("falls", 2.2), ("flat", 3.1)):
        rounds = torch.tensor(planted(np.random.default_rng(1), 40, 1024, 3.1, beyond))
        monkeypatch.setattr("draftsmith.train.module.rounds_of", lambda output, batch, rounds=rounds: rounds)
        run(config(artifacts, tmp_path / name, tau_prompts=0, max_steps=1, val_every=1))
        said = capsys.readouterr().out
        assert ("warning: tokens per round fall from 3." in said) == (name == "falls"), said


@pytest.mark.parametrize("packed", [False, True])
def test_rounds_of_a_batch_belong_to_their_texts(packed):
    lengths = (5, 3)
    positions = [*range(5), *range(3)] if packed else [*range(5), *range(5)]
    shape = (1, 8) if packed else (2, 5)
    ids = torch.zeros(shape, dtype=torch.long)
    mask = torch.ones(shape, dtype=torch.bool)
    data = FeatureBatch(ids, None, mask, torch.tensor(positions).view(shape), lengths=lengths if packed else None)
    batch = micro_batch(data, 1, indices=[7, 4][: len(lengths)])
    output = LossOutput(torch.zeros(()), rounds=(torch.tensor([1, 4, 6]), torch.tensor([1.0, 2.0, 3.0])))
    assert rounds_of(output, batch).tolist() == [[7, 2, 1], [7, 5, 2], [4, 2, 3]]
    assert rounds_of(LossOutput(torch.zeros(())), batch).shape == (0, 3)
