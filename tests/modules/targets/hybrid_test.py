"""Models with recurrent or convolution states drop drafted tokens: what they then say is what whole forwards say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hybrid_models import CONTEXT, HYBRIDS, VOCAB, hybrid_model, language_model

from draftsmith.modules.decoding.drafter import Drafter, Outcome
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.tree import DraftTree, chain_parents
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.formats.base import TargetFacts
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.targets import hf, hybrid
from draftsmith.modules.targets.hf import HFLM, DynamicLayer
from draftsmith.modules.targets.self_test import self_test
from draftsmith.modules.types import InputError, SamplingParams

GREEDY, ANSWER, DRAFTED = SamplingParams(), 24, 5
# One of each kind of state: delta rule, convolution alone, state space, and both kinds of layers in one.
KINDS = ("Qwen3.5", "LFM2", "Granite hybrid", "Falcon-H1")


def checked(name: str, vocab: int = VOCAB, dtype: torch.dtype = torch.float32) -> HFLM:
    model = hybrid_model(name, vocab, dtype)
    lm = language_model(model)
    lm.no_trees = self_test(model, lm, lm.mixers)
    return lm


def prompt_of(count: int, seed: int = 1) -> list[int]:
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def next_tokens(lm: HFLM, text: Sequence[int]) -> list[int]:
    """What follows each token of a text, of one whole forward."""
    return lm.model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0].argmax(-1).tolist()


def plain(lm: HFLM, prompt: list[int], count: int) -> list[int]:
    """The answer without drafts, which one whole forward has to confirm."""
    answer = generate_one(lm, None, prompt, GREEDY, count, TorchSource(0), ()).tokens
    assert next_tokens(lm, prompt + answer)[len(prompt) - 1 : -1] == answer
    return answer


class Foreseen(Drafter):
    """A `Drafter` that knows the answer, and errs in 3 of 10 tokens. Keeps the target's features."""

    def __init__(self, answer: list[int]):
        self._answer, self._rng = answer, random.Random(2)
        self.features = list[torch.Tensor]()
        self.counts = list[int]()  # accepted tokens of each round

    def start(self, prompt: Sequence[int], features: torch.Tensor, first_token: int) -> None:
        self._emitted = 1
        self.features.append(features)

    def propose(self, max_drafted: int, sampler: Sampler) -> DraftTree:
        known = self._answer[self._emitted : self._emitted + min(DRAFTED, max_drafted)]
        drafted = [token if self._rng.random() < 0.7 else self._rng.randrange(VOCAB) for token in known]
        return DraftTree(tuple(drafted), chain_parents(len(drafted)))

    def advance(self, outcome: Outcome) -> None:
        self._emitted += len(outcome.emitted)
        self.features.append(outcome.features)
        self.counts.append(outcome.num_accepted)


class Calls:
    """Counts the forwards of a model."""

    def __init__(self, lm: HFLM):
        self.count = 0
        lm.decoder.register_forward_pre_hook(self._called)

    def _called(self, *_: Any) -> None:
        self.count += 1


def decode(lm: HFLM, prompt: list[int], answer: list[int], aux_layers: tuple[int, ...] = ()) -> tuple[Any, Foreseen]:
    foreseen = Foreseen(answer)
    foreseen.aux_layers = aux_layers
    return generate_one(lm, foreseen, prompt, GREEDY, len(answer), TorchSource(0), ()), foreseen


@pytest.mark.parametrize("name", HYBRIDS)
def test_chains_give_the_answer_and_the_features_of_whole_forwards(name):
    lm, prompt, layers = checked(name), prompt_of(11), (1, 2)
    answer, calls = plain(lm, prompt, ANSWER), Calls(lm)
    found, foreseen = decode(lm, prompt, answer, layers)
    assert found.tokens == answer
    # One call a round, and one more where a token was dropped; the last round tells its drafter nothing.
    dropped = sum(step.num_accepted < step.num_drafted for step in found.trace.steps)
    assert calls.count == 1 + len(found.trace.steps) + dropped
    # Drafts of which all, some and none were accepted.
    assert {0, DRAFTED} < set(foreseen.counts)
    # What config.json says of a target that is not loaded is what its cache has.
    assert lm.mixers.hybrid and TargetFacts(lm.model.config.to_dict()).hybrid
    features = torch.cat(foreseen.features)
    whole = lm.features(torch.tensor([prompt + answer]), aux_layers=layers)[0, : len(features)]
    # Processors sum in other orders, and some states reach 40.
    torch.testing.assert_close(features, whole, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_differs_by_rounding_only(name):
    lm, exact, prompt = checked(name, dtype=torch.bfloat16), checked(name), prompt_of(11)
    session, text = lm.session(1, CONTEXT), prompt + prompt_of(17, 2)
    session.extend([prompt])
    read, found = len(prompt), []
    for count in (3, 1, 5, 2, 6):
        logits = session.extend([text[read : read + count] + [7] * 3], logits_to_keep=count + 3).logits[0, :count]
        read, found = read + count, [*found, logits]
        session.keep([read])
    with torch.no_grad():
        ids = torch.tensor([text[:read]])
        rounded, expected = (
            each.model(input_ids=ids, use_cache=False).logits[0, len(prompt) :] for each in (lm, exact)
        )
    differences = [(each - expected).norm(dim=-1).median() for each in (torch.cat(found), rounded)]
    assert differences[0] < 2 * differences[1] < expected.norm(dim=-1).median()


@pytest.mark.parametrize("name", [*KINDS, "Mamba"])
def test_a_hybrid_drafts_for_itself(name):
    """Single tokens are read and dropped; both sessions are of one model. All drafts are accepted."""
    lm, prompt = checked(name), prompt_of(9)
    drafter = ChainDrafter(DraftModelNet(lm), FixedLengthStop(4), CONTEXT)
    found = generate_one(lm, drafter, prompt, GREEDY, ANSWER, TorchSource(0), ())
    assert found.tokens == plain(lm, prompt, ANSWER)
    assert all(step.num_accepted == step.num_drafted for step in found.trace.steps)


@pytest.mark.parametrize("name", KINDS)
def test_long_texts_are_read_in_parts(name, monkeypatch):
    lm, ids, lengths = checked(name), torch.tensor([prompt_of(37), prompt_of(37, 2)]), []
    whole, read = lm.features(ids, aux_layers=(1, 2)), lm.read
    monkeypatch.setattr(
        lm, "read", lambda *args, **given: lengths.append(given["input_ids"].shape) or read(*args, **given)
    )
    monkeypatch.setattr(hf, "MASK_ELEMENTS", 16 * 37)
    torch.testing.assert_close(lm.features(ids, aux_layers=(1, 2)), whole, rtol=1e-4, atol=1e-4)
    # A mixer that continues by single tokens only reads all at once.
    assert lengths == ([(2, 37)] if lm.mixers.stepwise else 2 * [(1, 16), (1, 16), (1, 5)])


@pytest.mark.parametrize("name", KINDS)
def test_tokens_before_the_last_round_are_dropped_too(name, monkeypatch):
    monkeypatch.setattr(hybrid, "MOST_UNSAVED", 6)
    lm, text = checked(name), prompt_of(40)
    expected, session, calls = next_tokens(lm, text), lm.session(1, CONTEXT), Calls(lm)
    session.extend([text[:9]])
    for token in text[9:30]:
        session.extend([[token]])
    # After the saved states, before them, at the start; all but the last are read again.
    for kept, count in ((28, 23), (20, 25), (2, 27), (0, 28)):
        session.keep([kept])
        logits = session.extend([text[kept:]], logits_to_keep=len(text) - kept).logits[0]
        assert logits.argmax(-1).tolist() == expected[kept:] and calls.count == 1 + count


def test_trees_are_refused_in_one_line():
    session = checked("Qwen3.5").session(1, CONTEXT)
    session.extend([[3, 4, 5]])
    with pytest.raises(InputError, match=r"one state for all branches of a tree.* drafts chains"):
        session.extend([[6, 7]], [[-1, -1]])


def not_cloned(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: tensor)


def keys_stay(monkeypatch) -> None:
    monkeypatch.setattr(DynamicLayer, "crop", lambda layer, count: None)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mistake", [not_cloned, keys_stay])
def test_states_that_do_not_come_back_are_refused_by_name(name, mistake, monkeypatch):
    mistake(monkeypatch)
    model = hybrid_model(name)
    with pytest.raises(InputError, match=rf"{type(model).__name__}, which gives other logits for what follows dropped"):
        self_test(model, lm := language_model(model), lm.mixers)
