"""Rotary positions of draft layers beside transformers' own functions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.stablelm.modeling_stablelm import apply_rotary_pos_emb

from draftsmith.modules.attention import attend_text
from draftsmith.modules.engine.cache import NoCache
from draftsmith.modules.engine.lean import LeanStack
from draftsmith.modules.layers import DecoderLayer
from draftsmith.modules.llama_config import LlamaConfig, llama_sizes
from draftsmith.modules.rotary import rope_frequencies, rope_table, rotate

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 30, "head_dim": 32}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},  # gpt-oss leaves the ends as they are
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},  # DeepSeek
        {**YARN, "attention_factor": 1.3, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ],
)
def test_frequencies_and_scale_are_those_of_transformers(rope):
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=2048, rope_parameters=dict(rope))
    ours = llama_sizes({**SIZES, "max_position_embeddings": 2048, "rope_parameters": rope})
    if rope["rope_type"] == "default":
        size = int(32 * rope["partial_rotary_factor"])
        expected, scale = 10000.0 ** -(torch.arange(0, size, 2) / size), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config)
    torch.testing.assert_close(rope_frequencies(ours), expected)
    angles = torch.outer(torch.arange(100.0), expected)
    cos, sin = rope_table(ours, 100)
    torch.testing.assert_close(cos, torch.cat([angles, angles], -1).cos() * scale)
    torch.testing.assert_close(sin, torch.cat([angles, angles], -1).sin() * scale)


def test_two_bases_give_that_of_the_layers_that_read_everything():
    new = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
           "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    # As Gemma 3's files say it.
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for raw in ({"rope_parameters": new}, old):
        sizes = llama_sizes({**SIZES, **raw})
        assert (sizes.rope_theta, sizes.rope_scaling.kind, sizes.rope_scaling.factor) == (1e6, "linear", 8.0)


def layer_of(**rope: float) -> LlamaConfig:
    sizes = llama_sizes({**SIZES, "rope_parameters": {"rope_type": "default", **rope}})
    return dataclasses.replace(sizes, max_position=64, intermediate_size=96)


def test_a_part_of_each_head_is_rotated_as_stablelm_does():
    config = layer_of(partial_rotary_factor=0.5)
    query, key = torch.randn(2, 1, 4, 9, 32)
    cos, sin = rope_table(config, 9)
    for x, expected in zip(
        (query, key), apply_rotary_pos_emb(query[..., :16], key[..., :16], cos[None], sin[None]), strict=True
    ):
        torch.testing.assert_close(rotate(x, cos, sin), torch.cat([expected, x[..., 16:]], -1))


def test_fused_layers_rotate_a_part_of_each_head():
    config = layer_of(partial_rotary_factor=0.5)
    layer = DecoderLayer(config).requires_grad_(False)
    x = torch.randn(1, 12, 64)
    stack = LeanStack([layer], config, torch.float32, torch.device("cpu"))
    found = stack.chain(x, NoCache(), None)
    tables = (table[:, None] for table in rope_table(config, 12))
    torch.testing.assert_close(found.view(1, 12, 64), layer(x, *tables, attend_text), atol=1e-5, rtol=1e-5)
    whole = LeanStack([layer], layer_of(), torch.float32, torch.device("cpu"))
    assert not torch.allclose(found, whole.chain(x, NoCache(), None), atol=1e-3)
