"""Reading of a foreign directory without trust: no code of its files runs, no file outside it is opened."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.models.checkpoint import LARGEST, read_model_json, weight_map
from draftsmith.data.models.hub import model_directory
from draftsmith.data.store.reading import open_tensors
from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.llama import flat
from draftsmith.modules.layers import MOST_POSITIONS, MOST_SIZE
from draftsmith.modules.types import InputError

# In the order in which vLLM, SGLang and huggingface_hub prefer them.
KINDS = (".safetensors", ".bin", ".pt")
# Files that trainers leave beside the weights, and every system ignores (vLLM 0.33.0, model_loader/weight_utils.py).
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt"}
# Files that may lie beside safetensors, and the code that reads them first.
COPIES = {"pytorch_model.bin": "SafeAILab's code", "medusa_lm_head.pt": "Medusa's code"}
FETCH = "Fetch it again, or ask its author for safetensors."
STORED = "tensors by their names, nothing else"


def package_directory(path: str) -> Path:
    """Return the local directory of a foreign head: a path, or a hub id, which is downloaded or cached."""
    return model_directory(path, ("*.bin", "*.pt"))


def read_package(path: str) -> Package:
    """Read config, tensors and metadata of a foreign directory or hub id; tensors as stored, on the CPU.

    Of several kinds of weights files, safetensors count; a file of COPIES must then hold the same.

    Raises:
        InputError: a file is absent, damaged, outside the directory, or holds more than tensors; weights are ambiguous.
    """
    directory = package_directory(path)
    config = read_model_json(member(directory, "config.json", "the directory"))
    files = weight_files(directory)
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        if file.suffix == ".safetensors":
            with open_tensors(file, FETCH) as opened:
                stored = {name: opened.get_tensor(name) for name in list(opened.keys())}
                metadata |= opened.metadata() or {}
        else:
            stored = read_torch(file)
        if twice := sorted(stored.keys() & tensors.keys()):
            raise InputError(str(file), f"{twice[0]}, which another shard has", "every tensor once", FETCH)
        tensors |= stored

    # Messages show names, and a terminal obeys control characters.
    if odd := [name for name in tensors if not name.isprintable()]:
        raise InputError(str(files[0]), f"a tensor named {odd[0]!r}", "names that can be printed", FETCH)
    index = next(iter(directory.glob(f"*{files[0].suffix}.index.json")), None)
    if index is not None and (wrong := sorted(weight_map(index, FETCH).keys() ^ tensors.keys())):
        found = f"{len(wrong)} tensors that only it or only its files have ({', '.join(wrong[:3])})"
        raise InputError(str(index), found, "the tensors of its files", FETCH)
    _check_sizes(directory / "config.json", flat(config), tensors)
    package = Package(config, tensors, metadata)
    for copy, reader in COPIES.items():
        if files[0].suffix != ".safetensors" or not (directory / copy).exists():
            continue
        full, other = package.all_tensors(), read_torch(member(directory, copy, "the directory"))
        wrong = sorted(full.keys() ^ other.keys())
        both = ((name, full[name], other[name]) for name in full if name in other)
        wrong += [name for name, one, two in both if one.dtype != two.dtype or not torch.equal(one, two)]
        if wrong:
            found = f"{files[0].name} and {copy} that differ ({', '.join(wrong[:3])})"
            remedy = f"{reader} reads {copy}, vLLM and SGLang {files[0].name}: delete the one that is not meant."
            raise InputError("weights", found, "one set of weights", remedy)
    return package


def _check_sizes(file: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check the sizes in a config against the number of values in the tensors.

    A net of sizes far beyond that would take hours to build, or ask for petabytes.

    Raises:
        InputError: names the setting.
    """

    def count(name: str) -> int:
        value = config.get(name)
        return value if isinstance(value, int) else 1

    values = sum(tensor.numel() for tensor in tensors.values())
    width = max(count("hidden_size"), 1)
    # Room for heads with lost or cut tensors, so that the error names these.
    room = 64 * values + 2**24
    heads = max(count("num_attention_heads"), count("num_key_value_heads"), 1)
    widths = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    limits = dict.fromkeys(widths, room // width)
    limits |= {"head_dim": room // width // heads, "num_hidden_layers": max(len(tensors), 1)}
    limits |= {"num_layers": LARGEST["num_layers"], "vocab_size": MOST_SIZE, "draft_vocab_size": MOST_SIZE}
    limits |= {"max_position_embeddings": MOST_POSITIONS}
    for name, limit in limits.items():
        if count(name) > limit:
            found = f"{count(name)} with {len(tensors)} tensors of {values:,} values"
            raise InputError(f"{name} of {file}", found, f"at most {limit:,}", FETCH)


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the weights files of the preferred kind: one, or the shards that an index names.

    Raises:
        InputError: there are none, several and no index, or an index that names another place.
    """
    names = sorted({entry.name for entry in directory.iterdir()} - NOT_WEIGHTS)
    for kind in KINDS:
        files = [name for name in names if name.endswith(kind)]
        indexes = [name for name in names if name.endswith(f"{kind}.index.json")]
        if not files and not indexes:
            continue
        if not indexes and len(files) == 1:
            return (member(directory, files[0], "the directory"),)
        index = member(directory, indexes[0], "the directory") if indexes else None
        shards = sorted(set(weight_map(index, FETCH).values())) if index is not None else []
        if index is not None and len(indexes) == 1 and not set(files) - set(shards):
            return tuple(member(directory, name, index.name) for name in shards)
        found = f"several weights ({', '.join([*indexes, *files][:4])})"
        remedy = "Systems differ in which of them they read: keep those that are meant."
        raise InputError(str(directory), found, f"one {kind} file, or one index of all", remedy)
    raise InputError(str(directory), "no weights", "model.safetensors or pytorch_model.bin", "Check the path.")


def member(directory: Path, name: str, named_by: str) -> Path:
    """Return the regular file of this name in the directory. The hub's cache links from snapshots/X to blobs/.

    Raises:
        InputError: the name, or a link behind it, leads elsewhere; there is no such file.
    """
    if PureWindowsPath(name).name != name or name in ("", "..") or "\0" in name:
        remedy = "Do not trust this directory: it names files outside itself."
        raise InputError(str(directory), f"the path {name!r} in {named_by}", "a plain file name", remedy)
    root = Path(os.path.realpath(directory))
    file = Path(os.path.realpath(root / name))
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if file.parent not in (root, blobs):
        raise InputError(str(directory / name), f"a link to {file}", "a file of the directory", "Copy it there.")
    if not file.is_file():
        raise InputError(str(directory / name), "no such file", f"what {named_by} names", FETCH)
    return directory / name


def read_torch(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.bin` or `.pt` file by torch's restricted reader, which runs nothing of the file.

    Raises:
        InputError: damaged, or anything but a flat dict of plain tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unusual pickles and TorchScript, which fail right after
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged and hostile bytes make the reader fail in ways it does not list
        raise InputError(str(file), _why_refused(error), STORED, FETCH) from error
    if not isinstance(content, Mapping):
        raise InputError(str(file), f"a {type(content).__name__}", STORED, FETCH)
    wrong = [f"{name!r} ({what})" for name, value in content.items() if (what := _not_plain(name, value))]
    if wrong:
        raise InputError(str(file), ", ".join(wrong[:3]), STORED, "Save the head's state_dict alone.")
    return {name: tensor.detach() for name, tensor in content.items()}


def _why_refused(error: Exception) -> str:
    """Return the facts of torch's message, which ends with the advice to switch its check off."""
    text = " ".join(str(error).split())
    if code := re.search(r"(?:GLOBAL|class|function) ([\w.]+\.\w+)", text):
        return f"a pickle that asks for {code[1]}, which is code and not weights"
    reasons = {
        "TorchScript": "a TorchScript program",
        "legacy .tar": "a tar of pickles, torch's form before 2017",
        "weights_only": "a pickle of other things than tensors, or no weights at all",
    }
    damaged = f"damaged ({type(error).__name__}: {text[:120]})"
    return next((reason for words, reason in reasons.items() if words in text), damaged)


def _not_plain(name: Any, value: Any) -> str:
    """Return why an entry is no named tensor; empty if it is one."""
    if not isinstance(name, str):
        return "no name"
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.layout != torch.strided or value.is_quantized:
        return "sparse or quantised"
    return "" if value.device.type == "cpu" else "without values"
