"""Find and read the weights around a checkpoint's layers, whatever its family calls them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.modules.formats.base import same_values
from draftsmith.modules.pretrained.checkpoint import FLOATS, REMEDY, checkpoint_files, quantized
from draftsmith.modules.pretrained.reading import open_tensors
from draftsmith.modules.targets.outer import OuterWeights
from draftsmith.modules.types import InputError

# Ends of names, the usual one first: of Llama and most, Mistral's own files, GPT-NeoX, GPT-2, BLOOM, Nemotron-H.
EMBEDDINGS = (
    "embed_tokens",
    "tok_embeddings",
    "embed_in",
    "wte",
    "word_embeddings",
    "embeddings",
    "embedding",
    "embed",
)
OUTPUTS = ("lm_head", "output", "embed_out", "output_layer", "head", "unembed")
NORMS = (
    "norm", "final_layernorm", "norm_f", "ln_f", "final_layer_norm", "final_norm", "embedding_norm", "ln_out",
    "layer_norm",
)  # fmt: skip
# Parts of a checkpoint that are not its decoder, and its layers.
OTHERS = ("visual", "vision", "audio", "mtp", "eagle", "layers", "h", "blocks", "block")


@dataclass(frozen=True)
class OuterNames:
    """Names of these tensors in the files, by field of `OuterWeights`; a model that is tied has no `output`."""

    names: Mapping[str, str]
    files: Mapping[str, Path]

    @property
    def output(self) -> str:
        """The name of the output embedding; of a tied model, of its embedding."""
        return self.names.get("output", self.names["embeddings"])


def outer_names(directory: Path, hidden_size: int) -> OuterNames:
    """Find the tensors around the layers by the ends of their names and their shapes.

    Raises:
        InputError: there is no embedding of this width.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    for file in checkpoint_files(directory):
        with open_tensors(file, REMEDY) as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                if not set(name.split(".")[:-1]) & set(OTHERS):
                    shapes[name], files[name] = tuple(opened.get_slice(name).get_shape()), file

    def find(ends: Iterable[str], kind: str, rank: int) -> str | None:
        fitting = [name for name, shape in shapes.items() if len(shape) == rank and shape[-1] == hidden_size]
        for end in ends:
            own = [name for name in fitting if name.split(".")[-2:] == [end, kind]]
            if own:
                return min(own, key=len)
        return None

    found = {
        "embeddings": find(EMBEDDINGS, "weight", 2),
        "output": find(OUTPUTS, "weight", 2),
        "norm": find(NORMS, "weight", 1),
    }
    norm_bias = (found["norm"] or "").removesuffix("weight") + "bias"
    found["norm_bias"] = norm_bias if norm_bias in shapes else None
    # A tied output embedding may have a bias of its own.
    biases = (name for end in OUTPUTS for name in shapes if name.split(".")[-2:] == [end, "bias"])
    found["bias"] = next(biases, None)
    if found["embeddings"] is None:
        raise InputError("model", f"{directory} without an embedding of width {hidden_size}", "one", REMEDY)
    return OuterNames({field: name for field, name in found.items() if name is not None}, files)


def read_norm(directory: Path, hidden_size: int) -> tuple[Tensor | None, Tensor | None]:
    """Read the weight and the bias [H] of a target's final norm, None where the files have none.

    Raises:
        InputError: there is no embedding of this width, or the norm is quantized.
    """
    tensors = read_tensors_of(directory, outer_names(directory, hidden_size), ("norm", "norm_bias"))
    return tensors.get("norm"), tensors.get("norm_bias")


def read_outer(directory: Path, sizes: tuple[int, int], device: str, dtype: torch.dtype) -> OuterWeights:
    """Read a target's embedding, output embedding and final norm. sizes: its vocabulary and width.

    An output embedding of its own counts whatever `tie_word_embeddings` says, as in transformers and vLLM.

    Raises:
        InputError: they are missing, quantized, or of different sizes.
    """
    found = outer_names(directory, sizes[1])
    tensors = read_tensors_of(directory, found, tuple(found.names))
    if "output" in tensors and same_values(tensors["embeddings"], tensors["output"]):
        del tensors["output"]
    for field in {"embeddings", "output"} & tensors.keys():
        if (shape := tuple(tensors[field].shape)) != sizes:
            what = f"{directory} with {found.names[field]} of {shape[0]} x {shape[1]}"
            raise InputError("model", what, f"{sizes[0]} x {sizes[1]}, as config.json says", REMEDY)
    # One after the other: of a large target not everything is held in both types.
    moved = {field: tensors.pop(field).to(device, dtype) for field in list(tensors)}
    return OuterWeights(**{"output": moved["embeddings"], **moved})


def read_tensors_of(directory: Path, found: OuterNames, fields: tuple[str, ...]) -> dict[str, Tensor]:
    """Read the tensors of these fields that there are; raise InputError if one is quantized."""
    tensors = {}
    for field, name in found.names.items():
        if field in fields:
            with open_tensors(found.files[name], REMEDY) as opened:
                tensors[field] = opened.get_tensor(name).clone()
            if tensors[field].dtype not in FLOATS:
                raise quantized(directory, f"{name} in {tensors[field].dtype}")
    return tensors
