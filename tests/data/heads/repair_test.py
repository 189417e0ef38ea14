"""Corrections of a head's files; what the search finds is tested beside `diagnose`, on heads that know something."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.data.heads.diagnosis import HeadVariant, settled
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.eagle3.net import Eagle3Config, layer_like
from draftsmith.modules.layers import LlamaConfig

LLAMA = LlamaConfig(
    vocab_size=40, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4,
    max_position=32,
)  # fmt: skip


@pytest.mark.parametrize("shape", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_a_head_with_its_layers_put_in_order_reads_the_same_states_alike(shape: dict[str, Any]):
    torch.manual_seed(0)
    head = head_class("eagle3")(Eagle3Config(layer_like(LLAMA), (1, 2, 3), 40, **shape)).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_()
    states = {layer: torch.randn(5, 8) for layer in (1, 2, 3)}
    found = settled(HeadVariant("layers", "layers 3 1 2", head, (3, 1, 2)))
    assert found.config.capture == (1, 2, 3)
    as_read, ordered = (torch.cat([states[layer] for layer in order], -1) for order in ((3, 1, 2), (1, 2, 3)))
    # float32 sums of 24 products in another order.
    assert torch.allclose(found.read(ordered), head.read(as_read), rtol=0, atol=1e-5)
    assert not torch.allclose(head.read(ordered), head.read(as_read), atol=0.1)
