"""Our net against a plain forward of the systems' rules and against transformers' decoder layers: one function."""

from __future__ import annotations

import pytest
import torch
import transformers
from foreign_heads import FAMILIES, LLAMA3, H, llama, random_head, state_of
from plain_eagle import hidden
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftsmith.modules.formats.base import Reading
from draftsmith.modules.formats.compare import net_of
from draftsmith.modules.layers import RopeScaling

CASES = {**FAMILIES, "all at once": llama(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=6, qkv_bias=True,
                                          o_bias=True, mlp_bias=True, rope_scaling=LLAMA3)}  # fmt: skip


def reading_of(head) -> Reading:
    """As a format would give it."""
    return Reading(
        {name: tensor.float() for name, tensor in state_of(head).items()}, {"llama": head.config.llama}, (), ()
    )


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(9, H, dtype=torch.float64), torch.randn(9, H, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_our_head_does(case):
    head = random_head(CASES[case], fc_bias=True)
    reading = reading_of(head)
    embeds, features = inputs()
    ours = head.double()(embeds[None], features[None])[0]
    # float64 sums of some dozen terms; the rotary tables of both are the same float32 numbers
    torch.testing.assert_close(hidden(reading, embeds, features), ours, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_layers_do_without_the_first_norm(case):
    config = CASES[case]
    if config.qkv_bias != config.o_bias:
        config = llama(qkv_bias=True, o_bias=True)  # transformers' Llama has all four attention biases or none
    head = random_head(config, fc_bias=True)
    scaling = config.rope_scaling
    rope = {"rope_type": scaling.kind, "rope_theta": config.rope_theta}
    if scaling.kind != "default":
        rope["factor"] = scaling.factor
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
                 "original_max_position_embeddings": scaling.original_max_position}  # fmt: skip
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=H, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rms_norm_eps=config.rms_eps,
        rope_parameters=rope, attention_bias=config.o_bias, mlp_bias=config.mlp_bias,
        max_position_embeddings=config.max_position, attn_implementation="eager",
    )  # fmt: skip
    embeds, features = inputs()
    state = {name: tensor.double() for name, tensor in state_of(head).items()}
    x = torch.nn.functional.linear(torch.cat([embeds, features], -1), state["fc.weight"], state["fc.bias"])[None]
    tables = LlamaRotaryEmbedding(theirs)(x, torch.arange(9)[None])
    mask = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    for i in range(config.num_layers):
        layer = LlamaDecoderLayer(theirs, i).double()
        if i == 0:
            layer.input_layernorm = torch.nn.Identity()
        own = {name.removeprefix(f"layers.{i}."): t for name, t in state.items() if name.startswith(f"layers.{i}.")}
        layer.load_state_dict(own)
        x = layer(x, attention_mask=mask, position_embeddings=tables)
    # their norm and softmax run in float32
    torch.testing.assert_close(hidden(reading_of(head), embeds, features), x[0], rtol=1e-5, atol=1e-5)


def test_a_parameter_that_nothing_filled_reaches_every_row():
    reading = reading_of(random_head(FAMILIES["llama"]))
    reading.weights["fc.weight"] = torch.full((), float("nan")).expand(H, 2 * H)
    embeds, features = (part[None].float() for part in inputs())
    assert net_of(reading, 9)(embeds, features).isnan().all()


@pytest.mark.parametrize("case", CASES)
def test_a_net_is_what_its_system_read(case):
    head = random_head(CASES[case], fc_bias=True)
    embeds, features = (part[None].float() for part in inputs())
    assert torch.equal(net_of(reading_of(head), 9)(embeds, features), head(embeds, features))


def test_a_rope_that_our_layers_do_not_compute_reaches_every_row():
    weights = reading_of(random_head(FAMILIES["llama"])).weights
    reading = Reading(weights, {"llama": llama(rope_scaling=RopeScaling("yarn"))}, (), ())
    embeds, features = (part[None].float() for part in inputs())
    assert net_of(reading, 9)(embeds, features).isnan().all()
