"""Muon with AdamW, learning rate schedules, and trainings by the clock."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch
from trainings import Clock
from worlds import tiny_llama_dir

from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.module import LitDrafter
from draftsmith.train.optimizers import NEWTON_SCHULZ, MuonAdamW, TimeLimit, lr_share, orthogonalise
from draftsmith.train.prepare import make_head


@pytest.mark.parametrize("columns", [12, 13])  # 13: long enough for the iteration on the Gram matrix
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-3), (torch.bfloat16, 0.06)])
def test_orthogonalise_keeps_singular_vectors_and_levels_singular_values(dtype, tolerance, columns):
    """Also where one direction has nearly all of the norm, as in momenta of real trainings."""
    values = torch.tensor([[1.0] * 8, [1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.02, 0.02], [1.0] + [0.01] * 7])
    rng = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(3, 8, 8, generator=rng)).Q
    right = torch.linalg.qr(torch.randn(3, columns, 8, generator=rng)).Q
    matrices = left @ values.diag_embed() @ right.mT
    inner = left.mT @ orthogonalise(matrices, dtype).float() @ right
    levelled = inner.diagonal(dim1=1, dim2=2)
    assert (levelled > 0.65 - tolerance).all() and (levelled < 1.35 + tolerance).all()
    assert (inner - levelled.diag_embed()).abs().max() < tolerance
    for matrix, expected in zip(matrices, orthogonalise(matrices, dtype), strict=True):
        torch.testing.assert_close(orthogonalise(matrix.mT, dtype).mT, expected)


def test_rounding_in_bfloat16_pushes_no_value_out_of_the_polynomials_interval():
    """Past its end they rise steeply: without the margin these values pass 1.4, and those of real momenta 4."""
    rng = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(256, 256, generator=rng)).Q for _ in range(2))
    matrix = left @ torch.linspace(1, 0.02, 256).diag() @ right.mT
    assert torch.linalg.svdvals(orthogonalise(matrix, torch.bfloat16).float()).max() < 1.4


def test_vectors_move_as_torchs_adamw_moves_them_also_after_a_reload():
    """Without a decay: that is the matrices'."""
    ours, theirs = (torch.nn.Parameter(torch.arange(4.0)) for _ in range(2))
    opt = MuonAdamW([], [ours], lr=0.1, betas=(0.9, 0.98), weight_decay=0.3)
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(6):
        for param in (ours, theirs):
            param.grad = torch.sin(param.detach() + step)
        opt.step()
        reference.step()
        if step == 2:
            state = opt.state_dict()
            opt = MuonAdamW([], [ours], lr=0.1, betas=(0.9, 0.98), weight_decay=0.3)
            opt.load_state_dict(state)
    torch.testing.assert_close(ours, theirs)


def test_matrices_move_by_nesterovs_momentum():
    """Jordan 2024: m = 0.95 m + 0.05 g, then a step along 0.95 m + 0.05 g, whose singular values, divided by the fourth
    root of the sum of their fourth powers, went through the polynomials."""
    rng, lr, beta = torch.Generator().manual_seed(0), 0.01, 0.95
    matrix = torch.nn.Parameter(torch.randn(6, 10, generator=rng, dtype=torch.float64))
    opt = MuonAdamW([matrix], [], lr=lr, momentum=beta)
    expected, moment = matrix.detach().clone(), torch.zeros(6, 10, dtype=torch.float64)
    for _ in range(4):
        matrix.grad = torch.randn(6, 10, generator=rng, dtype=torch.float64)
        opt.step()
        moment = beta * moment + (1 - beta) * matrix.grad
        left, values, right = torch.linalg.svd(beta * moment + (1 - beta) * matrix.grad, full_matrices=False)
        values = values / (values**4).sum() ** 0.25
        for a, b, c in NEWTON_SCHULZ:
            values = a * values + b * values**3 + c * values**5
        expected -= lr * 0.2 * 10**0.5 * left @ values.diag() @ right
    torch.testing.assert_close(matrix.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dflash", {}),
        ("draft", {"train_embeddings": True}),
        ("dspark", {"markov_rank": 16}),
        ("eagle", {}),
        ("eagle3", {"train_lm_head": True, "draft_vocab": 100}),
        ("hydra", {"lm_head": "own"}),
        ("medusa", {"lm_head": "own"}),
    ],
)
def test_muon_moves_matrices_from_states_to_states_alone(kind, options, tmp_path):
    """Not what has a row for each token, nor a single row: torch.optim.Muon's own advice, and nanochat's rule."""
    path = str(tiny_llama_dir(tmp_path, layers=8))
    target = load_lm(path)
    settings = drafter_config(kind)(data=tmp_path, output=tmp_path, target=path, optimizer="muon", **options)
    head = make_head(settings, target, lambda: torch.arange(target.info.vocab_size))
    optimizer = LitDrafter(head, target, settings).configure_optimizers()
    moved = {p: group["orthogonal"] for group in optimizer.param_groups for p in group["params"]}
    assert set(moved) == {p for p in head.parameters() if p.requires_grad}
    # No other size of these heads is the vocabulary's, 100 or 1.
    sizes = {target.info.vocab_size, 100, 1}
    for parameter, orthogonal in moved.items():
        assert orthogonal == (parameter.ndim == 2 and sizes.isdisjoint(parameter.shape))
    assert any(moved.values())


def test_learning_rates_rise_linearly_to_the_peak_and_fall_by_their_schedule():
    shares = [lr_share(step, 100, "cosine", 0.1) for step in range(11)]
    assert shares == pytest.approx([(step + 1) / 11 for step in range(11)])
    shares = [lr_share(step, 100, "cosine", 0.0) for step in (0, 25, 50, 100)]
    assert shares == pytest.approx([1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, 0.0])
    assert lr_share(4, 10, "linear", 0.0) == pytest.approx(0.6)
    assert lr_share(9, 10, "constant", 0.0) == 1.0


def steps_of(limit: TimeLimit, clock: Clock, step_s: float, validates: tuple[int, float], done: int = 0) -> list[float]:
    """Run steps until the plan ends and return the planned share of the training at each; the last step validates too.

    validates: steps between validations, and their seconds.
    """
    shares, total = [], limit.total_steps(done)
    while done < total:
        shares.append(lr_share(done, total, "linear", 0.0))
        trial = limit.wants_trial()
        clock.now += step_s
        done += 1
        if done % validates[0] == 0 or done == total or trial:
            clock.now += validates[1]
            limit.pause(validates[1])
        total = limit.total_steps(done) if done < total else total
    return shares


@pytest.mark.parametrize(("every", "seconds"), [(7, 6.0), (1000, 6.0), (1000, 35.0)])
def test_the_last_validation_is_inside_the_time(every, seconds):
    """Training ends in time with and without earlier validations, after 20 s of loading; the learning rate nearly
    reaches 0."""
    clock = Clock()
    limit = TimeLimit(2.0, since=clock(), clock=clock)
    clock.now += 20
    limit.begin()
    shares = steps_of(limit, clock, 1.5, (every, seconds))
    assert 100 < clock.now - 1000 <= 120
    assert all(later <= earlier + 0.05 for earlier, later in itertools.pairwise(shares[1:]))
    assert shares[0] > 0.99 and shares[-1] < 0.12


def test_a_resumed_training_has_the_rest_of_the_time():
    clock = Clock()
    limit = TimeLimit(2.0, since=clock(), clock=clock)
    limit.begin()
    for done in range(20):
        assert limit.total_steps(done) > done + 1
        clock.now += 2.0
    state = limit.state()
    assert state["spent"] == 40

    clock.now += 5000
    again = TimeLimit(2.0, since=clock(), clock=clock)
    again.load(state)
    began = clock.now
    assert again.begin() == 40
    shares = steps_of(again, clock, 2.0, (1000, 5.0), done=20)
    assert 60 < clock.now - began <= 80
    # It stands where the first run has left it: a third is done, 40 s of 120 less what is kept for the end.
    assert shares[0] == pytest.approx(1 - 40 / (120 * 0.85), abs=0.03)


def test_a_training_by_the_clock_is_validated_saved_and_finished(artifacts, tmp_path):
    config = drafter_config("medusa")(
        data=artifacts.features, target=str(artifacts.target), output=tmp_path / "head", minutes=0.02, batch_size=4,
        tau_prompts=0, loggers=("csv",), val_share=0.3,
    )  # fmt: skip
    best = run(config)
    finished = json.loads((tmp_path / "head" / "training.json").read_text())
    assert finished["steps"] >= 1 and finished["last"] and best == tmp_path / "head" / "best"
    assert json.loads((best / "manifest.json").read_text())["step"] <= finished["steps"]
    assert run(config) == best, "it is finished"
    assert config.num_steps(per_epoch=10) > config.epochs * 10, "a recipe's epochs do not count"
    with pytest.raises(InputError, match=r"minutes: found 0\.02 with max_steps 3"):
        dataclasses.replace(config, max_steps=3)
