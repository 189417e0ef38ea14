"""Content hashes that identify a model and its tokenizer, with per-file digests cached in the user's cache.

A digest is computed over the values in bfloat16: the same weights have the same hash in other shards, under other file
names and in other floating-point types. (Two float32 checkpoints share a hash only if every weight rounds to the same
bfloat16 number.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.modules.pretrained.checkpoint import FLOATS, REMEDY, checkpoint_files, read_model_json
from draftsmith.modules.pretrained.files import CannotWrite, cache_folder, make_directory, write_json
from draftsmith.modules.pretrained.reading import open_tensors
from draftsmith.modules.targets.shape import text_config

VERSION = 1  # of a cached file's content
THREADS = 4  # each reads and hashes one tensor at a time, about 1 GB/s
NOTE_FROM_BYTES = 4e9  # hashing that takes long enough to be logged
# A file written less than this before it was read may be written again without a change of its time.
SETTLED_NS = 2_000_000_000
# Ends of the names of output embeddings.
OUTPUT_NAMES = ("lm_head.weight", "embed_out.weight")
# Files that decide how text becomes ids where there is no tokenizer.json, and settings that change it.
TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)

# Fields of config.json with the number of MTP modules.
MTP_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")

logger = logging.getLogger("draftsmith")
SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens", "do_lower_case")


class TensorDigest(NamedTuple):
    """Digest of one tensor. kind: `float`, or the dtype. sha256: of the values' bytes, floats in bfloat16."""

    shape: tuple[int, ...]
    kind: str
    sha256: str


def model_identity(directory: Path, config: Mapping[str, Any], outputs: Iterable[str]) -> dict[str, str]:
    """Hash a model's config, tensors, output embedding and own code, independent of engine, dtype and sharding.

    An MTP module in the same files is no part of it: another one drafts for the same model.

    config: config.json. outputs: names that the output embedding may have in the files, the likeliest first.
    """
    last = text_config(config).get("num_hidden_layers")
    # inv_freq is computed, and stored by old versions of transformers only.
    by_name = {
        _bare_name(name): digest
        for file in checkpoint_files(directory)
        for name, digest in file_digests(file).items()
        if not name.endswith("rotary_emb.inv_freq") and not _bare_name(name).startswith(("mtp.", f"layers.{last}."))
    }
    # Files of a model that ties its embeddings may hold the output embedding or not: a copy is not counted.
    others = {digest for name, digest in by_name.items() if not name.endswith(OUTPUT_NAMES)}
    counted = [
        (name, *digest)
        for name, digest in sorted(by_name.items())
        if not (name.endswith(OUTPUT_NAMES) and digest in others)
    ]
    weights = hashlib.sha256(json.dumps(counted).encode()).hexdigest()[:16]
    identity = {"config": config_hash(config), "weights": weights, "layers": "final-norm"}
    output = next((by_name[_bare_name(name)] for name in outputs if _bare_name(name) in by_name), None)
    if output is not None:
        identity["lm_head"] = output.sha256[:16]
    if "auto_map" in config:
        code = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.glob("*.py")}
        identity["code"] = _hash(code)
    return identity


def captured(identity: Mapping[str, str], layers: Sequence[int]) -> dict[str, str]:
    """Return the target's identity with the layers whose residual states are read; () is the final norm."""
    return {**identity, "layers": ",".join(map(str, layers))} if layers else dict(identity)


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash config.json without the bookkeeping fields that saving changes, and the numbers of MTP modules."""
    skipped = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", *MTP_COUNTS)
    kept = {key: value for key, value in config.items() if key not in skipped}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = {key: value for key, value in text.items() if key not in MTP_COUNTS}
    return _hash(kept)


def tensor_hash(tensor: torch.Tensor) -> str:
    """Hash a tensor's values in bfloat16, so that the dtype it was loaded in does not count."""
    return hashlib.sha256(_value_bytes(tensor.detach().to("cpu"), "float")).hexdigest()[:16]


def template_hash(tokenizer: Any) -> str:
    return _hash(tokenizer.chat_template)


def encoding_hash(directory: Path) -> str:
    """Hash everything in a tokenizer's files that turns text into ids: vocabulary, merges, normalization, splitting,
    added tokens and switches. Padding, truncation and file layout do not count."""
    content: dict[str, Any] = {}
    fast, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if fast.exists():
        skipped = ("version", "truncation", "padding")
        content = {key: _normalized(value) for key, value in read_model_json(fast).items() if key not in skipped}
    else:
        files = [file for name in TOKENIZER_FILES if (file := directory / name).exists()]
        files += sorted([*directory.glob("*.tiktoken"), *directory.glob("*.bpe"), *directory.glob("tokenization*.py")])
        content = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    if settings.exists():
        switches = read_model_json(settings)
        content |= {f"set_{name}": switches[name] for name in SWITCHES if switches.get(name) is not None}
    return _hash(content)


def _normalized(value: Any) -> Any:
    """Drop fields that are null or false, and write merges as pairs: versions of tokenizers differ in both."""
    if isinstance(value, dict):
        if "merges" in value:
            merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in value["merges"]]
            value = {**value, "merges": merges}
        # A field that is off and one that is absent mean the same.
        fields = {key: _normalized(own) if isinstance(own, dict | list) else own for key, own in value.items()}
        return {key: inner for key, inner in fields.items() if inner is not None and inner is not False}
    if isinstance(value, list):
        return [_normalized(own) if isinstance(own, dict | list) else own for own in value]
    return value


def file_digests(file: Path) -> dict[str, TensorDigest]:
    """Hash every tensor of a safetensors file. The digests are cached until the file is written again."""
    # ctime, unlike mtime, cannot be set back (cp -p, rsync -t).
    stat = file.stat()
    times = {"mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}
    stamp = {"version": VERSION, "size": stat.st_size, **times, "inode": stat.st_ino}
    folder = cache_folder("digests")
    # The hub's cache links one content from several places: the file behind the links is the key.
    entry = folder / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"
    # An absent or damaged entry is made again.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(entry.read_text("utf-8"))
        if content["stamp"] == stamp:
            return {name: TensorDigest(tuple(shape), *rest) for name, (shape, *rest) in content["tensors"].items()}

    if stat.st_size > NOTE_FROM_BYTES:
        logger.info("hashing %s, %.0f GB, once", file.name, stat.st_size / 1e9)

    def digest(name: str) -> TensorDigest:
        tensor = opened.get_tensor(name)
        kind = "float" if tensor.dtype in FLOATS else str(tensor.dtype)
        return TensorDigest(tuple(tensor.shape), kind, hashlib.sha256(_value_bytes(tensor, kind)).hexdigest())

    # Hashing releases the interpreter lock, so that threads work at the same time.
    with open_tensors(file, REMEDY) as opened, ThreadPoolExecutor(THREADS) as pool:
        names = list(opened.keys())
        digests = dict(zip(names, pool.map(digest, names), strict=True))

    # A file that changed while it was read, or may have, is hashed again the next time. So is every file of a user
    # without a home, or on a disk that is full.
    is_settled = time.time_ns() - stat.st_mtime_ns > SETTLED_NS and file.stat().st_ctime_ns == stat.st_ctime_ns
    if is_settled and folder.is_absolute():
        with contextlib.suppress(CannotWrite):
            make_directory(folder)
            write_json(entry, {"file": str(file.resolve()), "stamp": stamp, "tensors": digests})
    return digests


def _value_bytes(tensor: torch.Tensor, kind: str) -> Any:
    values = tensor.to(torch.bfloat16) if kind == "float" else tensor
    return values.contiguous().reshape(-1).view(torch.uint8).numpy()


def _bare_name(name: str) -> str:
    """Remove the prefix that a base model has inside the whole model."""
    return name.removeprefix("model.").removeprefix("transformer.")


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
