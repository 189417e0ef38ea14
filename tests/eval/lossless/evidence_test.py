"""The statistics of the certificate: bets are fair under the target, defects have the distributions that the real
samplers have with them, false alarms are as rare and finds as frequent as stated."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from draftsmith.eval.lossless.evidence import (
    DEFECTS,
    DRAFT_DEFECTS,
    DecidedTokens,
    Evidence,
    defective,
    growth_of_biases,
    mixture,
    score_bets,
    tilted,
)
from draftsmith.modules.decoding.protocols import DraftTree
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.sampling import draw_rows, pick
from draftsmith.modules.types import SamplingParams

V = 6


def distributions(count: int, generator: torch.Generator, size: int = V, spread: float = 1.5) -> torch.Tensor:
    return (spread * torch.randn(count, size, generator=generator, dtype=torch.float64)).softmax(-1)


def places(count: int, seed: int) -> DecidedTokens:
    """Tokens without values: drawn drafts, chosen children and the target's own, with a distribution that excludes a
    token."""
    generator = torch.Generator().manual_seed(seed)
    p, q = distributions(count, generator), distributions(count, generator)
    p[1::5, 2] = 0
    p /= p.sum(-1, keepdim=True)
    kind = torch.arange(count) % 4
    children = torch.rand(count, V, generator=generator) < 0.4
    return DecidedTokens(
        torch.zeros(count, dtype=torch.int64),
        p,
        q * (kind < 2)[:, None],
        children & (kind == 2)[:, None],
        torch.arange(count) % 3 == 0,
        torch.arange(count) % (V + 1) - 1,
    )


def with_tokens(found: DecidedTokens, token: torch.Tensor) -> DecidedTokens:
    return DecidedTokens(token, found.target, found.draft, found.children, found.first, found.copied)


def variation(distribution: torch.Tensor, p: torch.Tensor) -> float:
    """Mean over tokens of the total variation distance."""
    return float((distribution - p).abs().sum(-1).mean()) / 2


def draw(distribution: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return draw_rows(distribution, torch.rand(len(distribution), generator=generator, dtype=torch.float64))


def test_every_bet_is_fair_whatever_was_drafted():
    everywhere = places(40, seed=1)
    for row in range(40):
        mean: dict[str, torch.Tensor] = {}
        for token in range(V):
            weight = float(everywhere.target[row, token])
            if weight > 0:
                evidence = Evidence()
                evidence.add(with_tokens(everywhere, torch.full((40,), token)).take(slice(row, row + 1)))
                for name, stakes in evidence.stakes.items():
                    mean[name] = mean.get(name, 0) + weight * stakes.exp()
        for stakes in mean.values():
            assert torch.allclose(stakes, torch.ones_like(stakes), atol=1e-12)
    assert len(mean) == 5 + len(DEFECTS) + 2  # what `NUM_FAMILIES` divides by


class Pair:
    """A `Source` of one number for an acceptance and one for a draw."""

    def __init__(self, accept: float, draw: float):
        self._accept, self._draw = accept, draw

    def accept(self, prob: float) -> bool:
        return self._accept < prob

    def draw(self, probs: torch.Tensor) -> int:
        return pick(probs, self._draw)


def test_defects_have_the_distribution_of_the_real_verification_with_them():
    """The real verification over a grid of its uniform numbers, which sums over all that it can draw."""
    generator = torch.Generator().manual_seed(3)
    p, q = distributions(4, generator), distributions(4, generator)
    edge = 2e-2
    steps = 120  # of which an edge of a cell is off by one in either direction
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    first, second = (each.flatten() for each in torch.meshgrid(grid, grid, indexing="ij"))

    def real(row: int, drafted, accept, own) -> torch.Tensor:
        count = len(drafted)
        logits = p[row].log().expand(count, 2, V)
        tokens = draw_rows(q[row].expand(count, V), drafted).tolist()
        trees = [DraftTree((token,), (-1,), q[row : row + 1]) for token in tokens]
        sources = [Pair(*numbers) for numbers in zip(accept.tolist(), own.tolist(), strict=True)]
        verdicts = verify(trees, logits, SamplingParams(1.0), sources)
        made = [token if made.path else made.next_token for token, made in zip(tokens, verdicts, strict=True)]
        return torch.tensor(made).bincount(minlength=V) / count

    for row in range(4):
        one, other = p[row : row + 1], q[row : row + 1]
        # a draft, an acceptance and a replacement from two numbers: whichever two are the same
        reused = DRAFT_DEFECTS["a draft's own draw decides on it"](one, other)[0]
        assert torch.allclose(real(row, first, first, second), reused.float(), atol=edge)
        own = DRAFT_DEFECTS["the draw that rejects a token replaces it"](one, other)[0]
        assert torch.allclose(real(row, first, second, second), own.float(), atol=edge)
    assert torch.allclose(
        mixture(q, (p / q).clamp_max(1), (p - q).clamp_min(0) / (p - q).clamp_min(0).sum(-1, True)), p
    )


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_a_distribution_that_differs_where_it_can_act_only(name):
    found = places(60, seed=2)
    distribution = defective(name, found)
    assert torch.allclose(distribution.sum(-1), torch.ones(60, dtype=torch.float64)) and bool((distribution >= 0).all())
    assert not bool(distribution[found.target == 0].any())
    own = ~found.was_sampled & ~found.children.any(-1)
    assert torch.equal(distribution[own], found.target[own]) == (name != DEFECTS[-1])
    assert variation(distribution, found.target) > 0.001


def p_value(found: DecidedTokens, distribution: torch.Tensor, generator: torch.Generator) -> float:
    evidence = Evidence()
    evidence.add(with_tokens(found, draw(distribution, generator)))
    return evidence.p_value


def test_false_alarms_are_as_rare_as_stated():
    """Answers of a lossless method: at most a share `a` of runs has a p-value of `a` or less."""
    found, generator, runs = places(150, seed=4), torch.Generator().manual_seed(5), 300
    values = [p_value(found, found.target, generator) for _ in range(runs)]
    for a in (0.5, 0.2, 0.05, 0.01):
        # four standard deviations of a binomial count
        assert sum(value <= a for value in values) <= runs * a + 4 * math.sqrt(runs * a * (1 - a)) + 1
    assert min(values) < 1  # the bets do move


def test_looking_after_every_answer_gives_no_more_false_alarms():
    found, generator, runs, level = places(25, seed=6), torch.Generator().manual_seed(7), 100, 0.1
    alarms = 0
    for _ in range(runs):
        evidence = Evidence()
        for _ in range(6):
            evidence.add(with_tokens(found, draw(found.target, generator)))
            if evidence.p_value <= level:
                alarms += 1
                break
    assert alarms <= runs * level + 4 * math.sqrt(runs * level * (1 - level))


def test_a_bias_is_found_as_often_as_stated():
    """The best single bet decides as often as computed; all bets together find a little more, and never less."""
    found, generator, level, runs = places(600, seed=8), torch.Generator().manual_seed(9), 0.01, 60
    bets = growth_of_biases(found, 0.04)["towards what was drafted"]
    best = min(bets, key=lambda bet: bet.tokens_needed(0.6, level))
    tokens = best.tokens_needed(0.6, level)
    assert best.chance(tokens, level) == pytest.approx(0.6, abs=1e-6)
    assert best.chance(4 * tokens, level) > 0.95 and best.chance(tokens / 4, level) < 0.1
    biased = tilted(found.target, next(iter(score_bets(found))).x, 0.04)[0]
    assert variation(biased, found.target) == pytest.approx(0.04, rel=0.02)
    times, rest = divmod(round(tokens), len(found.token))
    index = torch.cat([torch.arange(len(found.token)).repeat(times), torch.randperm(600, generator=generator)[:rest]])
    hits = sum(p_value(found.take(index), biased[index], generator) <= level for _ in range(runs))
    deviation = math.sqrt(runs * 0.6 * 0.4)
    assert 0.6 * runs - 3 * deviation <= hits <= 0.85 * runs + 3 * deviation


def test_a_copied_answer_and_a_token_that_never_comes_are_named():
    found, generator = places(400, seed=10), torch.Generator().manual_seed(11)
    copied = draw(found.target, generator)
    evidence = Evidence()
    evidence.add(DecidedTokens(copied, found.target, found.draft, found.children, found.first, copied))
    assert evidence.p_value < 1e-9 and evidence.strongest == "repeats the answer before"
    distribution = found.target.clone()
    distribution[:, 4] = 0
    evidence = Evidence()
    evidence.add(with_tokens(found, draw(distribution / distribution.sum(-1, keepdim=True), generator)))
    assert evidence.p_value < 1e-9 and evidence.strongest == "token 4 comes too seldom"


def test_a_bias_that_the_prompts_do_not_allow_is_left_out():
    """A target that is certain everywhere leaves no sampler to be biased."""
    certain = torch.zeros(20, V, dtype=torch.float64)
    certain[:, 1] = 1
    found = places(20, seed=12)
    found = DecidedTokens(torch.ones_like(found.token), certain, found.draft, found.children, found.first, found.copied)
    assert growth_of_biases(found, 0.02) == {}


def test_evidence_does_not_depend_on_how_tokens_are_grouped():
    found, generator = places(60, seed=13), torch.Generator().manual_seed(14)
    tokens = with_tokens(found, draw(found.target, generator))
    whole, parts = Evidence(), Evidence()
    whole.add(tokens)
    for start, end in itertools.pairwise((0, 7, 30, 60)):
        parts.add(tokens.take(slice(start, end)))
    assert parts.log_mean == pytest.approx(whole.log_mean, abs=1e-9)
