"""The loop's own distribution in rows, its random numbers included: integrated over the cube of their uniforms,
exactly.

Every distribution of these tables has its steps at quarters, and so have the odds of acceptance and what replaces a
rejected token: the outcome is constant on the cells of a grid of 4 by uniform. One point of each cell, a row of the
batch each, is the integral itself, so that what comes out is compared without any tolerance. A uniform used twice, or
for two things, spoils it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.modules.decoding.loop import generate
from draftsmith.modules.decoding.protocols import DraftTree, EachRow
from draftsmith.modules.decoding.stop import Confidence, FixedLength, SelfVerify
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import ModelInfo, Scores
from draftsmith.modules.types import SamplingParams

V, H, CELLS = 3, 2, 4
PROMPT, PARAMS = (2, 0), SamplingParams(temperature=1.0)
DISTRIBUTIONS = [*dict.fromkeys([*itertools.permutations((0.25, 0.25, 0.5)), *itertools.permutations((0.5, 0.5, 0.0))])]
Distribution = dict[tuple[int, ...], float]


class QuarterLM:
    """A `CausalLM` whose distribution is a function of the whole prefix: one of DISTRIBUTIONS by a number made of all
    tokens."""

    packed, device, dtype = False, torch.device("cpu"), torch.float64

    def __init__(self, seed: int, context: int = 64):
        self.seed, self.info = seed, ModelInfo(H, V, 1, context, (), {"config": f"quarters-{seed}"})
        self.log_distributions = torch.tensor(DISTRIBUTIONS, dtype=torch.float64).log()

    def session(
        self, rows: int, capacity: int, capture: tuple[int, ...] = (), static: bool | None = None
    ) -> QuarterSession:
        return QuarterSession(self, rows)

    def distribution(self, prefix: Sequence[int]) -> tuple[float, ...]:
        number = self.seed
        for token in prefix:
            number = after(number, token)
        return DISTRIBUTIONS[number % len(DISTRIBUTIONS)]


def after(number: int, token: int) -> int:
    """The number of a prefix with one more token."""
    return (number * 1_000_003 + token + 1) % (2**31 - 1)


class QuarterSession:
    """Remembers the number of every prefix that each row has read, and nothing else."""

    capture: tuple[int, ...] = ()
    static, joins = False, True

    def __init__(self, lm: QuarterLM, rows: int):
        self._lm = lm
        self.reset(rows)

    @property
    def lengths(self) -> list[int]:
        return [len(numbers) - 1 for numbers in self._numbers]

    def reset(self, rows: int) -> None:
        self._numbers = [[self._lm.seed] for _ in range(rows)]  # after 0, 1, .. tokens

    def prefill(self, rows: Sequence[int], tokens: Any) -> Scores:
        for row in rows:
            self.begin(row)
        fed = dict(zip(rows, tokens, strict=True))
        scores = self.extend([fed.get(row, ()) for row in range(len(self._numbers))])
        return Scores(scores.logits[list(rows)], scores.features[list(rows)])

    def begin(self, row: int) -> None:
        self._numbers[row : row + 1] = [[self._lm.seed]]

    def extend(self, tokens: Any, parents: Any = None, num_logits: int = 1) -> Scores:
        widest = max(map(len, tokens))
        logits = torch.full((len(tokens), num_logits, V), torch.nan, dtype=torch.float64)
        for row, own in enumerate(tokens):
            numbers, above = self._numbers[row], range(-1, len(own) - 1) if parents is None else parents[row]
            first, kept = len(numbers), numbers[-1]
            for token, parent in zip(own, above, strict=True):
                numbers.append(after(kept if parent < 0 else numbers[first + parent], token))
            if own:
                read = [number % len(DISTRIBUTIONS) for number in numbers[first:][-num_logits:]]
                logits[row, : len(read)] = self._lm.log_distributions[read]
        return Scores(logits, torch.zeros(len(tokens), widest, H))

    def step(self, tokens: Any) -> tuple[Tensor, Tensor]:
        scores = self.extend(tokens)
        return scores.logits[:, 0], scores.features[:, 0]

    def keep(self, lengths: Sequence[int], slots: Any = None) -> None:
        for row, length in enumerate(lengths):
            numbers = self._numbers[row]
            path = slots[row] if slots else ()
            self._numbers[row] = numbers[: length + 1] + [numbers[slot + 1] for slot in path]

    def select(self, rows: Sequence[int]) -> None:
        self._numbers = [self._numbers[row] for row in rows]


class Stream(TorchSource):
    """Gives these uniforms, from left to right, then zeros."""

    def __init__(self, values: list[float]):
        super().__init__(0)
        self._uniforms = values[::-1]

    def _fill(self) -> None:
        self._uniforms = [0.0] * 8 + self._uniforms


class Twigs:
    """A tree of four nodes on two levels, which is a function of what was emitted."""

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        self._sum = sum(prompt) + first_token

    def propose(self, max_drafted: int, params: SamplingParams, source: Any) -> DraftTree:
        tokens = tuple((self._sum + shift) % V for shift in (0, 1, 2, 0))
        return DraftTree(tokens, (-1, -1, 0, 0)) if max_drafted > 1 else DraftTree(tokens[:2], (-1, -1))

    def advance(self, outcome: Any) -> None:
        self._sum += sum(outcome.emitted)


def target_distribution(target: QuarterLM, distribution: Distribution, length: int) -> Distribution:
    """The distribution of `length` tokens, of beginnings that have `distribution`."""
    grown: Distribution = defaultdict(float)
    for tokens, weight in distribution.items():
        if len(tokens) >= length:
            grown[tokens] += weight
            continue
        more = {(*tokens, v): weight * p for v, p in enumerate(target.distribution((*PROMPT, *tokens))) if p > 0}
        for whole, own in target_distribution(target, more, length).items():
            grown[whole] += own
    return dict(grown)


def distribution_in_rows(
    target: QuarterLM, stops: Any, per_round: int, rounds: int, count: int, seed: int
) -> tuple[Distribution, list]:
    """Of what `rounds` rounds after the prefill emit, and after that the target's own; and the generations.

    per_round: most uniforms of a round. stops: makes a row's policy; "tree" drafts trees, and None nothing.
    """
    middles = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    values = torch.cartesian_prod(*[middles] * (1 + per_round * rounds)).tolist()
    rows = len(values)
    drafter: Any = None
    if stops == "tree":
        drafter = EachRow([Twigs() for _ in range(rows)])
    elif stops is not None:
        drafter = DraftModelDrafter(QuarterLM(seed + 1), [stops() for _ in range(rows)], 64)
    sources = [Stream(own) for own in values]
    made = generate(target, drafter, [PROMPT] * rows, PARAMS, count, sources, ())
    distribution: Distribution = defaultdict(float)
    for one in made:
        distribution[tuple(one.tokens[: 1 + sum(step.num_emitted for step in one.trace.steps[:rounds])])] += 1 / rows
    return target_distribution(target, distribution, count), made


@pytest.mark.parametrize(
    ("name", "stops", "most", "rounds", "count"),
    [
        ("ar", None, 1, 4, 6),
        ("trees", "tree", 3, 1, 6),
        ("one drafted token, two rounds", lambda: FixedLength(1), 3, 2, 6),
        ("two drafted tokens", lambda: FixedLength(2), 5, 1, 6),
        ("drafts that differ in length", lambda: Confidence(0.3, 1, 2), 5, 1, 6),
        ("drafts of learned length", lambda: SelfVerify(2), 5, 1, 6),
        ("drafts that the limit cuts to one token", lambda: FixedLength(2), 5, 1, 3),
        ("some rows done in the first round", lambda: FixedLength(1), 3, 2, 3),
    ],
)
@pytest.mark.parametrize("seed", [7])
def test_the_cube_of_uniforms_gives_the_targets_distribution(name, stops, most, rounds, count, seed):
    target = QuarterLM(seed)
    distribution, made = distribution_in_rows(target, stops, most, rounds, count, seed)
    assert distribution == target_distribution(
        target, {(): 1.0}, count
    )  # multiples of 4^-9, which float64 holds exactly
    steps = [step for one in made for step in one.trace.steps[:rounds]]
    if stops is not None:
        assert {step.num_accepted > 0 for step in steps} == {True, False}
    if name.startswith("drafts that differ"):
        assert {step.num_drafted for step in steps} == {1, 2}
