"""Targets in GGUF: dequantized once into a directory of transformers' files beside the file.

The file's own weights are used, quantization error included: a head then learns from the states of the model that
llama.cpp serves. Quantized tensors are stored as float32, which holds their values exactly.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.gguf import HEADS, directory_name, head_from_gguf, read_layers, reordered
from draftsmith.modules.formats.llama import to_halves
from draftsmith.modules.llama_config import llama_sizes
from draftsmith.modules.pretrained.files import cache_folder, make_directory, whole_directory, write_json, write_tensors
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.llama import empty_model
from draftsmith.modules.targets.shape import llama_config
from draftsmith.modules.types import InputError, describe_error

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from numpy.typing import DTypeLike

logger = logging.getLogger("draftsmith")

STORED = {"F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = ("I8", "I16", "I32", "I64")
RECORD = "gguf.json"  # in the directory: the file's hash and how many of its tensors have each type
SHARD_BYTES = 4 << 30
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Texts of tokens at which llama.cpp ends an answer, whatever the file's metadata say (src/llama-vocab.cpp).
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "<|end_of_text|>",
    "<end_of_turn>", "<end_of_utterance>", "<eos>",
)  # fmt: skip
# Settings of an architecture that are read here or by `read_rope`, those that llama.cpp does not compute with either,
# and those under which its layers are ours.
READ = (
    "context_length", "embedding_length", "feed_forward_length", "block_count", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale_linear",
)  # fmt: skip
UNREAD = (
    "vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "attention.sliding_window",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
)  # fmt: skip
PLAIN_VALUES = {
    "expert_count": 0, "expert_used_count": 0, "attention.causal": True,
    "rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": 6,  # of Gemma 3, which newer files name
}  # fmt: skip
# Architectures that transformers dequantizes, with the settings that it reads, each of which has another default there,
# and those that must have the value it takes for granted: 256 is the number that Gemma 3 divides its attention's logits
# by the root of. The larger Gemmas 3 scale their positions, which it does not read.
THEIRS = {"gemma3": READ[:10] + ("attention.sliding_window",)}
THEIR_VALUES = {"attention.key_length": 256, "attention.value_length": 256}
# Rules of llama.cpp by which text is split as GPT-2 does, or as GPT-2 does with each digit alone, which is the same for
# a vocabulary that was learned so.
GPT2_SPLITS = ("gpt-2", "mpt", "olmo", "jais", "phi-2", "smollm", "starcoder", "refact", "command-r", "codeshell")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
LEAST_BYTES = (24, 13)  # of a tensor's and of a setting's entry in the file
LEAST_ITEM = 8  # bytes of a text, or of an array inside one
MOST_ITEMS = 2**22  # of an array: ten times the merges of a large vocabulary
REMEDY = "Use a GGUF file of Llama, Mistral, Qwen2, Qwen3 or a small Gemma 3, or the model's transformers directory."


def gguf_package() -> ModuleType:
    """Import the package `gguf`; raise InputError naming the extra that installs it."""
    try:
        import gguf
    except ImportError as error:
        remedy = 'pip install "draftsmith[llamacpp]"'
        raise InputError("gguf", "the package is not installed", "it, to read and write GGUF", remedy) from error
    return gguf


def dequantized_directory(file: Path) -> Path:
    """Return a directory with transformers' files of a GGUF model; write it at first, and when the file changes.

    It lies beside the file, or in the user's cache if nothing can be written there.

    Raises:
        InputError: no GGUF file, or an architecture or a setting that the lean engine does not compute.
    """
    stat = file.stat()
    stamp = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    directory = file.with_name(f"{file.name}.dequantized")
    if read_record(directory).get("stamp") == stamp:
        return directory
    try:
        lock = FileLock(f"{directory}.lock")
        lock.acquire()
    except OSError:
        directory = make_directory(cache_folder("gguf")) / hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]
        lock = FileLock(f"{directory}.lock")
        lock.acquire()
    # All ranks of a job arrive here: one writes, the others wait for it.
    try:
        record = read_record(directory)
        if record.get("stamp") == stamp:
            return directory
        # What is not read is refused before a large file is hashed.
        fields, tensors = open_gguf(file)
        if (kind := fields.get("general.architecture")) not in (known := [*CLASSES, *THEIRS]):
            raise InputError("model", f"{file} of architecture {kind}", f"one of {', '.join(known)}", REMEDY)
        sha256 = file_sha256(file)
        if record.get("sha256") == sha256:
            write_json(directory / RECORD, record | {"stamp": stamp})
            return directory
        logger.info("dequantizing %s into %s, once", file.name, directory)
        with whole_directory(directory) as partial:
            types = _write_model(file, partial, fields, tensors)
            write_json(partial / RECORD, {"file": file.name, "sha256": sha256, "types": types, "stamp": stamp})
    finally:
        lock.release()
    return directory


def read_record(directory: Path) -> dict[str, Any]:
    """Return the record in a directory that `dequantized_directory` wrote; {} in any other."""
    try:
        return read_object(directory / RECORD, {"sha256": str, "types": {"*": int}})
    except (OSError, InputError):
        return {}


def quantization(directory: Path) -> str | None:
    """Return the hash and tensor types of the GGUF file behind a directory, None for other models."""
    record = read_record(directory)
    if not record:
        return None
    return f"{record['sha256'][:16]}: {', '.join(f'{count} {name}' for name, count in record['types'].items())}"


def open_gguf(file: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Return the metadata of a GGUF file, and its tensors as the package `gguf` maps them, by name."""
    gguf_package()
    try:
        reader = bounded_reader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        # The reader trusts the file's numbers: damage shows as an index, a value or a type.
        found = f"{file} ({describe_error(error)})"
        raise InputError("model", found, "a whole GGUF file", "Fetch it again.") from error
    if (parts := fields.get("split.count", 1)) > 1:
        found = f"{file}, part {fields.get('split.no', 0) + 1} of {parts} of a split file"
        raise InputError("model", found, "a whole GGUF file", "Join the parts: llama-gguf-split --merge.")
    tensors = sorted(reader.tensors, key=lambda tensor: tensor.data_offset)
    for first, second in itertools.pairwise(tensors):
        if first.data_offset + first.n_bytes > second.data_offset:
            found = f"{file} with {first.name} and {second.name} at one place"
            raise InputError("model", found, "a whole GGUF file", "Fetch it again.")
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def bounded_reader(file: Path) -> GGUFReader:
    """Return the reader of the package `gguf`, which raises EOFError where a count leads beyond the file's end.

    Its own class goes on behind the end: an array of 2^62 numbers would take as many rounds, and memory for each.
    """

    types = gguf_package().GGUFValueType

    class BoundedReader(gguf_package().GGUFReader):  # type: ignore[misc]
        def _get(self, offset: int, dtype: DTypeLike, count: int = 1, *order: object, **named: object) -> np.ndarray:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            numbers = super()._get(offset, dtype, min(int(count), len(self.data)), *order, **named)
            if (offset, end) == (8, 24):  # the numbers of tensors and of settings
                end += sum(int(number) * least for number, least in zip(numbers, LEAST_BYTES, strict=True))
            if end > len(self.data):
                raise EOFError(f"entries of {end:,} bytes in {len(self.data):,}")
            return numbers

        def _get_field_parts(self, offset: int, kind: int) -> tuple[object, ...]:
            if kind == types.ARRAY:
                (item,), (count,) = self._get(offset, np.uint32), self._get(offset + 4, np.uint64)
                number = self.gguf_scalar_to_np.get(types(item))
                size = int(count) * (LEAST_ITEM if number is None else np.dtype(number).itemsize)
                if size > len(self.data) - offset or count > MOST_ITEMS:
                    raise EOFError(f"an array of {count:,} items in {len(self.data):,} bytes")
            return super()._get_field_parts(offset, kind)

    return BoundedReader(file)


def read_tensor(tensor: ReaderTensor) -> Tensor:
    """Return a tensor of a GGUF file, as `open_gguf` maps it, in float32, or its integers."""
    if tensor.tensor_type.name in INTEGERS:
        return torch.from_numpy(tensor.data.copy())
    return torch.from_numpy(gguf_package().quants.dequantize(tensor.data, tensor.tensor_type).copy())


def read_gguf_head(file: Path) -> Package:
    """Read a head's GGUF file as a directory in vLLM's layout; quantized weights become float32."""
    metadata, found = open_gguf(file)
    kind = metadata.get("general.architecture")
    if kind not in HEADS:
        raise InputError(str(file), f"GGUF of {kind}", f"a head's: {' or '.join(HEADS)}", "Check the path.")
    if not found:
        raise InputError(str(file), "GGUF without tensors", "a head's weights", "Fetch the file again.")
    tensors = {name: (tensor.tensor_type.name, read_tensor(tensor)) for name, tensor in found.items()}
    stored = {
        name: values if kind in INTEGERS else values.to(STORED.get(kind, torch.float32))
        for name, (kind, values) in tensors.items()
    }
    return head_from_gguf(metadata, stored)


def is_gguf_model(file: Path) -> bool:
    """Return whether a GGUF file is a whole model, and no head."""
    return open_gguf(file)[0].get("general.architecture") in {**CLASSES, **THEIRS}


def copied_metadata(file: Path) -> dict[str, tuple[object, ...]]:
    """Return all metadata of a GGUF file as `write_gguf` takes them, with their types."""
    fields = bounded_reader(file).fields
    return {
        name: (field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for name, field in fields.items()
    }


def _write_model(
    file: Path, directory: Path, fields: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]
) -> dict[str, int]:
    """Write config, weights and tokenizer of a GGUF file; return how many of its tensors have each type."""
    if fields["general.architecture"] in THEIRS:
        config, weights = _read_theirs(file, fields, len(tensors))
    else:
        config = _read_config(file, fields, tensors)
        weights = _read_weights(file, config, tensors)
    _write_tokenizer(file, directory, fields)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    for name, weight in weights:
        # A shard at a time: a model of 8B is 32 GB in float32.
        if shard and sum(tensor.nbytes for tensor in shard.values()) + weight.nbytes > SHARD_BYTES:
            weight_map |= _write_shard(directory, len(set(weight_map.values())), shard)
            shard = {}
        shard[name] = weight
    weight_map |= _write_shard(directory, len(set(weight_map.values())), shard)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"eos_token_id": _end_tokens(fields)})
    return dict(collections.Counter(tensor.tensor_type.name for tensor in tensors.values()))


def _read_theirs(
    file: Path, fields: Mapping[str, Any], num_tensors: int
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return config and weights of a GGUF model as transformers dequantizes it, every tensor."""
    from transformers import AutoModelForCausalLM

    kind = fields["general.architecture"]
    for name in THEIRS[kind]:
        value = fields.get(f"{kind}.{name}")
        if not value or value != THEIR_VALUES.get(name, value):  # a window of 0 is none
            found = f"{file} with {kind}.{name} {value}"
            raise InputError("model", found, str(THEIR_VALUES.get(name, "a number above 0")), REMEDY)
    _check_metadata(file, kind, fields, THEIRS[kind])
    expected = "settings and tensors of a plain model of its architecture"
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32, trust_remote_code=False,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as error:  # settings and tensors of another type fail in many ways
        raise InputError("model", f"{file} ({describe_error(error)})", expected, REMEDY) from error
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    # transformers fills them with random numbers and only warns.
    absent = sorted([*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])])
    if absent or len(weights) != num_tensors:
        found = f"{file} with {num_tensors} tensors, of which transformers reads {len(weights) - len(absent)}"
        raise InputError("model", ", not ".join([found, *absent[:1]]), expected, REMEDY)
    config = {
        "architectures": [type(model).__name__],
        **model.config.to_diff_dict(),
        "eos_token_id": _end_tokens(fields),
    }
    del config["quantization_config"]
    return config, iter(weights.items())


def _write_shard(directory: Path, number: int, shard: Mapping[str, Tensor]) -> dict[str, str]:
    name = f"model-{number + 1:05d}.safetensors"
    write_tensors(directory / name, shard, {"format": "pt"})
    return dict.fromkeys(shard, name)


def _read_config(file: Path, fields: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    """Return transformers' `config.json` of a GGUF model."""
    kind = fields["general.architecture"]
    names = {name: directory_name("model", name) for name in tensors if name != "rope_freqs.weight"}
    if unknown := sorted(name for name, ours in names.items() if ours is None):
        found = f"{file} with {len(unknown)} tensors of another design ({', '.join(unknown[:3])})"
        raise InputError("model", found, "the tensors of a Llama-family model", REMEDY)
    _check_metadata(file, kind, fields, READ + UNREAD)
    shapes = {
        str(ours).removeprefix("model."): tuple(map(int, reversed(tensors[name].shape))) for name, ours in names.items()
    }
    vocab_size = shapes.get("embed_tokens.weight", (0,))[0]
    if (num_tokens := len(fields.get("tokenizer.ggml.tokens") or [])) > vocab_size:
        found = f"{file} with {num_tokens:,} tokens and {vocab_size:,} rows of token_embd.weight"
        raise InputError("model", found, "a row for each token", REMEDY)
    divisors = tensors.get("rope_freqs.weight")
    try:
        layers = read_layers(kind, fields, None if divisors is None else torch.from_numpy(divisors.data.copy()))
    except InputError as error:
        raise error.within(str(file), REMEDY) from error
    config = {
        **layers,
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        # LlamaConfig's own default for an absent id is 1.
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(fields),
        "dtype": "float32",
    }
    if config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["embed_tokens.weight"]
    empty_model(llama_config(config), shapes, str(file))
    return config


def _check_metadata(file: Path, kind: str, fields: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise InputError for a setting of the architecture that nothing computes with."""
    for name, value in fields.items():
        setting = name.removeprefix(f"{kind}.")
        if setting == name or setting in known or value == PLAIN_VALUES.get(setting):
            continue
        raise InputError("model", f"{file} with {name} {str(value)[:80]}", f"settings of plain {kind} layers", REMEDY)


def _read_weights(
    file: Path, config: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]
) -> Iterator[tuple[str, Tensor]]:
    """Dequantize one tensor after the other, under transformers' names."""
    llama = llama_sizes(config)
    for name, tensor in tensors.items():
        ours = directory_name("model", name)
        if ours is None:
            continue
        try:
            weight = read_tensor(tensor)
        except NotImplementedError as error:
            found = f"{file} with {name} in {tensor.tensor_type.name}"
            raise InputError("model", found, "a type that the package gguf dequantizes", REMEDY) from error
        yield ours, reordered(config["model_type"], ours, weight, llama, to_halves).contiguous()


def _end_tokens(fields: Mapping[str, Any]) -> list[int]:
    """Return the ids at which llama.cpp ends an answer: those of the metadata, and those of known texts."""
    ids = [fields[key] for name in END_KEYS if (key := f"tokenizer.ggml.{name}") in fields]
    tokens = fields.get("tokenizer.ggml.tokens") or []
    known = set(END_TEXTS)
    return list(dict.fromkeys([*ids, *(number for number, text in enumerate(tokens) if text in known)]))


def _write_tokenizer(file: Path, directory: Path, fields: Mapping[str, Any]) -> None:
    """Write the file's tokenizer and chat template as transformers rebuilds them, and compare the vocabulary."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, trust_remote_code=False)
    except Exception as error:
        found = f"{file} ({describe_error(error)})"
        raise InputError("tokenizer", found, "one that transformers reads from GGUF", REMEDY) from error
    tokens = fields["tokenizer.ggml.tokens"]
    # Runs of spaces: llama.cpp's files have them as spaces, SentencePiece as its sign of one.
    spelled = [text.replace(" ", "▁") for text in tokens] if fields.get("tokenizer.ggml.model") == "llama" else tokens
    wrong = [number for number, text in enumerate(spelled) if tokenizer.convert_tokens_to_ids(text) != number]
    if wrong:
        found = f"{file}, of whose tokens transformers numbers {len(wrong)} otherwise ({tokens[wrong[0]]!r})"
        raise InputError("tokenizer", found, "the file's own numbers", REMEDY)
    tokenizer.save_pretrained(str(directory))
    # A tokenizer's class adds its default special tokens, with ids behind the vocabulary: this one adds none.
    settings, content = directory / "tokenizer_config.json", directory / "tokenizer.json"
    kept = read_object(settings, {})
    known = set(tokens)
    kept = {name: value for name, value in kept.items() if not (name.endswith("_token") and value not in known)}
    write_json(settings, kept | {"tokenizer_class": "PreTrainedTokenizerFast"})
    fast = read_object(content, {"added_tokens": [{"id": int}]})
    splits = fields.get("tokenizer.ggml.pre")
    # transformers falls back to GPT-2's rule. llama.cpp has a rule of its own where none is named.
    if (fast.get("pre_tokenizer") or {}).get("type") == "ByteLevel" and splits not in GPT2_SPLITS:
        found = f"{file} with tokenizer.ggml.pre {splits or 'missing'}"
        raise InputError("tokenizer", found, "a rule of splitting text that transformers has", REMEDY)
    fast["added_tokens"] = [token for token in fast["added_tokens"] if token["id"] < len(tokens)]
    write_json(content, fast)
