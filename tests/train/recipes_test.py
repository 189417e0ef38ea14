"""Every recipe is one that its command accepts, and those of large targets fit one GPU by their plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.launch.commands import COMMANDS, configure
from draftsmith.train.plan import plan_of

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
GPU_BYTES = 80e9


def every(period: int, count: int, others: str) -> list[str]:
    return ["full_attention" if layer % period == 0 else others for layer in range(1, count + 1)]


# Sizes as published. transformers' configuration classes default to those of gpt-oss-120b, GLM-4.5-Air, MiniMax-M2 and
# DeepSeek-V3; of the others SpecForge's configs/ and slime's scripts/models/ (both on GitHub) have them, and mlx-vlm's
# tests those of Gemma 4.
QWEN3_5 = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "num_key_value_heads": 4,
    "max_position_embeddings": 262144, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
GEMMA_4 = {
    "model_type": "gemma4_unified_text", "vocab_size": 262144, "hidden_size": 3840, "intermediate_size": 15360,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1,
    "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "sliding_window": 1024, "final_logit_softcapping": 30.0, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "layer_types": every(6, 48, "sliding_attention"), "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128, "num_experts_per_tok": 4,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3.5-4B": {
        "model_type": "qwen3_5", "tie_word_embeddings": True,
        "text_config": QWEN3_5 | {
            "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
            "linear_num_value_heads": 32, "layer_types": every(4, 32, "linear_attention"), "tie_word_embeddings": True,
        },
    },
    "Qwen/Qwen3.5-27B": {
        "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": QWEN3_5 | {
            "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
            "linear_num_value_heads": 48, "layer_types": every(4, 64, "linear_attention"),
        },
    },
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "google/gemma-4-12B-it": {"model_type": "gemma4_unified", "text_config": GEMMA_4, "tie_word_embeddings": True},
    "openai/gpt-oss-20b": GPT_OSS | {
        "num_hidden_layers": 24, "num_local_experts": 32, "layer_types": every(2, 24, "sliding_attention"),
    },
    "openai/gpt-oss-120b": GPT_OSS | {
        "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": every(2, 36, "sliding_attention"),
    },
    "zai-org/GLM-4.5-Air": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5,
        "rope_theta": 1e6, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "MiniMaxAI/MiniMax-M2": {
        "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64,
        "num_local_experts": 256, "num_experts_per_tok": 8, "rope_theta": 5e6, "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "rope_theta": 1e4, "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
}  # fmt: skip


def command_of(file: Path) -> str:
    """`configs/recipes/MODEL-HEAD.yaml`, or HEAD-TRAINER.yaml, belongs to `draftsmith train HEAD`."""
    (name,) = (name for part in file.stem.split("-") if (name := f"train {part}") in COMMANDS)
    return name


def parsed(file: Path, *words: str) -> Any:
    # No two runs share an output that a file names.
    assert "output" not in yaml.safe_load(file.read_text("utf-8"))
    return configure(command_of(file), ["--config", str(file), "--output", "mine", *words])[1]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_accepted_by_its_command(file):
    assert isinstance(parsed(file), COMMANDS[command_of(file)].config_class())


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, tuple[Any, Any]]:
    """Recipe -> its options and its plan on one GPU, for a target of which only config.json is there."""
    found = {}
    for file in FILES:
        if (target := yaml.safe_load(file.read_text("utf-8")).get("target")) in PUBLISHED:
            directory = tmp_path_factory.mktemp(file.stem)
            (directory / "config.json").write_text(json.dumps(PUBLISHED[target] | {"torch_dtype": "bfloat16"}))
            config = parsed(file, "--target", str(directory), "--device", "cuda")
            found[file.stem] = (config, plan_of(config))
    return found


def test_heads_of_every_large_target_have_recipes_that_fit_one_gpu(plans):
    kinds = [name.rpartition("-")[2] for name in plans]
    assert kinds.count("eagle3") == kinds.count("dspark") == len(PUBLISHED) == len(plans) / 2
    assert {name: plan.peak for name, (_, plan) in plans.items() if plan.peak > GPU_BYTES} == {}
    # One layer beside frozen embeddings: an EAGLE-3 head of these is smaller than a DSpark head of five layers.
    sizes = {name: plan.trained for name, (_, plan) in plans.items()}
    assert all(sizes[name] < sizes[name.replace("eagle3", "dspark")] / 3 for name in sizes if name.endswith("eagle3"))
