"""Replays of learning policies are the decoder's traces; what the target thinks of drafts below their first rejection
is what it says of them one by one; heads of the state before a token read what the decoder reads."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
import torch
from greedy_world import near_copy
from hand_rollouts import hand_rollouts, of_answer
from quick_heads import quick_eagle_head
from run_models import run_models
from tiny_models import CONTEXT, tiny_llama_dir

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.chains import ChainRecorder
from draftsmith.eval.replay.coupling import CoupledDraws, CoupledSource, ReadAnswer, TargetText
from draftsmith.eval.replay.record import Recording, TargetAnswers, record_all
from draftsmith.eval.replay.replay import (
    KnownPredictor,
    RecordedOnline,
    fixed_k,
    head_probs,
    replay,
    replay_by_prediction,
)
from draftsmith.eval.replay.rollouts import ChainRollouts, TargetAnswer, read_answer, write_answer
from draftsmith.eval.studies.policies.comparison import RAW, DrafterMode, Policy, PolicyReplay
from draftsmith.eval.studies.specdecpp.sweep import LengthRule, replayed
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.acceptance.policies import CostRule, OnlinePredictor, PredictorStop, ThresholdRule
from draftsmith.modules.acceptance.predictor import HeadPredictor
from draftsmith.modules.acceptance.repeats import Repeats, followers
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.chains import build_chains
from draftsmith.modules.drafters.methods import Models, parse_method
from draftsmith.modules.sampling import TorchSource, pick, probabilities
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import SamplingParams

DEPTH, NEW_TOKENS = 5, 30
GREEDY, WARM = SamplingParams(), SamplingParams(0.8)
FEATURES = ("log_q", "logit_max_q", "entropy", "depth")


@dataclasses.dataclass
class World:
    models: Models
    prompts: list[BenchPrompt]
    heads: dict[str, AcceptanceHead]
    embeds: dict[str, LlamaLM]
    kept: dict[tuple, ChainRollouts]

    def recorded(self, drafter: str, params: SamplingParams, **how: bool) -> ChainRollouts:
        key = drafter, params, *how
        if key not in self.kept:
            recorder = ChainRecorder(
                self.models,
                drafter,
                Recording(params, DEPTH, NEW_TOKENS, 0, ()),
                self.heads,
                self.answers[params],
                **how,
            )
            self.kept[key] = record_all(recorder, self.prompts)
        return self.kept[key]

    @functools.cached_property
    def answers(self) -> dict[SamplingParams, TargetAnswers]:
        target = self.models.target
        return {params: TargetAnswers(target, Recording(params, DEPTH, NEW_TOKENS, 0, ())) for params in (GREEDY, WARM)}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    root = tmp_path_factory.mktemp("predicted")
    directory = tiny_llama_dir(root / "target", seed=3)
    target = load_lm(str(directory))
    draft = load_lm(str(near_copy(directory, root / "draft", noise=0.15)))
    prompts = [BenchPrompt(str(n), [5 + (7 * i + 3 * n) % 200 for i in range(n)]) for n in (30, 12)]
    rows = [
        [*p.prompt_ids, *generate_one(target, None, p.prompt_ids, GREEDY, NEW_TOKENS, TorchSource(0), ()).tokens][-50:]
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
    undrawn = dataclasses.replace(before, state="undrawn", features=("logit_max_q", "repeat_mean"))
    heads["undrawn"] = AcceptanceHead(undrawn).requires_grad_(False)
    heads["undrawn"].direct.weight.fill_(1.0)
    models = run_models(target, draft, eagle=eagle, capacity=300)
    return World(models, prompts, heads, {"draft": draft, "eagle": target}, {})


def rule_of(name: str) -> ThresholdRule | CostRule:
    return ThresholdRule(0.6) if name == "threshold" else CostRule(0.2)


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
@pytest.mark.parametrize(
    "predictor",
    [
        "before",
        "late",
        "undrawn",
        "online q",
        "online max_q",
        "online q before",
        "online max_q late",
        "online q undrawn",
    ],
)
@pytest.mark.parametrize("rule", ["threshold", "cost"])
def test_a_replay_is_the_decoders_trace_and_learns_as_it_does(world, drafter, predictor, rule):
    rollouts = world.recorded(drafter, GREEDY)
    label, own, recorded = predictor.split()[-1], None, None
    if label in world.heads:
        head = world.heads[label]
        own = HeadPredictor(head, world.embeds[drafter].embed)
        recorded = KnownPredictor(head_probs(rollouts.heads[label], head, True), late=label == "late")
    if predictor.startswith("online"):
        by = predictor.split()[1]
        own, recorded = OnlinePredictor(by, head=own), RecordedOnline(rollouts, by, head=recorded)
    stop = PredictorStop(own, rule_of(rule), 1, DEPTH)
    chain = build_chains(world.models, drafter, [stop])
    decoded = [
        generate_one(world.models.target, chain, prompt.prompt_ids, GREEDY, NEW_TOKENS, TorchSource(0), ()).trace
        for prompt in world.prompts
    ]
    assert replay_by_prediction(rollouts, recorded, rule_of(rule), 1, DEPTH) == decoded
    lengths = {step.num_drafted for trace in decoded for step in trace.steps}
    assert len(lengths) > 1 or rule == "cost"  # the predictor had a say


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
@pytest.mark.parametrize("label", ["before", "late"])
def test_studies_replay_heads_of_either_kind_as_the_decoder_asks_them(world, drafter, label):
    """The sweep of SpecDec++'s study and the policies' player, against methods of `eval bench`."""
    rollouts, heads = world.recorded(drafter, GREEDY), {label: world.heads[label]}
    models = dataclasses.replace(world.models, acceptance=world.heads[label])
    played, lengths = PolicyReplay(DrafterMode(drafter, GREEDY, heads, rollouts, rollouts), rollouts), set()
    for minimum, h, calibrated in ((1, 0.4, True), (2, 0.6, False), (DEPTH, 0.4, True)):
        rule = LengthRule(head=label, h=h, calibrated=calibrated)
        method = f"{rule.method(minimum, DEPTH)}:drafter={drafter}"
        chain = parse_method(method).build(models)
        decoded = [
            generate_one(models.target, chain, prompt.prompt_ids, GREEDY, NEW_TOKENS, TorchSource(0), ()).trace
            for prompt in world.prompts
        ]
        assert replayed(rollouts, rule, (minimum, DEPTH), heads) == decoded
        policy = Policy("h", h, label if calibrated else label + RAW, minimum, DEPTH)
        assert played.traces(policy, 0.1) == decoded
        lengths |= {step.num_drafted for trace in decoded for step in trace.steps}
    assert len(lengths) > 2  # the head had a say


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampling"])
def test_heads_are_told_where_repetitions_lead(world, params, side_by_side, monkeypatch):
    monkeypatch.setattr(Repeats, "SIZES", (2, 1))  # such models repeat little more than a token
    draft, prompt = world.embeds["draft"], BenchPrompt("all tokens", list(range(5, 205)))
    head = AcceptanceHead(AcceptanceHeadConfig(32, num_blocks=0, state="undrawn", features=("repeat_mean",)))
    for weight in head.requires_grad_(False).parameters():
        weight.fill_(1.0 if weight is head.direct.weight else 0.0)
    how = Recording(params, DEPTH, 8, 0, ())
    recorder = ChainRecorder(world.models, "draft", how, {"mean": head}, side_by_side=side_by_side)
    found, told = record_all(recorder, [prompt]), []
    for row, tokens in enumerate(torch.from_numpy(found.token)):
        text = [*prompt.prompt_ids, *found.answers[0].tokens[: found.start[row]]]
        (halves,), (expected,) = followers(text, [len(text)], tokens[None])
        logits = draft.lm_head(draft.features(torch.tensor([[*text, *tokens.tolist()]]))[0, -DEPTH - 1 : -1])
        q = logits.softmax(-1) if params.greedy else probabilities(logits, params)
        told += [float(half * (2 * q[place, expected[place]] - 1)) for place, half in enumerate(halves)]
    assert found.heads["mean"].flatten().tolist() == pytest.approx(told, abs=1e-4)
    assert sum(value != 0 for value in told) > 3


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_drafts_end_at_end_tokens_in_replays_too(world, drafter, side_by_side):
    known = world.recorded(drafter, GREEDY)
    early = {token for answer in known.answers for token in answer.tokens[:8]}
    drafted = Counter(token for token in known.token.flatten().tolist() if token not in early)
    ends = tuple(token for token, _ in drafted.most_common(4))  # some are accepted, others not
    models = dataclasses.replace(world.models, ends=ends)
    recorder = ChainRecorder(
        models, drafter, Recording(GREEDY, DEPTH, NEW_TOKENS, 0, ends), world.heads, side_by_side=side_by_side
    )
    rollouts = record_all(recorder, world.prompts)
    assert (rollouts.available() < DEPTH).sum() > 2

    def decoded(method: str, head: str | None = None) -> list:
        chain = parse_method(method).build(dataclasses.replace(models, acceptance=world.heads.get(head)))
        return [
            generate_one(models.target, chain, prompt.prompt_ids, GREEDY, NEW_TOKENS, TorchSource(0), ends).trace
            for prompt in world.prompts
        ]

    limits, by = (1, DEPTH), f":drafter={drafter}"
    fixed = replay(rollouts, fixed_k(rollouts, DEPTH))
    assert fixed == decoded(f"{'spec' if drafter == 'draft' else 'eagle'}:k={DEPTH}")
    assert replayed(rollouts, LengthRule(t=0.2), limits, {}) == decoded(f"confidence:t=0.2:min=1:max={DEPTH}{by}")
    for label in world.heads:
        rule = LengthRule(head=label, h=0.4, calibrated=True)
        assert replayed(rollouts, rule, limits, world.heads) == decoded(rule.method(1, DEPTH) + by, label)
    online = replay_by_prediction(rollouts, RecordedOnline(rollouts), CostRule(0.1), 1, DEPTH)
    assert online == decoded(f"online:c=0.1:max={DEPTH}{by}")


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_the_target_of_drafts_below_their_first_rejection(world, drafter, tmp_path):
    """Against the target's teacher-forced distributions of text and draft."""
    rollouts = world.recorded(drafter, WARM, along=True, side_by_side=True)
    verified, below = rollouts.verified(), 0
    np.testing.assert_array_equal(rollouts.accept_along[verified], rollouts.accept_prob[verified])
    target = world.models.target
    for row in range(0, len(rollouts.start), 9):
        number, start = rollouts.answer[row], rollouts.start[row]
        drafted = rollouts.token[row].tolist()
        ids = [*world.prompts[number].prompt_ids, *rollouts.answers[number].tokens[:start], *drafted]
        logits = target.lm_head(target.features(torch.tensor([ids]))[0, -DEPTH - 1 : -1])
        p = probabilities(logits, WARM)[torch.arange(DEPTH), drafted].numpy()
        expected = np.minimum(p / np.exp(rollouts.log_q[row]), 1)
        np.testing.assert_allclose(rollouts.accept_along[row], expected, rtol=2e-3, atol=1e-6)  # float32, other shapes
        below += (~verified[row]).sum()
    assert below > 5
    write_answer(of_answer(rollouts, 0), tmp_path / "kept.parquet")
    np.testing.assert_array_equal(
        read_answer(tmp_path / "kept.parquet").accept_along, of_answer(rollouts, 0).accept_along
    )


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_drafts_side_by_side_are_the_drafters_own(world, drafter):
    """Greedy nothing is drawn: all but the last bits of logits must agree with one draft after another."""
    alone, together = (world.recorded(drafter, GREEDY, **how) for how in ({}, {"side_by_side": True}))
    assert together.accept_along is None
    for name in ("token", "num_accepted", "past_end", "accept_prob"):
        np.testing.assert_array_equal(getattr(together, name), getattr(alone, name))
    for name in ("log_q", "log_max_q", "entropy"):
        np.testing.assert_allclose(getattr(together, name), getattr(alone, name), atol=2e-4)
    for name, logits in alone.heads.items():
        np.testing.assert_allclose(together.heads[name], logits, atol=2e-3)


def test_a_context_that_ends_is_drafted_to_its_end(world):
    """There drafts are of different lengths: one after another, whatever was asked for."""
    ending = [BenchPrompt("long", [5 + i % 150 for i in range(CONTEXT - 20)])]
    how, models = Recording(GREEDY, DEPTH, NEW_TOKENS, 0, ()), world.models
    alone, together = (
        ChainRecorder(models, "draft", how, {}, side_by_side=fast)(ending[0], 0) for fast in (False, True)
    )
    np.testing.assert_array_equal(together.token, alone.token)
    assert together.available().min() < DEPTH


def test_draws_side_by_side_are_those_of_single_rounds():
    """The coupling that `coupling_test.py` enumerates, given the same uniforms."""
    rng, vocab, length, depth = torch.Generator().manual_seed(0), 6, 9, 4
    distributions = (2 * torch.randn(length, vocab, generator=rng)).softmax(-1)
    uniforms = torch.rand(length, generator=rng, dtype=torch.float64).tolist()
    text = TargetText(
        [int(distribution.multinomial(1, generator=rng)) for distribution in distributions], distributions, uniforms
    )
    tokens = text.tokens[: length - 2]  # the text goes on behind the answer
    reading = ReadAnswer(TargetAnswer("a", "", 3, tokens, True, 50), text, torch.empty(0), torch.empty(0))
    draws = CoupledDraws(reading, depth, WARM, seed=1)
    logits = torch.randn(depth, len(tokens) - 1, vocab, generator=rng)
    drawn = torch.stack([draws(slice(None), level, own) for level, own in enumerate(logits)], 1).tolist()
    free = torch.rand(len(tokens) - 1, depth, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()

    class Given:
        """A source of one round's uniforms, one a token whether it is needed or not."""

        def __init__(self, own: list[float]):
            self.own, self.level = own, 0

        def draw(self, probs: torch.Tensor) -> int:
            return pick(probs.double(), self.own[self.level])

    rejected = 0
    for row in range(len(tokens) - 1):
        given = Given(free[row])
        single = CoupledSource(text, row + 1, given)
        for level in range(depth):
            given.level = level
            distribution = probabilities(logits[level, row], WARM)
            assert single.draw(distribution) == drawn[row][level]
            token, place = drawn[row][level], row + 1 + level
            assert draws.known["log_q"][row, level].item() == pytest.approx(distribution[token].log().item(), abs=1e-6)
            if place < length:
                expected = min(1.0, (distributions[place, token] / distribution[token]).item())
                assert draws.known["accept_prob"][row, level].item() == pytest.approx(expected, rel=1e-5)
                rejected += token != text.tokens[place]
    assert 0 < rejected < len(tokens) * depth


def test_a_policy_hears_of_every_round_but_an_answers_last():
    """As in the decoder, where nobody asks for a draft after the last round; also where another answer follows."""

    class Listening(KnownPredictor):
        def __init__(self, probs):
            super().__init__(probs, late=False)
            self.heard: list[tuple[int, int]] = []

        def observe(self, num_drafted: int, num_accepted: int) -> None:
            self.heard.append((num_drafted, num_accepted))

    rollouts = hand_rollouts([[True] * 12, [True, False] * 7, [True] * 9], depth=3)
    listening = Listening(np.full_like(rollouts.log_q, 0.9))
    traces = replay_by_prediction(rollouts, listening, ThresholdRule(0.99), 1, 3)
    rounds = [[(step.num_drafted, step.num_accepted) for step in trace.steps if step.num_drafted] for trace in traces]
    assert all(len(own) > 1 for own in rounds)
    assert listening.heard == [step for own in rounds for step in own[:-1]]
