"""Branches off one text, read side by side, against whole forwards of each; drafters' own are in contract_test.py."""

from __future__ import annotations

import pytest
import torch
from oracles.tables import V
from worlds import tiny_llama_dir

from draftsmith.modules.drafters import branches
from draftsmith.modules.drafters.branches import BranchDrafter, BranchedText, target_states
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.pretrained.models import load_lm

DEPTH = 4
# Two ways through the same float64 arithmetic: sums in another order.
TOLERANCE = 1e-9


@pytest.fixture(scope="module", params=["lean llama", "lean mistral", "hf mistral"])
def lm(request, tmp_path_factory):
    """In float64: the lean engine, with a sliding window shorter than the text too, and transformers'."""
    engine, family = request.param.split()
    extra = {"sliding_window": 6} if family == "mistral" else {}
    path = tiny_llama_dir(tmp_path_factory.mktemp("model") / "lm", family=family, **extra)
    return load_lm(str(path), dtype="float64", loader=engine)


@pytest.fixture
def text(lm):
    rng = torch.Generator().manual_seed(1)
    return torch.randint(lm.info.vocab_size, (12,), generator=rng).tolist()


@pytest.fixture(params=[512, 8])
def group(request, monkeypatch):
    """All drafts in one group; in groups of two."""
    monkeypatch.setattr(branches, "GROUP_TOKENS", request.param)


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
