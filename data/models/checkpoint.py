"""What a model directory holds, read without trust: its settings, its weights' files and its end tokens."""

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
# Settings that count something, by the names of the families' config.json.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "n_embd", "n_layer", "n_head", "n_inner", "d_model", "num_layers", "num_heads",
)  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions", "sliding_window", "max_window_layers")
NUMBERS = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "initializer_range",
    "rope_local_base_freq",
)
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
MOST = dict.fromkeys(LAYERS, MOST_LAYERS) | dict.fromkeys(HEADS, MOST_HEADS)
AGAIN = "Fetch or build it again."


def read_model_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model.

    Raises:
        InputError: absent, damaged, or JSON of another kind.
    """
    try:
        return read_object(file, {}, AGAIN)
    except OSError as error:
        raise InputError(str(file), error.strerror or "unreadable", "a file with JSON", AGAIN) from error


def read_settings(directory: Path) -> dict[str, Any]:
    """`config.json` of a model.

    Raises:
        InputError: damaged, or with values that no model can have.
    """
    file = directory / "config.json"
    raw = read_model_json(file)
    nested = raw.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise InputError(f"text_config of {file}", repr(nested)[:80], "an object", AGAIN)
    for section in (raw, nested or {}):
        for name in (*SIZES, *POSITIONS):
            _check_count(section, name, file)
        for name in NUMBERS:
            _check_number(section, name, file)
        for name in SWITCHES:
            if not isinstance(section.get(name), bool | None):
                raise _wrong(section, name, "true or false", file)
        for name in ("rope_scaling", "rope_parameters", "quantization_config"):
            inner = section.get(name)
            if not isinstance(inner, Mapping | None):
                raise _wrong(section, name, "an object", file)
            for number in ROPE_NUMBERS:
                _check_number(inner or {}, number, file)
        if lacking := missing_keys(section):
            raise InputError(f"rope_parameters of {file}", f"no {lacking[0]}", "all that its rope_type needs", AGAIN)
        if not isinstance(section.get("model_type"), str | None):
            raise _wrong(section, "model_type", "a name", file)
    return raw


def _check_count(section: Mapping[str, Any], name: str, file: Path) -> None:
    value = section.get(name)
    most = MOST.get(name, MOST_POSITIONS if name in POSITIONS else MOST_SIZE)
    least = 0 if name in ("max_window_layers", "sliding_window") else 1  # transformers saves 0 for a window that is off
    for count in value if isinstance(value, list) else [] if value is None else [value]:  # a list has one a layer
        if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
            raise _wrong(section, name, f"an integer of {least} to {most:,}", file)


def _check_number(section: Mapping[str, Any], name: str, file: Path) -> None:
    value = section.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30):
        raise _wrong(section, name, "a number that is not negative", file)


def _wrong(section: Mapping[str, Any], name: str, expected: str, file: Path) -> InputError:
    return InputError(f"{name} of {file}", repr(section[name])[:80], expected, AGAIN)


def check_proportions(raw: Mapping[str, Any], files: list[Path]) -> None:
    """No size of a model is larger than all its weights together: what would ask for petabytes, or build layers for
    hours, is told before anything is built.

    Raises:
        InputError: names the setting.
    """
    tensors = values = 0
    for file in files:
        with open_tensors(file, AGAIN) as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                tensors += 1
                values += math.prod(opened.get_slice(name).get_shape())
    for section in (raw, raw.get("text_config") or {}):
        for name in SIZES:
            # Quantised weights are packed, at most eight to a stored value.
            most = tensors if name in LAYERS else 8 * values
            if isinstance(section.get(name), int) and section[name] > most:
                found = f"{section[name]} with {tensors} tensors of {values:,} values"
                raise InputError(f"{name} of config.json", found, f"at most {most:,}", "Check the checkpoint.")


def weight_map(index: Path, remedy: str = AGAIN) -> dict[str, str]:
    """Tensor -> file, of an index of shards.

    Raises:
        InputError: it does not say.
    """
    found = read_model_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise InputError(str(index), "no weight_map of names", "a tensor's name -> its file", remedy)
    return found


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files that hold a model's weights, as transformers chooses them: one file, or an index's shards.

    Raises:
        InputError: there are none, or the index names what is not there.
    """
    whole, index = directory / "model.safetensors", directory / INDEX
    if whole.exists():
        return [whole]
    if index.exists():
        files = [directory / name for name in sorted(set(weight_map(index).values()))]
        if outside := [file.name for file in files if file.parent != directory or file.name in ("", "..")]:
            raise InputError(str(index), f"a shard in another place ({outside[0]})", "files of the directory", AGAIN)
        if absent := [file.name for file in files if not file.is_file()]:
            found = f"{len(absent)} of {len(files)} shards missing ({absent[0]})"
            raise InputError("model", f"{directory} with {found}", "all shards of the index", AGAIN)
        return files
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        remedy = "Save it as safetensors first."
        raise InputError("model", f"{directory} without safetensors", "model*.safetensors", remedy)
    return files


def read_state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model, as stored."""
    state: dict[str, torch.Tensor] = {}
    for file in checkpoint_files(directory):
        state |= read_tensors(file, AGAIN)
    return state


def end_tokens(directory: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens: generation_config.json first, as `generate` does, then config.json.

    raw: config.json, or the part of it that is about text.

    Raises:
        InputError: they are no ids of the vocabulary, so that no answer would ever end with one.
    """
    ids, file = raw.get("eos_token_id"), directory / "config.json"
    generation = directory / "generation_config.json"
    if generation.exists():
        settings = read_model_json(generation)
        if "eos_token_id" in settings:
            ids, file = settings["eos_token_id"], generation
    several = ids if isinstance(ids, list) else [] if ids is None else [ids]
    vocab = raw.get("vocab_size")
    for token in several:
        known = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        if not known or (isinstance(vocab, int) and token >= vocab):
            expected = "token ids" if vocab is None else f"token ids below {vocab}, the vocabulary's size"
            raise InputError(f"eos_token_id of {file}", repr(token)[:80], expected, "Correct the file.")
    return tuple(several)
