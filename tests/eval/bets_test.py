"""The statistics of the certificate: bets are fair under the target, and false alarms as rare as stated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from oracles.tables import PROMPT, LogitTable, TableLM, emitted_rounds, method

from draftsmith.eval.bets import (
    MAX_GAP,
    SCORES,
    DecidedTokens,
    Drift,
    Evidence,
    decided_tokens,
    score_gains,
    with_tail,
)
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.sampling import draw_rows
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
        children & (kind % 2 == 0)[:, None],
    )


def with_tokens(found: DecidedTokens, token: torch.Tensor) -> DecidedTokens:
    return replace(found, token=token)


def draw(distribution: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return draw_rows(distribution, torch.rand(len(distribution), generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("likeliest_only", [False, True])
def test_every_bet_is_fair_whatever_was_drafted(likeliest_only):
    """Also where a server names the likeliest tokens only."""
    everywhere = places(40, seed=1)
    if likeliest_only:
        everywhere = replace(everywhere, target=distributions(40, torch.Generator().manual_seed(3)))
    logits, found = everywhere.target.log(), []
    known = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(3).indices, True)
    for token in range(V):
        tokens = with_tokens(everywhere, torch.full((40,), token))
        found.append(stakes_of(with_tail(tokens, logits, known) if likeliest_only else tokens))
    stakes, weight = torch.stack(found), everywhere.target.T[..., None]  # [V, 40, bets], [V, 40, 1]
    mean = torch.where(weight > 0, weight * stakes, 0).sum(0)
    torch.testing.assert_close(mean, torch.ones_like(mean))
    assert float((stakes[stakes.isfinite()] - 1).abs().mean()) > 0.05, "they bet on something"


def stakes_of(tokens: DecidedTokens) -> torch.Tensor:
    """The stakes [N, bets] of each token alone."""
    found = []
    for row in range(len(tokens.token)):
        evidence = Evidence()
        evidence.add(tokens.take(slice(row, row + 1)))
        found.append(torch.cat([stakes.flatten() for stakes in evidence.stakes.values()]).exp())
    return torch.stack(found)


def drafted_at(rounds: Sequence[Round], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the draft's distribution and the chosen children at each emitted token, [N, V] each."""
    draft = torch.zeros(sum(len(done.tokens) for done in rounds), vocab_size, dtype=torch.float64)
    children, row = torch.zeros_like(draft, dtype=torch.bool), 1  # the prefill's token is not drafted
    for tree, verdict, tokens in ((done.tree, done.verdict, done.tokens) for done in rounds[1:]):
        for i, parent in enumerate([-1, *verdict.path][: len(tokens)]):
            if tree.draft_prob is None:
                own = [token for token, above in zip(tree.tokens, tree.parents, strict=True) if above == parent]
                children[row, own] = True
            elif i < len(tree.tokens):
                draft[row] = tree.draft_prob[i]
            row += 1
    return draft, children


@pytest.mark.parametrize("name", ["spec:k=3", "eagle-tree", "online"])
def test_every_bet_is_fair_on_whole_rounds_of_a_method(name):
    """Methods of this decoder are lossless: every branch of it, weighted, gives stakes of 1 in the mean. 1e-10: float64
    sums of thousands of branches."""
    params, target, mean = SamplingParams(1.0), TableLM(1), dict[str, torch.Tensor]()
    for rounds, weight in emitted_rounds(target, method(name, target), params, length=2, max_new_tokens=8):
        answer = [token for done in rounds for token in done.tokens]
        drafted, evidence = drafted_at(rounds, LogitTable(1).info.vocab_size), Evidence()
        evidence.add(decided_tokens(LogitTable(1), PROMPT, answer, params, MAX_GAP, drafted)[0])
        for family, stakes in evidence.stakes.items():
            mean[family] = mean.get(family, 0) + weight * stakes.exp()
    for family, stakes in mean.items():
        assert torch.allclose(stakes, torch.ones_like(stakes), atol=1e-10), family


def test_false_alarms_are_as_rare_as_stated():
    """Answers of a lossless method: at most a share `a` of runs has a p-value of `a` or less."""
    found, generator, runs, values = places(150, seed=4), torch.Generator().manual_seed(5), 300, list[float]()
    for _ in range(runs):
        evidence = Evidence()
        evidence.add(with_tokens(found, draw(found.target, generator)))
        values.append(evidence.p_value)
    for a in (0.5, 0.2, 0.05, 0.01):
        # four standard deviations of a binomial count
        assert sum(value <= a for value in values) <= runs * a + 4 * math.sqrt(runs * a * (1 - a)) + 1
    assert min(values) < 1  # the bets do move


def test_a_token_that_never_comes_is_named():
    found, generator = places(400, seed=10), torch.Generator().manual_seed(11)
    distribution = found.target.clone()
    distribution[:, 4] = 0
    evidence = Evidence()
    evidence.add(with_tokens(found, draw(distribution / distribution.sum(-1, keepdim=True), generator)))
    assert evidence.p_value < 1e-9 and evidence.strongest == "token 4 comes too seldom"


def test_evidence_does_not_depend_on_how_tokens_are_grouped():
    found, generator = places(60, seed=13), torch.Generator().manual_seed(14)
    tokens = with_tokens(found, draw(found.target, generator))
    whole, parts = Evidence(), Evidence()
    whole.add(tokens)
    for start, end in itertools.pairwise((0, 7, 30, 60)):
        parts.add(tokens.take(slice(start, end)))
    assert all(torch.allclose(parts.stakes[name], logs) for name, logs in whole.stakes.items())


def test_a_drift_that_the_control_has_too_pays_nothing_and_a_larger_one_does():
    """A server that computes a slightly flatter target: alone its tokens fail, beside its own control they pass, and
    with acceptance at 1.4 times p / q they fail again."""
    generator, level, alarms, found_drift, found_mistake = torch.Generator().manual_seed(21), 1e-3, 0, 0, 0
    for seed in range(10):
        asked = [places(20_000, seed=100 * seed + number) for number in range(2)]
        asked = [replace(own, draft=distributions(20_000, generator)) for own in asked]
        served = [(own.target.clamp_min(1e-9).log() / 1.15).softmax(-1) * (own.target > 0) for own in asked]
        served = [p / p.sum(-1, keepdim=True) for p in served]
        drift = Drift()
        drift.add(score_gains(with_tokens(asked[0], draw(served[0], generator))))
        bounds = drift.bounds(level)
        q = asked[1].draft
        accepted = torch.minimum(q, 1.4 * served[1])
        rest = (served[1] - q).clamp_min(0)
        mistaken = accepted + (1 - accepted.sum(-1, keepdim=True)) * rest / rest.sum(-1, keepdim=True)
        found = []
        for law, allowed in ((served[1], bounds), (served[1], {}), (mistaken, bounds)):
            evidence = Evidence(allowed)
            evidence.add(with_tokens(asked[1], draw(law, generator)))
            found.append(evidence.p_value <= level)
        alarms, found_drift, found_mistake = alarms + found[0], found_drift + found[1], found_mistake + found[2]
    assert (alarms, found_drift) == (0, 10) and found_mistake >= 9


def test_the_drift_is_bounded_as_the_theorem_says():
    """Maurer & Pontil 2009, theorem 4, of values in [0, 1]: |mean - E| <= sqrt(2 V ln(2/d) / n) + 7 ln(2/d) / (3(n-1)),
    here both ways (4/d), of a range of 2, for 6 scores at once."""
    x, level = torch.linspace(-0.4, 0.6, 2000, dtype=torch.float64), 1e-3
    drift = Drift()
    drift.add(dict.fromkeys(SCORES, x))
    log = math.log(4 / (level / 6))
    width = math.sqrt(2 * float(x.var()) * log / 2000) + 2 * 7 * log / (3 * 1999)
    mean = float(x.mean())
    for low, high in drift.bounds(level).values():
        # Sums of 2000 numbers in float64.
        assert (low, high) == (pytest.approx(min(0, mean - width), 1e-9), pytest.approx(mean + width, 1e-9))


def test_the_shift_that_is_told_is_found_nine_times_in_ten():
    generator, level, shift, runs = torch.Generator().manual_seed(22), 1e-3, 0.0, 60
    count, found = 3000, 0
    p = torch.full((count, 2), 0.5, dtype=torch.float64)
    q = torch.tensor([0.9, 0.1], dtype=torch.float64).expand(count, 2)
    nothing = torch.zeros(count, 2, dtype=torch.bool)
    whole = DecidedTokens(torch.zeros(count, dtype=torch.int64), p, q, nothing)
    for _ in range(runs):
        moments, evidence = Evidence(), Evidence()
        moments.add(with_tokens(whole, draw(p, generator)))
        name = "tokens drafted more often than they are the target's"
        shift = moments.detectable(level)[name]  # of the probability of token 0
        evidence.add(with_tokens(whole, draw(p + torch.tensor([shift, -shift]), generator)))
        found += evidence.p_value <= level
    assert 0.03 < shift < 0.06 and found >= 0.8 * runs
