"""Packed linear layers: the same numbers as `F.linear`, one copy of the weights, and a fallback that is really used."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from worlds import tiny_llama_dir

from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.engine import lean
from draftsmith.modules.engine.lean import MIN_WEIGHTS, LeanLinear, can_pack
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch build has no oneDNN ops")
OUT, IN = 1280, 512
PROMPT = [5, 17, 250, 31, 7]
GREEDY = SamplingParams()


@pytest.fixture
def broken_ops(monkeypatch):
    """The private ops are gone, as they may be in another version of torch."""

    def gone(*args):
        raise NotImplementedError("no such op")  # what torch raises for an op that its build leaves out

    monkeypatch.setattr(lean, "_pack", gone)
    can_pack.cache_clear()
    yield
    can_pack.cache_clear()


@pytest.mark.parametrize("rows", [1, 8, 61])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("out", "width", "pack"),
    [(OUT, IN, False), pytest.param(OUT, IN, True, marks=needs_packing), (MIN_WEIGHTS // 64 - 1, 64, True)],
    ids=["plain", "packed", "small"],
)
def test_results_are_those_of_float64(rows, biased, out, width, pack):
    """Small weights are not packed: without a bias they lie in by out."""
    torch.manual_seed(rows)
    weight, x, residual = torch.randn(out, width), torch.randn(rows, width), torch.randn(rows, out)
    bias = torch.randn(out) if biased else None
    linear = LeanLinear(weight, bias, pack)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Sums of up to 512 products of order 1 in float32: some 1e-5 of rounding, whatever the order.
    torch.testing.assert_close(linear(x).double(), exact, rtol=0, atol=2e-4)
    torch.testing.assert_close(linear.add_to(residual.clone(), x).double(), residual + exact, rtol=0, atol=2e-4)
    assert linear.packed == (pack and out == OUT)
    if not linear.packed:
        assert torch.equal(linear.weight, weight) and linear.weight.stride() == (
            (1, out) if pack and not biased else (width, 1)
        )
        assert pack or linear.weight.data_ptr() == weight.data_ptr()  # without pack it lies as it did


def test_without_the_ops_linear_layers_are_plain(broken_ops):
    weight, x = torch.randn(OUT, IN), torch.randn(3, IN)
    linear = LeanLinear(weight, pack=True)
    assert not linear.packed and not can_pack(torch.float32)
    assert torch.equal(linear(x), F.linear(x, weight))


@needs_packing
def test_ops_that_compute_something_else_are_not_used(monkeypatch):
    right = lean._linear
    monkeypatch.setattr(lean, "_linear", lambda x, weight, bias: right(x, weight, bias) * 1.001)
    can_pack.cache_clear()
    try:
        assert not can_pack(torch.float32)
    finally:
        can_pack.cache_clear()


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_threads_that_multiply_at_once_leave_onednn_as_it_was(monkeypatch, first_out):
    """oneDNN's switch is the whole process's. Both threads are inside, then they leave in either order."""
    before, multiply = torch._C._get_mkldnn_enabled(), F.linear
    inside, leave, seen = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)], []

    def held(x, weight):
        number = int(x[0, 0])
        inside[number].set()
        assert leave[number].wait(60)
        seen.append(torch._C._get_mkldnn_enabled())
        return multiply(x, weight)

    monkeypatch.setattr(lean.F, "linear", held)
    weight = torch.ones(4, 4, dtype=torch.bfloat16)
    rows = [torch.full((1, 4), number, dtype=torch.bfloat16) for number in range(2)]
    threads = [threading.Thread(target=lean._one_row, args=(row, weight)) for row in rows]
    try:
        for number in range(2):
            threads[number].start()
            assert inside[number].wait(60)
        for number in (first_out, 1 - first_out):
            leave[number].set()
            threads[number].join(60)
        assert torch._C._get_mkldnn_enabled() == before and seen == [False, False]
    finally:
        torch._C._set_mkldnn_enabled(before)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def directory(request, tmp_path_factory):
    return str(tiny_llama_dir(tmp_path_factory.mktemp(request.param), family=request.param))


@pytest.fixture
def pack_all(monkeypatch):
    monkeypatch.setattr(lean, "MIN_WEIGHTS", 1)


@needs_packing
def test_greedy_answers_and_features_are_those_of_plain_weights(directory, pack_all):
    plain, dense = load_lm(directory), load_lm(directory, packed=True)
    linears = [linear for layer in dense.stack.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    assert all(linear.packed for linear in linears)

    answers = [generate_one(lm, None, PROMPT, GREEDY, 60, TorchSource(0), ()).tokens for lm in (plain, dense)]
    assert answers[0] == answers[1]
    drafter = ChainDrafter(DraftModelNet(dense), FixedLengthStop(5), 100)
    assert generate_one(dense, drafter, PROMPT, GREEDY, 60, TorchSource(0), ()).tokens == answers[0]
    ids = torch.tensor([PROMPT + answers[0]])
    torch.testing.assert_close(dense.features(ids), plain.features(ids), rtol=1e-3, atol=1e-3)


@needs_packing
def test_weights_are_held_once(directory, pack_all):
    model = load_lm(directory, packed=True).model
    left = {name for name, weight in model.named_parameters() if weight.ndim == 2 and weight.numel()}
    assert left == {"embed_tokens.weight"}  # everything else was given away to the packed layout
