"""Replays of learning policies are the decoder's traces; what the target thinks of drafts below their first rejection
is what it says of them one by one; heads of the state before a token read what the decoder reads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from greedy_world import near_copy
from quick_heads import quick_eagle_head
from tiny_models import tiny_llama_dir

from draftsmith.data.models import load_lm
from draftsmith.eval.measure import BenchPrompt
from draftsmith.eval.methods.base import Models
from draftsmith.eval.methods.chains import build_chain
from draftsmith.eval.rollouts.judged import KnownJudge, OnlineRows, replay_judged
from draftsmith.eval.rollouts.record import ChainRecorder, Recording
from draftsmith.eval.rollouts.replay import head_probs
from draftsmith.eval.rollouts.rollouts import ChainRollouts, joined
from draftsmith.eval.rollouts.store import read_answer, write_answer
from draftsmith.modules.decoding.loop import generate
from draftsmith.modules.decoding.policies import CostRule, JudgedStop, OnlineJudge, ThresholdRule
from draftsmith.modules.heads.acceptance import AcceptanceHead, AcceptanceHeadConfig, HeadJudge
from draftsmith.modules.sampling import TorchSource, probabilities
from draftsmith.modules.types import SamplingParams

DEPTH, NEW_TOKENS = 5, 40
GREEDY, WARM = SamplingParams(), SamplingParams(0.8)
FEATURES = ("log_q", "logit_max_q", "entropy", "depth")


@dataclasses.dataclass
class World:
    models: Models
    prompts: list[BenchPrompt]
    heads: dict[str, AcceptanceHead]
    embeds: dict[str, torch.nn.Module]

    def recorded(self, drafter: str, params: SamplingParams, along: bool = False) -> ChainRollouts:
        how = Recording(params, DEPTH, NEW_TOKENS, 0, ())
        recorder = ChainRecorder(self.models, drafter, how, self.heads, along=along)
        return joined([recorder(prompt, number) for number, prompt in enumerate(self.prompts)])


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    root = tmp_path_factory.mktemp("judged")
    directory = tiny_llama_dir(root / "target", seed=3)
    target = load_lm(str(directory))
    draft = load_lm(str(near_copy(directory, root / "draft", noise=0.15)))
    prompts = [BenchPrompt(str(n), [5 + (7 * i + 3 * n) % 200 for i in range(n)]) for n in (30, 12)]
    rows = [
        [*p.prompt_ids, *generate(target, None, p.prompt_ids, GREEDY, NEW_TOKENS, TorchSource(0), ()).tokens][-50:]
        for p in prompts
    ]
    eagle = quick_eagle_head(target, rows, steps=60)
    torch.manual_seed(5)
    before = AcceptanceHeadConfig(32, num_blocks=1, w_rej=1.0, state="before", features=FEATURES)
    late = AcceptanceHeadConfig(32, num_blocks=1, w_rej=1.0, features=("entropy", "depth"))
    heads = {"before": AcceptanceHead(before), "late": AcceptanceHead(late)}
    for head in heads.values():
        torch.nn.init.normal_(head.out.weight, std=1.0)
        head.requires_grad_(False)
    models = Models(target, draft, None, eagle, capacity=300)
    return World(models, prompts, heads, {"draft": draft, "eagle": target})


def rule_of(name: str) -> ThresholdRule | CostRule:
    return ThresholdRule(0.6) if name == "threshold" else CostRule(0.2)


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
@pytest.mark.parametrize("judge", ["before", "late", "online q", "online max_q"])
@pytest.mark.parametrize("rule", ["threshold", "cost"])
def test_a_replay_is_the_decoders_trace_and_learns_as_it_does(world, drafter, judge, rule):
    rollouts = world.recorded(drafter, GREEDY)
    if judge.startswith("online"):
        own, recorded = OnlineJudge(judge.split()[1]), OnlineRows(rollouts, judge.split()[1])
    else:
        head = world.heads[judge]
        own = HeadJudge(head, world.embeds[drafter].embed)
        recorded = KnownJudge(head_probs(rollouts.heads[judge], head, True), late=judge == "late")
    stop = JudgedStop(own, rule_of(rule), 1, DEPTH)
    chain = build_chain(world.models, drafter, stop)
    decoded = [
        generate(world.models.target, chain, prompt.prompt_ids, GREEDY, NEW_TOKENS, TorchSource(0), ()).trace
        for prompt in world.prompts
    ]
    assert replay_judged(rollouts, recorded, rule_of(rule), 1, DEPTH) == decoded
    lengths = {step.num_drafted for trace in decoded for step in trace.steps}
    assert len(lengths) > 1 or rule == "cost"  # the judge had a say


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_the_target_of_drafts_below_their_first_rejection(world, drafter, tmp_path):
    """Against the target's teacher-forced laws of text and draft."""
    rollouts = world.recorded(drafter, WARM, along=True)
    judged, below = rollouts.judged(), 0
    np.testing.assert_array_equal(rollouts.accept_along[judged], rollouts.accept_prob[judged])
    target = world.models.target
    for row in range(0, len(rollouts.start), 9):
        number, start = rollouts.answer[row], rollouts.start[row]
        drafted = [token for token in rollouts.token[row].tolist() if token >= 0]
        ids = [*world.prompts[number].prompt_ids, *rollouts.answers[number].tokens[:start], *drafted]
        logits = target.lm_head(target.features(torch.tensor([ids]))[0, -len(drafted) - 1 : -1])
        p = probabilities(logits, WARM)[torch.arange(len(drafted)), drafted].numpy()
        expected = np.minimum(p / np.exp(rollouts.log_q[row, : len(drafted)]), 1)
        np.testing.assert_allclose(rollouts.accept_along[row, : len(drafted)], expected, rtol=2e-3, atol=1e-6)
        below += (~judged[row, : len(drafted)]).sum()
    assert below > 20
    first = world.recorded(drafter, WARM, along=True)
    write_answer(dataclasses.replace(first, answers=first.answers[:1]), tmp_path / "kept.parquet")
    np.testing.assert_array_equal(read_answer(tmp_path / "kept.parquet").accept_along, first.accept_along)
    assert world.recorded(drafter, GREEDY, along=True).accept_along is None
