"""Load tokenizers, and hash what gives token ids their meaning."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from draftsmith.modules.pretrained.checkpoint import TRUST, describe_error, read_model_json
from draftsmith.modules.pretrained.hub import model_directory, read_config
from draftsmith.modules.pretrained.identity import encoding_hash, template_hash
from draftsmith.modules.types import InputError

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def has_tokenizer(directory: Path) -> bool:
    """Check whether a directory holds a tokenizer's files."""
    return any((directory / name).exists() for name in TOKENIZERS)


_trusted = False


def trust_code() -> None:
    """Allow code that comes with tokenizers for the rest of this process (--trust-remote-code)."""
    global _trusted
    _trusted = True


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a model."""
    from transformers import AutoTokenizer, PreTrainedConfig

    directory = model_directory(path)
    if not has_tokenizer(directory):
        raise InputError("tokenizer", f"{path} without tokenizer files", "tokenizer.json", "Save the tokenizer there.")
    # transformers reads the tokenizer's class from config.json, unless the tokenizer's own settings name it. Then it
    # needs the model's type only, and importing the class of the model's config takes longer than all else here.
    raw, settings, config = read_config(path), directory / "tokenizer_config.json", None
    if settings.exists() and read_model_json(settings).get("tokenizer_class") and not _trusted:
        config = PreTrainedConfig()
        config.model_type = raw.get("model_type", "")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), config=config, trust_remote_code=_trusted)
    except Exception as error:
        # The tokenizers library, written in Rust, raises plain Exceptions.
        if "trust_remote_code" in str(error):
            raise InputError("tokenizer", f"{path}, which runs its own code", "leave to run it", TRUST) from error
        found = f"{path}, which transformers cannot load ({describe_error(error)})"
        raise InputError("tokenizer", found, "a tokenizer's files", "Fetch or save it again.") from error
    # An editor's byte-order mark in the template's file would be the first token of every prompt.
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    return tokenizer


def tokenizer_identity(path: str) -> dict[str, str]:
    """Return content hashes: `tokenizer` (vocabulary with special tokens), `encoding` (everything that turns text into
    ids) and `chat_template`."""
    directory = model_directory(path)
    if not has_tokenizer(directory):
        # Raises the error that names the missing files.
        load_tokenizer(path)
    # Hashing reads the whole vocabulary: the result is kept until a file of the directory changes.
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.suffix != ".safetensors")
    stamps = tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return dict(_tokenizer_identity(str(directory), stamps))


@functools.lru_cache(maxsize=16)
def _tokenizer_identity(directory: str, stamps: tuple[tuple[str, int, int], ...]) -> dict[str, str]:
    tokenizer = load_tokenizer(directory)
    # Two models must share this map of texts to ids, special tokens included, to compare token ids.
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return {
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
        "encoding": encoding_hash(Path(directory)),
        "chat_template": template_hash(tokenizer),
    }


def text_identity(path: str) -> dict[str, str]:
    """Return the hashes of `tokenizer_identity` that token ids of text depend on."""
    identity = tokenizer_identity(path)
    return {name: identity[name] for name in ("tokenizer", "encoding")}


def check_same_tokenizer(target: str, draft: str, flag: str = "draft") -> None:
    """Raise InputError if two models give token ids another meaning. flag: option that named the draft."""
    target_hash, draft_hash = tokenizer_identity(target)["tokenizer"], tokenizer_identity(draft)["tokenizer"]
    if target_hash != draft_hash:
        found, expected = f"{draft} with tokenizer {draft_hash}", f"the tokenizer of {target} ({target_hash})"
        raise InputError(flag, found, expected, "Use a draft of the same family.")
