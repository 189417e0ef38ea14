"""Training-time test against real chains of drafting, one started at every row (EAGLE-3, section 3.2)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head, layer_like
from draftsmith.modules.layers import LlamaConfig, RopeScaling, rotate

LLAMA = LlamaConfig(
    vocab_size=23, hidden_size=12, intermediate_size=20, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=4,
    max_position=40, rope_scaling=RopeScaling("linear", 2.0),
)  # fmt: skip
PASSES = 4
SHAPES = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True},
    {"norm_before_residual": True},
]


def net_of(**shape: bool) -> Eagle3Head:
    torch.manual_seed(0)
    net = Eagle3Head(Eagle3Config(layer_like(LLAMA), (2, 4, 5), 9, **shape)).double()
    for weight in net.parameters():
        weight.data.normal_(std=0.4)
    net.cos, net.sin = net.cos.double(), net.sin.double()
    return net


def layer_once(net: Eagle3Head, embeds: Tensor, states: Tensor) -> Tensor:
    """The last output of the layer over a whole sequence of pairs [T, H], written out without a cache."""
    layer, length = net.layer, len(states)
    state = layer.hidden_norm(states)
    pair = torch.cat([layer.input_layernorm(embeds), state], -1)
    attention = layer.self_attn

    def heads(linear: torch.nn.Linear, count: int) -> Tensor:
        return linear(pair).view(length, count, attention.head_dim).transpose(0, 1)

    cos, sin = net.cos[:length], net.sin[:length]
    query = rotate(heads(attention.q_proj, 4), cos, sin)
    key = rotate(heads(attention.k_proj, 2), cos, sin).repeat_interleave(2, 0)
    value = heads(attention.v_proj, 2).repeat_interleave(2, 0)
    weights = (query[:, -1:] @ key.mT / attention.head_dim**0.5).softmax(-1)
    mixed = attention.o_proj((weights @ value).transpose(0, 1).flatten(1))[0]
    hidden = (state if net.config.norm_before_residual else states)[-1] + mixed
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return net.norm(hidden) if net.config.norm_output else hidden


def chain(net: Eagle3Head, embeds: Tensor, states: Tensor, start: int, ttt_steps: int) -> list[Tensor]:
    """What a chain from row `start` reads and gives: true states up to there, its own ones from then on."""
    read, given = list(net.read(states)[: start + 1]), []
    for j in range(ttt_steps):
        given.append(layer_once(net, embeds[: start + 1 + j], torch.stack(read)))
        read.append(given[-1])
    return given


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_is_a_real_chain(shape: dict[str, bool]) -> None:
    net, rows = net_of(**shape), 9
    embeds, states = torch.randn(2, rows + PASSES - 1, 12).double(), torch.randn(2, rows, 36).double()
    ttt_steps = net.unroll(embeds, states, PASSES)
    for b in range(2):
        for t in range(rows):
            for j, wanted in enumerate(chain(net, embeds[b], states[b], t, PASSES)):
                assert (ttt_steps[j][b, t] - wanted).abs().max() < 1e-10, (b, t, j)


def test_its_gradients_are_those_of_the_chains() -> None:
    net, rows = net_of(), 5
    embeds, states = torch.randn(1, rows + PASSES - 1, 12).double(), torch.randn(1, rows, 36).double()
    weights = list(net.layer.parameters()) + list(net.fc.parameters())
    scale = torch.randn(PASSES, rows, 12).double()
    ours = sum((scale[j] * h[0]).sum() for j, h in enumerate(net.unroll(embeds, states, PASSES)))
    chains = [chain(net, embeds[0], states[0], t, PASSES) for t in range(rows)]
    theirs = sum((scale[j, t] * h).sum() for t, own in enumerate(chains) for j, h in enumerate(own))
    pairs = zip(torch.autograd.grad(ours, weights), torch.autograd.grad(theirs, weights), strict=True)
    assert max(((a - b).abs() / b.abs().clamp_min(1)).max() for a, b in pairs) < 1e-10
