"""A model directory, opened once: what a command wants to know of a model's files is read in one place."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftsmith.modules.formats.base import TargetFacts, same_values
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.pretrained.auto import read_config
from draftsmith.modules.pretrained.gguf import RECORD, quantization
from draftsmith.modules.pretrained.hub import model_directory
from draftsmith.modules.pretrained.identity import encoding_hash, model_identity, template_hash
from draftsmith.modules.pretrained.outer import EMBEDDINGS, OUTPUTS, outer_names
from draftsmith.modules.pretrained.quantized import ACTIVATION, COMPUTED, SERVED, Quantized, decide
from draftsmith.modules.pretrained.reading import (
    FETCH,
    StoredTensor,
    read_model_json,
    tensor_headers,
    weight_map,
    whole_file,
)
from draftsmith.modules.pretrained.tokenizers import TOKENIZERS, end_tokens, read_tokenizer
from draftsmith.modules.targets.base import CausalLM, ModelInfo
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.targets.shape import (
    ON_HF,
    TargetShape,
    family_of,
    own_shape,
    plain_shape,
    stated_dtype,
    text_config,
)
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger("draftsmith")

INDEX = "model.safetensors.index.json"
# What is read of config.json before a model is built, which checks the rest.
SIZES = {f"{name}?": (int, None) for name in ("vocab_size", "hidden_size", "max_position_embeddings")}
CONFIG = {**SIZES, "model_type?": (str, None), "text_config?": (SIZES, None)}
# Settings of multimodal models.
MEDIA_TOKEN = re.compile(r"(image|video|audio)_token_(id|index)$")
# Tensors of modules for speculative decoding, which servers load, and of layers, whose number says if they are some.
LEFTOVER = re.compile(r"(?:(?:model|language_model)\.)*(?:mtp[._]|layers\.(\d+)\.)")


class Checkpoint:
    """A model in transformers' layout, opened once. Each part is read when it is first asked for, and kept.

    path: as the user named it: a directory, a GGUF file, a hub id, or a shipped model.
    directory: where it is, after a download and links.
    trust_remote_code: code that the model brings may tell its settings.

    Raises:
        InputError: there is no such model. Every part raises it for files that are missing, damaged or contradictory.
    """

    def __init__(self, path: str | Path, trust_remote_code: bool = False):
        self.path, self.trust_remote_code = str(path), trust_remote_code
        # Once: a link may change.
        self.directory = model_directory(self.path).resolve()
        self._opened: dict[Path, safe_open] = {}

    # -- config.json

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_model_json(self.directory / "config.json", CONFIG)

    @cached_property
    def known(self) -> PreTrainedConfig:
        """config.json as transformers reads it (`auto.read_config`)."""
        return read_config(self.directory, self.config, self.trust_remote_code)

    @cached_property
    def text(self) -> dict[str, Any]:
        """The settings of the text part, with the defaults of its family, which files leave out (Gemma 3).

        Of a family that transformers does not know they are those of config.json.
        """
        config = text_config(self.config)
        with contextlib.suppress(Exception):  # each family refuses in its own way
            return {**config, **self.known.get_text_config().to_dict()}
        return config

    @property
    def family(self) -> str:
        """The model type of the text part (`family_of`)."""
        return family_of(self.config)

    @cached_property
    def shape(self) -> TargetShape:
        """The sizes of the model, with the decoder layer that its heads have: its own, or a plain one.

        Embeddings are tied only if the files hold no other lm_head: transformers and vLLM keep an lm_head of its own,
        whatever `tie_word_embeddings` says.
        """
        shape = own_shape(self.config) or plain_shape(self.text)
        if not shape.tie_embeddings:
            return shape
        names = self._outer_names(shape.hidden_size)
        if not names.keys() >= {"embeddings", "output"}:
            return shape
        embeddings, output = (self.read_float(names[field]) for field in ("embeddings", "output"))
        return shape if same_values(embeddings, output) else dataclasses.replace(shape, tie_embeddings=False)

    @cached_property
    def dtype(self) -> str:
        """The type of the weights that config.json names; else, as transformers decides, that of the files."""
        if (stated := stated_dtype(self.config)) is not None:
            return stated
        stored = self.tensors.get(self._outer_names(self.shape.hidden_size).get("embeddings", ""))
        return COMPUTED.get(stored.dtype, "float32") if stored else "float32"

    @cached_property
    def facts(self) -> TargetFacts:
        """Facts of the model that formats need, without its tensors."""
        return TargetFacts(self.config)

    # -- weights

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files: one, or the shards of an index."""
        directory = self.directory
        whole, index = directory / "model.safetensors", directory / INDEX
        named = sorted(set(weight_map(index).values())) if index.exists() else []
        # An index that names the file too has a module that was added beside it: servers read both, transformers needs
        # the file alone. One of shards that are not here was left by an earlier save.
        if whole.exists() and whole.name not in named:
            if here := [name for name in named if (directory / name).is_file()]:
                remedy = "vLLM and SGLang read the shards, transformers the file: keep those that are meant."
                raise InputError("model", f"{directory} with {whole.name} and {here[0]}", "one of them", remedy)
            return [whole]
        if named:
            files = [directory / name for name in named]
            if outside := [file.name for file in files if file.parent != directory or file.name in ("", "..")]:
                raise InputError(
                    str(index), f"a shard in another place ({outside[0]})", "files of the directory", FETCH
                )
            if absent := [file.name for file in files if not file.is_file()]:
                found = f"{directory} with {len(absent)} of {len(files)} shards missing ({absent[0]})"
                raise InputError("model", found, "all shards of the index", FETCH)
            return files
        # Without an index, what lies beside shards (model-old.safetensors) is none of them.
        files = sorted(directory.glob("model-?????-of-?????.safetensors")) or sorted(
            directory.glob("model*.safetensors")
        )
        if not files:
            remedy = "Save it as safetensors first."
            raise InputError("model", f"{directory} without safetensors", "model*.safetensors", remedy)
        return files

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of the files by its name, from their headers. Of a name in two files, the last one."""
        stored: dict[str, StoredTensor] = {}
        for file in self.files:
            stored |= tensor_headers(file, FETCH)
        return stored

    @cached_property
    def quantized(self) -> Quantized:
        """The form in which the weights are stored, and the engines that compute them (`quantized.decide`)."""
        other = self.directory / "hf_quant_config.json"
        return decide(self.config, read_model_json(other) if other.exists() else {}, self.tensors)

    def check_weights(self, by_transformers: bool = False) -> None:
        """Raise InputError if numbers would be read without their scales. by_transformers: transformers reads them."""
        own = self.quantized
        if own.problem or (own.by_transformers and not by_transformers):
            raise own.error(self.directory, own.problem, SERVED if own.problem else ON_HF)

    @cached_property
    def weights(self) -> list[str]:
        """Names of the weights that layers compute with; what is stored with quantized ones is none of them."""
        parts = {name for names in self.quantized.weights.values() for name in names.values()}
        plain = [name for name in self.tensors if name not in parts and not ACTIVATION.search(name)]
        return [*plain, *self.quantized.weights]

    def state(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Map all weights but `leftovers` by their names. They share the files' pages, for models of many gigabytes:
        cutting such a file later ends the process, and writing to it changes the weights.

        dtype: of quantized weights, which are computed.
        """
        if (own := self.quantized).weights:
            about = f"{len(own.weights)} weights in {str(dtype).removeprefix('torch.')} from their scales"
            logger.info("%s is quantized (%s): computing %s. A server may round layers' inputs, too (docs/models.md)",
                        self.directory, own.method, about)  # fmt: skip
        self.log_unread()
        left_out = set(self.leftovers)
        names = [name for name in self.weights if name not in left_out]
        return {name: self.view(name).to(dtype) if name in own.weights else self._map(name) for name in names}

    def log_unread(self, others: Iterable[str] = ()) -> None:
        """Log which tensors of the files no engine loads: others, for which config.json has no place, and leftovers."""
        if names := [*sorted({*others} - {*self.leftovers}), *self.leftovers]:
            shown = ", ".join(names[:4])
            logger.warning("%d tensors of %s are no part of the model, and not read: %s", len(names), self.path, shown)

    @cached_property
    def leftovers(self) -> list[str]:
        """Names of tensors that belong to no layer of the model.

        Those behind the last one are of MTP modules, which transformers does not load either. AutoGPTQ writes a bias of
        zeros beside every quantized weight.
        """
        count = text_config(self.config).get("num_hidden_layers") or self.shape.num_layers
        named = {name: LEFTOVER.match(name) for name in self.weights}
        behind = [name for name, match in named.items() if match and (match[1] is None or int(match[1]) >= count)]
        packed = (parts["qweight"] for parts in self.quantized.weights.values() if "qweight" in parts)
        biases = (name for own in packed if (name := own.removesuffix("qweight") + "bias") in self.tensors)
        return [*behind, *(name for name in biases if name not in behind and not self._map(name).any())]

    def view(self, name: str) -> Tensor:
        """Return a weight by its name: a quantized one in float32, any other sharing the file's pages."""
        parts = self.quantized.weights.get(name)
        if parts is None:
            return self._map(name)
        return self.quantized.compute(name, {part: self._map(stored) for part, stored in parts.items()})

    def _map(self, name: str) -> Tensor:
        file = self.tensors[name].file
        with whole_file(file, FETCH):
            if file not in self._opened:
                self._opened[file] = safe_open(file, framework="pt")
            tensor: Tensor = self._opened[file].get_tensor(name)
        return tensor

    def read_float(self, name: str) -> Tensor:
        """Read a weight by its name, a quantized one in float32; raise InputError if its scales are unknown."""
        if name not in self.quantized.weights and (stored := self.tensors[name]).dtype not in COMPUTED:
            raise self.quantized.error(self.directory, f"{name} in {stored.dtype}")
        return self.view(name).clone()

    def read_tensors(self, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
        """Read the tensors whose names, without the base model's prefix `model.`, begin with one of these.

        Raises:
            InputError: one of them is quantized.
        """
        names = {name.removeprefix("model."): name for name in self.weights}
        return {bare: self.read_float(name) for bare, name in names.items() if bare.startswith(prefixes)}

    @cached_property
    def outer_names(self) -> dict[str, str]:
        """Names in the files of the weights around the layers, by field of `OuterWeights`."""
        size = self.shape.hidden_size
        names = self._outer_names(size)
        if "embeddings" not in names:
            raise InputError("model", f"{self.directory} without an embedding of width {size}", "one", FETCH)
        return names

    def _outer_names(self, hidden_size: int) -> dict[str, str]:
        shapes = {name: self.tensors[name].shape for name in self.weights if name in self.tensors}
        # The headers of quantized weights do not have their shapes.
        quantized = [name for name in self.quantized.weights if name.split(".")[-2] in (*EMBEDDINGS, *OUTPUTS)]
        return outer_names(shapes | {name: tuple(self.view(name).shape) for name in quantized}, hidden_size)

    def read_outer(self, fields: Sequence[str]) -> dict[str, Tensor]:
        """Read the weights of these fields of `OuterWeights` that there are; raise InputError if one is quantized."""
        return {field: self.read_float(name) for field, name in self.outer_names.items() if field in fields}

    # -- tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """True if the directory holds a tokenizer's files."""
        return any((self.directory / name).exists() for name in TOKENIZERS)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Who changes its chat template takes a copy."""
        if not self.has_tokenizer:
            found = f"{self.path} without tokenizer files"
            raise InputError("tokenizer", found, "tokenizer.json", "Save the tokenizer there.")
        return read_tokenizer(self.directory, self.config, self.path)

    @cached_property
    def tokenizer_identity(self) -> dict[str, str]:
        """Content hashes: `tokenizer` (vocabulary with special tokens), `encoding` (everything that turns text into
        ids) and `chat_template`."""
        # Two models must share this map of texts to ids, special tokens included, to compare token ids.
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return {
            "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
            "encoding": encoding_hash(self.directory),
            "chat_template": template_hash(self.tokenizer),
        }

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer (`tokenizers.end_tokens`)."""
        return end_tokens(self.directory, text_config(self.config), self.tokenizer if self.has_tokenizer else None)

    @cached_property
    def media_tokens(self) -> list[str]:
        """Tokens in whose place a multimodal model reads an image, a video or sound."""
        named = [value for name, value in text_config(self.config).items() if MEDIA_TOKEN.match(name)]
        ids = [own for own in named if type(own) is int and 0 <= own < len(self.tokenizer)]
        return list(self.tokenizer.convert_ids_to_tokens(ids))

    def text_identity(self, recorded: Mapping[str, object] | None = None) -> dict[str, str]:
        """Return the hashes that token ids of text depend on. recorded: see `template_identity`."""
        own = self.tokenizer_identity
        return {name: own[name] for name in ("tokenizer", "encoding")} | self.template_identity(recorded or {})

    def template_identity(self, recorded: Mapping[str, object]) -> dict[str, str]:
        """Return the hash of the model's own chat template, if the recorded identity has that of one."""
        return {"own_template": self.tokenizer_identity["chat_template"]} if "own_template" in recorded else {}

    # -- all of it

    @cached_property
    def identity(self) -> dict[str, str]:
        """Content hashes of the model, whatever engine runs it."""
        output = None
        # An embedding of another width, with a projection behind it (OPT), is found by no name.
        with contextlib.suppress(InputError):
            output = self.outer_names.get("output", self.outer_names["embeddings"])
            output = next(iter(self.quantized.weights.get(output, {"": output}).values()))
        identity = model_identity(self.config, self.tensors, output, self.directory.glob("*.py"))
        if (self.directory / RECORD).exists() and (stored_as := quantization(self.directory)) is not None:
            identity["gguf"] = stored_as
        if self.has_tokenizer:
            identity["tokenizer"] = self.tokenizer_identity["tokenizer"]
        return identity

    @cached_property
    def info(self) -> ModelInfo:
        """Sizes and identity of the model, which it has once it is loaded."""
        shape = self.shape
        return ModelInfo(
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            num_layers=shape.num_layers,
            max_position=shape.max_position,
            eos_ids=self.end_tokens,
            identity=self.identity,
            files=self,
        )


def opened(model: str | Path | Checkpoint) -> Checkpoint:
    """Return a model that is open, or open the one of this name."""
    return model if isinstance(model, Checkpoint) else Checkpoint(model)


def load_tokenizer(model: str | Path | Checkpoint) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model."""
    return opened(model).tokenizer


def checkpoint_of(lm: CausalLM) -> Checkpoint:
    """Return the files that a model was loaded from; InputError if it was built in Python."""
    if not isinstance(lm.info.files, Checkpoint):
        found = "a model that was built in Python"
        raise InputError("target", found, "one of draftsmith.load_target", "Save it, and load it by its directory.")
    return lm.info.files


def shape_of(lm: CausalLM) -> LlamaConfig:
    """Return the sizes of a loaded model, or of a lean one that was built in Python."""
    return lm.config if isinstance(lm, LlamaLM) and lm.info.files is None else checkpoint_of(lm).shape


def check_same_tokenizer(target: Checkpoint, draft: Checkpoint, flag: str = "head") -> None:
    """Raise InputError if two models give token ids another meaning. flag: option that named the draft."""
    target_hash, draft_hash = (model.tokenizer_identity["tokenizer"] for model in (target, draft))
    if target_hash != draft_hash:
        found, expected = f"{draft.path} with tokenizer {draft_hash}", f"the tokenizer of {target.path} ({target_hash})"
        raise InputError(flag, found, expected, "Use a draft of the same family.")
