"""Rows that begin while others go on: each is decoded as if it were alone, whoever had its place before."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from greedy_world import GREEDY, NEW_TOKENS, World, make_world
from run_models import run_models
from table_methods import METHODS, method
from table_models import TableLM, V
from tiny_models import CONTEXT

from draftsmith.modules.decoding.loop import (
    DecodeOptions,
    Generation,
    RowAnswer,
    RowPool,
    generate,
    generate_one,
)
from draftsmith.modules.drafters import feature_heads
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets import llama
from draftsmith.modules.types import SamplingParams

SETTINGS = {"greedy": GREEDY, "T=1": SamplingParams(temperature=1.0)}
PROMPTS = [[(3 * i + j * j) % V for j in range(1 + (5 * i) % 7)] for i in range(11)]
COUNTS = [1 + (7 * i) % 9 for i in range(11)]
ROWS = 3
LONGEST = max(map(len, PROMPTS)) + max(COUNTS)


class Followed:
    """A drafter, and for each of its policies the numbers of the prompts that it drafted for, in order."""

    def __init__(self, drafter: Any, prompts: Sequence[Sequence[int]]):
        self._drafter, self._prompts, self._rows = drafter, [list(prompt) for prompt in prompts], list[int]()
        self.served: dict[int, list[int]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def begin(self, row: int, prompt: Sequence[int], features: Any, first_token: int) -> None:
        self._drafter.begin(row, prompt, features, first_token)
        inner = self._drafter
        each = hasattr(inner, "drafters")
        parts, used = (inner.drafters, inner._used) if each else (inner.policies, [own.policy for own in inner._rows])
        # Trees without a rule have nothing of their own.
        places = [next(number for number, part in enumerate(parts) if part is own) for own in used]
        numbers = list(range(len(used))) if used[0] is None else places
        assert len(set(numbers)) == len(numbers), "no two rows have the same policy"
        self.served[numbers[row]].append(self._prompts.index(list(prompt)))


def together(target: Any, drafter: Any, params: SamplingParams, arrivals: Sequence[int]) -> list[Generation]:
    """Prompts that come before the round of these numbers, or when there is room for them."""
    pool, waiting = RowPool(target, drafter, params, ROWS, LONGEST), list(enumerate(arrivals))
    done, number = list[RowAnswer](), 0
    while waiting or pool.num_active:
        ready = [i for i, arrival in waiting if arrival <= number][: pool.num_free]
        if ready:
            fresh = [RowAnswer(target.info, PROMPTS[i], COUNTS[i], TorchSource(i), (), i) for i in ready]
            done += pool.admit(fresh)
            waiting = [entry for entry in waiting if entry[0] not in ready]
        if pool.num_active:
            done += pool.round()
        number += 1
    assert sorted(row.number for row in done) == list(range(len(arrivals)))
    return [Generation(row.tokens, row.trace, row.ended) for row in sorted(done, key=lambda row: row.number)]


@pytest.mark.parametrize("name", METHODS)
def test_rows_that_come_at_any_round_are_decoded_like_each_alone(name):
    target = TableLM(1)
    assert len({tuple(prompt) for prompt in PROMPTS}) == len(PROMPTS)
    for params, gap in itertools.product(SETTINGS.values(), (0, 1, 2, 7)):
        inner = method(name, target, rows=ROWS)()
        drafter = inner and Followed(inner, PROMPTS)
        made = together(target, drafter, params, [gap * i for i in range(len(PROMPTS))])
        served = drafter.served if drafter else {0: range(len(PROMPTS))}
        seen = 0
        for numbers in served.values():  # a policy goes on from prompt to prompt as if it had been alone with them
            alone = method(name, target)()
            for i in numbers:
                seen += 1
                one = generate_one(target, alone, PROMPTS[i], params, COUNTS[i], TorchSource(i), ())
                assert one == made[i]
        assert seen >= sum(count > 1 for count in COUNTS)
        assert [len(one.tokens) for one in made] == COUNTS
        assert name == "ar" or gap or len(served) == ROWS


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("pool"))


def models_of(world: World, **more: Any) -> Any:
    return run_models(
        world.target, world.draft, world.mid, eagle=world.eagle, acceptance=world.acceptance, capacity=CONTEXT, **more
    )


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "ar",
        "spec:k=5",
        "confidence:t=0.2:max=8",
        "self-verify:k=6",
        "eagle:k=4",
        "eagle-tree:nodes=8:depth=2:topk=3",
        "pld:k=4",
        "pearl:k=3",
    ],
)
def test_a_refilled_row_answers_as_transformers_does(world, monkeypatch, name, static):
    """static: fixed shapes as a GPU runs them: widths padded, spans in buckets, rows that idle until half are done."""
    for module in (feature_heads, llama):
        real = module.cached_rows
        monkeypatch.setattr(module, "cached_rows", lambda *given, real=real: real(*given[:3], static))
    ends = tuple(dict.fromkeys(answer[4 + 3 * i] for i, answer in enumerate(world.answers[:15])))
    drafter = parse_method(name).build(models_of(world), 4)
    session = world.target.session(4, CONTEXT, () if drafter is None else drafter.aux_layers, static=static)
    rows = [RowAnswer(world.target.info, p, NEW_TOKENS, TorchSource(0), ends, i) for i, p in enumerate(world.prompts)]
    pool = RowPool(world.target, drafter, GREEDY, 4, CONTEXT, DecodeOptions(session=session))
    order = [row.number for row in pool.run(rows)]
    assert order != sorted(order) and sorted(order) == list(range(len(rows)))
    for row, prompt, answer in zip(rows, world.prompts, world.answers, strict=True):
        assert row.tokens == answer[: len(row.tokens)] and row.done
        assert Generation(row.tokens, row.trace, row.ended) == world.run(name, prompt, NEW_TOKENS, ends)


def test_a_session_goes_on_with_fewer_rows_than_it_had(world):
    session, drafter = world.target.session(4, CONTEXT), parse_method("eagle:k=4").build(models_of(world), 4)
    for numbers in (range(4), range(4, 6), range(6, 9)):
        prompts = [world.prompts[i] for i in numbers]
        sources = [TorchSource(0) for _ in numbers]
        made = generate(world.target, drafter, prompts, GREEDY, 12, sources, (), DecodeOptions(session=session))
        assert [one.tokens for one in made] == [world.answers[i][:12] for i in numbers]
        pool = RowPool(
            world.target, drafter, GREEDY, 4, CONTEXT, DecodeOptions(session=session)
        )  # which is left half-way
        pool.admit([RowAnswer(world.target.info, prompt, 12, TorchSource(0), ()) for prompt in prompts])


def test_only_as_much_is_admitted_as_there_is_room_for():
    target = TableLM(1)
    pool = RowPool(target, None, GREEDY, 2, 8)
    rows = [RowAnswer(target.info, [1, 2, 3], count, TorchSource(0), (), i) for i, count in enumerate((5, 6, 5, 1))]
    with pytest.raises(ValueError, match="prompt 1: 9 tokens with its answer, and room for 8"):
        pool.admit(rows[:2])
    assert pool.admit([rows[0], rows[3]]) == [rows[3]] and pool.num_free == 1
    with pytest.raises(ValueError, match="2 rows where 1 are free"):
        pool.admit([rows[2], rows[2]])
    assert pool.admit([rows[2]]) == [] and pool.num_free == 0


def test_rows_that_cannot_join_wait_for_all_others(world):
    rows = [RowAnswer(world.hf_target.info, p, 4 + i, TorchSource(0), (), i) for i, p in enumerate(world.prompts[:5])]
    pool = RowPool(world.hf_target, None, GREEDY, 2, CONTEXT)
    free = []
    for row in pool.run(rows):
        free.append(pool.num_free)
        assert row.tokens == world.answers[row.number][: row.room]
    assert free == [0, 2, 0, 2, 2]


def test_prompts_beside_going_rows_are_read_as_alone(world):
    """Chains and trees, of rows that go on, of one that begins with a prompt, and of one that is fed nothing."""
    lm, prompts = world.target, world.prompts
    session, parents = lm.session(4, CONTEXT), [-1, 0, 0, 1]
    session.prefill([0, 1, 2], prompts[4:7])
    session.begin(1)
    fed = [prompts[7][:4], prompts[8], [], prompts[9][:4]]
    session.begin(3)
    for above in (None, [parents if row == 0 else range(-1, len(own) - 1) for row, own in enumerate(fed)]):
        found = session.extend(fed, above, logits_to_keep=2)
        assert list(session.lengths) == [len(prompts[4]) + 4, len(prompts[8]), len(prompts[6]), 4]
        for row, before in enumerate((prompts[4], [], None, [])):
            if before is not None:
                alone = lm.session(1, CONTEXT)
                if before:
                    alone.extend([before])
                own = alone.extend([fed[row]], above and [above[row]], logits_to_keep=2)
                torch.testing.assert_close(found.logits[row, :2], own.logits[0], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(found.features[row, : len(fed[row])], own.features[0], atol=1e-4, rtol=1e-4)
        session.keep([len(prompts[4]), 0, len(prompts[6]), 0])
