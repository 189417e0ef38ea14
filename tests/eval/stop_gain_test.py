"""What ending drafts by a prediction would gain: expectations against enumerated accept draws and against the decoder,
and that what is measured was held out."""

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
from draftsmith.eval import stop_gain
from draftsmith.eval.stop_gain import (
    FIXED,
    HEAD,
    KNOWN,
    ONLINE,
    PREDICTORS,
    Rounds,
    cost_lengths,
    drafted_rounds,
    head_probs,
    head_settings,
    online_probs,
    play,
    settled,
    stop_gains,
)  # fmt: skip
from draftsmith.modules.acceptance.policies import CostRule
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.types import SamplingParams
from draftsmith.train.acceptance import TrainAcceptanceConfig, acceptance_settings

DEPTH = 3


def rounds_of(lengths, accept_prob, owner=None, ends=None, depth=DEPTH) -> Rounds:
    """Answers with so many places; accept_prob [S, K]; ends [S, K]: end tokens, none without it. What is read of a
    token are its number and random numbers."""
    accept_prob = torch.as_tensor(np.asarray(accept_prob), dtype=torch.float32)
    passed = accept_prob if ends is None else accept_prob * ~torch.as_tensor(ends)
    reached = torch.cat([torch.ones(len(passed), 1), passed.cumprod(1)[:, :-1]], 1)
    count, generator = accept_prob.numel(), torch.Generator().manual_seed(0)
    return Rounds(
        answer=np.repeat(np.arange(len(lengths)), lengths),
        place=np.concatenate([np.arange(length) for length in lengths]),
        owner=np.arange(len(lengths)) if owner is None else np.asarray(owner),
        accept_prob=accept_prob.flatten(),
        reached=reached.flatten(),
        hidden=torch.randn(count, 4, generator=generator),
        features=torch.randn(count, 4, generator=generator),
        ids=torch.arange(count),
        embed=lambda ids: torch.stack([ids.sin(), ids.cos(), ids.sin() / 2, ids.cos() / 2], -1).float(),
    )


def random_rounds(num_answers=16, length=12, depth=DEPTH, seed=0) -> Rounds:
    prob = np.random.default_rng(seed).beta(0.2, 0.2, (num_answers * length, depth))
    return rounds_of([length] * num_answers, prob, depth=depth)


def enumerated(rounds: Rounds, lengths, place: int, end: int) -> np.ndarray:
    """Target calls, drafted, accepted and verified tokens from a place on, over every accept draw, one by one."""
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
    found = play(rounds, lengths)
    for answer, (start, end) in enumerate(((0, 4), (4, 9))):
        own = [getattr(found, name)[answer] for name in ("calls", "drafted", "accepted", "verified")]
        assert own == pytest.approx(enumerated(rounds, lengths, start, end))
        assert found.tokens[answer] == end - start
    assert found.time(0.1)[0] == pytest.approx(found.calls[0] + 0.1 * found.drafted[0])


class Settled(CostRule):
    """With a pace and an acceptance that stay."""

    pace, acceptance = 1.7, 0.6


def test_drafts_end_where_the_cost_rule_ends_them():
    prob = np.random.default_rng(2).uniform(0.5, 1.0, (200, 5))
    found = cost_lengths(prob, 0.2, Settled.pace, Settled.acceptance)
    for own, length in zip(prob, found, strict=True):
        ends = [n for n in range(1, 5) if Settled(0.2).enough(own[:n].prod(), 0)]
        assert length == next(iter(ends), 5)
    assert set(found) == {1, 2, 3, 4, 5}


def test_the_rule_goes_by_the_pace_that_it_comes_to_on_the_answers_that_are_kept():
    rounds, kept = random_rounds(), np.arange(16) < 8
    prob = rounds.by_round(rounds.accept_prob)
    start = play(rounds, np.ones(len(prob), int))
    for mask in (kept, ~kept):
        found = play(rounds, settled(rounds, prob, 0.2, mask, start))
        again = cost_lengths(prob, 0.2, found.pace(0.2, mask), found.acceptance(mask))
        assert play(rounds, again).pace(0.2, mask) == pytest.approx(found.pace(0.2, mask))
        assert found.pace(0.2, mask) > start.pace(0.2, mask)


@pytest.mark.parametrize("predict", [online_probs, head_probs])
def test_what_is_fitted_knows_nothing_of_the_answers_that_are_held_out(predict):
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


def test_every_sequence_is_held_out_once_and_with_all_its_answers(monkeypatch):
    rounds = dataclasses.replace(random_rounds(), owner=np.repeat(np.arange(8), 2))
    folds = []

    def learned_by_heart(rounds, kept):
        """The verdicts on what it has seen; of the rest, the contrary."""
        folds.append(~kept)
        seen, prob = kept[rounds.answer][:, None], rounds.by_round(rounds.accept_prob)
        return np.where(seen, prob, 1 - prob)

    monkeypatch.setitem(PREDICTORS, ONLINE, learned_by_heart)
    monkeypatch.setitem(PREDICTORS, HEAD, PREDICTORS[KNOWN])
    (found,) = stop_gains(rounds, [0.2], greedy=False)
    assert np.array_equal(np.sum(folds, 0), np.ones(16)) and len(folds) == 4
    assert all(np.array_equal(fold[::2], fold[1::2]) and fold.any() for fold in folds)
    assert found.gains[ONLINE].value < -0.02 and found.gains[KNOWN].value > 0.05
    assert found.gains[HEAD] == found.gains[KNOWN] and found.over_online.value > 0.1


def test_the_best_fixed_length_is_chosen_on_other_answers_than_it_is_measured_on(monkeypatch):
    # Half of the sequences accept everything and half nothing, so that each fold's others choose another length.
    prob = np.repeat([[1.0] * DEPTH] * 2 + [[0.0] * DEPTH] * 2, 4 * 12, axis=0)
    rounds, c = rounds_of([12] * 16, prob), 0.12
    monkeypatch.setattr(np.random, "default_rng", lambda seed: InOrder())
    monkeypatch.setitem(PREDICTORS, ONLINE, lambda rounds, kept: np.ones((len(rounds.place), DEPTH)))
    monkeypatch.setitem(PREDICTORS, HEAD, lambda rounds, kept: np.zeros((len(rounds.place), DEPTH)))
    monkeypatch.setattr(stop_gain, "gain", lambda own, base, seed: (own.sum(0), base.sum(0)))
    (found,) = stop_gains(rounds, [c], greedy=True)
    fixed = [play(rounds, np.full(len(rounds.place), k)) for k in range(1, DEPTH + 1)]
    rates = np.stack([[played.tokens, played.time(c)] for played in fixed])  # [K, 2, A]
    fold, expected, chosen = np.r_[np.repeat([0, 1], 4), np.repeat([2, 3], 4)], 0.0, set()
    for held in range(4):
        tokens, time = rates[:, :, fold != held].sum(-1).T
        best = int(np.argmax(tokens / time))
        chosen.add(best)
        expected += rates[best, 1, fold == held].sum()
    tokens, time = found.gains[ONLINE][1]
    assert len(chosen) > 1 and (tokens, time) == pytest.approx((16 * 12, expected))
    assert set(found.gains) == {ONLINE, HEAD}


class InOrder:
    """In the place of a random order: folds of neighbours."""

    def permutation(self, count):
        return np.arange(count) * stop_gain.FOLDS // count


def at_cost(online, head, over) -> stop_gain.AtCost:
    return stop_gain.AtCost(
        0.1, 4, {ONLINE: stop_gain.Gain(*online), HEAD: stop_gain.Gain(*head)}, stop_gain.Gain(*over)
    )


@pytest.mark.parametrize(
    ("online", "over", "pays", "said"),
    [
        ((0.1, 0.08, 0.12), (0.03, 0.01, 0.05), HEAD, "train one"),
        ((0.1, 0.08, 0.12), (0.03, -0.01, 0.05), ONLINE, "is enough"),
        ((0.1, 0.08, 0.12), (0.005, 0.001, 0.01), ONLINE, "is enough"),
        ((0.01, -0.01, 0.03), (0.02, -0.01, 0.03), FIXED, "fixed K of 4"),
        ((0.01, np.nan, np.nan), (0.02, np.nan, np.nan), FIXED, "fixed K of 4"),
    ],
)
def test_advice_is_the_simplest_that_nothing_is_told_to_be_better_than(online, over, pays, said):
    at = at_cost(online, (0.12, 0.1, 0.14), over)
    assert at.pays == pays and said in stop_gain.advice(at)


def test_the_head_is_that_of_train_acceptance(tmp_path):
    config = TrainAcceptanceConfig(
        data=tmp_path, output=tmp_path, draft="x", width=stop_gain.WIDTH, state="before",
        features=stop_gain.FEATURES, num_blocks=0, tied=False, w_rej=1.0,
    )  # fmt: skip
    assert acceptance_settings(config, 32) == head_settings(32)


@dataclasses.dataclass(frozen=True)
class Answered:
    target: object
    draft: object
    rows: list
    rounds: Rounds


@pytest.fixture(scope="module")
def answered(models, tmp_path_factory) -> Answered:
    """Greedy answers of the tiny target, and the rounds of its draft."""
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
    return Answered(target, draft, rows, drafted_rounds(labels, rows))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_greedy_rounds_are_those_of_the_decoder(answered, k):
    rounds = answered.rounds
    found = play(rounds, np.full(len(rounds.place), k))
    for number, row in enumerate(answered.rows):
        ((start, end),) = spans(row["loss_mask"])
        drafter = DraftModelDrafter(answered.draft, [FixedLength(k)], end + k)
        done = generate_one(answered.target, drafter, row["input_ids"][:start], SamplingParams(), end - start, None, ())
        assert done.tokens == row["input_ids"][start:end]
        assert found.calls[number] == pytest.approx(len(done.trace.steps))
        assert found.tokens[number] == end - start - 1


def test_what_a_head_reads_is_what_the_draft_predicted_the_tokens_by(answered):
    rounds = answered.rounds
    log_q = answered.draft.lm_head(rounds.hidden).float().log_softmax(-1).gather(-1, rounds.ids[:, None])[:, 0]
    torch.testing.assert_close(log_q, rounds.features[:, 0], atol=1e-4, rtol=1e-4)
    batch = rounds.of_head(torch.tensor([5, 2]))
    assert torch.equal(batch.embeds, answered.draft.embed(rounds.ids[[5, 2]]))
    assert torch.equal(batch.weight, rounds.reached[[5, 2]])
    assert rounds.features[:8, 2].exp().tolist() == pytest.approx([1, 2, 3, 4, 1, 2, 3, 4])


def test_answers_of_a_conversation_are_apart_and_of_one_owner(answered, models):
    row = answered.rows[0]
    ((start, end),) = spans(row["loss_mask"])
    two = row["input_ids"] + row["input_ids"][:start] + row["input_ids"][start : end - 3]
    mask = [start <= at < end or at >= end + start for at in range(len(two))]
    rows = [{"input_ids": two, "loss_mask": mask}, *answered.rows[1:]]
    how = AcceptanceConfig(
        responses=Path(), target="", output=Path(), draft=models["draft"], labels="rollout", depth=4, stride=1
    )
    labels = labels_of(how, (SamplingParams(),), answered.target, FrozenDrafter(answered.draft, {}))
    found = drafted_rounds(labels, rows)
    assert found.owner.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert np.bincount(found.answer)[:2].tolist() == [end - start - 1, end - start - 4]
    assert found.place[: end - start + 1].tolist() == [*range(end - start - 1), 0, 1]
