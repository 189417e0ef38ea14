"""Answers without a draft, in rows that begin while others go on: each is answered as if it were alone, whoever had its
place before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from oracles.tables import TableLM, V
from transformers import AutoModelForCausalLM
from worlds import CONTEXT, GREEDY, NEW_TOKENS, World, make_world, small_lm, tiny_llama_dir

from draftsmith.modules.attention import group_by_length
from draftsmith.modules.decoding.loop import Generation, generate_one
from draftsmith.modules.decoding.plain import ROUNDS_TOGETHER, PromptAnswer, RowPool
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource, draw_rows
from draftsmith.modules.types import SamplingParams

SAMPLING = SamplingParams(1.0)
PROMPTS = [[(3 * i + j * j) % V for j in range(1 + (5 * i) % 7)] for i in range(11)]
COUNTS = [1 + (7 * i) % 9 for i in range(11)]
ROWS = 3
LONGEST = max(map(len, PROMPTS)) + max(COUNTS)


def together(target: Any, params: SamplingParams, arrivals: Sequence[int]) -> list[Generation]:
    """Prompts that come before the round of these numbers, or when there is room for them."""
    pool, waiting = RowPool(target, params, ROWS, LONGEST), list(enumerate(arrivals))
    done, number = list[PromptAnswer](), 0
    while waiting or pool.num_active:
        ready = [i for i, arrival in waiting if arrival <= number][: pool.num_free]
        if ready:
            fresh = [PromptAnswer(target.info, PROMPTS[i], COUNTS[i], TorchSource(i), (), i) for i in ready]
            done += pool.admit(fresh)
            waiting = [entry for entry in waiting if entry[0] not in ready]
        if pool.num_active:
            done += pool.round()
        number += 1
    assert sorted(row.number for row in done) == list(range(len(arrivals)))
    return [Generation(row.tokens, row.trace, row.ended) for row in sorted(done, key=lambda row: row.number)]


@pytest.mark.parametrize("gap", [0, 1, 2, 7])
@pytest.mark.parametrize("params", [GREEDY, SAMPLING], ids=["greedy", "T=1"])
def test_rows_that_come_at_any_round_are_answered_like_each_alone(params, gap):
    """All at once, one after the other, and with pauses."""
    target = TableLM(1)
    assert len({tuple(prompt) for prompt in PROMPTS}) == len(PROMPTS)
    made = together(target, params, [gap * i for i in range(len(PROMPTS))])
    for i, found in enumerate(made):
        assert found == generate_one(target, None, PROMPTS[i], params, COUNTS[i], TorchSource(i), ())
    assert [len(one.tokens) for one in made] == COUNTS


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("pool"))


@pytest.mark.parametrize("static", [False, True])
def test_a_refilled_row_answers_as_transformers_does(world, static):
    """static: fixed shapes as a GPU runs them: spans in buckets, rows that idle until half are done."""
    ends = tuple(dict.fromkeys(answer[4 + 3 * i] for i, answer in enumerate(world.answers[:15])))
    session = world.target.session(4, CONTEXT, static=static)
    rows = [
        PromptAnswer(world.target.info, p, NEW_TOKENS, TorchSource(0), ends, i) for i, p in enumerate(world.prompts)
    ]
    pool = RowPool(world.target, GREEDY, 4, CONTEXT, session)
    order = [row.number for row in pool.run(rows)]
    assert order != sorted(order) and sorted(order) == list(range(len(rows)))
    for row, prompt, answer in zip(rows, world.prompts, world.answers, strict=True):
        assert row.tokens == answer[: len(row.tokens)] and row.done
        assert Generation(row.tokens, row.trace, row.ended) == world.run("ar", prompt, NEW_TOKENS, ends)


def test_a_session_goes_on_with_fewer_rows_than_it_had(world):
    session = world.target.session(4, CONTEXT)
    for numbers in (range(4), range(4, 6), range(6, 9)):
        rows = [PromptAnswer(world.target.info, world.prompts[i], 12, TorchSource(0), (), i) for i in numbers]
        for row in RowPool(world.target, GREEDY, 4, CONTEXT, session).run(rows):
            assert row.tokens == world.answers[row.number][:12]
        # One that is left half-way.
        RowPool(world.target, GREEDY, 4, CONTEXT, session).admit(
            [PromptAnswer(world.target.info, world.prompts[i], 12, TorchSource(0), ()) for i in numbers]
        )


def test_only_as_much_is_admitted_as_there_is_room_for():
    target = TableLM(1)
    pool = RowPool(target, GREEDY, 2, 8)
    rows = [PromptAnswer(target.info, [1, 2, 3], count, TorchSource(0), (), i) for i, count in enumerate((5, 6, 5, 1))]
    with pytest.raises(ValueError, match="prompt 1: 9 tokens with its answer, and room for 8"):
        pool.admit(rows[:2])
    assert pool.admit([rows[0], rows[3]]) == [rows[3]] and pool.num_free == 1
    with pytest.raises(ValueError, match="2 rows where 1 are free"):
        pool.admit([rows[2], rows[2]])
    assert pool.admit([rows[2]]) == [] and pool.num_free == 0


def test_transformers_engine_answers_two_rows_at_a_time(world):
    rows = [
        PromptAnswer(world.hf_target.info, p, 4 + i, TorchSource(0), (), i) for i, p in enumerate(world.prompts[:5])
    ]
    pool = RowPool(world.hf_target, GREEDY, 2, CONTEXT)
    assert sorted(row.number for row in pool.run(rows)) == [*range(5)] and pool.num_free == 2
    assert [row.tokens for row in rows] == [world.answers[row.number][: row.room] for row in rows]


LENGTHS = [7, 31, 30, 1, 32, 64, 60, 59, 2, 31]


@pytest.mark.parametrize("size", [8192, 49152, 50257])
def test_rows_of_a_large_vocabulary_are_drawn_by_the_inverse_cdf(size):
    """Against NumPy's cumulative sum in float64; 4096 uniforms, also where half of the vocabulary has no mass."""
    rng = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(64, size, generator=rng)
    logits[::2, size // 3 :] = -torch.inf
    probs = logits.softmax(-1)
    cumulative = probs.double().numpy().cumsum(-1)
    for uniforms in (torch.rand(64, generator=rng, dtype=torch.float64) for _ in range(64)):
        wanted = cumulative[:, -1] * uniforms.numpy()
        expected = [np.searchsorted(own, value, "right") for own, value in zip(cumulative, wanted, strict=True)]
        assert draw_rows(probs, uniforms).tolist() == expected
    ends = draw_rows(probs, torch.full((64,), 1 - 2**-53, dtype=torch.float64))
    assert (probs.gather(1, ends[:, None]) > 0).all()
    probs[3, 1], probs[4], probs[5, 0] = torch.nan, 0, torch.inf
    assert (draw_rows(probs, uniforms) == NO_TOKEN).nonzero()[:, 0].tolist() == [3, 4, 5]


def test_groups_hold_sequences_of_like_lengths():
    groups = group_by_length(LENGTHS, most_tokens=96, most_padding=0.1)
    assert sorted(itertools.chain(*groups)) == list(range(len(LENGTHS)))
    assert [[LENGTHS[i] for i in group] for group in groups] == [[64], [60], [59], [32, 31, 31], [30], [7], [2], [1]]
    assert group_by_length([1, 9], most_tokens=4) == [[1], [0]], "a sequence longer than a group is alone"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prompts_that_are_read_together_are_read_as_alone(tmp_path, family):
    """Logits of the last tokens, and what follows, against transformers on each prompt; rows in any places, which other
    prompts have had before; a window that a prompt outgrows."""
    path = tiny_llama_dir(tmp_path, family=family, **({"sliding_window": 9} if family == "mistral" else {}))
    lm, oracle = load_lm(str(path)), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = [[(i * 7 + j * j + 3) % 100 for j in range(length)] for i, length in enumerate(LENGTHS)]
    session = lm.session(len(prompts), CONTEXT)
    session.prefill(range(len(prompts)), [[5] * 80] * len(prompts))
    places = [i for i in range(len(prompts)) if i != 4][::-1]
    found = session.prefill(places, [prompts[place] for place in places])
    with torch.no_grad():
        expected = [oracle(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
        later = [oracle(torch.tensor([[*prompt, 9]])).logits[0, -1] for prompt in prompts]
    close = {"atol": 2e-5, "rtol": 1e-4}  # sums in float32 in another order
    for place, logits in zip(places, found, strict=True):
        torch.testing.assert_close(logits, expected[place], **close)
    followed = session.extend([[9] if place != 4 else [] for place in range(len(prompts))]).logits[:, 0]
    for place in places:
        torch.testing.assert_close(followed[place], later[place], **close)


def test_a_broken_row_is_named_within_rounds_that_run_together():
    """A NaN at the sixth token of a row, whatever the rows beside it have emitted by then."""
    assert ROUNDS_TOGETHER > 5
    lm = small_lm(1)
    session = lm.session(3, 60, static=True)
    extend, calls = session.extend, [0]

    def broken(tokens, *others, **more):
        scores = extend(tokens, *others, **more)
        calls[0] += 1
        if calls[0] == 5:
            scores.logits[1] = torch.nan
        return scores

    session.extend = broken
    pool = RowPool(lm, GREEDY, 3, 40, session)
    pool.admit([PromptAnswer(lm.info, [3, 1, i + 5], 30, TorchSource(i), (), 10 + i) for i in range(3)])
    with pytest.raises(NonFinite) as caught:
        pool.round()
    # Three tokens of the prompt, one of the prefill, and four of the first rounds stand before it.
    assert (caught.value.row, caught.value.position, caught.value.what) == (11, 8, "logits")
