"""Replays of recorded rollouts count what the decoder counts, and coupled drafts are distributed as real ones."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import CONTEXT, near_copy, quick_eagle_head, run_models, tiny_llama_dir

from draftsmith.benchmarks.papers import replay
from draftsmith.benchmarks.papers.replay import RAW, Policy, PolicyReplay
from draftsmith.benchmarks.papers.rollouts import (
    ChainRecorder,
    ChainRollouts,
    CoupledSource,
    Recording,
    TargetAnswer,
    TargetText,
    TreeRecorder,
    TreeRollouts,
    record_all,
)
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.trace import DecodeTrace, pool
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.drafters.methods import DynamicTreeMethod
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource, probabilities
from draftsmith.modules.types import SamplingParams

GREEDY, WARM = SamplingParams(), SamplingParams(0.8)
DEPTH, TREE_DEPTH, NEW_TOKENS = 9, 3, 60


@dataclasses.dataclass
class World:
    """Models, prompts, and the greedy rollouts of the target's responses."""

    models: Models
    heads: dict[str, AcceptanceHead]
    prompts: list[BenchPrompt]
    eos_ids: tuple[int, ...]
    chains: dict[str, ChainRollouts]
    trees: TreeRollouts

    def decoded(self, name: str, head: str = "") -> list[DecodeTrace]:
        """Traces of the production loop."""
        drafter = parse_method(name).build(dataclasses.replace(self.models, acceptance=self.heads.get(head)))
        how = (GREEDY, NEW_TOKENS, TorchSource(0), self.eos_ids)
        return [generate_one(self.models.target, drafter, prompt.prompt_ids, *how).trace for prompt in self.prompts]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    """Contexts that end (the draft's within a response, the target's before max_new_tokens), and end tokens."""
    root = tmp_path_factory.mktemp("tiny")
    directory = tiny_llama_dir(root / "target", seed=3)
    near = near_copy(directory, Path(root / "draft"), noise=0.1, max_position_embeddings=CONTEXT - 30)
    target, draft = load_lm(str(directory)), load_lm(str(near))
    prompts = [BenchPrompt(str(n), [5 + (7 * i + 3 * n) % 200 for i in range(n)]) for n in (CONTEXT - 50, 150, 12)]
    answers = [generate_one(target, None, p.prompt_ids, GREEDY, NEW_TOKENS, TorchSource(0), ()).tokens for p in prompts]
    rows = [[*p.prompt_ids, *answer][-70:] for p, answer in zip(prompts, answers, strict=True)]
    eagle = quick_eagle_head(target, rows, steps=80)
    torch.manual_seed(5)
    heads = {f"D={blocks}": AcceptanceHead(AcceptanceHeadConfig(32, blocks, w_rej=1.0)) for blocks in (1, 0)}
    for head in heads.values():
        torch.nn.init.normal_(head.out.weight, std=1.0)
        head.requires_grad_(False)

    # An end token in the middle of a response, around which the draft agrees with the target.
    eos_ids = []
    for prompt, answer in zip(prompts[1:], answers[1:], strict=True):
        states = draft.features(torch.tensor([[*prompt.prompt_ids, *answer]]))[0, len(prompt.prompt_ids) - 1 : -1]
        agrees = (draft.lm_head(states).argmax(-1) == torch.tensor(answer)).tolist()
        eos_ids.append(
            next(answer[i] for i in range(20, 58) if all(agrees[i : i + 2]) and answer[i] not in answer[:20])
        )
    models = run_models(target, draft, eagle=eagle, acceptance=heads["D=1"], capacity=400)
    how = Recording(GREEDY, DEPTH, NEW_TOKENS, 0, tuple(eos_ids))
    chains = {name: record_all(ChainRecorder(models, name, how, heads), prompts) for name in ("draft", "eagle")}
    tree_how = dataclasses.replace(how, depth=TREE_DEPTH)
    trees = record_all(TreeRecorder(models, DynamicTreeMethod(nodes=1, topk=3, drafter="eagle"), tree_how), prompts)
    return World(models, heads, prompts, tuple(eos_ids), chains, trees)


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
@pytest.mark.parametrize(
    "policy",
    [
        Policy("k", 1), Policy("k", 4), Policy("k", 9), Policy("t", 0.5, maximum=9), Policy("t", 0.9, "", 3, 6),
        Policy("h", 0.6, "D=0" + RAW, 2, 9), Policy("h", 0.3, "D=1", 1, 7),
    ],
    ids=lambda policy: f"{policy.label} {policy.predictor}",
)  # fmt: skip
def test_a_replay_is_the_decoders_trace(world, drafter, policy):
    decoded = world.decoded(str(policy.method(drafter)), policy.head)
    assert PolicyReplay(world.chains[drafter], world.heads).traces(policy) == decoded
    # Drafts were right in part and wrong in part, else this would show little.
    assert 0 < pool(decoded).num_accepted < pool(decoded).num_draft_tokens


@pytest.mark.parametrize(("nodes", "depth"), [(2, 1), (7, 2), (30, 3)])
def test_a_replayed_tree_is_the_decoders_trace(world, nodes, depth):
    decoded = world.decoded(f"eagle-tree:nodes={nodes}:depth={depth}:topk=3")
    assert replay.replay_tree(world.trees, nodes, depth) == decoded
    assert 0 < pool(decoded).num_accepted < pool(decoded).num_draft_tokens


def test_the_world_reaches_the_ends_of_contexts_and_responses(world):
    rollouts = world.chains["draft"]
    assert {answer.ended for answer in rollouts.answers} == {True, False}
    assert rollouts.available().min() == 0 < rollouts.available().max() == DEPTH
    assert rollouts.answers[0].room == 50 < NEW_TOKENS
    assert rollouts.past_end.sum() > 0


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_drafts_that_end_with_an_end_token_are_replayed_too(world, drafter):
    models = dataclasses.replace(world.models, ends=world.eos_ids)
    how = Recording(GREEDY, DEPTH, NEW_TOKENS, 0, world.eos_ids)
    rollouts = record_all(ChainRecorder(models, drafter, how, {}), world.prompts)
    ending = dataclasses.replace(world, models=models)
    for policy in (Policy("k", DEPTH), Policy("t", 0.2, maximum=DEPTH)):
        decoded = ending.decoded(str(policy.method(drafter)))
        assert PolicyReplay(rollouts, {}).traces(policy) == decoded


def test_probabilities_along_the_draft_are_those_of_the_target_read_token_by_token(world):
    how = Recording(WARM, 4, 20, 0, ())
    models = world.models
    rollouts = record_all(ChainRecorder(models, "draft", how, {}, along=True), world.prompts[1:])
    assert rollouts.accept_along is not None
    for row in range(0, len(rollouts.start), 5):
        number = rollouts.answer[row]
        text = [*world.prompts[1:][number].prompt_ids, *rollouts.answers[number].tokens[: rollouts.start[row]]]
        for place in range(rollouts.available()[row]):
            token = rollouts.token[row, place]
            ids = torch.tensor([[*text, *rollouts.token[row, :place]]])
            p = probabilities(models.target.lm_head(models.target.features(ids)[0, -1]), WARM)[token]
            expected = min(1.0, float(p) / np.exp(rollouts.log_q[row, place]))
            assert rollouts.accept_along[row, place] == pytest.approx(expected, abs=1e-4)


# -- rules by hand: halves and quarters, so that a probability equals a threshold exactly


def hand_rollouts(agreed: list[list[bool]], depth: int) -> ChainRollouts:
    """Greedy rollouts of a drafter that agrees with token t of response a where agreed[a][t], in every round."""
    answers = [TargetAnswer(f"row-{a}", "", 5, list(range(len(own))), True, 50) for a, own in enumerate(agreed)]
    rounds = [(a, start) for a, own in enumerate(agreed) for start in range(1, len(own))]
    accepted, probs = [], np.full((len(rounds), depth), np.nan)
    for row, (a, start) in enumerate(rounds):
        left = agreed[a][start:][:depth]
        accepted.append(left.index(False) if False in left else len(left))
        probs[row, : min(accepted[-1] + 1, len(left))] = left[: accepted[-1] + 1]
    answer, start = np.array(rounds).T
    zeros = np.zeros(probs.shape)
    return ChainRollouts(
        answers, answer, start, zeros.astype(np.int64), np.array(accepted), zeros.copy(), zeros.copy(), probs,
        np.zeros(len(rounds), np.int64),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("t", "minimum", "maximum", "length"), [(0.5, 1, 5, 5), (0.51, 1, 5, 2), (0.76, 1, 5, 1), (0.51, 3, 5, 3)]
)
def test_a_confidence_that_equals_the_threshold_continues(t, minimum, maximum, length):
    rollouts = hand_rollouts([[True] * 3], 5)
    rollouts.log_q[:] = np.log([0.75, 0.5, 0.5, 0.5, 0.5])
    assert set(replay.confidence_lengths(rollouts, t, minimum, maximum)) == {length}


def test_the_oracle_leaves_the_last_token_to_the_target():
    rollouts = hand_rollouts([[True] * 5, [True, False, True, True], [True, True, True, False]], 5)
    rounds = [
        [(s.num_drafted, s.num_accepted) for s in t.steps] for t in replay.replay(rollouts, replay.oracle(rollouts))
    ]
    assert rounds == [[(3, 3)], [(0, 0), (1, 1)], [(2, 2)]]


def test_time_is_a_round_and_c_a_drafted_token():
    """The draft agrees with everything but every third token; 12 tokens follow the first."""
    own = PolicyReplay(hand_rollouts([[i % 3 != 0 for i in range(13)]], depth=4), {})
    # K=2: rounds accept two tokens and add the target's own: 4 rounds, 8 drafted, and the prefill.
    assert own.pairs(Policy("k", 2), 0.5).tolist() == [[13, 1 + 4 + 0.5 * 8]]
    assert own.pairs(Policy("k", 4), 0.1)[0, 1] == pytest.approx(1 + 4 + 0.1 * 16)
    assert own.pairs(Policy("oracle"), 0.5).tolist() == own.pairs(Policy("k", 2), 0.5).tolist()


# -- the coupling, enumerated

SIZE = 4
EDGE = 1e-9


def distribution_after(model: int, prefix: tuple[int, ...]) -> torch.Tensor:
    """A random distribution with one zero entry, in places that differ."""
    seed = hash((model, *prefix)) % 9973
    values = torch.rand(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values[seed % SIZE] = 0
    return values / values.sum()


class OneToken:
    """A source that returns a given token and keeps the distribution."""

    def __init__(self, token: int):
        self.token, self.distribution = token, None

    def draw(self, probs: torch.Tensor) -> int:
        self.distribution = probs
        return self.token


def coupled_branches(text: TargetText, start: int, prefix: tuple[int, ...]):
    """Yield (y, accepted, weight) of one draw given the text; the edge of the uniform is searched for."""

    def draw(uniform: float, token: int) -> tuple[int, torch.Tensor | None]:
        uniforms = list(text.uniforms)
        uniforms[start] = uniform
        free = OneToken(token)
        source = CoupledSource(TargetText(text.tokens, text.distributions, uniforms), start, free)
        return source.draw(distribution_after(2, prefix)), free.distribution

    low, high = 0.0, 1.0
    if draw(0.0, 0)[1] is not None:
        high = 0.0
    while high - low > EDGE / 1e6 and high < 1 + EDGE:
        middle = (low + high) / 2
        low, high = (middle, high) if draw(middle, 0)[1] is None else (low, middle)
    if high > 0:
        yield draw(0.0, 0)[0], True, high
    if 1 - high > EDGE:
        distribution = draw(1 - 1e-16, 0)[1]
        for token in range(SIZE):
            yield draw(1 - 1e-16, token)[0], False, (1 - high) * distribution[token].item()


def speculative(prefix: tuple[int, ...]):
    """Yield (y, accepted, the target's token there, weight) of speculative sampling."""
    p, q = distribution_after(1, prefix).tolist(), distribution_after(2, prefix).tolist()
    excess = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    for y in range(SIZE):
        if q[y]:
            keep = min(1.0, p[y] / q[y])
            yield y, True, y, q[y] * keep
            for own in range(SIZE):
                yield y, False, own, q[y] * (1 - keep) * excess[own] / sum(excess)


def test_a_coupled_draft_is_drawn_from_q_and_accepted_as_speculative_sampling_accepts():
    """Two tokens deep: X ~ p and every branch of the coupling, against speculative sampling itself."""
    coupled: dict[tuple, float] = {}
    direct: dict[tuple, float] = {}
    for tokens in itertools.product(range(SIZE), repeat=2):
        distributions = torch.stack([distribution_after(1, ()), distribution_after(1, tokens[:1])])
        weight = (distributions[0, tokens[0]] * distributions[1, tokens[1]]).item()
        text = TargetText(list(tokens), distributions, [0.5, 0.5])
        for first, accepted, w1 in coupled_branches(text, 0, ()) if weight else ():
            if not accepted:
                key = (first, False, tokens[0])
                coupled[key] = coupled.get(key, 0) + weight * w1
                continue
            for second, also, w2 in coupled_branches(text, 1, (first,)):
                key = (first, True, second, also, tokens[1])
                coupled[key] = coupled.get(key, 0) + weight * w1 * w2
    for first, accepted, own, w1 in speculative(()):
        if not accepted:
            direct[first, False, own] = direct.get((first, False, own), 0) + w1
            continue
        for second, also, own_too, w2 in speculative((first,)):
            key = (first, True, second, also, own_too)
            direct[key] = direct.get(key, 0) + w1 * w2
    assert sum(abs(coupled.get(key, 0) - direct.get(key, 0)) for key in {*coupled, *direct}) / 2 < 1e-12
    assert sum(coupled.values()) == pytest.approx(1, abs=1e-12)


def test_after_a_rejection_and_beyond_the_text_the_draft_is_free():
    distributions = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    free, other = OneToken(1), torch.tensor([0.4, 0.6], dtype=torch.float64)
    rejected = CoupledSource(TargetText([0, 1], distributions, [0.3, 0.3]), 0, free)
    assert rejected.draw(torch.tensor([0.0, 1.0], dtype=torch.float64)) == 1 and free.distribution.tolist() == [0, 1]
    assert rejected.draw(other) == 1 and free.distribution is other
    past = CoupledSource(TargetText([0, 1], distributions, [0.3, 0.3]), 2, free)
    free.distribution = None
    past.draw(other)
    assert free.distribution is other
