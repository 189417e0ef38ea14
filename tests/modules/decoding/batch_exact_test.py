"""The batched loop's own law, its random numbers included: integrated over the cube of a round's uniforms, exactly.

Every law of these tables has its steps at quarters, and so have the odds of acceptance and what replaces a rejected
token: the outcome is constant on the cells of a grid of 4 by uniform. One point of each cell, a row of the batch each,
is the integral itself, so that what comes out is compared without any tolerance. A uniform used twice, or for two
things, spoils it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.modules.decoding.batch import generate_batch
from draftsmith.modules.decoding.stop import Confidence, FixedLength, SelfVerify
from draftsmith.modules.drafters.draft_model_batch import BatchDraftModel
from draftsmith.modules.targets.base import ModelInfo, Scores
from draftsmith.modules.types import SamplingParams

V, H, CELLS = 3, 2, 4
PROMPT, PARAMS = (2, 0), SamplingParams(temperature=1.0)
LAWS = [*dict.fromkeys([*itertools.permutations((0.25, 0.25, 0.5)), *itertools.permutations((0.5, 0.5, 0.0))])]
Law = dict[tuple[int, ...], float]


class QuarterLM:
    """A `RowsLM` whose law is a function of the whole prefix: one of LAWS by a number made of all tokens."""

    packed, device, dtype = False, torch.device("cpu"), torch.float64

    def __init__(self, seed: int, context: int = 64):
        self.seed, self.info = seed, ModelInfo(H, V, 1, context, (), {"config": f"quarters-{seed}"})
        self.log_laws = torch.tensor(LAWS, dtype=torch.float64).log()

    def rows_session(self, batch: int, capacity: int, static: bool | None = None) -> QuarterRows:
        return QuarterRows(self, batch, capacity)

    def law(self, prefix: Sequence[int]) -> tuple[float, ...]:
        number = self.seed
        for token in prefix:
            number = after(number, token)
        return LAWS[number % len(LAWS)]


def after(number: Any, token: Any) -> Any:
    """The number of a prefix with one more token: of integers or tensors of them."""
    return (number * 1_000_003 + token + 1) % (2**31 - 1)


class QuarterRows:
    """Remembers the number of every prefix that each row has read, and nothing else."""

    static = False

    def __init__(self, lm: QuarterLM, batch: int, capacity: int):
        self._lm, self.batch, self.capacity = lm, batch, capacity
        # After 0, 1, .. tokens. Drafts of rows that have stopped are read on past the last slot.
        self._numbers = torch.full((batch, capacity + 8), -1)
        self._numbers[:, 0] = lm.seed

    def prefill(self, row: int, prompt: Sequence[int]) -> Scores:
        number = self._lm.seed
        for place, token in enumerate(prompt, start=1):
            number = after(number, token)
            self._numbers[row, place] = number
        return Scores(self._lm.log_laws[number % len(LAWS)][None], torch.zeros(len(prompt), H))

    def extend(self, tokens: Tensor, starts: Tensor, end: int, num_logits: int = 1) -> tuple[Tensor, Tensor]:
        count = tokens.shape[1]
        assert end == int(starts.max()) + count
        own = self._numbers.gather(1, starts[:, None])[:, 0]
        assert (own >= 0).all(), "a token follows others that were never read"
        logits = []
        for i in range(count):
            own = after(own, tokens[:, i])
            self._numbers.scatter_(1, starts[:, None] + i + 1, own[:, None])
            logits.append(self._lm.log_laws[own % len(LAWS)])
        return torch.stack(logits[count - num_logits :], 1), torch.zeros(len(tokens), count, H)

    def select(self, rows: Tensor) -> None:
        self._numbers = self._numbers[rows]


class Streams:
    """In the place of torch.rand: the generator of seed r gives row r of `values`, from left to right, then zeros. The
    first call of each is the prefill's, which draws one token: any of its numbers is the first column's."""

    def __init__(self, values: Tensor):
        self._values, self._width = values, values.shape[1]
        self._places: dict[int, tuple[Any, int]] = {}

    def __call__(self, size: int, *, generator: Any, dtype: Any) -> Tensor:
        row, place = self._values[generator.initial_seed()], self._places.get(id(generator), (None, 0))[1]
        used = size if place else 1
        self._places[id(generator)] = generator, place + used  # held, or another would have its id
        own = torch.zeros(used, dtype=dtype)
        known = row[place : place + used]
        own[: len(known)] = known
        return own.expand(size)


def target_law(target: QuarterLM, law: Law, length: int) -> Law:
    """The law of `length` tokens, of beginnings that have `law`."""
    grown: Law = defaultdict(float)
    for tokens, weight in law.items():
        if len(tokens) >= length:
            grown[tokens] += weight
            continue
        more = {(*tokens, v): weight * p for v, p in enumerate(target.law((*PROMPT, *tokens))) if p > 0}
        for whole, own in target_law(target, more, length).items():
            grown[whole] += own
    return dict(grown)


def batched_law(
    monkeypatch: Any, target: QuarterLM, stops: Any, per_round: int, rounds: int, count: int, seed: int
) -> tuple[Law, list]:
    """Of what `rounds` rounds after the prefill emit, and after that the target's own; and the generations.

    per_round: uniforms of a round. stops: makes a row's policy, or None.
    """
    middles = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    values = torch.cartesian_prod(*[middles] * (1 + per_round * rounds))
    rows = len(values)
    monkeypatch.setattr(torch, "rand", Streams(values))
    draft = QuarterLM(seed + 1)
    drafter = None if stops is None else BatchDraftModel(draft, [stops() for _ in range(rows)], 64)
    made = generate_batch(target, drafter, [PROMPT] * rows, PARAMS, count, list(range(rows)), ())
    monkeypatch.undo()
    law: Law = defaultdict(float)
    for one in made:
        law[tuple(one.tokens[: 1 + sum(step.num_emitted for step in one.trace.steps[:rounds])])] += 1 / rows
    return target_law(target, law, count), made


@pytest.mark.parametrize(
    ("name", "stops", "longest", "rounds", "count"),
    [
        ("ar", None, 0, 4, 6),
        ("one drafted token, two rounds", lambda: FixedLength(1), 1, 2, 6),
        ("two drafted tokens", lambda: FixedLength(2), 2, 1, 6),
        ("drafts that differ in length", lambda: Confidence(0.3, 1, 2), 2, 1, 6),
        ("drafts of learned length", lambda: SelfVerify(2), 2, 1, 6),
        ("drafts that the limit cuts to one token", lambda: FixedLength(2), 2, 1, 3),
        ("some rows done in the first round", lambda: FixedLength(1), 1, 2, 3),
    ],
)
@pytest.mark.parametrize("seed", [7])
def test_the_cube_of_uniforms_gives_the_targets_law(monkeypatch, name, stops, longest, rounds, count, seed):
    target = QuarterLM(seed)
    law, made = batched_law(monkeypatch, target, stops, 2 * longest + 1, rounds, count, seed)
    assert law == target_law(target, {(): 1.0}, count)  # multiples of 4^-9, which float64 holds exactly
    steps = [step for one in made for step in one.trace.steps[:rounds]]
    assert longest == 0 or {step.num_accepted == step.num_drafted for step in steps} == {True, False}
    if name.startswith("drafts that differ"):
        assert {step.num_drafted for step in steps} == {1, 2}
