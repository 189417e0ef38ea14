"""A step on tensors without numbers, beside the same step on real ones: what it holds and what it computes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.modules.layers import LlamaConfig, LlamaModel
from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.train import deepspeed
from draftsmith.train.muon import MuonAdamW
from draftsmith.train.planning.dry_run import MOST_REAL, WORKING, DryRun, HeldBytes
from draftsmith.train.planning.heap import Heap
from draftsmith.train.planning.memory import FLOAT32, LAYOUTS, ZERO_BUCKET, Resident, memory, trained
from draftsmith.train.planning.step import GRADIENTS, StepBytes, averages

MiB = 2**20


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
    run = DryRun(on_cpu=False)
    with run:
        with run.making("weights"):
            model = net()
        tokens = torch.zeros(3, 40, dtype=torch.int64)
        held = call(model, tokens)
    assert held.shape == (3, 40, 64)
    assert run.now[WORKING] == found  # the token ids are among both
    assert run.now["weights"] == sum(t.untyped_storage().nbytes() for t in (*real.parameters(), *real.buffers()))


def test_products_and_attention_are_counted_as_torch_counts_them():
    """In forward and backward. torch's counter sees attention in full where it is composed of products: what causality
    leaves out is put in."""
    real, ids = net(), torch.zeros(2, 16, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), counter:
        real.features(ids).sum().backward()
    run = DryRun(on_cpu=False)
    with run:
        net().features(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    in_full = run.attention_flops * 16 * 16 / (16 * 17 / 2)
    assert run.flops + in_full == counter.get_total_flops()


def test_a_frozen_model_that_decodes_counts_what_it_computes():
    """In inference mode composed operators are not taken apart before a mode sees them."""
    run = DryRun(on_cpu=False)
    info = ModelInfo(64, 100, 2, 128, (), {})
    with run:
        lm = LlamaLM(net().requires_grad_(False), info)
        lm.features(torch.zeros(1, 20, dtype=torch.int64))
        expected = run.flops
        session = lm.session(1, 32, static=False)
        session.extend([[0] * 20], num_logits=20)
    assert run.flops - expected == expected + 2 * 64 * 100 * 20  # and the logits


def test_code_that_goes_by_values_runs():
    run = DryRun(on_cpu=False)
    with run:
        mask = torch.arange(10) % 3 == 0
        states = torch.zeros(10, 8)
        assert states[mask].shape == (4, 8)
        assert states[states[:, 0] > 0].shape == (10, 8)  # not known: all
        assert sum(mask.tolist()) == 4 and float(torch.tensor(2.5)) == 2.5
        wide = torch.arange(MOST_REAL)
        assert (wide[None] - wide[:, None] <= 0).shape == (MOST_REAL, MOST_REAL)  # 128 TB, were it real


def test_a_cpu_keeps_small_blocks_and_gives_large_ones_back():
    heap = Heap()
    heap.give(heap.take(24 * MiB), 24 * MiB)  # mapped; blocks below its size are not from here on
    first, second = heap.take(10 * MiB), heap.take(10 * MiB)
    assert heap.take(40 * MiB) is None
    heap.give(first, 10 * MiB)
    assert (heap.end, heap.used) == (20 * MiB, 10 * MiB)
    assert heap.take(4 * MiB) == first and heap.take(6 * MiB) == first + 4 * MiB and heap.end == 20 * MiB
    third, fourth = heap.take(20 * MiB), heap.take(20 * MiB)
    heap.give(fourth, 20 * MiB)
    assert heap.end == 60 * MiB  # less than twice the bound is kept
    heap.give(third, 20 * MiB)
    heap.give(second, 10 * MiB)
    assert heap.end == 10 * MiB and heap.used == 10 * MiB


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

    with DryRun(on_cpu=False):
        dry = made(net(1))
    real = made(net(1))
    assert dry == real > 0


@pytest.mark.parametrize(("strategy", "offload"), list(LAYOUTS)[2:])
def test_what_zero_shares_out_adds_up_over_the_ranks(strategy, offload):
    """Rajbhandari et al. 2020, figure 1: a stage more shares out the optimizer, the gradients, the weights."""
    whole, ranks = FLOAT32 * 1000, 4
    own = trained(whole, 2 * whole, 100, strategy, ranks, offload)
    stage = int(strategy[-1])
    stepped = ranks * (own.host if offload else own.optimizer)  # master weights and averages, with offload gradients
    assert stepped == (4 if offload else 3) * whole
    assert own.gradients * (ranks if stage >= 2 else 1) == whole
    assert own.weights * (ranks if stage == 3 else 1) == whole


def test_the_bucket_is_the_one_that_deepspeed_is_given():
    assert ZERO_BUCKET == deepspeed.BUCKET


def test_the_peak_is_that_of_the_largest_phase():
    forward = HeldBytes({WORKING: 700, GRADIENTS: 40}, freed=5)
    backward = HeldBytes({WORKING: 650, GRADIENTS: 20})
    step = StepBytes(40, 80, 10, {"forward": forward, "backward": backward, "update": HeldBytes({WORKING: 12})})
    stays = 100 + 1000 + 40 + 80 + 2 * 10
    small = memory(Resident(100, 1000, 1100), step, 1, "one process", 1)
    assert (small.phase, small.peak) == ("forward", stays + 40 + 700 + 5)
    assert small.phases["backward"] == stays + 20 + 650 and small.phases["update"] == stays + 40 + 12
    assert memory(Resident(100, 1000, 3000), step, 1, "one process", 1).phase == "loading"
