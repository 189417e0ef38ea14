"""The decoding loop: where a generation ends, and who is told what."""

from __future__ import annotations

import math
from typing import Any

import pytest
from oracles.tables import CAPACITY, PROMPT, TableLM, method, random_eagle_head
from worlds import GREEDY

from draftsmith.modules.decoding import loop
from draftsmith.modules.decoding.loop import DecodeOptions, Generation, Round, generate_one
from draftsmith.modules.decoding.plain import PromptAnswer
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.tree import DraftTree, DynamicTree
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.sampling import TorchSource
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
    answer = PromptAnswer(TableLM(1).info, [1, 2, 3], room, TorchSource(0), [9])
    assert answer.emit(emitted) == kept == answer.tokens
    assert answer.ended == ended and answer.done == (ended or len(kept) == room)


def rounds_of(**how: Any) -> tuple[Generation, list[Round]]:
    rounds: list[Round] = []
    return generate_one(**how, options=DecodeOptions(rounds.append)), rounds


@pytest.mark.parametrize("name", ["spec:k=3", "eagle:k=2", "tree", "eagle-tree", "hsddw", "pld", "lookahead"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLING], ids=["greedy", "T=1"])
def test_no_draft_outruns_what_is_wanted(name, params, monkeypatch):
    """Each of three limits is the one that counts, and drafts come up to it. A draft's deepest token may be the last
    but one wanted: the round's own token is the last."""
    make = method(name, TableLM(1))
    for wanted, context, nodes in ((7, 64, 128), (60, 9, 128), (30, 64, 1)):
        deepest = []
        monkeypatch.setattr(loop, "MAX_NODES", nodes)
        for seed in SEEDS:
            target = TableLM(1, max_position=context)
            made, rounds = rounds_of(
                target=target, drafter=make(), prompt=PROMPT, params=params, max_new_tokens=wanted,
                source=TorchSource(seed), eos_ids=(),
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


@pytest.mark.parametrize("name", ["spec:k=3", "tree", "eagle-tree"])
def test_drafters_hear_of_every_token_and_of_the_features_of_those_read(name):
    """Features of the root and of the accepted nodes that the target has read, wherever in the tree they lie."""
    target, apart = TableLM(1), 0
    for seed in range(10):
        drafter, heard = method(name, target)(), []
        advance = drafter.advance
        drafter.advance = lambda outcome, advance=advance, heard=heard: (heard.append(outcome), advance(outcome))
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
            middle, ChainDrafter(DraftModelNet(TableLM(101)), FixedLengthStop(1), CAPACITY), 4, True, CAPACITY
        )
        drafter.drafts = drafts
        generate_one(TableLM(1), drafter, PROMPT, SAMPLING, 14, TorchSource(seed))
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
    chain = ChainDrafter(head.net(target), FixedLengthStop(3), capacity)
    tree = TreeDrafter(head.net(target), DynamicTree(nodes=3, depth=2, topk=1), capacity)
    steps = [generate_one(target, drafter, PROMPT, GREEDY, 14, TorchSource(0)).trace.steps for drafter in (chain, tree)]
    drafted = [[step.num_drafted for step in own] for own in steps]
    assert drafted[0] == drafted[1]
    # What is read ends with the context; a drafted token needs no room until it is read.
    ends = [len(PROMPT) + sum(step.num_emitted for step in steps[0][:n]) for n in range(len(steps[0]))]
    assert drafted[0] == [max(0, min(3, capacity - end + 1, 12 - (end - len(PROMPT)))) for end in ends]
    assert {3, 0} <= set(drafted[0])
