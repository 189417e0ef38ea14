"""Rollouts along the target's answers count what decoding counts, and coupled drafts are distributed as real ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import near_copy, quick_eagle_head, run_models, tiny_llama_dir

from draftsmith.benchmarks.papers.rollouts import RAW, Policy, Recorder, Rollouts, coupled, decoded, lengths
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.trace import pool
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource, draw_rows, probabilities
from draftsmith.modules.types import SamplingParams

GREEDY, DEPTH, NEW_TOKENS = SamplingParams(), 9, 60


@dataclass
class World:
    """Models, two of whose answers end with an end token, acceptance heads, and prompts."""

    models: Models
    heads: dict[str, AcceptanceHead]
    prompts: list[BenchPrompt]

    def record(self, drafter: str, params: SamplingParams = GREEDY) -> list[Rollouts]:
        recorder = Recorder(self.models, drafter, params, DEPTH, NEW_TOKENS, 0, self.heads)
        return [recorder(prompt, number) for number, prompt in enumerate(self.prompts)]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    root = tmp_path_factory.mktemp("tiny")
    directory = tiny_llama_dir(root / "target", seed=3)
    target = load_lm(str(directory))
    draft = load_lm(str(near_copy(directory, Path(root / "draft"), noise=0.1)))
    prompts = [BenchPrompt(str(n), [5 + (7 * i + 3 * n) % 200 for i in range(n)]) for n in (90, 60, 12)]
    answers = [generate_one(target, None, p.prompt_ids, GREEDY, NEW_TOKENS, TorchSource(0), ()).tokens for p in prompts]
    rows = [[*p.prompt_ids, *answer][-70:] for p, answer in zip(prompts, answers, strict=True)]
    torch.manual_seed(5)
    heads = {f"D={blocks}": AcceptanceHead(AcceptanceHeadConfig(32, blocks, w_rej=1.0)) for blocks in (1, 0)}
    for head in heads.values():
        torch.nn.init.normal_(head.out.weight, std=1.0)
        head.requires_grad_(False)
    ends = tuple(next(token for token in answer[20:] if token not in answer[:20]) for answer in answers[1:])
    eagle = quick_eagle_head(target, rows, steps=80)
    return World(run_models(target, draft, eagle=eagle, capacity=400, ends=ends), heads, prompts)


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_rollouts_give_the_decoders_traces(world, drafter):
    rollouts = world.record(drafter)
    policies = [
        *(Policy("k", k) for k in (1, 4, 9)), Policy("t", 0.5, maximum=9), Policy("t", 0.9, "", 3, 6),
        Policy("h", 0.6, "D=0" + RAW, 2, 9), Policy("h", 0.3, "D=1", 1, 7),
    ]  # fmt: skip
    for policy in policies:
        models = dataclasses.replace(world.models, acceptance=world.heads.get(policy.head))
        drafter_of_policy = parse_method(str(policy.method(drafter))).build(models)
        how = (GREEDY, NEW_TOKENS, TorchSource(0), models.ends)
        traces = [generate_one(models.target, drafter_of_policy, p.prompt_ids, *how).trace for p in world.prompts]
        assert [decoded(policy, own, world.heads) for own in rollouts] == traces, policy
        # Drafts were right in part and wrong in part, else this would show little.
        assert 0 < pool(traces).num_accepted < pool(traces).num_draft_tokens


def test_a_draft_that_has_no_room_in_the_context_is_none(world):
    longest = world.models.target.info.max_position
    prompt = BenchPrompt("long", [5 + (7 * i) % 200 for i in range(longest - 20)])
    rollouts = Recorder(world.models, "draft", GREEDY, DEPTH, NEW_TOKENS, 0, {})(prompt, 0)
    assert rollouts.limit.max() > 0 == rollouts.limit[-1]


def by_hand(accepted: list[int], q: list[float], num_tokens: int = 13) -> Rollouts:
    rows = len(accepted)
    return Rollouts(num_tokens, np.full(rows, 4), np.array(accepted), np.tile(np.array(q), (rows, 1)), {})


def test_rules_by_hand():
    # Every third token is the target's alone.
    own = by_hand([2, 1, 0] * 4, [0.75, 0.5, 0.5, 0.5])
    assert set(lengths(Policy("t", 0.5, maximum=4), own, {})) == {4}  # as likely as the threshold: goes on
    assert set(lengths(Policy("t", 0.51, maximum=4), own, {})) == {2}
    assert set(lengths(Policy("t", 0.76, "", 3, 4), own, {})) == {3}
    # Four rounds of two tokens and the target's own; the oracle leaves the last token to the target.
    for policy in (Policy("k", 2), Policy("oracle")):
        trace = decoded(policy, own, {})
        assert [(step.num_drafted, step.num_accepted) for step in trace.steps] == [(2, 2)] * 4
    assert pool([decoded(Policy("k", 4), own, {})]).num_draft_tokens == 16


# -- the coupling, integrated over its uniforms

SIZE, GRID = 4, 300


def test_a_coupled_draft_is_drawn_from_q_and_accepted_as_speculative_sampling_accepts():
    p, q = torch.tensor([[0.1, 0.0, 0.6, 0.3], [0.4, 0.3, 0.3, 0.0]], dtype=torch.float64)
    kept_by, rejected_by = torch.zeros(SIZE), torch.zeros(SIZE, SIZE)
    middles = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    decides, uniforms = (values.flatten() for values in torch.meshgrid(middles, middles, indexing="ij"))
    rows = len(decides)
    free = torch.stack([uniforms, uniforms], 1)
    for x in range(SIZE):
        draw = coupled(
            torch.full((rows,), x),
            lambda at: p.expand(len(at), SIZE),
            torch.arange(rows),
            decides,
            free,
            SamplingParams(1),
        )
        y = draw(slice(0, rows), 0, q.log().expand(rows, SIZE))
        for token in range(SIZE):
            share = p[x] * (y == token).double().mean()
            if token == x:
                kept_by[x] += share
            else:
                rejected_by[token, x] += share
        # Behind a rejected token the draft is free, and behind the text.
        second = draw(slice(0, rows), 1, q.log().expand(rows, SIZE))
        own = draw_rows(probabilities(q.log().expand(rows, SIZE), SamplingParams(1)), uniforms)
        lost = y != x
        assert torch.equal(second[lost], own[lost]) and second[-1] == own[-1]
    accept = torch.minimum(p / q, torch.tensor(1.0)).nan_to_num(0)
    excess = (p - q).clamp_min(0)
    assert torch.allclose(kept_by.double(), q * accept, atol=2 / GRID)
    expected = (q * (1 - accept))[:, None] * (excess / excess.sum())
    assert torch.allclose(rejected_by.double(), expected, atol=2 / GRID)
