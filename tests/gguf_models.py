"""Llama-family models as GGUF files, as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

from pathlib import Path

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
