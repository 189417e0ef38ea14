"""A step on tensors without numbers, beside the same step on real ones: what it holds and what it computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftsmith.modules.layers import LlamaConfig, LlamaModel
from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.train.muon import MuonAdamW
from draftsmith.train.planning.dry_run import GRADIENTS, MOST_REAL, WORKING, DryRun, HeldBytes, averages
from draftsmith.train.planning.memory import CPU_KEEPS, FLOAT32, LAYOUTS, memory, trained


def net(num_layers: int = 2) -> LlamaModel:
    return LlamaModel(LlamaConfig(100, 64, 176, num_layers, 4, 2, 16, 128))


def saved_bytes(call, model) -> int:
    """Bytes of distinct storages that autograd keeps and that the call returns, weights and tables aside."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}  # by address; the tensors are held, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pack(call())
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in known)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_stays_of_a_forward_is_what_autograd_keeps(autocast):
    """To the byte: nothing else is alive after it. (Casts of weights, which autocast caches, are gone with it.)"""

    def call(model, ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model.features(ids)

    real, ids = net(), torch.zeros(3, 40, dtype=torch.int64)
    found = saved_bytes(lambda: call(real, ids), real)
    run = DryRun()
    with run:
        with run.making("weights"):
            model = net()
        tokens = torch.zeros(3, 40, dtype=torch.int64)
        held = call(model, tokens)
    assert held.shape == (3, 40, 64)
    assert run.now[WORKING] == found  # the token ids are among both
    assert run.now["weights"] == sum(t.untyped_storage().nbytes() for t in (*real.parameters(), *real.buffers()))


def test_a_frozen_model_that_decodes_holds_what_it_makes():
    """In inference mode composed operators are not taken apart before a mode sees them."""
    run, info = DryRun(), ModelInfo(64, 100, 2, 128, (), {})
    with run:
        lm = LlamaLM(net().requires_grad_(False), info)
        session = lm.session(1, 32, static=False)
        before = run.now[WORKING]
        scores = session.extend([[0] * 20], num_logits=20)
    assert scores.logits.shape == (1, 20, 100)
    assert run.now[WORKING] - before >= 4 * 20 * (100 + 64)


def test_code_that_goes_by_values_runs():
    run = DryRun()
    with run:
        mask = torch.arange(10) % 3 == 0
        states = torch.zeros(10, 8)
        assert states[mask].shape == (4, 8)
        assert states[states[:, 0] > 0].shape == (10, 8)  # not known: all
        assert sum(mask.tolist()) == 4 and float(torch.tensor(2.5)) == 2.5
        wide = torch.arange(MOST_REAL)
        assert (wide[None] - wide[:, None] <= 0).shape == (MOST_REAL, MOST_REAL)  # 128 TB, were it real


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_averages_are_those_of_the_optimizer(optimizer):
    def made(model):
        parameters = list(model.parameters())
        matrices, vectors = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
        found = MuonAdamW(matrices, vectors, lr=0.1) if optimizer == "muon" else torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        found.step()
        return averages(found)

    with DryRun():
        dry = made(net(1))
    real = made(net(1))
    assert dry == real > 0


@pytest.mark.parametrize(("strategy", "offload"), list(LAYOUTS)[2:])
def test_what_zero_shares_out_adds_up_over_the_ranks(strategy, offload):
    """Rajbhandari et al. 2020, figure 1: a stage more shares out the optimizer, the gradients, the weights."""
    whole, ranks = FLOAT32 * 1000, 4
    own = trained(whole, 2 * whole, 100, (strategy, offload), ranks)
    stage = int(strategy[-1])
    stepped = ranks * (own.host if offload else own.optimizer)  # master weights and averages, with offload gradients
    assert stepped == (4 if offload else 3) * whole
    assert own.gradients * (ranks if stage >= 2 else 1) == whole
    assert own.weights * (ranks if stage == 3 else 1) == whole


def test_the_peak_is_that_of_the_largest_phase():
    peaks = {
        "forward": {WORKING: 700, GRADIENTS: 40},
        "backward": {WORKING: 650, GRADIENTS: 20},
        "update": {WORKING: 12},
    }
    held, alone = HeldBytes(100, 1000, 1100, 40, 80, 10, peaks), ("one process", False)
    stays = 100 + 1000 + 40 + 80 + 2 * 10
    small = memory(held, 1, alone, 1)
    kept = round(CPU_KEEPS * 700)
    assert (small.phase, small.peak, small.parts["freed, kept"]) == ("forward", stays + 40 + 700 + kept, kept)
    assert small.phases["backward"] == stays + 20 + 650 + round(CPU_KEEPS * 650)
    assert small.phases["update"] == stays + 40 + 12 + 1
    assert memory(dataclasses.replace(held, loading=3000), 1, alone, 1).phase == "loading"
    on_gpu = dataclasses.replace(held, libraries=0)
    assert memory(on_gpu, 1, alone, 1).parts["freed, kept"] == 0  # its allocator is torch's
