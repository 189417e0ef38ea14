"""Reading of a foreign directory without trust: no code of its files runs, no file outside it is opened."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.formats.base import NotReadHere, Package
from draftsmith.modules.formats.foreign import head_kind
from draftsmith.modules.llama_config import config_object
from draftsmith.modules.pretrained.gguf import read_gguf_head
from draftsmith.modules.pretrained.heads import kind_at, named_kind
from draftsmith.modules.pretrained.hub import model_directory
from draftsmith.modules.pretrained.quantized import Quantized, decide
from draftsmith.modules.pretrained.reading import (
    read_model_json,
    read_object,
    read_tensors,
    tensor_headers,
    unreadable,
    weight_map,
)
from draftsmith.modules.types import InputError

# In the order in which vLLM, SGLang and huggingface_hub prefer them.
KINDS = (".safetensors", ".bin", ".pt")
# Files that trainers leave beside the weights, and every system ignores (vLLM 0.33.0, model_loader/weight_utils.py).
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt"}
FETCH = "Fetch it again, or ask its author for safetensors."
MASK_EMBEDDING = "mask_embedding.pt"  # of MiMo-V2.5's heads
TORCH_FILE = "pytorch_model.bin"
WRAPPERS = ("module.", "_orig_mod.")
STORED = "tensors by their names, nothing else"
RECORD = "draftsmith.json"  # what an export leaves in its directory
RECORD_SHAPE = {"format": str, "kind": str, "tensors": {"*": str}, "config": dict, "head": dict, "types": [str],
                "tied_to_target?": [str]}  # fmt: skip


def package_directory(path: str) -> Path:
    """Return the local directory of a foreign head: a path, or a hub id, which is downloaded or cached."""
    if (gguf := gguf_file(Path(path))) is not None:
        return gguf.parent
    return model_directory(path, ("*.bin", "*.pt"))


def gguf_file(path: Path) -> Path | None:
    """Return a head's GGUF file: the path itself, or the only such file of a directory without config.json."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def read_package(path: str) -> Package:
    """Read config, tensors and record of a foreign directory or hub id, on the CPU.

    Tensors are as stored, but quantized weights as servers compute with them.

    Raises:
        InputError: a file is absent, damaged, outside the directory, or holds more than tensors; weights are ambiguous.
    """
    directory = package_directory(path)
    exported = read_record(directory)
    if (gguf := gguf_file(Path(path))) is not None:
        return dataclasses.replace(read_gguf_head(gguf), exported=exported)
    config = read_model_json(member(directory, "config.json", "the directory"))
    if (directory / MASK_EMBEDDING).exists():
        raise NotReadHere(MASK_EMBEDDING, "an embedding of the mask token, which vLLM reads", "none")
    tensors: dict[str, Tensor] = {}
    files, other = weight_files(directory), directory / TORCH_FILE
    for file in files:
        tensors |= read_tensors(file, FETCH) if file.suffix == ".safetensors" else read_torch(file)
    # SafeAILab's code reads this one, others the safetensors beside it, which hold no tensor twice.
    if other not in files and other.exists() and _differ(read_torch(other), tensors):
        found, expected = f"other tensors in {TORCH_FILE} than in {files[0].name}", "the same"
        raise InputError(str(directory), found, expected, "Systems differ in which they read: keep what is meant.")
    # Of torch's wrappers, whose state_dict was saved in place of the module's.
    if tensors and (prefix := next((one for one in WRAPPERS if all(name.startswith(one) for name in tensors)), "")):
        found = f"names that begin with {prefix} ({min(tensors)}, ...)"
        remedy = "Save the state_dict of the module inside DistributedDataParallel or torch.compile."
        raise InputError(str(directory), found, "names without it, as every system reads them", remedy)
    # Messages show names, and a terminal obeys control characters.
    if odd := [name for name in tensors if not name.isprintable()]:
        raise InputError(str(directory), f"a tensor named {odd[0]!r}", "names that can be printed", FETCH)
    package = Package(config, tensors, exported)
    quantized = config.get("quantization_config") and files[0].suffix == ".safetensors"
    return dequantized(package, directory, files) if quantized else package


def dequantized(package: Package, directory: Path, files: Sequence[Path]) -> Package:
    """Return a directory with plain weights; raise InputError for quantized ones that are not computed here."""
    tensors = dict(package.tensors)
    headers = {name: header for file in files for name, header in tensor_headers(file, FETCH).items()}
    found = decide(package.config, {}, headers)
    if not found.weights or found.problem:
        raise found.error(directory, found.problem, "Import the directory that the weights were made from.")
    try:
        odd = next(contradictions(found, tensors), None)
    except re.error as error:
        odd = f"a pattern that is none ({error})"
    if odd is not None:
        raise InputError(f"quantization_config of {directory}", odd, "files as it says", "Quantize the head again.")
    for name, parts in found.weights.items():
        stored = {part: tensors.pop(on_disk) for part, on_disk in parts.items()}
        tensors[name] = found.compute(name, stored)
    config = {name: value for name, value in package.config.items() if name != "quantization_config"}
    note = f"{len(found.weights)} weights are computed from {found.method}"
    if found.settings.get("quant_method") != "compressed-tensors" or "'input_activations': {" in str(found.settings):
        note += "; a server may round their inputs, too"
    return dataclasses.replace(package, config=config, tensors=tensors, quantized=(*found.weights,), notes=(note,))


def contradictions(found: Quantized, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield weights that servers read in another type than the files have: by `targets` and `ignore` of
    compressed-tensors, which name layers or, as "Linear", all but embeddings and lm_head."""
    groups = config_object(found.settings, "config_groups").values()
    lists = [group.get("targets") for group in groups if isinstance(group, dict)]
    targets = [name for names in lists if isinstance(names, list) for name in names]
    ignored = found.settings.get("ignore") or []
    if not isinstance(ignored, list) or found.settings.get("quant_method") != "compressed-tensors":
        return

    def named(layer: str, names: Iterable[object]) -> bool:
        patterns = [name[3:] if name.startswith("re:") else f".*{re.escape(name)}$" for name in map(str, names)]
        return any(re.match(pattern, layer) for pattern in patterns)

    for name in found.weights:
        layer = name.removesuffix(".weight")
        if named(layer, ignored) or (layer.endswith("lm_head") and not named(layer, targets)):
            yield f"{name} quantized, which it leaves out"
    if "Linear" in targets:
        for name, tensor in tensors.items():
            layer = name.removesuffix(".weight")
            if layer.endswith("_proj") and name not in found.weights and not named(layer, ignored):
                yield f"{name} in {tensor.dtype}, which it does not leave out"


def read_record(directory: Path) -> dict[str, Any] | None:
    """Read the record of an export; None for a directory that this project did not write.

    Raises:
        InputError: a damaged file.
    """
    path = directory / RECORD
    return read_object(path, RECORD_SHAPE, "Export the head again.") if path.exists() else None


def _differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    common = one.keys() & other.keys()
    return not common or any(not torch.equal(one[name], other[name]) for name in common)


def foreign_package(directory: Path) -> Package:
    """Read a directory that another system wrote.

    Raises:
        InputError: no such directory, or one of our own heads.
    """
    package = read_package(str(directory))
    if kind_at(directory) is not None:
        remedy = f"Write it for others: draftsmith export --head {directory} --format FORMAT --output DIR"
        raise InputError("directory", f"{directory}, one of draftsmith's own heads", "another system's", remedy)
    return package


def check_own(path: str) -> None:
    """Raise InputError for a local directory with another system's head, which a command would take for a model."""
    directory = Path(path)
    files = directory.glob("*.safetensors") if (directory / "config.json").is_file() else ()
    headers = {name: header for file in files for name, header in tensor_headers(file, FETCH).items()}
    shapes = {name: torch.empty(header.shape, device="meta") for name, header in headers.items()}
    package = Package(read_model_json(directory / "config.json") if shapes else {}, shapes)
    try:
        kind = head_kind(package)
    except NotReadHere:
        raise
    except InputError:  # a model, or whatever its loader makes of it
        return
    remedy = f"Import it first: draftsmith import {path} --target TARGET --output HEAD"
    raise InputError("head", f"{path}, {named_kind(kind)} head of another system", "a head of ours", remedy)


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the weights files of the preferred kind: one, or the shards that an index names.

    Raises:
        InputError: there are none, several and no index, or an index that names another place.
    """
    if (gguf := gguf_file(directory)) is not None:
        return (gguf,)
    names = sorted({entry.name for entry in directory.iterdir()} - NOT_WEIGHTS)
    for kind in KINDS:
        files = [name for name in names if name.endswith(kind)]
        indexes = [name for name in names if name.endswith(f"{kind}.index.json")]
        if len(files) == 1 and not indexes:
            return (member(directory, files[0], "the directory"),)
        if len(indexes) == 1:
            shards = set(weight_map(member(directory, indexes[0], "the directory"), FETCH).values())
            # transformers reads a file of this name and ignores the index, vLLM and SGLang read all.
            if not set(files) - shards and not (len(shards) > 1 and f"model{kind}" in shards):
                return tuple(member(directory, name, indexes[0]) for name in sorted(shards))
        if files or indexes:
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
        # torch's own message ends with the advice to switch its check off.
        code = re.search(r"(?:GLOBAL|class|function) ([\w.]+\.\w+)", " ".join(str(error).split()))
        found = f"a pickle that asks for {code[1]}, which is code" if code else f"no weights ({type(error).__name__})"
        raise unreadable(file, found, STORED, FETCH) from error
    if not isinstance(content, dict):
        raise InputError(str(file), f"a {type(content).__name__}", STORED, FETCH)
    wrong = [f"{name!r} ({type(value).__name__})" for name, value in content.items() if not _is_plain(name, value)]
    if wrong:
        raise InputError(str(file), ", ".join(wrong[:3]), STORED, "Save the head's state_dict alone.")
    return {name: tensor.detach() for name, tensor in content.items()}


def _is_plain(name: object, value: object) -> bool:
    """Return whether an entry is a named dense tensor with values."""
    if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_quantized:
        return False
    return value.layout == torch.strided and value.device.type == "cpu"
