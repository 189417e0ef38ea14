"""Counts and rates on traces made by hand, and the identity of the counts on decoded ones."""

from __future__ import annotations

import itertools

import pytest
from oracles.tables import CAPACITY, METHODS, PROMPT, TableLM, TableSession, method

from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, pool
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams


def test_a_trace_by_hand():
    # Prefill: 1 token. Round 1: 5 drafted, 3 kept, 4 emitted. Round 2: 5 drafted, 5 kept, cut to 2 by the end token.
    trace = DecodeTrace([DecodeStep(5, 3, 4, 5), DecodeStep(5, 5, 2, 5)], prefill_emitted=1)
    assert trace.num_tokens == 7
    assert trace.num_target_calls == 3
    assert trace.num_draft_tokens == 10
    assert trace.num_accepted == 5  # three, and two of the five that were accepted behind the end token
    # Two rejected, three cut; and the bonus token of round 2, which the target made and nobody got.
    assert trace.num_discarded == 6
    assert trace.draft_calls == 10


def test_rates_are_ratios_of_sums():
    first = DecodeTrace([DecodeStep(4, 4, 5, 4)], prefill_emitted=1)  # 6 tokens, 2 calls, nothing discarded
    second = DecodeTrace([DecodeStep(4, 0, 1, 4)] * 2, prefill_emitted=1)  # 3 tokens, 3 calls, 8 discarded
    totals = pool([first, second])
    assert (totals.prompts, totals.num_tokens, totals.num_target_calls, totals.num_discarded) == (2, 9, 5, 8)
    assert totals.tau == 9 / 5  # the mean of 3 and 1 would be 2
    assert totals.discard_rate == 8 / 9
    assert totals.verification_rate == 5 / 9


class CountingLM(TableLM):
    """Counts its own calls and the tokens it reads: how often the target was new_answer, whatever the trace says."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.calls: list[int] = []  # tokens fed in each

    def session(self, rows, capacity, aux_layers=(), static=None):
        calls = self.calls

        class Counting(TableSession):
            def extend(self, tokens, parents=None, logits_to_keep=1):
                calls.append(len(tokens[0]))
                return super().extend(tokens, parents, logits_to_keep)

        return Counting(self, rows, capacity)


@pytest.mark.parametrize("name", METHODS)
def test_the_trace_of_every_method_is_a_true_account(name):
    drafted = accepted = cut = 0
    for seed, temperature in itertools.product(range(8), (0.0, 1.0)):
        target, rounds = CountingLM(seed), []
        drafter = method(name, target, seed - 100 if seed % 3 == 0 else seed)()  # a third of the drafts: the target
        eos_ids = (1,) if seed % 4 == 3 else ()
        params, source = SamplingParams(temperature), TorchSource(seed)
        done = generate_one(target, drafter, PROMPT, params, 12, source, eos_ids, DecodeOptions(rounds.append))
        trace, (prefill, *drafts) = done.trace, rounds
        assert prefill.tokens == done.tokens[:1] and prefill.tree is None
        # Target calls as the target counts them, and in each the root and the nodes that it read.
        assert trace.num_target_calls == len(target.calls) == len(rounds)
        assert target.calls[1:] == [1 + len(r.tree.tokens) for r in drafts]
        # Emitted tokens, round by round, and their sum.
        assert [t for r in rounds for t in r.tokens] == done.tokens
        assert [step.num_emitted for step in trace.steps] == [len(r.tokens) for r in drafts]
        assert trace.num_tokens == len(done.tokens) == 1 + sum(step.num_emitted for step in trace.steps)
        for shown, step in zip(drafts, trace.steps, strict=True):
            tree, verdict = shown.tree, shown.verdict
            # Accepted nodes are a path from the root down.
            assert [tree.parents[node] for node in verdict.path] == [-1, *verdict.path][: len(verdict.path)]
            made = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
            assert shown.tokens == made[: step.num_emitted] and step.num_accepted == len(verdict.path)
            assert shown.num_accepted == min(step.num_accepted, step.num_emitted)
            cut += step.num_accepted > step.num_emitted
            # Only the last round is cut.
            assert step is trace.steps[-1] or step.num_emitted == len(made)
            assert step.num_drafted == len(tree.tokens)
            assert (step.draft_calls > 0) == (step.num_drafted > 0) or name in ("pld", "lookahead")
        if drafter is not None and all(r.tree.is_chain for r in drafts):
            # A chain's drafted tokens are accepted and emitted, or discarded; so is the call's own token where cut.
            lost = sum(step.num_drafted + 1 - step.num_emitted for step in trace.steps)
            assert trace.num_discarded == lost
        assert trace.num_draft_tokens + trace.num_target_calls == trace.num_tokens + trace.num_discarded
        assert trace.num_accepted == sum(r.num_accepted for r in drafts) <= trace.num_draft_tokens
        assert not {*eos_ids} & {*done.tokens[:-1]} and done.ended == (done.tokens[-1] in eos_ids)
        assert done.ended or len(done.tokens) == 12
        drafted, accepted = drafted + trace.num_draft_tokens, accepted + trace.num_accepted
    # Lookups seldom find anything in twelve tokens of four; that they draft at all is enough here.
    assert name == "ar" or drafted > 0
    assert name in ("ar", "pld") or 0 < accepted < drafted
    assert cut > 0 or name != "spec:k=3"


def hierarchy():
    """M1 is M2, which therefore rejects nothing."""
    inner = ChainDrafter(DraftModelNet(TableLM(201)), FixedLengthStop(2), CAPACITY)
    return HierarchicalDrafter(TableLM(201), inner, 4, True, CAPACITY)


@pytest.mark.parametrize("name", ["spec:k=3", "self-verify", "eagle-tree", "hierarchy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "T=1"])
def test_no_model_reads_the_same_text_twice(monkeypatch, name, temperature):
    """Neither the target nor a drafter's models: what was accepted stays in their caches."""
    read: list[tuple[int, tuple[int, ...]]] = []
    row = TableLM.row

    def watched(lm, prefix):
        read.append((id(lm), prefix))
        return row(lm, prefix)

    monkeypatch.setattr(TableLM, "row", watched)
    for seed in range(8):
        target = TableLM(seed)
        drafter = hierarchy() if name == "hierarchy" else method(name, target, seed)()
        read.clear()
        generate_one(target, drafter, PROMPT, SamplingParams(temperature), 12, TorchSource(seed), ())
        assert len(set(read)) == len(read)
