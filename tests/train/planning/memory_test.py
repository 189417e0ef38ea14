"""The numbers behind a plan, beside what torch itself saves, holds and writes."""

from __future__ import annotations

import pytest
import torch

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.eagle.head import EagleConfig, EagleHead
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.packing import Documents
from draftsmith.train import deepspeed
from draftsmith.train.muon import MuonAdamW
from draftsmith.train.planning.footprint import PartShape, acceptance_saved, eagle_matrices, eagle_saved
from draftsmith.train.planning.memory import FLOAT32, LAYOUTS, ZERO_BUCKET, HeadSizes, Sizes, memory, moments, trained

LENGTHS = (40, 64, 57)


def shape(num_layers: int = 1, num_kv_heads: int = 4) -> LlamaConfig:
    return LlamaConfig(100, 64, 176, num_layers, 4, num_kv_heads, 16, 128)


def saved_bytes(call, modules) -> int:
    """Bytes of distinct storages that autograd keeps and that the call returns, parameters and buffers aside."""
    known = {t.untyped_storage().data_ptr() for m in modules for t in (*m.parameters(), *m.buffers())}
    kept: dict[int, torch.Tensor] = {}  # by address; the tensors are held, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for tensor in call():
            pack(tensor)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in known)


def run_head(config: LlamaConfig, packed: bool, passes: int, autocast: bool) -> tuple[int, PartShape]:
    head = EagleHead(EagleConfig.for_target(config, config.num_layers))
    size = sum(LENGTHS) if packed else len(LENGTHS) * max(LENGTHS)
    batch = (1, size) if packed else (len(LENGTHS), max(LENGTHS))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None] if packed else torch.arange(max(LENGTHS))
    embeds, features = torch.randn(*batch, 64), torch.randn(*batch, 64)
    documents = Documents.of(LENGTHS, embeds.device) if packed else None

    def call():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return head.unroll(embeds, features, passes, positions.expand(batch), documents)

    part = PartShape(size, len(LENGTHS) * max(LENGTHS), max(LENGTHS), size, packed)
    return saved_bytes(call, [head]), part


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "passes"), [(1, 4, 1), (1, 2, 1), (2, 4, 1), (1, 4, 2), (2, 2, 3)]
)
def test_what_the_head_saves_is_known_to_the_byte(packed, num_layers, num_kv_heads, passes):
    config = shape(num_layers, num_kv_heads)
    found, part = run_head(config, packed, passes, autocast=False)
    assert eagle_saved(config, part, passes) == found


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_what_autocast_saves_is_known_nearly(packed, num_layers):
    """Which casts are kept differs between versions of torch: 5 %."""
    config = shape(num_layers)
    found, part = run_head(config, packed, passes=1, autocast=True)
    assert eagle_saved(config, part, autocast=True) == pytest.approx(found, rel=0.05)


def test_what_the_acceptance_head_saves():
    head, part = AcceptanceHead(AcceptanceHeadConfig(32, num_blocks=3)), PartShape(50, 50, 25, 50)
    states = torch.randn(2, 25, 32)
    found = saved_bytes(lambda: [head(states)], [head])
    assert found == acceptance_saved(head.config, part.tokens) + 4 * part.tokens  # and the logits


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_averages_are_those_of_the_optimizer(optimizer):
    head = EagleHead(EagleConfig.for_target(shape(2), 2))
    matrices = [p for p in head.parameters() if p.ndim >= 2]
    vectors = [p for p in head.parameters() if p.ndim < 2]
    made = torch.optim.AdamW(head.parameters()) if optimizer == "adamw" else MuonAdamW(matrices, vectors, lr=0.1)
    for parameter in head.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    state = [v for entry in made.state.values() for v in entry.values() if isinstance(v, torch.Tensor) and v.ndim]
    assert moments(HeadSizes.of(head), optimizer) == sum(tensor.nbytes for tensor in state)


def test_sizes_of_a_head_are_the_same_on_the_meta_device():
    config = EagleConfig.for_target(shape(2), 2)
    with torch.device("meta"):
        planned = HeadSizes.of(EagleHead(config))
    assert planned == HeadSizes.of(EagleHead(config))
    assert planned.matrices == eagle_matrices(shape(2))
    assert planned.largest == planned.largest_group / 4 == 64 * 176  # gate and up of two layers; down lies otherwise


def test_tied_blocks_count_once():
    tied, own = (HeadSizes.of(AcceptanceHead(AcceptanceHeadConfig(8, 3, tied=t))) for t in (True, False))
    assert own.params - tied.params == 2 * (8 * 8 + 8)


@pytest.mark.parametrize(("strategy", "offload"), LAYOUTS[2:])
def test_what_zero_shares_out_adds_up_over_the_ranks(strategy, offload):
    """Rajbhandari et al. 2020, figure 1: a stage more shares out the optimizer, the gradients, the weights."""
    sizes, ranks = HeadSizes(params=1000, matrices=900, largest=300, largest_group=600), 4
    own = trained(sizes, "adamw", strategy, ranks, offload)
    whole, stage = FLOAT32 * sizes.params, int(strategy[-1])
    stepped = ranks * (own.host if offload else own.optimizer)  # master weights and averages, with offload gradients
    assert stepped == (4 if offload else 3) * whole
    assert own.gradients * (ranks if stage >= 2 else 1) == whole
    assert own.weights * (ranks if stage == 3 else 1) == whole


def test_the_bucket_is_the_one_that_deepspeed_is_given():
    assert ZERO_BUCKET == deepspeed.BUCKET


def test_the_peak_is_that_of_the_largest_phase():
    sizes = Sizes(HeadSizes(10, 8, 4, 8), 100, 1000, 2000, 10, 20, 300, 50, 400, 0)
    found = memory(sizes)
    stays = 100 + 1000 + 4 * 10 + 8 * 10
    assert (found.phase, found.peak) == ("loading", 100 + 2000)
    assert found.phases["loss"] == stays + 10 + 20 + 300 + 400
    assert found.phases["gradients"] == stays + 40 + 10 + 20 + 50
