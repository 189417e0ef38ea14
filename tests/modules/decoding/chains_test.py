"""Chains of several rows against single ones fed the same uniforms, and their verdicts' law by the places where the
outcome jumps."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from table_models import PROMPT, TableLM, V, target_law, total_variation
from torch import Tensor

from draftsmith.modules.decoding.chain import draft_chain
from draftsmith.modules.decoding.chains import draft_chains, verify_chains
from draftsmith.modules.decoding.protocols import DraftTree
from draftsmith.modules.decoding.stop import Confidence, FixedLength, SelfVerify
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.sampling import draw_rows, pick, probabilities
from draftsmith.modules.types import SamplingParams

LARGEST_UNIFORM = 1 - 2**-53
SETTINGS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7,top_k=2": SamplingParams(temperature=0.7, top_k=2),
    "T=1.5,top_p=0.8": SamplingParams(temperature=1.5, top_p=0.8),
    "greedy": SamplingParams(),
}


class Replay:
    """A `Source` of given uniforms: one for each acceptance, and one for the draw."""

    def __init__(self, coins: list[float], last: float):
        self.coins, self.last = coins, last

    def accept(self, prob: float) -> bool:
        return self.coins.pop(0) < prob

    def draw(self, probs: Tensor) -> int:
        return pick(probs, self.last)


def sparse_logits(*shape: int, rng: torch.Generator) -> Tensor:
    """Random, about a third of them without mass, never all; float64, so that both ways compute the same laws."""
    logits = 2 * torch.randn(*shape, generator=rng, dtype=torch.float64)
    hidden = torch.rand(*shape, generator=rng) < 0.35
    hidden[..., 1] = False
    return logits.masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_judged_like_single_chains(setting, seed):
    params, rng = SETTINGS[setting], torch.Generator().manual_seed(seed)
    batch, count, vocab = 300, 4, 6
    logits = sparse_logits(batch, count + 1, vocab, rng=rng)
    # Drafts that are often right: the target's laws, disturbed.
    draft = logits[:, :count] + sparse_logits(batch, count, vocab, rng=rng).clamp_min(-0.5)
    law = probabilities(torch.where(draft.isfinite(), draft, -torch.inf), params)
    draws = torch.rand(batch * count, generator=rng, dtype=torch.float64)
    tokens = draw_rows(law.flatten(0, 1), draws).view(batch, count)
    num_drafted = torch.randint(count + 1, (batch,), generator=rng)
    uniforms = torch.rand(batch, count + 1, generator=rng, dtype=torch.float64)
    num_accepted, own = verify_chains(tokens, num_drafted, None if params.greedy else law, logits, params, uniforms)
    seen = set()
    for row in range(batch):
        length = int(num_drafted[row])
        chosen = tuple(tokens[row, :length].tolist())
        tree = DraftTree(chosen, tuple(range(-1, length - 1)), None if params.greedy else law[row, :length])
        source = Replay(uniforms[row, :count].tolist(), uniforms[row, count].item())
        verdict = verify(tree, logits[row, : length + 1], params, source)
        assert (int(num_accepted[row]), int(own[row])) == (len(verdict.path), verdict.next_token)
        seen.add((length, len(verdict.path)))
    # Every length was accepted whole, in part and not at all.
    assert seen >= {(length, accepted) for length in range(count + 1) for accepted in (0, length)}


class Draws:
    """A `Source` that draws by given uniforms, one after the other."""

    def __init__(self, uniforms: list[float]):
        self._uniforms = iter(uniforms)

    def draw(self, probs: Tensor) -> int:
        return pick(probs, next(self._uniforms))


POLICIES = {
    "lengths of their own": [lambda k=k: FixedLength(k) for k in (1, 4, 2, 3)],
    "any": [
        lambda: Confidence(0.5, 1, 4),
        lambda: FixedLength(2),
        lambda: SelfVerify(3),
        lambda: Confidence(0.9, 2, 3),
    ],
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policies", POLICIES)
def test_rows_are_drafted_like_single_chains(setting, policies):
    """Rows that stop by themselves, rows that the limit stops, and rows that may not draft at all."""
    params, lm, most = SETTINGS[setting], TableLM(3), 4
    rows = [(make, limit, number) for limit in (4, 3, 1, 0) for number, make in enumerate(POLICIES[policies] * 3)]
    contexts = [[*PROMPT, number % V, limit % V] for _, limit, number in rows]
    uniforms = torch.rand(len(rows), most, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def read(prefixes: list[list[int]]) -> tuple[Tensor, Tensor]:
        made = [lm.row(tuple(prefix)) for prefix in prefixes]
        return torch.stack([logits for logits, _ in made]), torch.stack([state for _, state in made])

    fed = [list(context) for context in contexts]

    def step(j: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        for prefix, token in zip(fed, tokens.tolist(), strict=True):
            assert len(prefix) == len(contexts[0]) + j
            prefix.append(token)
        return read(fed)

    limits = [limit for _, limit, _ in rows]
    chains = draft_chains(*read(contexts), step, [make() for make, *_ in rows], limits, params, uniforms, contexts)
    lengths = set()
    for row, (make, limit, _) in enumerate(rows):
        prefix = list(contexts[row])

        def single(token: int, prefix: list[int] = prefix) -> tuple[Tensor, Tensor]:
            prefix.append(token)
            logits, states = read([prefix])
            return logits[0], states

        logits, states = read([prefix])
        source = Draws(uniforms[row].tolist())
        tree = draft_chain(logits[0], states, single, make(), limit, params, source, contexts[row])
        count = chains.num_drafted[row]
        assert (count, tuple(chains.tokens[row, :count].tolist())) == (len(tree.tokens), tree.tokens)
        if tree.draft_prob is not None:
            assert chains.draft_prob is not None
            torch.testing.assert_close(chains.draft_prob[row, :count], tree.draft_prob, atol=1e-15, rtol=0)
        lengths.add((limit, count))
    assert {limit for limit, _ in lengths} == {0, 1, 3, 4} and len(lengths) > 5


@pytest.mark.parametrize("uniform", [0.0, 2**-1074, 0.5, LARGEST_UNIFORM])
def test_a_token_without_mass_is_never_emitted(uniform):
    rng = torch.Generator().manual_seed(7)
    logits, params = sparse_logits(200, 3, 6, rng=rng).float(), SETTINGS["T=1"]
    law = probabilities(sparse_logits(200, 2, 6, rng=rng).float(), params)
    tokens = law.argmax(-1)
    uniforms = torch.full((200, 3), uniform, dtype=torch.float64)
    num_accepted, own = verify_chains(tokens, torch.full((200,), 2), law, logits, params, uniforms)
    target_law = probabilities(logits, params)
    for row in range(200):
        count = int(num_accepted[row])
        assert target_law[row, count, own[row]] > 0
        assert all(target_law[row, i, tokens[row, i]] > 0 for i in range(count))


def jump(below: Callable[[Tensor], Tensor], batch: int) -> Tensor:
    """Where `below`, true at small uniforms and false at larger ones, changes in each row: float64 [B] by bisection."""
    low, high = torch.zeros(batch, dtype=torch.float64), torch.ones(batch, dtype=torch.float64)
    for _ in range(54):
        middle = (low + high) / 2
        held = below(middle)
        low, high = torch.where(held, middle, low), torch.where(held, high, middle)
    return torch.where(below(torch.zeros(batch, dtype=torch.float64)), high, 0.0)


def verified_law(target: TableLM, draft: TableLM, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The law of two tokens: every chain of two tokens with its probability, the outcome's with the widths between the
    uniforms at which it jumps, and the target's own law behind an early end."""
    chains = torch.tensor(list(itertools.product(range(V), repeat=2)))
    rows = [[(*PROMPT, *chain[:i]) for i in range(3)] for chain in chains.tolist()]
    logits = torch.stack([torch.stack([target.row(prefix)[0] for prefix in row]) for row in rows])
    law = torch.stack([torch.stack([probabilities(draft.row(p)[0], params) for p in row[:2]]) for row in rows])
    size, two = len(chains), torch.full((len(chains),), 2)

    def outcome(uniforms: list[Tensor | float]) -> tuple[Tensor, Tensor]:
        columns = [torch.as_tensor(u, dtype=torch.float64).expand(size) for u in uniforms]
        return verify_chains(chains, two, law, logits, params, torch.stack(columns, 1))

    accept = [
        jump(lambda u: outcome([u, 0.0, 0.0])[0] > 0, size),
        jump(lambda u: outcome([0.0, u, 0.0])[0] > 1, size),
    ]
    reject = LARGEST_UNIFORM
    own: list[list[Tensor]] = []  # own[n][v]: P(the target's own token is v | n accepted), [chains]
    for coins in ([reject, 0.0], [0.0, reject], [0.0, 0.0]):
        reached = [jump(lambda u, v=v, coins=coins: outcome([*coins, u])[1] <= v, size) for v in range(V)]
        own.append([b - a for a, b in zip([torch.zeros(size), *reached], reached, strict=False)])
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for i, (first, second) in enumerate(chains.tolist()):
        drafted = float(law[i, 0, first] * law[i, 1, second])
        both = drafted * float(accept[0][i])
        for v in range(V):
            after = probabilities(target.row((*PROMPT, v))[0], params)
            for w in range(V):
                emitted[v, w] += drafted * float((1 - accept[0][i]) * own[0][v][i] * after[w])
            emitted[first, v] += both * float((1 - accept[1][i]) * own[1][v][i])
        emitted[first, second] += both * float(accept[1][i])
    return dict(emitted)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "greedy"])
@pytest.mark.parametrize(("seed", "support"), [(1, (2, 2, 2, 3)), (2, (2, 2, 2, 3)), (5, (V,))])
def test_the_emitted_law_is_the_targets(setting, seed, support):
    # Bisection is good to 2^-53, and float64 cumulative sums of four terms to as much: 1e-10 is far from both.
    target, draft, params = TableLM(seed, support), TableLM(seed + 100, support), SETTINGS[setting]
    law = verified_law(target, draft, params)
    assert total_variation(law, target_law(target, params, 2)) < 1e-10


def test_the_bonus_token_follows_the_last_drafted_one():
    params, target, draft = SETTINGS["T=1"], TableLM(3, (V,)), TableLM(3, (V,))  # equal laws: all is accepted
    logits = torch.stack([target.row((*PROMPT, *[1] * i))[0] for i in range(3)])[None]
    law = probabilities(torch.stack([draft.row((*PROMPT, *[1] * i))[0] for i in range(2)]), params)[None]
    for length in range(3):  # a row that drafted less than the others: what is drafted beyond is padding

        def own(u: Tensor, length: int = length) -> Tensor:
            coins = torch.full((len(u), 2), LARGEST_UNIFORM, dtype=torch.float64)
            size = len(u)
            num_accepted, token = verify_chains(
                torch.ones(size, 2, dtype=torch.int64), torch.full((size,), length), law.expand(size, -1, -1),
                logits.expand(size, -1, -1), params, torch.cat([coins, u[:, None]], 1),
            )  # fmt: skip
            assert (num_accepted == length).all()
            return token

        reached = jump(lambda u, own=own: own(u) <= torch.arange(V), V)
        torch.testing.assert_close(reached, probabilities(logits[0, length], params).cumsum(0), atol=1e-12, rtol=0)
