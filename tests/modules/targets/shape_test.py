"""The layer that heads of other families get, from settings as published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig

from draftsmith.modules.drafters.eagle3 import default_layers
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import TargetFacts
from draftsmith.modules.formats.families import VLLM
from draftsmith.modules.llama_config import captured_layers
from draftsmith.modules.targets.shape import plain_shape

# huggingface.co/deepseek-ai/DeepSeek-V3, openai/gpt-oss-20b, Qwen/Qwen3.5-27B, google/gemma-3-270m: config.json
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "n_routed_experts": 256, "vocab_size": 129280, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "vocab_size": 201088,
    "max_position_embeddings": 131072, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "rope_theta": 150000,
}  # fmt: skip
QWEN3_5 = {
    "model_type": "qwen3_5", "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "max_position_embeddings": 262144, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip


def test_latent_attention_and_experts_become_plain_heads_and_one_mlp():
    shape = plain_shape(DEEPSEEK_V3)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (56, 8, 128)
    # That of its dense layers, not of an expert.
    assert (shape.intermediate_size, shape.num_layers, shape.full_layers) == (18432, 61, ())
    assert shape.rope_scaling.kind == "yarn" and shape.rope_scaling.mscale_all_dim == 1.0
    assert "latent attention" in shape.reasons[1]

    shape = plain_shape(GPT_OSS)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (64, 8, 64, 3 * 2880)
    assert not shape.rope_scaling.truncate and shape.full_layers == ()


def test_a_head_of_a_hybrid_reads_behind_full_attention_and_rotates_whole_heads():
    shape = plain_shape(QWEN3_5)
    assert shape.full_layers == tuple(range(4, 65, 4))
    assert captured_layers((), default_layers(shape.num_layers), shape) == (4, 32, 60)
    assert captured_layers((2, 32, 61), (), shape) == (2, 32, 61)
    assert (shape.rope_theta, shape.rotary_dim, shape.head_dim) == (1e7, 256, 256)
    assert shape.reasons[-1].startswith("rotation of whole heads")


# transformers' default config of a family -> where its own lists have attention over the whole text; None of a family
# without recurrent layers.
HYBRIDS: dict[str, Callable[[Any], list[int]] | None] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), lambda config: []),
    **dict.fromkeys(("jamba", "zamba"), lambda config: places(config.layers_block_type, "attention", "hybrid")),
    "zamba2": lambda config: places(config.layers_block_type, "hybrid"),
    "qwen3_next": lambda config: places(config.layer_types, "full_attention"),
    **dict.fromkeys(("qwen3", "gemma3_text")),
}


def places(kinds: list[str], *names: str) -> list[int]:
    return [number for number, kind in enumerate(kinds, 1) if kind in names]


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_and_their_full_layers_are_those_of_transformers_lists(family: str):
    config, wanted = AutoConfig.for_model(family), HYBRIDS[family]
    facts, shape = TargetFacts(config.to_dict()), plain_shape(config.to_dict())
    assert facts.hybrid == (wanted is not None)
    assert list(shape.full_layers) == ([] if wanted is None else wanted(config))
    assert bool(formats()["vllm", "eagle3"].unserved(facts)) == (facts.hybrid and family not in VLLM)


def test_default_layers_of_a_hybrid_stand_behind_attention():
    jamba = plain_shape(AutoConfig.for_model("jamba").to_dict())  # in every eighth layer, from the fifth
    assert captured_layers((), default_layers(jamba.num_layers), jamba) == (5, 13, 29)


def test_layers_that_read_an_image_give_no_state():
    raw = {**QWEN3_5["text_config"], "num_hidden_layers": 12, "layer_types": None, "cross_attention_layers": [3, 8]}
    shape = plain_shape(raw | {"model_type": "mllama_text_model"})
    assert shape.num_layers == TargetFacts(raw).num_layers == 10 and default_layers(10) == (2, 5, 7)
