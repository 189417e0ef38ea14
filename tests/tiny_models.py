"""Tiny random models for shapes and exactness; never for claims about quality."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from draftsmith.benchmarks.embedded.tokenizer import train_tokenizer

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
CONTEXT = 256


def padded(directory: Path, path: Path, rows: int) -> Path:
    """A copy of a model with more rows of embeddings, or fewer: no token has them."""
    shutil.copytree(directory, path)
    config, state = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    config["vocab_size"] += rows
    generator = torch.Generator().manual_seed(rows % 9)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & state.keys():
        more = torch.randn(max(rows, 0), state[name].shape[1], generator=generator)
        state[name] = torch.cat([state[name], more])[: config["vocab_size"]]
    save_file(state, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


@functools.cache
def tiny_tokenizer() -> Any:
    """A byte-level tokenizer with the embedded pair's chat template."""
    texts = ["def add(first, second):\n    return first + second\n", "What does this function do?", "Rename a to b:"]
    return train_tokenizer(texts * 4, 2048, CONTEXT)


def tiny_llama_dir(
    path: Path,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    family: str = "llama",
    vocab: int | None = None,
    **extra: Any,
) -> Path:
    """A transformers directory of random weights, with `tiny_tokenizer`; logits are spread, so that argmaxes are clear.

    vocab: None takes the tokenizer's size. extra: more fields of the transformers config.
    """
    config_class, model_class = FAMILIES[family]
    tokenizer = tiny_tokenizer()
    settings = {
        "vocab_size": vocab or len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if family.startswith("qwen3"):
        settings["head_dim"] = hidden // 4
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings, **extra}))
    for parameter in model.parameters():  # transformers starts biases and norms at 0 and 1: hidden mistakes
        if parameter.ndim == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    tokenizer.save_pretrained(str(path))
    return path
