"""Write GGUF files of heads with the package `gguf`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.files import whole
from draftsmith.modules.pretrained.gguf import copied_metadata, gguf_package, open_gguf, read_tensor
from draftsmith.modules.types import InputError

# Type of weights -> GGUF's, and its number in general.file_type.
TYPES = {"float32": ("F32", 0), "float16": ("F16", 1), "bfloat16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
# Patterns by which tokenizers split text, and llama.cpp's names for them. Splitting of digits, then GPT-2's: smollm.
SPLITS = {
    r"\p{N}{1,3}": "llama-bpe",
    r"\p{N}": "qwen2",
}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens


def write_gguf(
    path: Path, kind: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], weights: str = "float32"
) -> None:
    """Write a GGUF file. metadata: values, or (value, GGUF type, GGUF type of an array's items) as they were read.

    weights: type of all matrices, of TYPES; other tensors stay float32: llama.cpp adds the kernels of a convolution to
        float32. Rows that q8_0 cannot divide become float16.
    """
    gguf = gguf_package()
    name, file_type = TYPES[weights]
    with whole(path) as temporary:
        writer = gguf.GGUFWriter(temporary, kind)
        writer.add_file_type(file_type)
        types = gguf.GGUFValueType
        for key, value in metadata.items():
            if value in ("", []):
                continue  # as the merges of a tokenizer without any
            if not isinstance(value, tuple):
                own = types.get_type(value)
                # An integer alone is unsigned in llama.cpp's files.
                value = value, types.UINT32 if own == types.INT32 else own
            writer.add_key_value(key, *value)
        for key, tensor in tensors.items():
            if not tensor.is_floating_point():
                writer.add_tensor(key, tensor.contiguous().numpy())
                continue
            type_name = name if tensor.ndim == 2 else "F32"
            if type_name == "Q8_0" and tensor.shape[-1] % 32:
                type_name = "F16"
            stored = getattr(gguf.GGMLQuantizationType, type_name)
            array = gguf.quants.quantize(tensor.detach().float().contiguous().numpy(), stored)
            writer.add_tensor(key, array, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def rounded_to_q8(tensor: Tensor) -> Tensor:
    """Return a tensor with the values that q8_0 stores of it; all but matrices of floats are stored as they are."""
    if tensor.ndim != 2 or not tensor.is_floating_point():
        return tensor
    gguf = gguf_package()
    stored = gguf.GGMLQuantizationType.F16 if tensor.shape[-1] % 32 else gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.float().numpy(), stored), stored).copy())


def widen_gguf(file: Path, path: Path) -> None:
    """Write a copy of a GGUF file with all weights in float32, and nothing else changed."""
    fields, found = open_gguf(file)
    tensors = {name: read_tensor(tensor) for name, tensor in found.items()}
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    metadata = {name: value for name, value in copied_metadata(file).items() if not name.startswith(skipped)}
    write_gguf(path, fields["general.architecture"], metadata, tensors)


def tokenizer_metadata(model: Checkpoint) -> dict[str, Any]:
    """Return the metadata of a model's byte-level BPE tokenizer.

    Raises:
        InputError: another kind, or one that splits text in a way whose name in llama.cpp is not known here.
    """
    remedy = "Convert the target with llama.cpp's convert_hf_to_gguf.py, and pass the file as --target-gguf."
    content = json.loads((model.directory / "tokenizer.json").read_text("utf-8"))
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers") or [steps]
    digits = any(step.get("type") == "Digits" and step.get("individual_digits") for step in steps)
    patterns = [str(step["pattern"].get("Regex")) for step in steps if step.get("type") == "Split"]
    split = next((name for mark, name in SPLITS.items() if any(f"|{mark}|" in pattern for pattern in patterns)), None)
    pre = "smollm" if digits and not patterns else split
    if content["model"].get("type") != "BPE" or pre is None:
        raise InputError("tokenizer", f"one of {model.path}", "byte-level BPE of SmolLM, Llama 3 or Qwen", remedy)
    tokenizer, size = model.tokenizer, model.shape.vocab_size
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    added = {token["id"] for token in content["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [names.get(number, f"[PAD{number}]") for number in range(size)],
        "tokenizer.ggml.token_type": [
            CONTROL if number in special else USER_DEFINED if number in added or number not in names else NORMAL
            for number in range(size)
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }
    ends = model.end_tokens
    ids = {"bos": tokenizer.bos_token_id, "eos": ends[0] if ends else None, "padding": tokenizer.pad_token_id}
    fields |= {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number is not None}
    if tokenizer.chat_template:
        fields["tokenizer.chat_template"] = tokenizer.chat_template
    return fields
