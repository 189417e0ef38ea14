"""Linear layers in fewer bits: what they compute, that it does not depend on neighbors, and that drafting in them
leaves the target's output alone."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from worlds import tiny_llama_dir

from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bench.runner import load_models
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.feature_heads import PairNetwork
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import parse_method, parse_methods
from draftsmith.modules.engine import low_precision
from draftsmith.modules.engine.lean import LeanLinear
from draftsmith.modules.engine.low_precision import (
    FEW_ROWS,
    GROUP,
    Int4Linear,
    Int8Linear,
    check_precision,
    copy_of,
    linear_of,
    round_int4,
)
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams

# Asked of the processor, so that products that are wrong fail here and skip nothing.
# ONEDNN_MAX_CPU_ISA=AVX2 stands for a processor without VNNI.
needs_int8 = pytest.mark.skipif(
    not torch.cpu._is_vnni_supported() or "ONEDNN_MAX_CPU_ISA" in os.environ,
    reason="no VNNI: int8 may be refused here",
)
OUT, IN = 384, 160
PROMPT = [5, 17, 250, 31, 7]


def by_hand(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rounded numbers' product, in float64, where sums of integers are exact."""
    scales, tops = weight.abs().amax(1) / 127, x.abs().amax(1, keepdim=True)
    rounded = (weight / scales[:, None]).round().double(), (x * (127 / tops)).round().double()
    return (rounded[1] @ rounded[0].t()) * scales.double() * (tops / 127).double()


@needs_int8
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_int8_products_are_those_of_the_rounded_numbers(turned, biased):
    torch.manual_seed(0)
    weight, x, residual = torch.randn(OUT, IN), torch.randn(7, IN) * 10.0 ** torch.arange(-3.0, 4)[:, None], 1.0
    bias = torch.randn(OUT) if biased else None
    linear = Int8Linear(weight.t().contiguous().t() if turned else weight, bias)
    expected = by_hand(x, weight) + (0 if bias is None else bias.double())
    # Integers are exact; what is left are some roundings of float32 of numbers up to 1e4 * 12.
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.add_to(torch.full((7, OUT), residual), x).double(), expected + 1, rtol=1e-5,
                               atol=1e-5)  # fmt: skip


@needs_int8
def test_a_row_in_int8_does_not_depend_on_what_it_is_read_with():
    torch.manual_seed(0)
    linear, x = Int8Linear(torch.randn(OUT, IN)), torch.randn(61, IN) * torch.logspace(-3, 3, 61)[:, None]
    together = linear(x)
    for count in (1, 2, 6, 13):
        assert torch.equal(linear(x[:count]), together[:count])
    assert torch.equal(linear(x[None, -4:])[0], together[-4:])
    x[1, 3] = torch.nan  # nothing hides
    assert linear(x).isnan().all(1).nonzero().tolist() == [[1]] and int(linear(x).isnan().any(1).sum()) == 1
    assert not bool(Int8Linear(torch.zeros(OUT, IN))(torch.zeros(1, IN)).any())


def levels(weight: torch.Tensor) -> torch.Tensor:
    """The weights that stand for these in int4, [out, in]."""
    codes, scales = round_int4(weight)
    return ((codes.double() - 8) * scales[..., :1].double() + scales[..., 1:].double()).flatten(1)


@pytest.mark.parametrize("out", [OUT, OUT + 5])  # the kernel's tiles are 16 wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_products_are_those_of_the_rounded_weights(out, dtype):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(out, IN) + 0.5, torch.randn(out), torch.randn(FEW_ROWS + 5, IN).to(dtype)
    linear = Int4Linear(weight, bias.to(dtype))
    expected = x.bfloat16().double() @ levels(weight).t() + bias.to(dtype).double()
    for rows in (slice(FEW_ROWS), slice(None)):
        found = linear(x[None, rows])[0]
        assert found.dtype == dtype
        # Results of about 20 are rounded to bf16, and for many rows so are the weights.
        torch.testing.assert_close(found.double(), expected[rows], rtol=2**-7, atol=0.2)
    together = linear(x[:FEW_ROWS])
    for count in range(1, FEW_ROWS):
        assert torch.equal(linear(x[:count]), together[:count])
    x[1, 3] = torch.nan
    assert linear(x).isnan().any(1).tolist() == linear(x[:3]).isnan().all(1).tolist() + [False] * (FEW_ROWS + 2)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_keeps_the_levels_of_a_gguf_file(kind):
    gguf = pytest.importorskip("gguf")
    weight = np.random.default_rng(0).normal(size=(64, 8 * GROUP)).astype(np.float32)
    weight[0] = 0
    kind = gguf.GGMLQuantizationType[kind]
    stored = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind))
    # Scales of a group, and its middle, are rounded to bf16; other levels would be 0.04 off.
    assert float((levels(stored) - stored).norm() / stored.norm()) < 2**-8
    made = torch.from_numpy(weight)
    assert float((levels(made) - made).norm() / made.norm()) < 0.1


def test_the_embedded_target_in_int4_is_its_rounded_weights_but_for_bf16():
    exact, found = (load_lm("embedded:target", precision=precision, packed=False) for precision in ("dtype", "int4"))
    rows = read_prompts("embedded:prompts", "embedded:target", split="test", limit=8)

    def logits(lm):
        return torch.cat([lm.lm_head(lm.features(torch.tensor([row.prompt_ids])))[0] for row in rows])

    def distance(one, other):
        """Relative error, and share of tokens with the same first choice."""
        agreement = float((one.argmax(-1) == other.argmax(-1)).float().mean())
        return float((one - other).norm() / other.norm()), agreement

    original, in_int4 = logits(exact), logits(found)
    for layer in exact.stack.layers:
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            linear.weight.copy_(levels(linear.weight))
    error, agreement = distance(in_int4, logits(exact))
    assert error < 0.02 and agreement > 0.95
    # What 4 bits cost this small model.
    error, agreement = distance(in_int4, original)
    assert error < 0.2 and agreement > 0.8


@needs_int8
def test_a_copy_is_the_layer_that_it_was_read_off():
    torch.manual_seed(0)
    layer = torch.nn.Linear(IN, OUT).requires_grad_(False)
    copied = copy_of(layer, torch.empty(IN), "int8")
    x = torch.randn(5, IN)
    exact = layer(x)
    # Each rounding is 1/254 of the largest number of its row, relative to the whole.
    assert float((copied(x) - exact).norm() / exact.norm()) < 0.02
    torch.testing.assert_close(linear_of(layer.weight, layer.bias, False, "dtype")(x), F.linear(x, *layer.parameters()))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(tiny_llama_dir(tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("precision", [pytest.param("int8", marks=needs_int8), "int4"])
@pytest.mark.parametrize("method", ["spec:k=3", "eagle:k=3", "eagle-tree:nodes=6:depth=2:topk=3"])
def test_drafts_in_fewer_bits_leave_greedy_answers_alone(directory, method, precision):
    target = load_lm(directory, packed=True)
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(target.config)).requires_grad_(False)
    head.draft_in(precision, target)
    models = Models(target, load_lm(directory, precision=precision), heads={"eagle": head}, capacity=120)
    alone, drafted = (
        generate_one(target, drafter, PROMPT, SamplingParams(), 60, TorchSource(0), ())
        for drafter in (None, parse_method(method).build(models))
    )
    assert drafted.tokens == alone.tokens
    if method == "spec:k=3":  # a copy of the target: nearly all is accepted
        assert drafted.trace.num_target_calls < 40


@needs_int8
def test_a_head_drafts_nearly_the_same_distributions(directory):
    target = load_lm(directory, packed=True)
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(target.config)).requires_grad_(False)
    ids, states = torch.arange(6), torch.randn(6, target.config.hidden_size)

    def drafted() -> torch.Tensor:
        net = PairNetwork(head, target)
        assert head.precision == "dtype" or net.lm_head is head.output
        return net.head.logits(net.stack.chain(net.inputs(ids, states), net.stack.new_cache(1, 8)), net.lm_head)

    exact = drafted()
    head.draft_in("int8", target)
    found = drafted()
    assert not torch.equal(found, exact)
    # Some roundings of about one percent each, one behind the other.
    assert float((found - exact).norm() / exact.norm()) < 0.06


@pytest.mark.parametrize(("precision", "error"), [pytest.param("int8", 0.06, marks=needs_int8), ("int4", 0.6)])
def test_a_target_in_fewer_bits_decodes_as_it_does_alone(directory, precision, error):
    target, draft = load_lm(directory, precision=precision), load_lm(directory)
    alone, drafted = (
        generate_one(target, drafter, PROMPT, SamplingParams(), 60, TorchSource(0), ())
        for drafter in (None, parse_method("spec:k=3").build(Models(target, draft, capacity=120)))
    )
    assert drafted.tokens == alone.tokens
    ids = torch.tensor([PROMPT + alone.tokens])
    exact = draft.lm_head(draft.features(ids))
    assert 0 < float((target.lm_head(target.features(ids)) - exact).norm() / exact.norm()) < error


@needs_int8
def test_a_run_quantizes_what_drafts_and_not_its_target(directory):
    paths = {"target": directory, "draft": directory}
    named = parse_methods("spec:k=2")
    models = load_models(named, paths, 64, SamplingParams(), load_lm(directory), "int8")
    kinds = [type(lm._head) for lm in (models.target, models.draft)]
    assert kinds == [LeanLinear, Int8Linear]


def test_other_devices_and_engines_are_refused(directory, monkeypatch):
    # A CPU without the products does not hide an option that can be changed.
    monkeypatch.setattr(low_precision, "can_multiply", lambda _: False)
    with pytest.raises(InputError, match="int8 on cuda"):
        check_precision("draft_precision", "int8", "cuda")
    with pytest.raises(InputError, match="int8 on the hf engine"):
        load_lm(directory, engine="hf", precision="int8")
    with pytest.raises(InputError, match="int8 without its products"):
        check_precision("target_precision", "int8", "cpu")
