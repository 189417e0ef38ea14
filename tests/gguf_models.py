"""Models as GGUF files, as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import torch
import transformers
from torch import Tensor

from draftsmith.modules.formats.gguf import gguf_name, llama_metadata, reordered, rope_divisors
from draftsmith.modules.formats.llama import to_adjacent
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.gguf_writer import tokenizer_metadata, write_gguf


def write_gguf_model(path: Path, model: Checkpoint, weights: str = "float32") -> None:
    """Write a model with its tokenizer."""
    model.check_weights()
    llama, kind = model.shape, str(model.config["model_type"]).replace("mistral", "llama")
    tensors = rope_divisors(kind, llama)
    for name, tensor in model.state().items():
        theirs = gguf_name("model", name)
        if theirs is not None and not (name == "lm_head.weight" and llama.tie_embeddings):
            tensors[theirs] = reordered(kind, name, tensor, llama, to_adjacent)
    metadata = {"general.name": model.directory.name, **llama_metadata(kind, llama), **tokenizer_metadata(model)}
    write_gguf(path, kind, metadata, tensors, weights)


def write_gemma3(
    path: Path, changes: Mapping[str, object] | None = None, more: Mapping[str, Tensor] | None = None
) -> transformers.PreTrainedModel:
    """Write a random Gemma 3 with a SentencePiece vocabulary and windows of 8 tokens; return the model.

    Names of tensors are those of llama.cpp's own table. Its norms multiply by w, transformers' by 1 + w.

    changes: metadata; more: tensors.
    """
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", *map(chr, range(33, 127)), "th", "the", "▁the"]
    kinds = [3, 3, 3, 2, *[6] * 256, *[4] * 2, *[1] * len(words)]
    tokens += ["  ", "   ", *words]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7, "num_attention_heads": 2}
    config = transformers.Gemma3TextConfig(
        vocab_size=len(tokens), num_key_value_heads=1, head_dim=256, sliding_window=8, **sizes
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config)
    for name, tensor in model.named_parameters():
        torch.nn.init.normal_(tensor, 0.0, 0.5 if "norm" in name else 0.2)
    fields = {
        "context_length": config.max_position_embeddings, "embedding_length": 32, "block_count": 7,
        "feed_forward_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1,
        "attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 8,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    }  # fmt: skip
    metadata = {f"gemma3.{name}": value for name, value in fields.items()} | {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 7)
    tensors = {
        str(names.get_name(name, try_suffixes=(".weight",))): tensor.detach() + ("norm" in name)
        for name, tensor in model.named_parameters()
    }
    write_gguf(path, "gemma3", metadata | dict(changes or {}), tensors | dict(more or {}))
    return model.eval()
