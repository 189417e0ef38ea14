"""What an opened model decides, from config.json files as published, and how often its files are opened for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.reading import tensor_headers
from draftsmith.modules.types import InputError

# huggingface.co: ai21labs/Jamba-v0.1, ibm-ai-platform/Bamba-9B, mistralai/Mamba-Codestral-7B-v0.1,
# meta-llama/Llama-3.2-11B-Vision, mistralai/Mistral-7B-v0.1, Qwen/Qwen2.5-7B-Instruct, openai/gpt-oss-20b,
# microsoft/Phi-3-mini-128k-instruct, Qwen/Qwen3-VL-8B-Instruct: config.json
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
PUBLISHED: dict[str, dict[str, Any]] = {
    "jamba": {**LLAMA, "model_type": "jamba", "num_hidden_layers": 32, "attn_layer_offset": 4, "attn_layer_period": 8,
              "expert_layer_offset": 1, "expert_layer_period": 2, "num_experts": 16, "vocab_size": 65536,
              "max_position_embeddings": 262144, "sliding_window": None, "torch_dtype": "bfloat16"},
    "bamba": {**LLAMA, "model_type": "bamba", "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27],
              "vocab_size": 128256, "max_position_embeddings": 262144, "torch_dtype": "bfloat16"},
    "mamba2": {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768,
               "num_heads": 128, "head_dim": 64, "state_size": 128, "torch_dtype": "bfloat16"},
    "mllama": {"model_type": "mllama", "torch_dtype": "bfloat16", "text_config": {
        **LLAMA, "model_type": "mllama_text_model", "num_hidden_layers": 40, "vocab_size": 128256,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "max_position_embeddings": 131072}},
    "mistral": {**LLAMA, "model_type": "mistral", "num_hidden_layers": 32, "vocab_size": 32000,
                "max_position_embeddings": 32768, "sliding_window": 4096, "torch_dtype": "bfloat16"},
    "qwen2": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
              "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064, "torch_dtype": "bfloat16",
              "max_position_embeddings": 32768, "sliding_window": 131072, "use_sliding_window": False,
              "max_window_layers": 28},
    "qwen3_vl": {"model_type": "qwen3_vl", "vision_config": {"hidden_size": 1152, "depth": 27}, "text_config": {
        "model_type": "qwen3_vl_text", "dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36,
        "vocab_size": 151936, "max_position_embeddings": 262144, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}},
    "gpt_oss": {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
                "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "head_dim": 64,
                "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
                "layer_types": ["sliding_attention", "full_attention"] * 12, "torch_dtype": "bfloat16"},
    "phi3": {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": 262144,
             "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "torch_dtype": "bfloat16",
             "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}},
}  # fmt: skip
ALIKE = {"hybrid": False, "full_layers": (), "window": None, "windowed": False}
DECIDED: dict[str, dict[str, Any]] = {
    "jamba": {**ALIKE, "num_layers": 32, "hybrid": True, "full_layers": (5, 13, 21, 29), "context": 262144},
    "bamba": {**ALIKE, "num_layers": 32, "hybrid": True, "full_layers": (10, 19, 28), "context": 262144},
    "mamba2": {**ALIKE, "num_layers": 64, "hybrid": True, "context": 0},
    "mllama": {**ALIKE, "num_layers": 32, "context": 131072},
    "mistral": {**ALIKE, "num_layers": 32, "window": 4096, "context": 32768, "max_position": 32768},
    "qwen2": {**ALIKE, "num_layers": 28, "context": 32768},
    "qwen3_vl": {**ALIKE, "num_layers": 36, "rope_theta": 5000000, "head_dim": 128, "context": 262144},
    "gpt_oss": {**ALIKE, "num_layers": 24, "windowed": True, "context": 131072},
    "phi3": {**ALIKE, "num_layers": 32, "window": 262144, "context": 131072, "max_position": 4096},
}


def opened(directory: Path, name: str) -> Checkpoint:
    (directory / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return Checkpoint(directory)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_decides_these(tmp_path, name):
    model = opened(tmp_path, name)
    assert {field: getattr(model.shape, field) for field in DECIDED[name]} == DECIDED[name]
    text = PUBLISHED[name].get("text_config", PUBLISHED[name])
    assert (model.shape.vocab_size, model.shape.hidden_size) == (text["vocab_size"], text["hidden_size"])
    assert model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ({}, "tensors up to byte"),  # values without a name
        ([], "no table of tensors"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}}, "no table of tensors"),
    ],
)
def test_a_header_that_names_other_bytes_is_damage(tmp_path, header, found):
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(InputError, match=f"damaged.*{found}"):
        tensor_headers(file)
