"""The plugin's estimator beside vLLM's own, whose kernels are run by Triton's interpreter, and under vLLM's own
allocation of a batch's drafts. Run by `make test-engines`."""

from __future__ import annotations

import importlib
import inspect
import types

import estimator_code  # noqa: F401
import numpy as np
import pytest
import served_law
import torch
from vllm.v1.worker.gpu.spec_decode import adaptive_verification, speculator

from draftsmith.data.exchange import vllm_plugin
from draftsmith.modules.acceptance.served import ServedTexts, Start
from draftsmith.modules.types import InputError

CPU = torch.device("cpu")
EXACT, CAUGHT = 1e-12, 1e-3
OWN = speculator.OnlineAcceptanceEstimator
START = Start((0.6, 0.9), (0.1, -0.3), (((0.0,) * 3,) * 3,) * 2)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> type:
    """The class that vLLM makes its estimator of, once the plugin was asked for."""
    runner = vllm_plugin.named("vllm.v1.worker.gpu.model_runner:GPUModelRunner")
    monkeypatch.setattr(runner, "initialize_kv_cache", runner.initialize_kv_cache)
    monkeypatch.setattr(speculator, "OnlineAcceptanceEstimator", OWN)
    monkeypatch.setenv(vllm_plugin.VARIABLE, "1")
    vllm_plugin.register()
    vllm_plugin.register()
    return speculator.OnlineAcceptanceEstimator


def test_it_is_off_unless_asked_for(monkeypatch):
    for value in ("", "0"):
        monkeypatch.setenv(vllm_plugin.VARIABLE, value)
        vllm_plugin.register()
        assert speculator.OnlineAcceptanceEstimator is OWN


def test_it_is_made_as_vllm_makes_its_own(registered):
    assert issubclass(registered, OWN) and registered is not OWN
    for name in ("step", "predict"):
        assert [*inspect.signature(getattr(registered, name)).parameters] == [
            *inspect.signature(getattr(OWN, name)).parameters
        ]
    source = inspect.getsource(speculator.DraftModelSpeculator.load_model)
    assert "OnlineAcceptanceEstimator(\n                self.max_num_reqs," in source
    assert isinstance(registered(4, 3, CPU), OWN)


def test_the_texts_are_those_of_the_model_runner(registered):
    runner = types.SimpleNamespace()
    kind = vllm_plugin.named("vllm.v1.worker.gpu.spec_decode.eagle.speculator:EagleSpeculator")
    runner.speculator = drafter = kind.__new__(kind)
    drafter.acceptance_estimator, drafter.draft_tokens, drafter.draft_logits = (
        registered(1, 2, CPU),
        torch.ones(1),
        None,
    )
    tensor = types.SimpleNamespace
    runner.req_states = tensor(
        all_token_ids=tensor(gpu=torch.ones(2)), total_len=tensor(gpu=torch.ones(3)), index_to_req_id={3: "a"},
        prefill_len=tensor(np=np.ones(4)),
    )  # fmt: skip
    wrapped = types.new_class("Runner")
    wrapped.initialize_kv_cache = lambda self, kv_cache_config, is_profiling=False: ("made", kv_cache_config)
    vllm_plugin.attach_to(wrapped)
    assert wrapped.initialize_kv_cache(runner, "config") == ("made", "config")
    found, state = drafter.acceptance_estimator._served, runner.req_states
    assert found.tokens is state.all_token_ids.gpu and found.lengths is state.total_len.gpu
    assert found.drafted is drafter.draft_tokens and found.greedy_drafts
    assert found.requests is state.index_to_req_id and found.num_read is state.prefill_len.np


@pytest.mark.parametrize("change", ["a parameter", "an attribute", "no estimator"])
def test_another_vllm_is_refused_in_one_line(monkeypatch, change):
    def predict(self, logits, idx_mapping, draft_step, draft_tokens, temperature): ...

    def without(self): ...

    monkeypatch.setenv(vllm_plugin.VARIABLE, "1")
    states = importlib.import_module("vllm.v1.worker.gpu.states")
    if change == "a parameter":
        monkeypatch.setattr(OWN, "predict", predict)
    elif change == "an attribute":
        monkeypatch.setattr(states.RequestState, "__init__", without)
    else:
        monkeypatch.delattr(speculator, "OnlineAcceptanceEstimator")
    with pytest.raises(InputError, match=r"found .*, expected .*\. Use vLLM 0\.32 or 0\.33") as refused:
        vllm_plugin.register()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_log_odds_and_predictions_are_vllms(registered, temperature):
    random = torch.Generator().manual_seed(1)
    rows, K, index = 4, 3, torch.tensor([2, -1, 0])
    own, ours = OWN(rows, K, CPU), registered(rows, K, CPU)
    own.slope.fill_(0.6), own.intercepts.copy_(torch.tensor([0.1, -0.3, 0.2]))
    ours.weights.copy_(torch.tensor([0.6, 5.0])), ours.intercepts.copy_(own.intercepts)
    said = [torch.zeros(rows, K) for _ in range(2)]
    for k in range(K):
        logits = torch.randn(len(index), 5000, generator=random) * 3
        for estimator, conf in zip((own, ours), said, strict=True):
            estimator.predict(logits, index, torch.tensor(k), conf, torch.full((rows,), temperature))
    live = torch.tensor([2, 0])
    assert torch.allclose(own.features[live], ours.features[live, :, 0], atol=1e-3)
    assert torch.allclose(said[0][[0, 2]], said[1][[0, 2]], atol=1e-4)


def test_the_same_tokens_are_learned_from(registered):
    """Its sums of a round are ours: the same labels, weights, and places."""
    random, rows, K = np.random.default_rng(2), 5, 3
    own, ours = OWN(rows, K, CPU), registered(rows, K, CPU)
    index = torch.tensor([4, 0, 2, 1])
    features = torch.from_numpy(random.normal(0, 2, (rows, K))).float()
    prob = torch.from_numpy(random.uniform(0.1, 0.9, (rows, K))).float()
    own.features[:], own.predictions[:] = features, prob
    ours.features[:rows, :, 0], ours.predictions[:rows] = features, prob
    sampled, rejected = torch.tensor([1, 3, 4, 0]), torch.tensor([2, 1, 0, 0])
    for estimator in (own, ours):
        estimator.step(index, sampled, rejected)
    found = ours.information
    expected = torch.stack([found[:, 0, 0], found[:, 0, 2], found[:, 2, 2]], -1)
    assert torch.allclose(own.info, expected, atol=1e-4) and own.counts.tolist() == [3, 2, 2]


class _Seeing:
    def _follower(self, served, index, rows, steps):
        half, expected = super()._follower(served, index, rows, steps)
        drawn = served.drafted[: len(rows)].gather(1, steps[:, None])[:, 0]
        return torch.where(drawn == expected, half, -half), expected


def admitted(made, tables, budget):
    """What vLLM verifies of every draft when so many tokens may be."""
    texts, K = served_law.TEXTS, served_law.PLACES
    tokens = torch.zeros(len(texts), 20, dtype=torch.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    drafted, ids = torch.zeros(len(texts), K, dtype=torch.int64), {0: "a", 1: "b"}
    estimator, index = made(len(texts), K, CPU), torch.arange(len(texts))
    estimator.weights.copy_(torch.tensor(START.weights)), estimator.intercepts.copy_(torch.tensor(START.intercepts))
    estimator.attach(ServedTexts(tokens, lengths, drafted, False, ids, lengths.numpy()))
    estimator.step(index, torch.zeros(2), torch.zeros(2))

    def of(drafts):
        drafted[:] = torch.tensor(drafts)
        conf = torch.zeros(len(texts), K)
        for k in range(K):
            estimator.predict(tables.logits(drafts, k), index, torch.tensor(k), conf, torch.ones(2))
        capacities = torch.full((len(texts),), K, dtype=torch.int32)
        adaptive_verification._assign_draft_token_budget(conf, index, capacities, budget, K)
        return tuple(capacities.tolist())

    return {drafts: of(drafts) for drafts, _ in tables.drafts()}


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_what_vllm_admits_by_it_leaves_the_answers_the_targets(registered, budget):
    seeing, splits = type("Seeing", (_Seeing, registered), {}), set()
    biases = {registered: list[float](), seeing: list[float]()}
    for seed in range(4):
        tables = served_law.Tables(seed)
        for made, found in biases.items():
            kept = admitted(made, tables, budget)
            splits |= {*kept.values()} if made is registered else set()
            found.append(served_law.bias(tables, kept.__getitem__))
    assert len(splits) > 1, "nothing depended on the drafts"
    assert max(biases[registered]) < EXACT and max(biases[seeing]) > CAUGHT
