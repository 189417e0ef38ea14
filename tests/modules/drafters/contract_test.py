"""What every head in the registry must do: a finite loss, gradients everywhere, an exact round trip, lossless decoding.

A new head adds a `Case`; a head without one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from table_models import H, TableLM, V, decoded_law, target_law, total_variation
from torch import nn

from draftsmith.data.heads.directory import HEADS, load_head, save_head
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, SpecDecPP
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.drafters.eagle.drafting import EagleDrafter
from draftsmith.modules.drafters.eagle.head import EagleConfig, EagleHead, shift
from draftsmith.modules.layers import LlamaConfig, RopeScaling
from draftsmith.modules.losses import acceptance_loss, eagle_loss
from draftsmith.modules.types import AcceptanceBatch, FeatureBatch, LossOutput, SamplingParams

CAPACITY, BATCH, LENGTH = 32, 2, 7
LLAMA = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=8, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=2,
    max_position=CAPACITY, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
    rope_scaling=RopeScaling("llama3", 4.0, original_max_position=16),
)  # fmt: skip
SAMPLING = SamplingParams(temperature=0.9, top_k=2)


@dataclass(frozen=True)
class Case:
    """How to make a head, its loss on a random batch, and a drafter that uses it."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], LossOutput]
    drafter: Callable[[Any, TableLM], Any]


def random_mask(rng: torch.Generator) -> torch.Tensor:
    mask = torch.rand(BATCH, LENGTH, generator=rng) < 0.7
    mask[:, -1] = True
    return mask


def loss_of_acceptance(head: nn.Module, rng: torch.Generator) -> LossOutput:
    hidden, prob = torch.randn(BATCH, LENGTH, H, generator=rng), torch.rand(BATCH, LENGTH, generator=rng)
    return acceptance_loss(head(hidden), AcceptanceBatch(hidden, prob, random_mask(rng)))


def loss_of_eagle(head: nn.Module, rng: torch.Generator) -> LossOutput:
    ids = torch.randint(V, (BATCH, LENGTH), generator=rng)
    features = torch.randn(BATCH, LENGTH, H, generator=rng)
    inputs = shift(FeatureBatch(ids, features, random_mask(rng), torch.arange(LENGTH).expand(BATCH, LENGTH)))
    embedding, lm_head = torch.randn(V, H, generator=rng), torch.randn(V, H, generator=rng)
    hidden = head(embedding[inputs.next_ids], inputs.features, inputs.position_ids)
    return eagle_loss(hidden, inputs.target_features, inputs.loss_mask, lambda x: x @ lm_head.T)


def acceptance_drafter(head: Any, target: TableLM) -> Any:
    return DraftModelDrafter(TableLM(9), [SpecDecPP(head.float(), h=0.6, min_drafted=1, max_drafted=3)], CAPACITY)


def eagle_drafter(head: Any, target: TableLM) -> Any:
    return EagleDrafter(head.double(), target, [FixedLength(2)], CAPACITY)


CASES = {
    "acceptance": Case(lambda: AcceptanceHead(AcceptanceHeadConfig(H)), loss_of_acceptance, acceptance_drafter),
    "eagle": Case(lambda: EagleHead(EagleConfig(LLAMA, fc_bias=True)), loss_of_eagle, eagle_drafter),
}


@pytest.fixture(params=sorted(HEADS))
def case(request) -> Case:
    assert request.param in CASES, "a head of the registry has no case here"
    torch.manual_seed(0)
    return CASES[request.param]


@pytest.fixture
def head(case) -> nn.Module:
    """Random everywhere: what a head initialises to zero would hide mistakes."""
    head = case.make()
    for weight in head.parameters():
        weight.data.normal_(std=0.5)
    return head


def test_the_loss_is_finite_and_every_trainable_weight_gets_a_gradient(case, head):
    output = case.loss(head, torch.Generator().manual_seed(0))
    assert torch.isfinite(output.loss) and output.loss > 0
    assert output.sums and output.sums.keys() == output.counts.keys()
    assert not any(value.requires_grad for value in output.sums.values())
    output.loss.backward()
    for name, weight in head.named_parameters():
        assert weight.grad is not None and torch.isfinite(weight.grad).all(), name
        assert weight.grad.any(), name


def test_a_few_steps_of_a_fresh_head_lower_its_loss(case):
    head = case.make()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = case.loss(head, torch.Generator().manual_seed(0)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_saving_and_loading_is_exact(case, head, tmp_path):
    loaded = load_head(save_head(tmp_path / "head", head, {}, "# A head\n"))
    assert loaded.config == head.config
    ours, theirs = head.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    losses = [case.loss(h, torch.Generator().manual_seed(1)).loss for h in (head, loaded)]
    assert torch.equal(*losses)


def test_decoding_with_it_is_lossless(case, head, tmp_path):
    loaded = load_head(save_head(tmp_path / "head", head, {}, "# A head\n"))
    target = TableLM(1)
    law = decoded_law(target, lambda: case.drafter(loaded, target), SAMPLING, length=3, max_new_tokens=8)
    assert total_variation(law, target_law(target, SAMPLING, 3)) < 1e-10  # float64, every branch
