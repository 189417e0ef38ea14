"""Files of a model directory, read without trusting them: config.json, weights and end tokens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.modules.formats.base import FLOATS, same_values
from draftsmith.modules.layers import LlamaConfig, config_object
from draftsmith.modules.pretrained.reading import open_tensors, read_object
from draftsmith.modules.targets.llama import llama_config
from draftsmith.modules.targets.shape import text_config
from draftsmith.modules.types import InputError

INDEX = "model.safetensors.index.json"
REMEDY = "Fetch or build it again."
TRUST = "Pass --trust-remote-code if you trust it."
UNQUANTIZED = "Use the model that it was made from, or let a vLLM server run it (train --features vllm)."
BY_TRANSFORMERS = "Pass --engine hf, which applies the scales, or let a vLLM server run it (train --features vllm)."
# What is read of config.json before a model is built, which checks the rest.
SIZES = {f"{name}?": (int, None) for name in ("vocab_size", "hidden_size", "max_position_embeddings")}
CONFIG = {**SIZES, "model_type?": (str, None), "text_config?": (SIZES, None)}
# Weights, which are integers only if they are quantized. (`attn.bias` is a mask in old files of GPT-2.) Their scales.
WEIGHT, SCALE = re.compile(r"(weight|proj(\.bias)?)$"), re.compile(r"(weight|input|proj)_(scale|zero_point)\w*$")


def read_model_json(file: Path, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the JSON object in a file of a model. shape: as of `read_object`."""
    try:
        return read_object(file, shape or {}, REMEDY)
    except OSError as error:
        raise InputError(str(file), error.strerror or "unreadable", "a file with JSON", REMEDY) from error


def weight_map(index: Path, remedy: str = REMEDY) -> dict[str, str]:
    """Read the map of tensors to files in an index of shards; raise InputError if it has none."""
    names = read_model_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InputError(str(index), "no weight_map of names", "a tensor's name -> its file", remedy)
    return names


def checkpoint_files(directory: Path) -> list[Path]:
    """Return a model's safetensors files: one file, or the shards of an index."""
    whole, index = directory / "model.safetensors", directory / INDEX
    named = sorted(set(weight_map(index).values())) if index.exists() else []
    # As transformers does, but where the index names the file too, and a module that was added beside it, as vLLM does.
    if whole.exists() and whole.name not in named:
        return [whole]
    if named:
        files = [directory / name for name in named]
        if outside := [file.name for file in files if file.parent != directory or file.name in ("", "..")]:
            raise InputError(str(index), f"a shard in another place ({outside[0]})", "files of the directory", REMEDY)
        if absent := [file.name for file in files if not file.is_file()]:
            found = f"{directory} with {len(absent)} of {len(files)} shards missing ({absent[0]})"
            raise InputError("model", found, "all shards of the index", REMEDY)
        return files
    # Without an index, what lies beside shards (model-old.safetensors) is none of them.
    files = sorted(directory.glob("model-?????-of-?????.safetensors")) or sorted(directory.glob("model*.safetensors"))
    if not files:
        remedy = "Save it as safetensors first."
        raise InputError("model", f"{directory} without safetensors", "model*.safetensors", remedy)
    return files


def check_unquantized(directory: Path, config: Mapping[str, Any], by_transformers: bool = False) -> None:
    """Raise InputError for a quantized checkpoint (FP8, GPTQ, AWQ, NVFP4), before its weights are read.

    by_transformers: transformers reads it, which applies the scales of the methods that it has. With any other method
        it takes the stored numbers for the weights.
    """
    settings, remedy = config_object(text_config(config), "quantization_config"), UNQUANTIZED
    if settings:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

        # bitsandbytes has two methods, by these switches.
        switched = settings.get("load_in_4bit") or settings.get("load_in_8bit")
        if switched or str(settings.get("quant_method")) in AUTO_QUANTIZATION_CONFIG_MAPPING:
            if by_transformers:
                return
            remedy = BY_TRANSFORMERS
    # ModelOpt writes a file of its own.
    other = directory / "hf_quant_config.json"
    settings = settings or config_object(read_model_json(other) if other.exists() else {}, "quantization")
    names = [settings.get(name) for name in ("quant_method", "quant_algo", "format", "bits")]
    # Settings of the cache of keys alone name no method.
    if method := " ".join(str(name) for name in names if name) or quantized_weight(directory):
        raise quantized(directory, method, remedy)


def quantized_weight(directory: Path) -> str:
    """Name a weight in a type that no layer computes with, by the headers of the files; empty if there is none."""
    for file in checkpoint_files(directory):
        with open_tensors(file, REMEDY) as opened:
            for name in filter(WEIGHT.search, opened.keys()):
                if (kind := opened.get_slice(name).get_dtype()) not in ("F64", "F32", "F16", "BF16"):
                    return f"{name} in {kind}"
    return ""


def quantized(directory: Path, method: str, remedy: str = UNQUANTIZED) -> InputError:
    found = f"{directory}, which is quantized ({method})"
    return InputError("model", found, "weights in bfloat16, float16 or float32", remedy)


def checkpoint_tensors(directory: Path, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """Read the tensors whose names, without the base model's prefix `model.`, begin with one of these.

    Raises:
        InputError: one of them is quantized.
    """
    tensors = {}
    for file in checkpoint_files(directory):
        with open_tensors(file, REMEDY) as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                if (bare := name.removeprefix("model.")).startswith(prefixes):
                    tensors[bare] = opened.get_tensor(name)
                    if tensors[bare].dtype not in FLOATS:
                        raise quantized(directory, f"{name} in {tensors[bare].dtype}")
    return tensors


def model_shape(directory: Path, config: Mapping[str, Any]) -> LlamaConfig:
    """Return a model's sizes: `llama_config`, but its embeddings are tied only if the files hold no other lm_head.

    transformers and vLLM keep an lm_head of its own, whatever `tie_word_embeddings` says.
    """
    shape = llama_config(config)
    own = checkpoint_tensors(directory, ("lm_head.weight",)) if shape.tie_embeddings else {}
    tied = checkpoint_tensors(directory, ("embed_tokens.weight",)) if own else {}
    differs = any(not same_values(*pair) for pair in zip(own.values(), tied.values(), strict=False))
    return dataclasses.replace(shape, tie_embeddings=False) if differs else shape


def listed_ends(directory: Path, config: Mapping[str, Any]) -> tuple[list[int], Path]:
    """Return the end tokens in generation_config.json or else config.json, in their order, and the file that has them.

    config: config.json, or its part about text.
    """
    ids, file = config.get("eos_token_id"), directory / "config.json"
    generation = directory / "generation_config.json"
    if generation.exists():
        settings = read_model_json(generation)
        if "eos_token_id" in settings:
            ids, file = settings["eos_token_id"], generation
    tokens = ids if isinstance(ids, list) else [] if ids is None else [ids]
    vocab_size = config.get("vocab_size")
    for token in tokens:
        valid = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        if not valid or (isinstance(vocab_size, int) and token >= vocab_size):
            expected = "token ids" if vocab_size is None else f"token ids below {vocab_size}, the vocabulary's size"
            raise InputError(f"eos_token_id of {file}", repr(token)[:80], expected, "Correct the file.")
    return tokens, file


def describe_error(error: BaseException) -> str:
    """Return an exception of a library as one line, for an error of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
