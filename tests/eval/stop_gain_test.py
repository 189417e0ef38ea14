"""Gains of stop rules: expectations against enumerated accept draws and the decoder, and held-out measurement."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.data import prompts, responses
from draftsmith.data.acceptance import AcceptanceConfig, labels_of
from draftsmith.data.heads.directory import FrozenDrafter
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.answers import spans
from draftsmith.eval import diagnose
from draftsmith.eval.diagnose import (
    HEAD,
    ONLINE,
    PREDICTORS,
    Gain,
    Rounds,
    StopGains,
    cost_lengths,
    drafted_rounds,
    expected_counts,
    head_probs,
    online_probs,
    settled_lengths,
    stop_gains,
)
from draftsmith.modules.acceptance.policies import CostRule
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.types import SamplingParams

DEPTH = 3


def rounds_of(lengths, accept_prob, ends=None) -> Rounds:
    """Answers with so many places; accept_prob, ends [S, K]. What a head reads are random numbers."""
    accept_prob = torch.as_tensor(np.asarray(accept_prob), dtype=torch.float32)
    passed = accept_prob if ends is None else accept_prob * ~torch.as_tensor(ends)
    reached = torch.cat([torch.ones(len(passed), 1), passed.cumprod(1)[:, :-1]], 1)
    count, generator = accept_prob.numel(), torch.Generator().manual_seed(0)
    return Rounds(
        answer=np.repeat(np.arange(len(lengths)), lengths),
        place=np.concatenate([np.arange(length) for length in lengths]),
        owner=np.arange(len(lengths)),
        accept_prob=accept_prob.flatten(),
        reached=reached.flatten(),
        hidden=torch.randn(count, 4, generator=generator),
        features=torch.randn(count, 4, generator=generator),
        ids=torch.arange(count),
        embed=lambda ids: torch.stack([ids.sin(), ids.cos(), ids.sin() / 2, ids.cos() / 2], -1).float(),
    )


def random_rounds(num_answers=16, length=12) -> Rounds:
    prob = np.random.default_rng(0).beta(0.2, 0.2, (num_answers * length, DEPTH))
    return rounds_of([length] * num_answers, prob)


def enumerated(rounds: Rounds, lengths, place: int, end: int) -> np.ndarray:
    """Return target calls, drafted, accepted and verified tokens from a place on, over every accept draw."""
    if place >= end:
        return np.zeros(4)
    prob, reached = rounds.by_round(rounds.accept_prob)[place], rounds.by_round(rounds.reached)[place]
    total = np.zeros(4)
    for draws in np.ndindex(*[2] * int(lengths[place])):
        chance, accepted, verified = 1.0, 0, 0
        for level, draw in enumerate(draws):
            chance *= prob[level] if draw else 1 - prob[level]
            if accepted == level and reached[level] > 0:
                verified += 1
                accepted += draw
        after = enumerated(rounds, lengths, place + accepted + 1, end)
        total += chance * (np.array([1, len(draws), accepted, verified]) + after)
    return total


def test_expectations_are_those_of_every_accept_draw():
    rng = np.random.default_rng(1)
    ends = np.zeros((9, DEPTH), bool)
    ends[2, 1] = ends[7, 0] = True
    rounds = rounds_of([4, 5], rng.uniform(size=(9, DEPTH)), ends=ends)
    lengths = rng.integers(1, DEPTH + 1, 9)
    counts = expected_counts(rounds, lengths)
    for answer, (start, end) in enumerate(((0, 4), (4, 9))):
        own = [getattr(counts, name)[answer] for name in ("calls", "drafted", "accepted", "verified")]
        assert own == pytest.approx(enumerated(rounds, lengths, start, end))
        assert counts.tokens[answer] == end - start


class SettledRule(CostRule):
    """Cost rule whose pace and acceptance do not change."""

    pace, acceptance = 1.7, 0.6


def test_drafts_end_where_the_cost_rule_ends_them():
    prob = np.random.default_rng(2).uniform(0.5, 1.0, (200, 5))
    lengths = cost_lengths(prob, 0.2, SettledRule.pace, SettledRule.acceptance)
    for own, length in zip(prob, lengths, strict=True):
        ends = [n for n in range(1, 5) if SettledRule(0.2).enough(own[:n].prod(), 0)]
        assert length == next(iter(ends), 5)
    assert set(lengths) == {1, 2, 3, 4, 5}


def test_the_rule_settles_at_its_own_pace():
    rounds, kept = random_rounds(), np.arange(16) < 8
    prob = rounds.by_round(rounds.accept_prob)
    start = expected_counts(rounds, np.ones(len(prob), int))
    for mask in (kept, ~kept):
        counts = expected_counts(rounds, settled_lengths(rounds, prob, 0.2, mask, start))
        again = cost_lengths(prob, 0.2, counts.pace(0.2, mask), counts.acceptance(mask))
        assert expected_counts(rounds, again).pace(0.2, mask) == pytest.approx(counts.pace(0.2, mask))
        assert counts.pace(0.2, mask) > start.pace(0.2, mask)


@pytest.mark.parametrize("predict", [online_probs, head_probs])
def test_what_is_fitted_does_not_see_the_answers_held_out(predict):
    rounds, kept = random_rounds(), np.arange(16) % 4 != 1
    held = torch.from_numpy(np.repeat(~kept[rounds.answer], DEPTH))
    swapped = dataclasses.replace(
        rounds,
        accept_prob=torch.where(held, 1 - rounds.accept_prob, rounds.accept_prob),
        reached=torch.where(held, torch.ones(()), rounds.reached),
    )
    np.testing.assert_array_equal(predict(rounds, kept), predict(swapped, kept))
    learned = torch.where(held, rounds.accept_prob, 1 - rounds.accept_prob)
    assert not np.allclose(predict(rounds, kept), predict(dataclasses.replace(rounds, accept_prob=learned), kept))


def test_every_sequence_is_held_out_once_with_all_its_answers(monkeypatch):
    rounds = dataclasses.replace(random_rounds(), owner=np.repeat(np.arange(8), 2))
    folds = []

    def memorise(rounds, kept):
        """Return the verdicts on what was seen, and the contrary on the rest."""
        folds.append(~kept)
        seen, prob = kept[rounds.answer][:, None], rounds.by_round(rounds.accept_prob)
        return np.where(seen, prob, 1 - prob)

    monkeypatch.setitem(PREDICTORS, ONLINE, memorise)
    monkeypatch.setitem(PREDICTORS, HEAD, lambda rounds, kept: rounds.by_round(rounds.accept_prob))
    result = stop_gains(rounds, 0.2)
    assert np.array_equal(np.sum(folds, 0), np.ones(16)) and len(folds) == 4
    assert all(np.array_equal(fold[::2], fold[1::2]) and fold.any() for fold in folds)
    assert result.online.value < -0.02 and result.head.value > 0.05 and result.over_online.value > 0.1


def test_the_best_fixed_length_is_chosen_on_other_answers(monkeypatch):
    class InOrder(np.random.Generator):
        """Folds of neighbours in place of a random order."""

        def permutation(self, count):
            return np.arange(count) * diagnose.FOLDS // count

    # Half of the sequences accept everything and half nothing: each fold's others choose another length.
    prob = np.repeat([[1.0] * DEPTH] * 2 + [[0.0] * DEPTH] * 2, 4 * 12, axis=0)
    rounds, c = rounds_of([12] * 16, prob), 0.12
    monkeypatch.setattr(np.random, "default_rng", lambda seed: InOrder(np.random.PCG64(seed)))
    monkeypatch.setitem(PREDICTORS, ONLINE, lambda rounds, kept: np.ones((len(rounds.place), DEPTH)))
    monkeypatch.setitem(PREDICTORS, HEAD, lambda rounds, kept: np.zeros((len(rounds.place), DEPTH)))
    result = stop_gains(rounds, c)
    fixed = [expected_counts(rounds, np.full(len(rounds.place), k)) for k in range(1, DEPTH + 1)]
    rates = np.stack([[counts.tokens, counts.time(c)] for counts in fixed])  # [K, 2, A]
    fold, expected, chosen = np.r_[np.repeat([0, 1], 4), np.repeat([2, 3], 4)], 0.0, set()
    for held in range(4):
        tokens, time = rates[:, :, fold != held].sum(-1).T
        best = int(np.argmax(tokens / time))
        chosen.add(best)
        expected += rates[best, 1, fold == held].sum()
    # The rules draft as long as they can, or one token.
    whole, one = (rates[k, 1].sum() for k in (-1, 0))
    assert len(chosen) > 1
    assert (result.online.value, result.head.value) == pytest.approx((expected / whole - 1, expected / one - 1))
    assert result.over_online.low <= result.over_online.value == pytest.approx(whole / one - 1)


@pytest.mark.parametrize(
    ("online", "over", "text"),
    [
        ((0.1, 0.08, 0.12), (0.03, 0.01, 0.05), "train one"),
        ((0.1, 0.08, 0.12), (0.03, -0.01, 0.05), "is enough"),
        ((0.01, np.nan, np.nan), (0.02, np.nan, np.nan), "fixed K of 4"),
    ],
)
def test_the_simplest_rule_that_no_other_beats_is_recommended(online, over, text):
    assert text in StopGains(0.1, 4, Gain(*online), Gain(0.12, 0.1, 0.14), Gain(*over)).advice()


@dataclasses.dataclass(frozen=True)
class Answered:
    target: object
    draft: object
    rows: list
    labels: object
    rounds: Rounds


@pytest.fixture(scope="module")
def answered(models, tmp_path_factory) -> Answered:
    """Greedy answers of the tiny target, and the rounds of its draft model."""
    root: Path = tmp_path_factory.mktemp("answered")
    (root / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"What does f{i} do?" + " Rename a:" * i}) + "\n" for i in range(8))
    )
    made = prompts.run(
        prompts.PromptsConfig(source=str(root / "prompts.jsonl"), target=models["target"], output=root / "prompts")
    )
    made = responses.run(
        responses.ResponsesConfig(
            prompts=made, target=models["target"], output=root / "responses", max_new_tokens=20, ignore_eos=True,
            temperature=0.0, num_threads=1,
        )
    )  # fmt: skip
    target, draft = (load_lm(models[name]) for name in ("target", "draft"))
    how = AcceptanceConfig(
        responses=made, target=models["target"], output=root, draft=models["draft"], labels="rollout", depth=4, stride=1
    )
    labels = labels_of(how, (SamplingParams(),), target, FrozenDrafter(draft, {}))
    rows = list(Rows(made, Manifest.read(made)).iterate())
    return Answered(target, draft, rows, labels, drafted_rounds(labels, rows))


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_rounds_are_those_of_the_decoder(answered, k):
    rounds = answered.rounds
    counts = expected_counts(rounds, np.full(len(rounds.place), k))
    for number, row in enumerate(answered.rows):
        ((start, end),) = spans(row["loss_mask"])
        drafter = DraftModelDrafter(answered.draft, [FixedLength(k)], end + k)
        done = generate_one(answered.target, drafter, row["input_ids"][:start], SamplingParams(), end - start, None, ())
        assert done.tokens == row["input_ids"][start:end]
        assert counts.calls[number] == pytest.approx(len(done.trace.steps))
        assert counts.tokens[number] == end - start - 1


def test_a_head_reads_the_states_that_predicted_the_tokens(answered):
    rounds = answered.rounds
    log_q = answered.draft.lm_head(rounds.hidden).float().log_softmax(-1).gather(-1, rounds.ids[:, None])[:, 0]
    torch.testing.assert_close(log_q, rounds.features[:, 0], atol=1e-4, rtol=1e-4)
    batch = rounds.head_batch(torch.tensor([5, 2]))
    assert torch.equal(batch.embeds, answered.draft.embed(rounds.ids[[5, 2]]))
    assert torch.equal(batch.weight, rounds.reached[[5, 2]])
    assert rounds.features[:8, 2].exp().tolist() == pytest.approx([1, 2, 3, 4, 1, 2, 3, 4])


def test_answers_of_a_conversation_are_apart_and_have_one_owner(answered):
    row = answered.rows[0]
    ((start, end),) = spans(row["loss_mask"])
    two = row["input_ids"] + row["input_ids"][:start] + row["input_ids"][start : end - 3]
    mask = [start <= at < end or at >= end + start for at in range(len(two))]
    rounds = drafted_rounds(answered.labels, [{"input_ids": two, "loss_mask": mask}, *answered.rows[1:]])
    assert rounds.owner.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert np.bincount(rounds.answer)[:2].tolist() == [end - start - 1, end - start - 4]
    assert rounds.place[: end - start + 1].tolist() == [*range(end - start - 1), 0, 1]
