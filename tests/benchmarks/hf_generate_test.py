"""transformers' own generation under our counts, against rounds replayed with plain forwards."""

from __future__ import annotations

import pytest
import torch

from draftsmith.benchmarks.hf_generate import HFRunner, load_hf_model
from draftsmith.modules.decoding.trace import pool
from draftsmith.modules.types import SamplingParams

GREEDY = SamplingParams()
PROMPT = [5, 9, 60, 61, 7]


def greedy(model, ids: list[int], count: int) -> list[int]:
    """The argmax continuation, without a cache and without `generate`."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(ids) - count :]


def draft_prob(draft, ids: list[int], token: int) -> float:
    with torch.no_grad():
        return float(draft(torch.tensor([ids])).logits[0, -1].softmax(-1)[token])


def confident(draft, ids: list[int], proposal: list[int], threshold: float) -> list[int]:
    """The proposal up to its first token below the threshold, which stays in."""
    for i, token in enumerate(proposal):
        if draft_prob(draft, ids + proposal[:i], token) < threshold:
            return proposal[: i + 1]
    return proposal


def replay(target, draft, prompt: list[int], count: int, k: int, threshold: float = 0) -> list[tuple[int, int, int]]:
    """(drafted, accepted, emitted) of every assisted round: each drafts at most up to the last token but one."""
    answer = greedy(target, prompt, count)
    rounds, done = [], 0
    while done < count:
        known = prompt + answer[:done]
        proposal = greedy(draft, known, min(k, count - done - 1)) if count - done > 1 else []
        proposal = confident(draft, known, proposal, threshold)
        accepted = 0
        while accepted < len(proposal) and proposal[accepted] == answer[done + accepted]:
            accepted += 1
        emitted = min(accepted + 1, count - done)
        rounds.append((len(proposal), accepted, emitted))
        done += emitted
    return rounds


@pytest.mark.parametrize(("k", "count"), [(3, 24), (5, 17), (2, 1)])
def test_assisted_counts_equal_replayed_rounds(models, k, count):
    target, draft = (load_hf_model(models[name], "float32", "cpu") for name in ("target", "draft"))
    generation = HFRunner(target, GREEDY, (), draft, k)(PROMPT, count, 0)
    assert generation.tokens == greedy(target, PROMPT, count)
    rounds = [(step.num_drafted, step.num_accepted, step.num_emitted) for step in generation.trace.steps]
    assert rounds == replay(target, draft, PROMPT, count, k)
    totals = pool([generation.trace])
    assert totals.num_target_calls == len(rounds)
    assert totals.num_draft_tokens + totals.num_target_calls == totals.num_tokens + totals.num_discarded
    if count > 10:  # the pair is neither all right nor all wrong, else this shows little
        assert 0 < totals.num_accepted < totals.num_draft_tokens


def test_a_threshold_shortens_drafts(models, monkeypatch):
    """Fixed, as it is without scikit-learn: a token of lower probability ends the draft and stays in it."""
    monkeypatch.setattr("transformers.generation.candidate_generator.is_sklearn_available", lambda: False)
    target, draft = (load_hf_model(models[name], "float32", "cpu") for name in ("target", "draft"))
    drafted = []
    for threshold in (0.0, 0.1):
        generation = HFRunner(target, GREEDY, (), draft, 8, threshold)(PROMPT, 24, 0)
        rounds = [(step.num_drafted, step.num_accepted, step.num_emitted) for step in generation.trace.steps]
        assert rounds == replay(target, draft, PROMPT, 24, 8, threshold)
        assert generation.tokens == greedy(target, PROMPT, 24)
        drafted.append(sorted({step.num_drafted for step in generation.trace.steps}))
    assert drafted[0][-1] == 8 and drafted[1][-1] < 8 and len(drafted[1]) > 2


def test_plain_generate_is_one_target_call_a_token(models):
    target = load_hf_model(models["target"], "float32", "cpu")
    generation = HFRunner(target, GREEDY, ())(PROMPT, 12, 0)
    totals = pool([generation.trace])
    assert generation.tokens == greedy(target, PROMPT, 12)
    assert (totals.num_tokens, totals.num_target_calls, totals.num_draft_tokens, totals.tau) == (12, 12, 0, 1.0)


@pytest.mark.parametrize("assisted", [False, True])
def test_an_end_token_ends_the_answer_and_is_kept(models, assisted):
    target, draft = (load_hf_model(models[name], "float32", "cpu") for name in ("target", "draft"))
    free = greedy(target, PROMPT, 16)
    end = free[9]
    runner = HFRunner(target, GREEDY, (end,), draft if assisted else None, 4)
    generation = runner(PROMPT, 16, 0)
    assert generation.tokens == free[: free.index(end) + 1] and generation.ended
    assert generation.trace.num_tokens == len(generation.tokens)


def test_sampling_follows_its_seed_and_leaves_the_global_generator_alone(models):
    target, draft = (load_hf_model(models[name], "float32", "cpu") for name in ("target", "draft"))
    runner = HFRunner(target, SamplingParams(1.0, top_k=20, top_p=0.9), (), draft, 3)
    before = torch.get_rng_state()
    first, again, other = (runner(PROMPT, 12, seed).tokens for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(before, torch.get_rng_state())
