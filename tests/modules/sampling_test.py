"""Warping against a formula in float64 and transformers' own warpers; draws at the edges of the unit interval."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.formulas import warped
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.modules.finite import NO_TOKEN, NonFinite, checked, first_broken
from draftsmith.modules.sampling import (
    TorchSource,
    best_token,
    best_tokens,
    draw_rows,
    pick,
    probabilities,
    residual,
    top_values,
)
from draftsmith.modules.types import InputError, SamplingParams

LARGEST_UNIFORM = 1 - 2**-53  # the largest float64 below one


# Every pair of values once.
SETTINGS = [(0.3, 0, 0.4), (0.3, 1, 0.9), (0.3, 7, 1.0), (0.3, 99, 0.4), (1.0, 0, 0.9), (1.0, 1, 1.0), (1.0, 7, 0.4),
            (1.0, 99, 0.9), (1.7, 0, 1.0), (1.7, 1, 0.4), (1.7, 7, 0.9), (1.7, 99, 1.0)]  # fmt: skip


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_probabilities_are_the_definitions_and_those_of_transformers(temperature, top_k, top_p):
    logits, params = (
        3 * torch.randn(8, 50, generator=torch.Generator().manual_seed(1)),
        SamplingParams(temperature, top_k, top_p),
    )
    for row, distribution in zip(logits.double(), probabilities(logits.double(), params), strict=True):
        assert distribution.tolist() == pytest.approx(warped(row, params), abs=1e-12)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    distributions = probabilities(logits, params)
    assert torch.equal(distributions > 0, scores.softmax(-1) > 0)
    torch.testing.assert_close(distributions, scores.softmax(-1), atol=1e-6, rtol=0)  # float32 rounding of a sum of 50


def test_ties_at_the_top_k_boundary_are_all_kept_as_in_transformers():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    distribution = probabilities(logits, SamplingParams(1.0, top_k=2))
    assert (distribution > 0).tolist() == [[True, True, True, True, False]]
    assert torch.equal(distribution > 0, TopKLogitsWarper(2)(None, logits) > -torch.inf)


def test_ties_at_the_top_p_boundary_keep_the_smallest_set_from_the_lowest_index():
    logits = torch.log(torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2]], dtype=torch.float64))
    distribution = probabilities(logits, SamplingParams(1.0, top_p=0.5))
    torch.testing.assert_close(distribution, torch.tensor([[1, 1, 1, 0, 0]], dtype=torch.float64) / 3)
    # transformers breaks ties by its sort; how many survive is defined.
    assert (TopPLogitsWarper(0.5)(None, logits) > -torch.inf).sum() == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_nucleus_ends_with_the_token_that_brings_its_mass_to_top_p_exactly(dtype):
    logits = torch.full((1, 11), -torch.inf, dtype=dtype)
    logits[:, 2:10] = 1.5  # an eighth each: no rounding decides
    for top_p, expected in [(k / 8 + more, k + (more > 0)) for k in range(1, 8) for more in (0, 1e-3)]:
        distribution = probabilities(logits, SamplingParams(1.0, top_p=top_p))
        assert distribution[0].nonzero()[:, 0].tolist() == list(range(2, 2 + expected))
        if dtype != torch.bfloat16:
            assert int((TopPLogitsWarper(top_p)(None, logits) > -torch.inf).sum()) == expected


def test_greedy_is_one_hot_on_the_lowest_index_of_the_maximum():
    assert probabilities(torch.tensor([1.0, 5.0, 5.0]), SamplingParams()).tolist() == [0, 1, 0]


def test_half_precision_logits_are_widened_before_the_softmax():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    distribution = probabilities(logits, SamplingParams(1.0))
    assert distribution.dtype == torch.float32
    torch.testing.assert_close(distribution.double(), logits.double().softmax(-1), atol=1e-7, rtol=0)
    assert (logits.softmax(-1).double() - logits.double().softmax(-1)).abs().sum() / 2 > 1e-4  # what it prevents


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0}],
)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@given(st.lists(st.sampled_from([0.0, 1e-20, 0.1, 1.0, 3.0]), min_size=1, max_size=9), st.floats(0, LARGEST_UNIFORM))
@settings(max_examples=200, deadline=None)
def test_any_distribution_and_any_uniform_draw_a_possible_token(weights, uniform):
    probs = torch.tensor(weights)
    if probs.sum() == 0:
        return
    probs = probs / probs.sum()
    rows = draw_rows(torch.stack([probs, probs.flip(0)]), torch.tensor([uniform, uniform], dtype=torch.float64))
    assert probs[pick(probs, uniform)] > 0 and probs[rows[0]] > 0 and probs.flip(0)[rows[1]] > 0


def test_a_source_repeats_itself_and_its_accept_draws_have_the_right_odds():
    first, second = TorchSource(5), TorchSource(5)
    assert [first.uniform() for _ in range(600)] == [second.uniform() for _ in range(600)]
    assert not any(first.accept(0.0) for _ in range(300)) and all(first.accept(1.0) for _ in range(300))
    heads = sum(first.accept(0.3) for _ in range(20_000))
    assert abs(heads - 6000) < 5 * (20_000 * 0.21) ** 0.5  # plumbing only: five standard deviations, one seed


@pytest.mark.parametrize(("size", "count"), [(7, 10), (8192, 1), (8193, 60), (32000, 10), (32032, 60)])
def test_top_values_are_those_of_a_sort(size, count):
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    values, indices = top_values(rows, min(count, size))
    ordered = rows.sort(dim=-1, descending=True)
    assert torch.equal(values, ordered.values[:, :count]) and torch.equal(indices, ordered.indices[:, :count])


def drawn_by(probs: torch.Tensor, uniform: float) -> int:
    """What both draws give."""
    row = draw_rows(probs[None], torch.tensor([uniform], dtype=torch.float64))
    assert int(row) == pick(probs, uniform)
    return int(row)


def end_of(probs: torch.Tensor, token: int) -> float:
    """The largest uniform that draws `token` or one before it, to the last bit of a float64."""
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if pick(probs, middle) <= token else (low, middle)
    return low


def test_the_parts_of_the_unit_interval_are_the_probabilities():
    """All of them, by bisection, against exact sums of the float32 numbers."""
    probs = (4 * torch.randn(40, generator=torch.Generator().manual_seed(0))).softmax(-1)
    probs[[3, 17, 39]] = 0
    exact = [Fraction(p) for p in probs.tolist()]
    ends = [end_of(probs, token) for token in range(len(probs))]
    for token, (start, end) in enumerate(zip([0.0, *ends], ends, strict=False)):
        assert abs(end - start - exact[token] / sum(exact)) < 1e-12
    assert {
        drawn_by(probs, (start + end) / 2) for start, end in zip([0.0, *ends], ends, strict=False) if end > start
    } == {token for token, p in enumerate(exact) if p}


@pytest.mark.parametrize(("size", "spread"), [(32000, 1.0), (128256, 2.5), (151936, 4.0)])
def test_every_token_of_a_large_vocabulary_can_be_drawn(size, spread):
    """In float32 a third of 128k tokens and two thirds of 152k were beyond reach, whatever the uniform."""
    probs = (spread * torch.randn(size, generator=torch.Generator().manual_seed(0))).softmax(-1)
    ends = probs.numpy().astype(np.longdouble).cumsum()
    middles = (ends - probs.numpy() / 2) / ends[-1]
    # Sums of 152k numbers in float64 are right to some 1e-13, and where a part begins no more than that.
    order = probs.argsort()
    seen = order[probs[order] > 1e-12].tolist()
    assert float(probs[probs <= 1e-12].double().sum()) < 1e-7
    for token in [*seen[:: len(seen) // 60], *seen[:60]]:
        assert drawn_by(probs, float(middles[token])) == token
    for token in order[probs[order] > 1e-14][:10].tolist():
        width = end_of(probs, token) - end_of(probs, token - 1)
        assert abs(width - float(probs[token]) / float(ends[-1])) < 1e-15


BROKEN = [[math.nan, 1, 2], [2, 1, math.nan], [1, math.inf, 2], [math.inf, -math.inf, math.nan], [-math.inf] * 3]
COLD = SamplingParams(1e-39)
MODES = [
    SamplingParams(),
    SamplingParams(1.0),
    COLD,
    SamplingParams(0.5, 1),
    SamplingParams(2.0, 2),
    SamplingParams(1.0, 0, 0.5),
]


@pytest.mark.parametrize(
    ("logits", "dtype"),
    [*((row, torch.float32) for row in BROKEN), (BROKEN[0], torch.bfloat16), (BROKEN[2], torch.float64)],
)
def test_nothing_is_drawn_from_numbers_that_are_none(logits, dtype):
    row = torch.tensor(logits, dtype=dtype)
    assert best_token(row) == NO_TOKEN
    rows = torch.stack([torch.zeros_like(row), row])
    assert best_tokens(rows).tolist() == [0, NO_TOKEN]
    for params in MODES:
        distributions = probabilities(rows, params)
        assert distributions[0].isfinite().all() and distributions[1].isnan().any()
        for uniform in (0.0, 0.5, LARGEST_UNIFORM):
            assert pick(distributions[1], uniform) == NO_TOKEN
            drawn = draw_rows(distributions, torch.full((2,), uniform, dtype=torch.float64))
            assert drawn[0] >= 0 and drawn[1] == NO_TOKEN
        whole = distributions[0]
        for distribution in (residual(distributions[1], whole), residual(whole, distributions[1])):
            assert pick(distribution, 0.5) == NO_TOKEN


def test_masked_logits_are_legal():
    row = torch.tensor([-math.inf, 1.0, -math.inf, 2.0])
    for params in (*MODES, SamplingParams(1e30), SamplingParams(1.0, 3)):
        distribution = probabilities(row, params)
        assert distribution[[0, 2]].tolist() == [0, 0] and abs(float(distribution.sum()) - 1) < 1e-6
        assert pick(distribution, LARGEST_UNIFORM) == 3
    assert best_token(row) == 3 and best_tokens(row[None]).tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_temperature_near_zero_is_the_greedy_limit(dtype):
    logits = torch.tensor([[65504.0, 65472.0, -65504.0], [0.25, 0.375, 0.375], [0, -60000, -math.inf]], dtype=dtype)
    for temperature in (5e-324, 1e-45, 1e-39, 1e-30, 1e-12):
        distributions = probabilities(logits, SamplingParams(temperature))
        assert distributions.tolist() == [[1, 0, 0], [0, 0.5, 0.5], [1, 0, 0]]
        assert torch.equal(probabilities(logits, SamplingParams(temperature, 1))[[0, 2]], distributions[[0, 2]])


@pytest.mark.parametrize("value", [1e6, 1e38, 1e39, 1.7e308, 1e-9, 1e-38, 1e-46, 5e-324])
def test_a_very_high_temperature_is_uniform_over_what_can_come_and_a_nucleus_is_never_empty(value):
    """Below the smallest float32 a comparison of top_p in float32 would be with zero."""
    if value > 1:
        distribution = probabilities(torch.tensor([1.0, -math.inf, 5.0]), SamplingParams(value))
        torch.testing.assert_close(distribution, torch.tensor([0.5, 0, 0.5]), atol=1e-5, rtol=0)
    else:
        assert probabilities(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(1.0, top_p=value)).tolist() == [0, 1, 0]


def test_a_nucleus_of_a_large_vocabulary_ends_where_the_mass_does():
    logits = 0.5 * torch.randn(151936, generator=torch.Generator().manual_seed(0))
    kept = int((probabilities(logits, SamplingParams(1.0, top_p=0.9999)) > 0).sum())
    mass = logits.softmax(-1).sort(descending=True).values.double().cumsum(-1)
    assert kept == int((mass < 0.9999).sum()) + 1


def test_rows_without_a_token_are_found():
    assert (
        checked(torch.tensor([3, 0])).tolist() == [3, 0] and checked(torch.empty(0, dtype=torch.int64)).tolist() == []
    )
    with pytest.raises(NonFinite) as caught:
        checked(torch.tensor([3, NO_TOKEN, 0, NO_TOKEN]))
    assert caught.value.row == 1
    states = torch.ones(4, 3)
    assert first_broken(states) is None and first_broken(states.half() * 65504) is None
    for number in (math.nan, math.inf, -math.inf):
        states[2, 1] = states[3, 0] = number
        assert first_broken(states) == 2 and first_broken(states.bfloat16()) == 2


@pytest.mark.parametrize("size", [8191, 8192, 8193, 8192 + 127])
def test_blocks_and_rows_draw_alike(size):
    """Where vocabularies begin to be searched in blocks, with a rest behind the last one, and zeros at the ends."""
    probs = (2 * torch.randn(size, generator=torch.Generator().manual_seed(1))).softmax(-1)
    probs[torch.rand(size, generator=torch.Generator().manual_seed(2)) < 0.5] = 0
    probs[-200:] = 0
    for uniform in [0.0, 2**-1074, LARGEST_UNIFORM, *torch.linspace(0, 1, 302, dtype=torch.float64)[1:-1].tolist()]:
        assert probs[drawn_by(probs, uniform)] > 0
    # A sum that rounding leaves short of the block's is not a step into the next one.
    lumps = torch.zeros(size)
    lumps[5], lumps[4000], lumps[-1] = 0.3, 0.3, 0.4
    ends = torch.tensor([0.3, 0.6]).double().tolist()
    for uniform in [*ends, *(math.nextafter(end, 0) for end in ends), *(math.nextafter(end, 1) for end in ends)]:
        assert drawn_by(lumps, uniform) in (5, 4000, size - 1)


@pytest.mark.parametrize(
    ("uniform", "prob", "accepted"),
    [(0.0, 0.0, False), (0.0, 2**-1074, True), (0.5, 0.5, False), (LARGEST_UNIFORM, 1.0, True)],
)
def test_a_token_is_accepted_where_the_uniform_lies_below_its_odds(monkeypatch, uniform, prob, accepted):
    source = TorchSource(0)
    monkeypatch.setattr(source, "uniform", lambda: uniform)
    assert source.accept(prob) == accepted


@pytest.mark.parametrize("temperature", [1e-6, 9e-4, 1e-3, 0.02])
def test_a_low_temperature_is_the_softmax_in_float64(temperature):
    """On both sides of where the largest logit is taken off first."""
    logits = 20 + 3 * temperature * torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    found = probabilities(logits, SamplingParams(temperature))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)  # 20 / 1e-6 keeps 1e-9 of a unit
