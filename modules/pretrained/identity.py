"""Content hashes that identify a model and its tokenizer.

Of the weights, every tensor's name, shape and kind is hashed, and of its values sixteen runs of 128 spread over it, in
bfloat16: the same weights have the same hash in other shards, under other file names and in other floating-point types.
A model of 140 GB is identified in seconds, because about 4 KB of each tensor are read. So a change between these runs,
of a tensor that keeps its shape, is not noticed: rows of an embedding that were trained for new tokens, or values that
somebody edits to deceive, up to a fifteenth of each tensor in one piece. Training, merging and rounding change every
value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.modules.pretrained.reading import StoredTensor, read_model_json
from draftsmith.modules.targets.shape import text_config

RUN, NUM_RUNS = 128, 16  # values of a run, runs of a tensor
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens", "do_lower_case")
# Fields of config.json with the number of MTP modules.
MTP_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


class TensorDigest(NamedTuple):
    """Digest of one tensor. kind: `float`, or the dtype. sha256: of the sampled values' bytes, floats in bfloat16."""

    shape: tuple[int, ...]
    kind: str
    sha256: str


def model_identity(
    config: Mapping[str, object], tensors: Mapping[str, StoredTensor], output: str | None, code: Iterable[Path] = ()
) -> dict[str, str]:
    """Hash a model's config, tensors, output embedding and own code, independent of engine, dtype and sharding.

    An MTP module in the same files is no part of it: another one drafts for the same model.

    config: config.json. output: name of the output embedding in the files, if it is known. code: files of the model's
        own code, if it has some.
    """
    last = text_config(config).get("num_hidden_layers")
    # inv_freq is computed, and stored by old versions of transformers only.
    by_name = {
        name: digest
        for name, digest in ((_bare_name(name), _digest(stored)) for name, stored in tensors.items())
        if not name.endswith("rotary_emb.inv_freq") and not name.startswith(("mtp.", f"layers.{last}."))
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
    if output is not None and _bare_name(output) in by_name:
        identity["lm_head"] = by_name[_bare_name(output)].sha256[:16]
    if "auto_map" in config:
        identity["code"] = _hash({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in code})
    return identity


def captured(identity: Mapping[str, str], layers: Sequence[int]) -> dict[str, str]:
    """Return the target's identity with the layers whose residual states are read; () is the final norm."""
    return {**identity, "layers": ",".join(map(str, layers))} if layers else dict(identity)


def config_hash(config: Mapping[str, object]) -> str:
    """Hash config.json without the bookkeeping fields that saving changes, and the numbers of MTP modules."""
    skipped = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", *MTP_COUNTS)
    kept = {key: value for key, value in config.items() if key not in skipped}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = {key: value for key, value in text.items() if key not in MTP_COUNTS}
    return _hash(kept)


def tensor_hash(tensor: torch.Tensor) -> str:
    """Hash a loaded tensor of floats as `model_identity` hashes one in a file."""
    values = tensor.detach().reshape(-1)
    return _sample_hash([values[start:end].cpu() for start, end in _runs(values.numel())])


def template_hash(tokenizer: Any) -> str:
    """Hash the chat template of a tokenizer. A list of the default alone is saved as the template itself."""
    template = tokenizer.chat_template
    if isinstance(template, dict) and [*template] == ["default"]:
        template = template["default"]
    return _hash(template)


def encoding_hash(directory: Path) -> str:
    """Hash everything in a tokenizer's files that turns text into ids: vocabulary, merges, normalization, splitting,
    added tokens and switches. Padding, truncation and file layout do not count."""
    content: dict[str, object] = {}
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


def _normalized(value: object) -> object:
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


def _digest(stored: StoredTensor) -> TensorDigest:
    begin, end = stored.place
    dtype, runs = FLOATS.get(stored.dtype, torch.uint8), list[torch.Tensor]()
    width = dtype.itemsize
    # Unbuffered: a buffer would read more than the sample.
    with stored.file.open("rb", buffering=0) as file:
        for first, last in _runs((end - begin) // width):
            file.seek(begin + first * width)
            runs.append(torch.frombuffer(bytearray(file.read((last - first) * width)), dtype=dtype))
    return TensorDigest(stored.shape, "float" if stored.dtype in FLOATS else stored.dtype, _sample_hash(runs))


def _runs(count: int) -> list[tuple[int, int]]:
    """Return the runs of a tensor of so many values that are hashed: all of a small one, else from its first value to
    its last."""
    if count <= RUN * NUM_RUNS:
        return [(0, count)] if count else []
    starts = [number * (count - RUN) // (NUM_RUNS - 1) for number in range(NUM_RUNS)]
    return [(start, start + RUN) for start in starts]


def _sample_hash(runs: Sequence[torch.Tensor]) -> str:
    """Hash runs of values; floats in bfloat16, so that the type they are stored in does not count."""
    digest = hashlib.sha256()
    for run in runs:
        dtype = torch.bfloat16 if run.is_floating_point() else run.dtype
        rounded = bytearray(run.numel() * dtype.itemsize)
        torch.frombuffer(rounded, dtype=dtype).copy_(run)
        digest.update(rounded)
    return digest.hexdigest()


def _bare_name(name: str) -> str:
    """Remove the prefix that a base model has inside the whole model."""
    return name.removeprefix("model.").removeprefix("transformer.")


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
