"""Drafts side by side against the decoder's own drafters, one start at a time."""

from __future__ import annotations

import pytest
import torch
from oracles.drafts import Given, Spy
from oracles.tables import V
from worlds import tiny_llama_dir

from draftsmith.modules.drafters import branches
from draftsmith.modules.drafters.branches import BranchDrafter, BranchedText, target_states
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import Sampler
from draftsmith.modules.types import SamplingParams

DEPTH = 4
# Two ways through the same float64 arithmetic: sums in another order.
TOLERANCE = 1e-9


def one_by_one(make_drafter, text, features, starts, params, uniforms):
    """Tokens [S, K] and states [S, K + 1, H] of real drafts: the last state by a draft of one token more."""
    tokens, states = [], []
    for number, start in enumerate(starts):
        spy = Spy(DEPTH + 1)
        drafter = make_drafter(spy)
        own = [*([] if uniforms is None else uniforms[number].tolist()), 0.5]
        read = torch.empty(0) if features is None else features[: start - 1]
        drafter.start(text[: start - 1], read, text[start - 1])
        tree = drafter.propose(DEPTH + 1, Sampler(params, Given(own)))
        tokens.append(tree.tokens[:DEPTH])
        states.append(torch.stack([hidden for _, hidden, _ in spy.rounds[0]]))
    return torch.tensor(tokens), torch.stack(states)


def check(drafter, make_drafter, text, features, vocab):
    starts, rng = [3, 4, 7, len(text), 11], torch.Generator().manual_seed(0)
    for params in (SamplingParams(1.0), SamplingParams(0.5, 7, 0.9), SamplingParams(2.0), SamplingParams()):
        uniforms = None if params.greedy else torch.rand(5, DEPTH, generator=rng, dtype=torch.float64)
        expected, hidden = one_by_one(make_drafter, text, features, starts, params, uniforms)
        drafter.open([1, 2, 3], None if features is None else features[:3])  # leaves nothing behind
        drafter.open(text, features)
        drafted = drafter.draft(starts, DEPTH, params, uniforms)
        assert torch.equal(drafted.tokens, expected)
        torch.testing.assert_close(drafted.hidden, hidden[:, :-1], rtol=0, atol=TOLERANCE)
        states = drafter.states(starts, drafted.tokens)
        torch.testing.assert_close(states, hidden, rtol=0, atol=TOLERANCE)
        other = (expected + 1) % vocab  # any branches, not only its own drafts
        assert not torch.allclose(drafter.states(starts, other)[:, 1:], hidden[:, 1:])


@pytest.fixture(scope="module", params=["lean llama", "fixed llama", "lean mistral", "hf mistral"])
def lm(request, tmp_path_factory):
    """In float64: the lean engine, with calls of fixed shapes too and with a sliding window shorter than the text, and
    transformers'."""
    engine, family = request.param.split()
    extra = {"sliding_window": 6} if family == "mistral" else {}
    path = tiny_llama_dir(tmp_path_factory.mktemp("model") / "lm", family=family, **extra)
    lm = load_lm(str(path), dtype="float64", loader="hf" if engine == "hf" else "lean")
    if engine == "fixed":
        plain = lm.session
        lm.session = lambda *how, static=None, **more: plain(*how, static=static is None or static, **more)
    return lm


@pytest.fixture
def text(lm):
    rng = torch.Generator().manual_seed(1)
    return torch.randint(lm.info.vocab_size, (12,), generator=rng).tolist()


@pytest.fixture(params=[512, 8])
def group(request, monkeypatch):
    """All drafts in one group; in groups of two."""
    monkeypatch.setattr(branches, "GROUP_TOKENS", request.param)


def test_a_draft_models_drafts_and_states_are_the_decoders(lm, text, group):
    def drafter(stop):
        return ChainDrafter(DraftModelNet(lm), stop, 64)

    check(BranchDrafter(DraftModelNet(lm), DEPTH), drafter, text, None, lm.info.vocab_size)


def test_the_target_reads_all_drafts_of_a_text_at_once(lm, text, group):
    """Its states at every token's place are those of the whole text that ends there."""
    starts, drafts = [1, 5, 12], torch.randint(V, (3, DEPTH), generator=torch.Generator().manual_seed(2))
    branched = BranchedText(lm, DEPTH)
    for opened in (text[:3], text * 9, text):  # a session is used again where it is wide enough
        branched.open(opened)
        assert len(branched.features) == len(opened)
    states = target_states(branched, starts, drafts)
    for number, start in enumerate(starts):
        whole = torch.tensor([[*text[:start], *drafts[number].tolist()]])
        expected = lm.features(whole)[0, start - 1 : -1]
        torch.testing.assert_close(states[number], expected, rtol=0, atol=TOLERANCE)


def test_a_training_around_it_changes_nothing_and_may_use_the_states(tmp_path):
    lm = load_lm(str(tiny_llama_dir(tmp_path / "lm")))
    drafter, starts, drafts = BranchDrafter(DraftModelNet(lm), 2), [2, 3], torch.tensor([[5, 6], [7, 8]])
    drafter.open([1, 2, 3])
    expected = drafter.states(starts, drafts)
    with torch.autocast("cpu", torch.bfloat16):
        drafter.open([1, 2, 3])
        states = drafter.states(starts, drafts)
        drafted = drafter.draft(starts, 2)
    assert torch.equal(states, expected) and torch.equal(drafted.hidden[:, 0], expected[:, 0])
    weight = torch.ones((), requires_grad=True)
    (weight * states).sum().backward()  # no tensor of inference mode
    assert weight.grad is not None
