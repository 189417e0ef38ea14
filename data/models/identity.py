"""What makes a model the one that an artefact or a head was made with: its settings, its weights and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.models.checkpoint import checkpoint_files, read_model_json
from draftsmith.data.models.digests import output_hash, tensor_digests, weights_hash

# What decides how text becomes ids, by kind of tokenizer; and the switches beside them that change it.
TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens", "do_lower_case")


def config_hash(raw: Mapping[str, Any]) -> str:
    """Hash of what makes the model: bookkeeping fields that saving changes do not count."""
    skipped = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
    return _hash({key: value for key, value in raw.items() if key not in skipped})


def model_identity(directory: Path, raw: Mapping[str, Any], outputs: Iterable[str]) -> dict[str, str]:
    """Hashes of a model's config, of all its tensors, of its output embedding, and of code that it brings; the same for
    each engine, type of numbers and number of shards.

    raw: config.json. outputs: names that the output embedding may have in the files, the likeliest first.
    """
    digests = tensor_digests(checkpoint_files(directory))
    identity = {"config": config_hash(raw), "weights": weights_hash(digests), "layers": "final-norm"}
    if (head := output_hash(digests, outputs)) is not None:
        identity["lm_head"] = head
    if "auto_map" in raw:
        code = {file.name: file.read_bytes() for file in sorted(directory.glob("*.py"))}
        identity["code"] = _hash({name: hashlib.sha256(text).hexdigest() for name, text in code.items()})
    return identity


def captured(identity: Mapping[str, str], layers: Sequence[int]) -> dict[str, str]:
    """The identity of a target whose residual states after these layers are read; none are the final norm's."""
    return {**identity, "layers": ",".join(map(str, layers))} if layers else dict(identity)


def encoding_hash(directory: Path) -> str:
    """Hash of what makes ids of text in a tokenizer's files: vocabulary, merges, normalisation, splitting, added tokens
    and switches. How much is padded or cut, and how a file is laid out, does not count."""
    found: dict[str, Any] = {}
    fast, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if fast.exists():
        content = read_model_json(fast)
        found = {
            key: _normalised(value) for key, value in content.items() if key not in ("version", "truncation", "padding")
        }
    else:
        files = [file for name in TOKENIZER_FILES if (file := directory / name).exists()]
        files += sorted([*directory.glob("*.tiktoken"), *directory.glob("*.bpe"), *directory.glob("tokenization*.py")])
        found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    if settings.exists():
        switches = read_model_json(settings)
        found |= {f"set_{name}": switches[name] for name in SWITCHES if switches.get(name) is not None}
    return _hash(found)


def _normalised(value: Any) -> Any:
    """What several versions of one file agree in: what is off or absent is left out, and merges are pairs or text."""
    if isinstance(value, dict):
        if "merges" in value:
            merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in value["merges"]]
            value = {**value, "merges": merges}
        kept = {key: _normalised(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if inner is not None and inner is not False}
    if isinstance(value, list):
        return [_normalised(inner) for inner in value]
    return value


def vocabulary_hash(tokenizer: Any) -> str:
    """Hash of which id is which text, special tokens included: what two models must agree in to compare token ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def template_hash(tokenizer: Any) -> str:
    """Hash of the chat template."""
    return _hash(tokenizer.chat_template)


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
