"""Drafts coupled with the target's text have the distribution of drafts that the target verifies."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftsmith.eval.replay.coupling import CoupledSource, TargetText

SIZE = 5
EDGE = 1e-9


def random_distribution(seed: int) -> torch.Tensor:
    """One of its entries is zero, in places that differ."""
    distribution = torch.rand(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    distribution[seed % SIZE] = 0
    return distribution / distribution.sum()


def p_after(prefix: tuple[int, ...]) -> torch.Tensor:
    return random_distribution(hash((1, *prefix)) % 9973)


def q_after(prefix: tuple[int, ...]) -> torch.Tensor:
    return random_distribution(hash((2, *prefix)) % 9973)


class Recorded:
    """A source that gives a chosen token and remembers the distribution it was asked for."""

    def __init__(self, token: int):
        self.token, self.distribution = token, None

    def draw(self, probs: torch.Tensor) -> int:
        self.distribution = probs
        return self.token


def branches(text: TargetText, start: int, prefix: tuple[int, ...]):
    """(y, accepted, weight) of one draw, given the text: the uniform's two sides by their lengths, the free draw by its
    distribution. Where the uniform's edge is comes from the code: it is searched for."""

    def draw(uniform: float, token: int) -> tuple[int, torch.Tensor | None]:
        uniforms = list(text.uniforms)
        uniforms[start] = uniform
        free = Recorded(token)
        source = CoupledSource(TargetText(text.tokens, text.distributions, uniforms), start, free)
        return source.draw(q_after(prefix)), free.distribution

    low, high = 0.0, 1.0
    if draw(0.0, 0)[1] is not None:
        high = 0.0
    while high - low > EDGE / 1e6 and high < 1 + EDGE:
        middle = (low + high) / 2
        low, high = (middle, high) if draw(middle, 0)[1] is None else (low, middle)
    accepted = high
    if accepted > 0:
        yield draw(0.0, 0)[0], True, accepted
    if 1 - accepted > EDGE:
        distribution = draw(1 - 1e-16, 0)[1]
        for token in range(SIZE):
            yield draw(1 - 1e-16, token)[0], False, (1 - accepted) * distribution[token].item()


def test_a_coupled_draft_is_drawn_from_q_and_accepted_as_speculative_sampling_accepts():
    """Two tokens deep. Enumerated: X ~ p, then every branch of the coupling; and speculative sampling itself: y ~ q,
    accepted with min(1, p/q), else replaced by a draw from norm((p - q)+)."""
    coupled: dict[tuple, float] = {}
    for tokens in itertools.product(range(SIZE), repeat=2):
        distributions = torch.stack([p_after(()), p_after(tokens[:1])])
        weight = (distributions[0, tokens[0]] * distributions[1, tokens[1]]).item()
        if weight == 0:
            continue
        text = TargetText(list(tokens), distributions, [0.5, 0.5])
        for first, accepted, w1 in branches(text, 0, ()):
            if not accepted:
                add(coupled, (first, False, tokens[0]), weight * w1)
                continue
            assert first == tokens[0]
            for second, accepted_too, w2 in branches(text, 1, (first,)):
                add(coupled, (first, True, second, accepted_too, tokens[1]), weight * w1 * w2)
    direct: dict[tuple, float] = {}
    for first, accepted, own, w1 in speculative(()):
        if not accepted:
            add(direct, (first, False, own), w1)
            continue
        for second, accepted_too, own_too, w2 in speculative((first,)):
            add(direct, (first, True, second, accepted_too, own_too), w1 * w2)
    distance = sum(abs(coupled.get(key, 0) - direct.get(key, 0)) for key in {*coupled, *direct}) / 2
    assert distance < 1e-12
    assert sum(coupled.values()) == pytest.approx(1, abs=1e-12)


def speculative(prefix: tuple[int, ...]):
    """(y, accepted, the target's token at that place, weight)."""
    p, q = p_after(prefix).tolist(), q_after(prefix).tolist()
    excess = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    for y in range(SIZE):
        if q[y] == 0:
            continue
        keep = min(1.0, p[y] / q[y])
        yield y, True, y, q[y] * keep
        for own in range(SIZE):
            yield y, False, own, q[y] * (1 - keep) * excess[own] / sum(excess)


def add(distribution: dict, key: tuple, weight: float) -> None:
    if weight:
        distribution[key] = distribution.get(key, 0) + weight


def test_past_a_rejection_and_past_the_text_the_draft_goes_on_by_itself():
    distributions = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    never = torch.tensor([0.0, 1.0], dtype=torch.float64)
    free = Recorded(1)
    rejected = CoupledSource(TargetText([0, 1], distributions, [0.3, 0.3]), 0, free)
    assert rejected.draw(never) == 1 and free.distribution.tolist() == [0, 1]
    other = torch.tensor([0.4, 0.6], dtype=torch.float64)
    assert rejected.draw(other) == 1 and free.distribution is other
    past = CoupledSource(TargetText([0, 1], distributions, [0.3, 0.3]), 2, free)
    free.distribution = None
    past.draw(other)
    assert free.distribution is other
