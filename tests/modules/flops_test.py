"""Model FLOPs against torch's own counter, on real forward and backward passes.

The counter sees attention's two products where torch composes it of products (the `math` backend), each in full:
T x T. The formulas count the half that causality leaves, so the other pairs are put in before comparing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.modules import flops
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.types import FeatureBatch

BATCH, LENGTH = 3, 11
GROUPED = LlamaConfig(
    vocab_size=53,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,  # 4 x 8 is not the width
    max_position=32,
)
PLAIN = dataclasses.replace(GROUPED, num_layers=3, num_kv_heads=4, head_dim=6, intermediate_size=64)


def _square(query: torch.Size, *_: object, **__: object) -> int:
    """Scores and weighted values of a kernel that torch's counter does not know, above the diagonal too."""
    batch, heads, length, size = query
    return 4 * batch * heads * length * length * size


# Its backward computes the gradients of both products: twice as much.
FLASH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _square,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, *rest, **_: 2 * _square(grad),
}


def counted(run: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=FLASH)
    with sdpa_kernel(SDPBackend.MATH), counter:
        run()
    return counter.get_total_flops()


def hidden_half(config: LlamaConfig, lengths: list[int], products: int) -> float:
    """What attention would compute above the diagonal, in all layers. products: 1 forward, 3 with backward."""
    unseen = sum(length * length for length in lengths) - flops.causal_pairs(lengths)
    return products * config.num_layers * flops.attention(config, unseen)


@pytest.mark.parametrize("config", [GROUPED, PLAIN], ids=["grouped", "plain"])
def test_a_targets_forward(config):
    model, ids = LlamaModel(config), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    lengths = [LENGTH] * BATCH
    with torch.no_grad():
        features = counted(lambda: model.features(ids))
        logits = counted(lambda: model(ids))
    assert features == flops.layers_forward(config, lengths) + hidden_half(config, lengths, 1)
    assert logits - features == flops.linear(config.hidden_size, config.vocab_size, BATCH * LENGTH)


def eagle3_head(config: LlamaConfig) -> Eagle3Head:
    return Eagle3Head(
        Eagle3Config(dataclasses.replace(config, num_layers=2), (0, 1), config.vocab_size, own_embedding=True)
    )


@pytest.mark.parametrize("config", [GROUPED, PLAIN], ids=["grouped", "plain"])
@pytest.mark.parametrize("ttt_steps", [1, 3])
@pytest.mark.parametrize("make", [lambda config: EagleHead(EagleConfig(config)), eagle3_head], ids=["eagle", "eagle3"])
def test_training_a_head(make, config, ttt_steps):
    head, lengths = make(config), (LENGTH,) * BATCH
    weight = torch.randn(config.vocab_size, config.hidden_size)
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    layers = max(1, len(head.loss_layers(head.config, config.num_layers)))
    features = torch.randn(BATCH, LENGTH, layers * config.hidden_size)
    batch = FeatureBatch(torch.zeros_like(places), features, torch.rand(BATCH, LENGTH) < 0.5, places)
    settings = head.Settings(ttt_steps=ttt_steps)
    loss_tokens = head.logit_rows(batch, settings)

    class Target:  # no module: the counter's hooks fail in the loss' inner backward
        dtype = torch.float32

        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return weight[ids]

        def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden @ weight.T

    def step() -> None:
        head.loss(batch, Target(), settings, None).loss.backward()

    ours = head.flops(settings, TrainStep(1, 1, lengths, ()), loss_tokens)
    assert counted(step) == ours + ttt_steps * hidden_half(head.config.llama, lengths, 3)


@pytest.mark.parametrize("window", [None, 1, 4, 11, 50])
def test_pairs_are_those_of_the_mask(window):
    lengths = [1, 4, 5, 11]
    mask = [torch.ones(n, n).tril().triu(1 - window if window else -n) for n in lengths]
    assert flops.causal_pairs(lengths, window) == sum(int(m.sum()) for m in mask)
