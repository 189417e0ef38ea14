"""A target's multi-token-prediction module in its checkpoint: read it, or write another into a copy.

The copy links to every file that stays as it is: a target of 200 GB is not written twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from draftsmith.modules.formats import MTP
from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.mtp import EXPERT, FAMILIES, mtp_family
from draftsmith.modules.pretrained.checkpoint import INDEX, Checkpoint
from draftsmith.modules.pretrained.directory import KINDS, foreign_package, read_record
from draftsmith.modules.pretrained.files import check_disk, link_file, write_json, write_tensors
from draftsmith.modules.pretrained.reading import FETCH, open_tensors
from draftsmith.modules.types import InputError

SHARD = "mtp.safetensors"
# transformers reads a file called model.safetensors alone, without the index.
WHOLE, FIRST = "model.safetensors", "model-00001-of-00001.safetensors"


def module_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that may hold an MTP module: without an index vLLM reads every one beside the target's, too."""
    files, directory = checkpoint.files, checkpoint.directory
    beside = [] if (directory / INDEX).exists() else sorted({*directory.glob("*mtp*.safetensors")} - {*files})
    return [*files, *beside]


def ships_mtp(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint holds an MTP module of a family that is known here."""
    # The directory may be a head's, whose config.json has no sizes of a model.
    if checkpoint.family not in FAMILIES:
        return False
    for file in module_files(checkpoint):
        with open_tensors(file, FETCH) as opened:
            if FAMILIES[checkpoint.family].own(opened.keys(), checkpoint.shape.num_layers):
                return True
    return False


def mtp_state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read a checkpoint's own MTP module, by the names of `MtpFamily.from_file`; empty if it has none.

    Raises:
        InputError: the target's family has no known module, or the module has other names or unknown scales.
    """
    family, num_layers = mtp_family(checkpoint.shape.family), checkpoint.shape.num_layers
    stored = Checkpoint(checkpoint.directory)
    stored.files = module_files(checkpoint)
    stored.check_weights()
    tensors = {name: stored.read_float(name) for name in family.own(stored.weights, num_layers)}
    others = [name for name in stored.tensors if ".mtp." in f".{name}"]
    if others and not tensors:
        expected = f"the names {family.prefix.format(n=num_layers)}*"
        raise InputError("target", f"an MTP module named {min(others)}", expected, "Rename its tensors.")
    return family.from_file(tensors, num_layers)


def head_package(directory: Path, format: str) -> Package:
    """Read what a format reads of a head's directory: of a checkpoint with an MTP module, that alone."""
    if format != MTP:
        return foreign_package(directory)
    checkpoint = Checkpoint(directory)
    return Package({}, mtp_state(checkpoint), read_record(checkpoint.directory))


def stitch(source: Checkpoint, directory: Path, state: Mapping[str, Tensor]) -> None:
    """Write a copy of a checkpoint with this MTP module in the place of its own.

    directory: new and empty; the caller gives it its name once it is whole. state: by the names of `mtp_state`, in the
    type of the copy.

    Raises:
        InputError: as of `mtp_state`; the checkpoint is quantized; the disk has no room for what is written.
    """
    if source.quantized.method:
        raise source.quantized.error(source.directory, "its settings would hold for the module, too")
    raw, shape, files = source.config, source.shape, dict[Path, list[str]]()
    family, num_layers = mtp_family(shape.family), shape.num_layers
    for name, stored in source.tensors.items():
        files.setdefault(stored.file, []).append(name)
    every = [name for names in files.values() for name in names]
    own = set(family.own(every, num_layers))
    # The layout of the module in place of which it stands, else of the target's layers: Qwen3.5's differ.
    tensors = family.to_file(state, num_layers, fused=not any(map(EXPERT.search, own or every)))
    mixed = [file for file, names in files.items() if not own.isdisjoint(names)]
    needed = sum(file.stat().st_size for file in mixed) + sum(tensor.nbytes for tensor in tensors.values())
    check_disk(directory, needed, "output", "Choose another place.")

    if family.count:
        # Without it vLLM and SGLang take the module for a layer of the target.
        one: dict[str, object] = {family.count: 1}
        raw = {**raw, "text_config": {**raw["text_config"], **one}} if raw.get("text_config") else {**raw, **one}
    write_json(directory / "config.json", raw, indent=2)
    weight_map: dict[str, str] = {}
    for file, names in files.items():
        kept, name = [name for name in names if name not in own], FIRST if file.name == WHOLE else file.name
        if file not in mixed:
            link_file(file, directory / name)
        elif kept:
            # vLLM and SGLang read all tensors of a file, whatever the index says, SGLang's files in no fixed order: an
            # old tensor left in it could replace the new one.
            with open_tensors(file, FETCH) as opened:
                write_tensors(directory / name, {name: opened.get_tensor(name) for name in kept}, opened.metadata())
        weight_map |= dict.fromkeys(kept, name)
    shard = SHARD if SHARD not in weight_map.values() else f"new-{SHARD}"
    write_tensors(directory / shard, tensors, {"format": "pt"})
    weight_map |= dict.fromkeys(tensors, shard)
    total = sum((directory / name).stat().st_size for name in set(weight_map.values()))
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    for file in source.directory.iterdir():
        weights = file.name.endswith((*KINDS, ".index.json"))
        if file.is_file() and not weights and not file.name.startswith(".") and file.name != "config.json":
            link_file(file, directory / file.name)
