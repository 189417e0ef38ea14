"""Files of a model directory, read without trusting them: config.json, weights and end tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.store.reading import open_tensors, read_object, read_tensors
from draftsmith.modules.formats.rope import ROPE_NUMBERS, missing_keys
from draftsmith.modules.layers import MOST_HEADS, MOST_LAYERS, MOST_POSITIONS, MOST_SIZE
from draftsmith.modules.types import InputError

INDEX = "model.safetensors.index.json"
# Sizes in config.json, by the names of all families.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "n_embd", "n_layer", "n_head", "n_inner", "d_model", "num_layers", "num_heads",
)  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions", "sliding_window", "max_window_layers")
NUMBERS = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "initializer_range", "rope_local_base_freq",
)  # fmt: skip
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
OBJECTS = ("rope_scaling", "rope_parameters", "quantization_config")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
LARGEST = dict.fromkeys(LAYERS, MOST_LAYERS) | dict.fromkeys(HEADS, MOST_HEADS)
REMEDY = "Fetch or build it again."


def read_model_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file of a model.

    Raises:
        InputError: absent, damaged, or other JSON.
    """
    try:
        return read_object(file, {}, REMEDY)
    except OSError as error:
        raise InputError(str(file), error.strerror or "unreadable", "a file with JSON", REMEDY) from error


def read_settings(directory: Path) -> dict[str, Any]:
    """Read and check a model's config.json.

    Raises:
        InputError: damaged, or with values that no model can have.
    """
    file = directory / "config.json"
    config = read_model_json(file)
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise InputError(f"text_config of {file}", repr(nested)[:80], "an object", REMEDY)
    for section in (config, nested or {}):
        _check_section(section, file)
    return config


def _check_section(section: Mapping[str, Any], file: Path) -> None:
    def check(valid: bool, name: str, value: Any, expected: str) -> None:
        if not valid:
            raise InputError(f"{name} of {file}", repr(value)[:80], expected, REMEDY)

    def check_number(values: Mapping[str, Any], name: str) -> None:
        value = values.get(name)
        valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e30
        check(value is None or valid, name, value, "a number that is not negative")

    for name in (*SIZES, *POSITIONS):
        value = section.get(name)
        most = LARGEST.get(name, MOST_POSITIONS if name in POSITIONS else MOST_SIZE)
        least = 0 if name in ("max_window_layers", "sliding_window") else 1  # transformers saves 0 for an unused window
        for count in value if isinstance(value, list) else [value]:  # a list has one per layer
            valid = isinstance(count, int) and not isinstance(count, bool) and least <= count <= most
            check(count is None or valid, name, value, f"an integer of {least} to {most:,}")
    for name in NUMBERS:
        check_number(section, name)
    for name in SWITCHES:
        check(isinstance(section.get(name), bool | None), name, section.get(name), "true or false")
    for name in OBJECTS:
        value = section.get(name)
        check(isinstance(value, Mapping | None), name, value, "an object")
        for number in ROPE_NUMBERS:
            check_number(value or {}, number)
    if missing := missing_keys(section):
        raise InputError(f"rope_parameters of {file}", f"no {missing[0]}", "all that its rope_type needs", REMEDY)
    check(isinstance(section.get("model_type"), str | None), "model_type", section.get("model_type"), "a name")


def check_proportions(config: Mapping[str, Any], files: list[Path]) -> None:
    """Raise InputError if a size in config.json is larger than all weights together.

    Building such a model would allocate petabytes, or create layers for hours.
    """
    num_tensors = num_values = 0
    for file in files:
        with open_tensors(file, REMEDY) as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                num_tensors += 1
                num_values += math.prod(opened.get_slice(name).get_shape())
    for section in (config, config.get("text_config") or {}):
        for name in SIZES:
            # Quantized weights are packed, at most eight to a stored value.
            most = num_tensors if name in LAYERS else 8 * num_values
            if isinstance(section.get(name), int) and section[name] > most:
                found = f"{section[name]} with {num_tensors} tensors of {num_values:,} values"
                raise InputError(f"{name} of config.json", found, f"at most {most:,}", "Check the checkpoint.")


def weight_map(index: Path, remedy: str = REMEDY) -> dict[str, str]:
    """Read the map of tensors to files in an index of shards; raise InputError if it has none."""
    names = read_model_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InputError(str(index), "no weight_map of names", "a tensor's name -> its file", remedy)
    return names


def checkpoint_files(directory: Path) -> list[Path]:
    """Return a model's safetensors files, chosen as transformers does: one file, or the shards of an index.

    Raises:
        InputError: there are none, or a shard of the index is missing.
    """
    whole, index = directory / "model.safetensors", directory / INDEX
    if whole.exists():
        return [whole]
    if index.exists():
        files = [directory / name for name in sorted(set(weight_map(index).values()))]
        if outside := [file.name for file in files if file.parent != directory or file.name in ("", "..")]:
            raise InputError(str(index), f"a shard in another place ({outside[0]})", "files of the directory", REMEDY)
        if absent := [file.name for file in files if not file.is_file()]:
            found = f"{directory} with {len(absent)} of {len(files)} shards missing ({absent[0]})"
            raise InputError("model", found, "all shards of the index", REMEDY)
        return files
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        remedy = "Save it as safetensors first."
        raise InputError("model", f"{directory} without safetensors", "model*.safetensors", remedy)
    return files


def read_state(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a model."""
    state: dict[str, torch.Tensor] = {}
    for file in checkpoint_files(directory):
        state |= read_tensors(file, REMEDY)
    return state


def end_tokens(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens from generation_config.json or else config.json, in the order of `generate`.

    config: config.json, or its part about text.

    Raises:
        InputError: they are not ids of the vocabulary, so that no response would ever end.
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
    return tuple(tokens)
