"""The decoding loop: where a generation ends, who is told what, and rows that begin while others go on.

Each row is decoded as if it were alone, whoever had its place before."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from oracles.tables import CAPACITY, METHODS, PROMPT, TableLM, V, method, random_eagle_head
from transformers import AutoModelForCausalLM
from worlds import CONTEXT, GREEDY, NEW_TOKENS, World, make_world, small_lm, tiny_llama_dir

from draftsmith.modules.attention import group_by_length
from draftsmith.modules.decoding.drafter import EachRow
from draftsmith.modules.decoding.loop import (
    ROUNDS_TOGETHER,
    DecodeOptions,
    Generation,
    Round,
    RowAnswer,
    RowPool,
    generate,
    generate_one,
)
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.tree import DraftTree, DynamicTree
from draftsmith.modules.drafters import feature_heads
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource, draw_rows
from draftsmith.modules.targets import llama
from draftsmith.modules.types import SamplingParams

SAMPLING = SamplingParams(1.0)
SEEDS = range(4)


@pytest.mark.parametrize(
    ("room", "emitted", "kept", "ended"),
    [
        (9, [1, 2, 3], [1, 2, 3], False),
        (9, [1, 9, 3], [1, 9], True),
        (9, [9, 9, 3], [9], True),
        (3, [1, 2, 9], [1, 2, 9], True),
        (2, [1, 2, 9], [1, 2], False),  # the end token was cut: this answer has not ended
        (2, [1, 9, 9], [1, 9], True),
        (2, [1, 2, 3, 4], [1, 2], False),
    ],
)
def test_an_answer_is_cut_at_the_first_end_token_and_at_its_room(room, emitted, kept, ended):
    answer = RowAnswer(TableLM(1).info, [1, 2, 3], room, TorchSource(0), [9])
    assert answer.emit(emitted) == kept == answer.tokens
    assert answer.ended == ended and answer.done == (ended or len(kept) == room)


def rounds_of(max_nodes: int = 128, **how: Any) -> tuple[Generation, list[Round]]:
    rounds: list[Round] = []
    return generate_one(**how, options=DecodeOptions(rounds.append, max_nodes=max_nodes)), rounds


@pytest.mark.parametrize("name", ["spec:k=3", "eagle:k=2", "tree", "eagle-tree", "hsddw", "pld", "lookahead"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLING], ids=["greedy", "T=1"])
def test_no_draft_outruns_what_is_wanted(name, params):
    """Each of three limits is the one that counts, and drafts come up to it. A draft's deepest token may be the last
    but one wanted: the round's own token is the last."""
    make = method(name, TableLM(1))
    for wanted, context, nodes in ((7, 64, 128), (60, 9, 128), (30, 64, 1)):
        deepest = []
        for seed in SEEDS:
            target = TableLM(1, max_position=context)
            made, rounds = rounds_of(
                target=target, drafter=make(), prompt=PROMPT, params=params, max_new_tokens=wanted,
                source=TorchSource(seed), eos_ids=(), max_nodes=nodes,
            )  # fmt: skip
            room = min(wanted, context - len(PROMPT))
            assert len(made.tokens) == room and not made.ended
            emitted = 1
            for done in rounds[1:]:
                most = min(room - emitted - 1, nodes)
                deepest.append(depth_of(done.tree) - most)
                if not done.tree.tokens:
                    assert done.step.draft_calls == 0
                emitted += len(done.tokens)
        assert max(deepest) <= 0
        assert max(deepest) == 0 or name in ("pld", "lookahead")


def depth_of(tree: DraftTree) -> int:
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


@pytest.mark.parametrize(
    ("name", "params"),
    [("spec:k=3", GREEDY), *((name, SAMPLING) for name in ("spec:k=3", "tree", "eagle-tree", "hsddw"))],
)
def test_watchers_hear_of_what_was_emitted(name, params):
    """End tokens amid accepted drafts: what is shown is the answer, piece by piece, and counts no token cut from it."""
    cut = 0
    for seed in range(40):
        target = TableLM(seed)
        made, rounds = rounds_of(
            target=target, drafter=method(name, target, seed)(), prompt=PROMPT, params=params,
            max_new_tokens=9, source=TorchSource(seed), eos_ids=(3,),
        )  # fmt: skip
        assert [token for done in rounds for token in done.tokens] == made.tokens
        assert made.ended == (made.tokens[-1] == 3) and 3 not in made.tokens[:-1]
        for done in rounds[1:]:
            accepted = [done.tree.tokens[node] for node in done.verdict.path]
            assert done.tokens[: done.num_accepted] == accepted[: done.num_accepted]
            assert done.num_accepted == min(len(accepted), len(done.tokens))
            cut += len(accepted) > len(done.tokens)
        assert made.trace.num_accepted == sum(done.num_accepted for done in rounds)
    assert cut > 0


@pytest.mark.parametrize("name", ["spec:k=3", "tree", "eagle-tree"])
def test_drafters_hear_of_every_token_and_of_the_features_of_those_read(name):
    """Features of the root and of the accepted nodes that the target has read, wherever in the tree they lie."""
    target, apart = TableLM(1), 0
    for seed in range(10):
        drafter, heard = method(name, target)(), []
        advance = drafter.advance
        drafter.advance = lambda outcomes, advance=advance, heard=heard: (heard.extend(outcomes), advance(outcomes))
        _, rounds = rounds_of(
            target=target, drafter=drafter, prompt=PROMPT, params=SAMPLING, max_new_tokens=14,
            source=TorchSource(seed), eos_ids=(),
        )  # fmt: skip
        text = [*PROMPT, *rounds[0].tokens]
        for outcome, done in zip(heard, rounds[1:], strict=False):
            assert list(outcome.emitted) == done.tokens
            path = list(done.verdict.path)
            for number, feature in enumerate(outcome.features):
                assert feature.equal(target.row((*text, *done.tokens[:number]))[1])
            assert len(outcome.features) == 1 + len(path)
            apart += path != list(range(len(path)))
            text += done.tokens
    assert (apart > 0) == (name in ("tree", "eagle-tree"))


class Even(TableLM):
    """Two tokens have mass, a half each: every entropy is the same number, in whatever order it is summed."""

    def row(self, prefix):
        logits, feature = super().row(prefix)
        return logits.where(logits.isinf(), 0.0), feature


class Watched(HierarchicalDrafter):
    """Keeps, of every draft, the largest entropy in each of M2's rounds, the threshold, and whether it was full."""

    def propose(self, max_drafted, sampler):
        self.rounds = []
        tree = super().propose(max_drafted, sampler)
        if tree.tokens:
            full = len(tree.tokens) == min(max_drafted, self.max_drafted)
            self.drafts.append((self.rounds, self.rule.threshold, full))
        return tree

    def _round(self, room, sampler):
        distributions = super()._round(room, sampler)
        self.rounds.append(
            [-sum(p * math.log(p) for p in distribution.tolist() if p > 0) for distribution in distributions]
        )
        return distributions


@pytest.mark.parametrize("middle", [Even(201, (2,)), TableLM(201)], ids=["equal entropies", "any"])
def test_a_hierarchy_goes_on_while_no_entropy_of_the_last_round_is_above_the_mean(middle):
    """HSDDW, algorithm 2: handed over after the round of M2 in which some token's entropy is above the threshold."""
    drafts, mixed = [], 0
    for seed in range(30):
        drafter = Watched(
            middle, ChainDrafter(DraftModelNet(TableLM(101)), [FixedLengthStop(1)], CAPACITY), 4, True, CAPACITY
        )
        drafter.drafts = drafts
        generate_one(TableLM(1), EachRow([drafter]), PROMPT, SAMPLING, 14, TorchSource(seed))
    ends = set()
    for rounds, threshold, full in drafts:
        *before, last = rounds
        assert all(max(own) <= threshold + 1e-12 for own in before)
        assert full or max(last) > threshold + 1e-12
        ends.add(full)
        mixed += any(own[0] <= threshold - 1e-6 and max(own) > threshold + 1e-6 for own in rounds)
    assert ends == {True, False}
    if isinstance(middle, Even):  # such a round's entropies equal the mean once there is one
        assert any(len(rounds) > 1 for rounds, *_ in drafts)
    else:
        assert mixed > 0


@pytest.mark.parametrize("capacity", [6, 7, 8, 9])
def test_a_tree_is_drafted_to_the_end_of_the_heads_context_as_a_chain_is(capacity):
    """A tree of one child a level is the chain of the same tokens."""
    target, head = TableLM(1), random_eagle_head(7)
    chain = ChainDrafter(head.net(target), [FixedLengthStop(3)], capacity)
    tree = TreeDrafter(head.net(target), DynamicTree(nodes=3, depth=2, topk=1), capacity)
    steps = [generate_one(target, drafter, PROMPT, GREEDY, 14, TorchSource(0)).trace.steps for drafter in (chain, tree)]
    drafted = [[step.num_drafted for step in own] for own in steps]
    assert drafted[0] == drafted[1]
    # What is read ends with the context; a drafted token needs no room until it is read.
    ends = [len(PROMPT) + sum(step.num_emitted for step in steps[0][:n]) for n in range(len(steps[0]))]
    assert drafted[0] == [max(0, min(3, capacity - end + 1, 12 - (end - len(PROMPT)))) for end in ends]
    assert {3, 0} <= set(drafted[0])


# -- rows that come and go


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
    # All at once, one after the other, and with pauses.
    for params, gap in ((GREEDY, 1), (SAMPLING, 0), (SAMPLING, 2), (GREEDY, 7)):
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
    ],
)
def test_a_refilled_row_answers_as_transformers_does(world, monkeypatch, name, static):
    """static: fixed shapes as a GPU runs them: widths padded, spans in buckets, rows that idle until half are done."""
    for module in (feature_heads, llama):
        real = module.cached_rows
        monkeypatch.setattr(module, "cached_rows", lambda *given, real=real: real(*given[:3], static))
    ends = tuple(dict.fromkeys(answer[4 + 3 * i] for i, answer in enumerate(world.answers[:15])))
    drafter = parse_method(name).build(world.models(), 4)
    session = world.target.session(4, CONTEXT, () if drafter is None else drafter.aux_layers, static=static)
    rows = [RowAnswer(world.target.info, p, NEW_TOKENS, TorchSource(0), ends, i) for i, p in enumerate(world.prompts)]
    pool = RowPool(world.target, drafter, GREEDY, 4, CONTEXT, DecodeOptions(session=session))
    order = [row.number for row in pool.run(rows)]
    assert order != sorted(order) and sorted(order) == list(range(len(rows)))
    for row, prompt, answer in zip(rows, world.prompts, world.answers, strict=True):
        assert row.tokens == answer[: len(row.tokens)] and row.done
        assert Generation(row.tokens, row.trace, row.ended) == world.run(name, prompt, NEW_TOKENS, ends)


def test_a_session_goes_on_with_fewer_rows_than_it_had(world):
    session, drafter = world.target.session(4, CONTEXT), parse_method("eagle:k=4").build(world.models(), 4)
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
    """Logits of the last tokens, states of all, and what follows, against transformers on each prompt; rows in any
    places, which other prompts have had before; a window that a prompt outgrows."""
    path = tiny_llama_dir(tmp_path, family=family, **({"sliding_window": 9} if family == "mistral" else {}))
    lm, oracle = load_lm(str(path)), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = [[(i * 7 + j * j + 3) % 100 for j in range(length)] for i, length in enumerate(LENGTHS)]
    session = lm.session(len(prompts), CONTEXT, (1, 2))
    session.prefill(range(len(prompts)), [[5] * 80] * len(prompts))
    places = [i for i in range(len(prompts)) if i != 4][::-1]
    scores = session.prefill(places, [prompts[place] for place in places])
    with torch.no_grad():
        expected = [oracle(torch.tensor([prompt]), output_hidden_states=True) for prompt in prompts]
        later = [oracle(torch.tensor([[*prompt, 9]])).logits[0, -1] for prompt in prompts]
    for place, logits, states in zip(places, scores.logits, scores.features, strict=True):
        # Sums in float32 in another order.
        close = {"atol": 2e-5, "rtol": 1e-4}
        torch.testing.assert_close(logits[0], expected[place].logits[0, -1], **close)
        torch.testing.assert_close(states[: LENGTHS[place], :32], expected[place].hidden_states[1][0], **close)
    followed = session.extend([[9] if place != 4 else [] for place in range(len(prompts))]).logits[:, 0]
    for place in places:
        torch.testing.assert_close(followed[place], later[place], **close)


def test_prompts_wait_until_a_group_is_free():
    """With 64 rows few prompts are read alone, and most rows are in use."""
    lm, rows, count = small_lm(1), 64, 600
    read = list[int]()
    session = lm.session(rows, 40)
    prefill = session.prefill
    session.prefill = lambda places, tokens: read.append(len(places)) or prefill(places, tokens)
    pool = RowPool(lm, None, GREEDY, rows, 30, DecodeOptions(session=session, max_nodes=0))
    active = list[int]()

    def waiting():
        for i in range(count):
            active.append(pool.num_active)
            yield RowAnswer(lm.info, [1 + i % 5] * 3, 5 + i * 7919 % 19, TorchSource(i), (), i)

    assert len(list(pool.run(waiting()))) == count
    assert sum(size for size in read if size == 1) <= 0.05 * count
    assert sum(active[rows:]) / len(active[rows:]) > 0.85 * rows  # when they are taken


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
    pool = RowPool(lm, None, GREEDY, 3, 40, DecodeOptions(session=session, max_nodes=0))
    pool.admit([RowAnswer(lm.info, [3, 1, i + 5], 30, TorchSource(i), (), 10 + i) for i in range(3)])
    with pytest.raises(NonFinite) as caught:
        pool.round()
    # Three tokens of the prompt, one of the prefill, and four of the first rounds stand before it.
    assert (caught.value.row, caught.value.position, caught.value.what) == (11, 8, "logits")
