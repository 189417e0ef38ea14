"""Counts and rates on traces made by hand, and the identity of the counts on decoded ones."""

from __future__ import annotations

import pytest
from table_models import PROMPT, TableLM

from draftsmith.modules.decoding.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.decoding.loop import generate
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, pool
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
    assert totals.redundancy == 1 - 4 / 12


def test_rates_of_nothing_are_finite():
    totals = pool([])
    assert (totals.tau, totals.discard_rate, totals.redundancy) == (0, 0, 0)


@pytest.mark.parametrize("eos_ids", [(), (1,), (0, 3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_identity_of_the_counts_holds_and_discards_are_what_was_not_emitted(temperature, eos_ids):
    seen_cut = False
    for seed in range(30):
        target, draft = TableLM(seed // 3), TableLM(seed // 3 + seed % 3)  # a third of the drafts are the target
        drafter = DraftModelDrafter(draft, FixedLength(3), 64)
        rounds = []
        done = generate(
            target, drafter, PROMPT, SamplingParams(temperature), 9, TorchSource(seed), eos_ids, rounds.append
        )
        trace = done.trace
        assert trace.num_draft_tokens + trace.num_target_calls == trace.num_tokens + trace.num_discarded
        assert trace.num_tokens == len(done.tokens) == sum(len(r.tokens) for r in rounds)
        assert trace.num_accepted == sum(r.num_accepted for r in rounds)
        assert trace.num_target_calls == len(rounds)
        # Independently: every target call gives one token of its own, which is emitted unless the end cut it.
        own_tokens = sum(len(r.tokens) - r.num_accepted for r in rounds)
        assert trace.num_discarded == trace.num_draft_tokens - trace.num_accepted + len(rounds) - own_tokens
        assert done.ended == (done.tokens[-1] in eos_ids) and not set(done.tokens[:-1]) & set(eos_ids)
        seen_cut |= any(step.num_emitted < step.num_accepted + 1 for step in trace.steps)
    assert seen_cut == bool(eos_ids)


def test_autoregressive_decoding_calls_the_target_once_a_token():
    trace = generate(TableLM(0), None, PROMPT, SamplingParams(1.0), 9, TorchSource(0)).trace
    assert (trace.num_tokens, trace.num_target_calls, trace.num_discarded, trace.draft_calls) == (9, 9, 0, 0)
