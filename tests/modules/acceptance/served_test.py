"""P(accept) for servers that trim: against our own `Repeats`, float64 formulas and dense algebra, and by enumeration of
what a server's requests are answered."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import served_law
import torch

from draftsmith.modules.acceptance.repeats import Repeats, RepeatScores
from draftsmith.modules.acceptance.served import (
    COLD,
    PRIOR,
    WORTH,
    ServedEstimator,
    ServedTexts,
    Start,
    TextIndex,
    fit_priors,
    fit_start,
    undrawn_features,
)
from draftsmith.modules.decoding.protocols import DraftView

CPU = torch.device("cpu")
EXACT, CAUGHT = 1e-12, 1e-3
CERTAIN = Start((0.6, 0.9), (0.1, -0.3), (((0.0,) * 3,) * 3,) * 2)


def texts_of(texts, num_places, greedy_drafts=False, room=40) -> ServedTexts:
    """A server's state with these texts, and none of the places drafted yet."""
    tokens = torch.zeros(len(texts), max(map(len, texts)) + room, dtype=torch.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    drafted = torch.full((len(texts), num_places), -7)
    requests = {row: f"r{row}" for row in range(len(texts))}
    return ServedTexts(tokens, lengths, drafted, greedy_drafts, requests, lengths.numpy().copy())


def nothing(num: int) -> torch.Tensor:
    return torch.zeros(num, dtype=torch.int32)


def mean_of(text, drafted, logits, temperature, greedy) -> float:
    """The feature by `Repeats` and a float64 softmax."""
    repeats = Repeats()
    repeats.read(text)
    half, expected = repeats.follower((*text, *drafted)[-8:])
    if not half:
        return 0.0
    if greedy or temperature == 0:
        return half if int(logits.argmax()) == expected else -half
    return half * (2 * float((logits.double() / temperature).softmax(-1)[expected]) - 1)


@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_features_are_the_log_odds_of_the_mode_and_the_mean_repetition(greedy_drafts):
    """While texts grow and other requests take places of those that end."""
    random, K, V = np.random.default_rng(1), 4, 3
    texts = [random.integers(0, V, n).tolist() for n in (1, 5, 60, 300)]
    served = texts_of(texts, K, greedy_drafts, room=200)
    estimator = ServedEstimator(len(texts), K, CPU, CERTAIN)
    estimator.attach(served)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.6])
    found_some = set()
    for turn in range(25):
        rows = torch.from_numpy(random.permutation(len(texts))[: random.integers(1, 5)])
        if turn in (9, 17):  # another request takes a place
            row = turn % 4
            texts[row] = random.integers(0, V, 20).tolist()
            served.requests[row], served.num_read[row] = f"later {turn}", 20  # type: ignore[index]
            served.tokens[row, :20] = torch.tensor(texts[row])
        served.lengths[:] = torch.tensor([len(text) for text in texts])
        estimator.step(rows, nothing(len(rows)), nothing(len(rows)))
        conf = torch.zeros(len(texts), K)
        drafts = random.integers(0, V, (len(rows), K))
        served.drafted[: len(rows)] = torch.from_numpy(drafts)
        for k in range(K):
            logits = torch.from_numpy(random.normal(0, 4, (len(rows), V)))
            estimator.predict(logits, rows, torch.tensor(k), conf, temperature)
            for n, row in enumerate(rows.tolist()):
                t = float(temperature[row])
                top = float((logits[n] / (t or 1)).softmax(-1).max())
                mean = mean_of(texts[row], drafts[n, :k].tolist(), logits[n], t, greedy_drafts)
                odds = math.log(top / (1 - top))
                assert estimator.features[row, k, :2].tolist() == pytest.approx([odds, mean], abs=1e-3)
                logit = 0.6 * odds + 0.9 * mean + (0.1, -0.3, -0.3, -0.3)[k]
                assert float(conf[n, k]) == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-4)
                found_some.add(math.ceil(abs(mean)))
        for row in rows.tolist():  # more than a round's tokens at once do not come
            more = random.integers(0, V, random.integers(0, K + 2)).tolist()
            served.tokens[row, len(texts[row]) : len(texts[row]) + len(more)] = torch.tensor(more, dtype=torch.int32)
            texts[row] += more
    assert {0, 1, 2, 4} <= found_some  # no repetition, and those of two, four and eight tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_stop_policy_is_shown_the_same_features(temperature):
    """Of drafts that are the mode at temperature 0, and drawn else."""
    random, V = np.random.default_rng(4), 3
    text, repeats, found = random.integers(0, V, 5).tolist(), RepeatScores(), 0
    for _ in range(40):
        drafted = []
        for place in range(3):
            logits = torch.from_numpy(random.normal(0, 4, V)).float()
            prob = (logits / temperature).softmax(-1) if temperature else None
            token = int(logits.argmax()) if prob is None else int(random.integers(V))
            view = DraftView(place + 1, token, torch.empty(0), logits, prob, temperature, text)
            odds, mean = undrawn_features(view, repeats)
            top = float((logits.double() / (temperature or 1)).softmax(-1).max())
            assert odds == pytest.approx(math.log(top / (1 - top)), abs=1e-3)
            assert mean == pytest.approx(mean_of(text, drafted, logits, temperature, False), abs=1e-4)
            found += mean != 0
            drafted.append(token)
        text = text + random.integers(0, V, 2).tolist()
    assert found > 20
    sure = DraftView(1, 0, torch.empty(0), torch.tensor([200.0, 0.0]), None, 0.0, [])
    assert undrawn_features(sure, RepeatScores())[0] == 40


def test_priors_are_of_verified_tokens_only():
    random = np.random.default_rng(5)
    features = torch.from_numpy(random.normal(0, 1, (50, 3, 2)))
    accepted = torch.from_numpy(random.integers(0, 4, 50))
    verified = torch.maximum(accepted, torch.from_numpy(random.integers(0, 4, 50)))
    weight, label = torch.zeros(50, 3), torch.zeros(50, 3)
    for row in range(50):
        for place in range(int(verified[row])):
            weight[row, place] = place <= accepted[row]
            label[row, place] = place < accepted[row]
    assert fit_priors(features, accepted, verified) == fit_start(features, label.double(), weight.double(), WORTH)


def test_a_full_index_forgets_and_says_nothing_false():
    text = np.random.default_rng(2).integers(0, 3, 400).tolist()
    index, tokens = TextIndex(1, CPU, num_buckets=16), torch.tensor([text])
    places = torch.arange(len(text))[None]
    index.add(tokens, torch.zeros(1, dtype=torch.long), places, places >= 0)
    for end in range(8, 400):
        half, token = index.follower(tokens, torch.zeros(1, dtype=torch.long), tokens[:, end - 8 : end])
        size = int(2 * half)
        stood = [text[at] for at in range(size, 400) if text[at - size : at] == text[end - size : end]]
        assert not size or int(token) in stood


def test_learning_is_the_dense_newton_step():
    """With what was rejected behind the first rejection, dropped, or of no request left out."""
    random, K, N = np.random.default_rng(3), 3, 5
    estimator = ServedEstimator(N, K, CPU, CERTAIN, memory=50.0)
    theta = np.array([0.6, 0.9, 0.1, -0.3, -0.3])
    information = np.zeros((5, 5))
    index = torch.tensor([4, 0, -1, 2])
    for _ in range(30):
        for k in range(K):
            logits = torch.from_numpy(random.normal(0, 2, (len(index), 6)))
            estimator.predict(logits, index, torch.tensor(k), torch.zeros(N, K), torch.ones(N))
            estimator.features[:, k, 1] = torch.from_numpy(random.normal(0, 1, N + 1))  # no texts: as if there were
        accepted, rejected = random.integers(0, K + 1, 4), random.integers(0, 2, 4)
        rejected = np.minimum(rejected, K - accepted)
        gradient, added, count = np.zeros(5), np.zeros((5, 5)), 0
        for n, row in enumerate(index.tolist()):
            for k in range(min(accepted[n] + 1, accepted[n] + rejected[n])) if row >= 0 else ():
                z = np.array([*estimator.features[row, k, :2].tolist(), *np.eye(K)[k]])
                prob = float(estimator.predictions[row, k])
                gradient += ((k < accepted[n]) - prob) * z
                added += prob * (1 - prob) * np.outer(z, z)
                count += 1
        estimator.step(index, torch.from_numpy(accepted + 1), torch.from_numpy(rejected))
        information = information * math.exp(-count / 50) + added
        theta = theta + np.linalg.solve(information + PRIOR * np.eye(5), gradient)
        mine = [*estimator.weights.tolist(), *estimator.intercepts.tolist()]
        assert mine == pytest.approx(theta, abs=2e-3)


def test_a_start_is_fitted_and_comes_first():
    random, K = np.random.default_rng(4), 3
    features = torch.from_numpy(random.normal(1, 2, (6000, K, 2)))
    truth = features @ torch.tensor([0.8, 0.4]).double() + torch.tensor([0.5, 0.0, -0.5])
    labels = (torch.from_numpy(random.random((6000, K))) < truth.sigmoid()).double()
    start = fit_start(features, labels, torch.ones(6000, K).double(), 300.0)
    assert start.weights == pytest.approx((0.8, 0.4), abs=0.06)
    assert start.intercepts == pytest.approx((0.5, 0.0, -0.5), abs=0.12)
    sure, cold = (ServedEstimator(1, K, CPU, one) for one in (start, COLD))
    moved = []
    for one in (sure, cold):
        before = one.weights.clone()
        one.predict(torch.tensor([[4.0, 0.0]]), torch.tensor([0]), torch.tensor(0), torch.zeros(1, K), torch.ones(1))
        one.step(torch.tensor([0]), torch.tensor([1]), torch.tensor([1]))
        moved.append(float((one.weights - before).abs().max()))
    assert moved[0] < moved[1] / 5


def test_padding_changes_nothing():
    estimator = ServedEstimator(2, 2, CPU)
    conf = torch.zeros(2, 2)
    before = estimator.features[:2].clone(), estimator.predictions[:2].clone()
    estimator.predict(torch.randn(2, 4), torch.tensor([-1, -1]), torch.tensor(1), conf, torch.ones(2))
    estimator.step(torch.tensor([-1, -1]), torch.tensor([1, 3]), torch.tensor([1, 0]))
    assert torch.equal(estimator.features[:2], before[0]) and torch.equal(estimator.predictions[:2], before[1])
    assert estimator.weights.tolist() == list(COLD.weights)


def test_places_that_are_drafted_at_once_are_told_apart():
    estimator, conf = ServedEstimator(3, 2, CPU, CERTAIN), torch.zeros(3, 2)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    estimator.predict(logits, torch.tensor([2, 2, 0, 0]), torch.tensor([0, 1, 0, 1]), conf, torch.ones(3))
    own = torch.zeros(3, 2)
    for k in range(2):
        estimator.predict(logits[k::2], torch.tensor([2, 0]), torch.tensor(k), own, torch.ones(3))
    assert torch.allclose(conf[:2], own[:2]) and conf[:2].unique().numel() == 4


class Seeing(ServedEstimator):
    """Looks for what was drawn, and not for what may be."""

    def _follower(self, served, index, rows, steps):
        half, expected = super()._follower(served, index, rows, steps)
        drawn = served.drafted[: len(rows)].gather(1, steps[:, None])[:, 0]
        return torch.where(drawn == expected, half, -half), expected


def confidences(made: type, tables: served_law.Tables):
    """What an estimator says of all drafts, every token of which already lies where a mutant finds it."""
    served = texts_of(served_law.TEXTS, served_law.PLACES)
    estimator = made(served_law.REQUESTS, served_law.PLACES, CPU, CERTAIN)
    estimator.attach(served)
    index = torch.arange(served_law.REQUESTS)
    estimator.step(index, nothing(2), nothing(2))

    def of(drafts: served_law.Drafts) -> torch.Tensor:
        served.drafted[:] = torch.tensor(drafts)
        conf = torch.zeros(served_law.REQUESTS, served_law.PLACES)
        for k in range(served_law.PLACES):
            estimator.predict(tables.logits(drafts, k), index, torch.tensor(k), conf, torch.ones(2))
        return conf

    return of


def best(conf: torch.Tensor, budget: int) -> list[int]:
    """So many tokens, those of the greatest survival."""
    survival = conf.cumprod(1)
    flat = survival.flatten().topk(budget).indices
    return [sum(flat // conf.shape[1] == row).item() for row in range(len(conf))] if budget else [0] * len(conf)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_server_that_trims_by_it_answers_as_the_target_does(budget):
    """A place's rank is known once the tokens before it are, which were admitted before it: which place is next is
    never up to what lies behind."""
    splits, biases = set(), list[float]()
    for seed in range(4):
        tables = served_law.Tables(seed)
        says = confidences(ServedEstimator, tables)
        splits |= {tuple(best(says(drafts), budget)) for drafts, _ in tables.drafts()}
        biases.append(served_law.bias(tables, lambda drafts, says=says: best(says(drafts), budget)))
    assert max(biases) < EXACT
    assert len(splits) > 1, "nothing depended on the drafts"


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_one_that_has_seen_the_drawn_token_changes_the_answers(budget):
    biases = []
    for seed in range(4):
        tables = served_law.Tables(seed)
        says = confidences(Seeing, tables)
        biases.append(served_law.bias(tables, lambda drafts, says=says: best(says(drafts), budget)))
    assert max(biases) > CAUGHT


def test_so_does_a_budget_that_has_seen_the_round():
    """As of costs with steps: verify all or one, by how much they promise together. vLLM's comes from the confidences
    of the round before."""
    biases = []
    for seed in range(4):
        tables = served_law.Tables(seed)
        says = confidences(ServedEstimator, tables)
        promised = {drafts: float(says(drafts).cumprod(1).sum()) for drafts, _ in tables.drafts()}
        bar = sorted(promised.values())[len(promised) // 2]

        def all_or_one(drafts: served_law.Drafts, says=says, promised=promised, bar=bar) -> list[int]:
            return best(says(drafts), 4 if promised[drafts] > bar else 1)

        biases.append(served_law.bias(tables, all_or_one))
    assert max(biases) > CAUGHT


def test_the_enumeration_knows_the_law():
    """p = (.7, .3), q = (.5, .5), drop every b: (.85, .15); and nothing is biased that looks at nothing."""
    tables = served_law.Tables(0)
    for key in tables.p:
        tables.p[key], tables.q[key] = np.array([0.7, 0.3, 0.0]), np.array([0.5, 0.5, 0.0])
    found = dict.fromkeys(range(3), 0.0)
    for token in (0, 1):
        for text, prob in tables.answers(0, (token,) if token == 0 else ()):
            found[text[0]] += 0.5 * prob
    assert found == pytest.approx({0: 0.85, 1: 0.15, 2: 0.0})
    for count in itertools.product(range(3), repeat=2):
        assert served_law.bias(served_law.Tables(1), lambda drafts, count=count: count) < EXACT
