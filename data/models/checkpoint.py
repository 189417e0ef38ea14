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
SHAPE = {
    **{f"{name}?": (int, [(int, None)], None) for name in (*SIZES, *POSITIONS)},
    **{f"{name}?": (float, None) for name in NUMBERS},
    **{f"{name}?": (bool, None) for name in SWITCHES},
    **{f"{name}?": ({f"{number}?": (float, None) for number in ROPE_NUMBERS}, None) for name in OBJECTS},
    "model_type?": (str, None),
}


def read_model_json(file: Path, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the JSON object in a file of a model. shape: as of `read_object`."""
    try:
        return read_object(file, shape or {}, REMEDY)
    except OSError as error:
        raise InputError(str(file), error.strerror or "unreadable", "a file with JSON", REMEDY) from error


def read_settings(directory: Path) -> dict[str, Any]:
    """Read a model's config.json and check that each value is one that a model can have."""
    file = directory / "config.json"
    config = read_model_json(file, SHAPE | {"text_config?": (SHAPE, None)})
    for section in (config, config.get("text_config") or {}):
        for name in (*SIZES, *POSITIONS):
            value = section.get(name)
            most = LARGEST.get(name, MOST_POSITIONS if name in POSITIONS else MOST_SIZE)
            # transformers saves 0 for an unused window.
            least = 0 if name in ("max_window_layers", "sliding_window") else 1
            # A list has one value per layer.
            for count in value if isinstance(value, list) else [value]:
                if count is not None and not least <= count <= most:
                    raise InputError(f"{name} of {file}", value, f"an integer of {least} to {most:,}", REMEDY)
        # Rope numbers may lie at the top or in one of the rope objects.
        for values in (section, *(section.get(name) or {} for name in OBJECTS)):
            for name in (*NUMBERS, *ROPE_NUMBERS):
                if not 0 <= (values.get(name) or 0) < 1e30:
                    raise InputError(f"{name} of {file}", values[name], "a number that is not negative", REMEDY)
        if missing := missing_keys(section):
            raise InputError(f"rope_parameters of {file}", f"no {missing[0]}", "all that its rope_type needs", REMEDY)
    return config


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
    """Return a model's safetensors files, chosen as transformers does: one file, or the shards of an index."""
    whole, index = directory / "model.safetensors", directory / INDEX
    # A whole file counts before an index, even if both are there.
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
