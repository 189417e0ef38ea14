"""Load tokenizers, and hash what gives token ids their meaning."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.modules.pretrained.checkpoint import TRUST, describe_error, listed_ends, read_model_json
from draftsmith.modules.pretrained.hub import model_directory, read_config
from draftsmith.modules.pretrained.identity import encoding_hash, template_hash
from draftsmith.modules.targets.shape import text_config
from draftsmith.modules.types import InputError

logger = logging.getLogger("draftsmith")
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


class Facts(NamedTuple):
    """What is kept of a tokenizer. identity: as `tokenizer_identity`. eos: its end token. closing: special tokens that
    the chat template writes directly behind an answer."""

    identity: dict[str, str]
    eos: int | None
    closing: tuple[int, ...]


def tokenizer_identity(path: str) -> dict[str, str]:
    """Return content hashes: `tokenizer` (vocabulary with special tokens), `encoding` (everything that turns text into
    ids) and `chat_template`."""
    directory = model_directory(path)
    if not has_tokenizer(directory):
        # Raises the error that names the missing files.
        load_tokenizer(path)
    return dict(_facts(str(directory), _stamps(directory)).identity)


def _stamps(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Return what changes with the small files of a model: loading a tokenizer and hashing its vocabulary take long."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.suffix != ".safetensors")
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


@functools.lru_cache(maxsize=16)
def _facts(directory: str, stamps: tuple[tuple[str, int, int], ...]) -> Facts:
    tokenizer = load_tokenizer(directory)
    # Two models must share this map of texts to ids, special tokens included, to compare token ids.
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    identity = {
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
        "encoding": encoding_hash(Path(directory)),
        "chat_template": template_hash(tokenizer),
    }
    return Facts(identity, tokenizer.eos_token_id, closing_tokens(tokenizer))


def closing_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that the chat template writes directly behind an answer, if it writes any there."""
    said = {"content": "draftsmith answer", "reasoning_content": "draftsmith thought", "thinking": "draftsmith thought"}
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    with contextlib.suppress(Exception):  # each template refuses in its own way
        turns = [{"role": "user", "content": "draftsmith question"}, {"role": "assistant", **said}]
        before, _, behind = tokenizer.apply_chat_template(turns, tokenize=False).partition(said["content"])
        first, inside = (
            tokenizer(part, add_special_tokens=False)["input_ids"]
            for part in ("".join(behind.split()[:1]), before.partition(said["thinking"])[2])
        )
        closing = tuple(itertools.takewhile({*special, *tokenizer.all_special_ids}.__contains__, first))
        # One that ends a thought too does not end an answer (<|end|> in some templates of gpt-oss).
        return () if set(closing) & set(inside) else closing
    return ()


def end_tokens(path: str) -> tuple[int, ...]:
    """Return the tokens that end an answer: those that the model's files list, and, as in vLLM and SGLang, the
    tokenizer's own; and the first one with which the chat template closes an answer, if all of these lack it.

    What the sources have is logged, once, if they disagree.
    """
    directory = model_directory(path)
    return _end_tokens(str(directory), _stamps(directory))


@functools.lru_cache(maxsize=16)
def _end_tokens(directory: str, stamps: tuple[tuple[str, int, int], ...]) -> tuple[int, ...]:
    folder, config = Path(directory), text_config(read_config(directory))
    listed, file = listed_ends(folder, config)
    if not has_tokenizer(folder):
        return tuple(listed)
    _, eos, closing = _facts(directory, stamps)
    ends = dict.fromkeys([*listed, *([] if eos is None or eos >= config.get("vocab_size", eos + 1) else [eos])])
    if closing and ends.keys().isdisjoint(closing):
        ends[closing[0]] = None
    known = config.get("eos_token_id")
    if not ends.keys() <= set(listed) or not set(known if isinstance(known, list) else [known]) <= {*ends, None}:
        sources = {file.name: listed, "config.json": known, "the tokenizer": eos, "its chat template": list(closing)}
        found = ", ".join(f"{name} {ids}" for name, ids in sources.items())
        logger.info("end tokens of %s disagree: %s. Answers end at each of %s", directory, found, list(ends))
    return tuple(ends)


def text_identity(path: str, recorded: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the hashes of `tokenizer_identity` that token ids of text depend on. recorded: see `template_identity`."""
    identity = tokenizer_identity(path)
    return {name: identity[name] for name in ("tokenizer", "encoding")} | template_identity(path, recorded or {})


def template_identity(path: str, recorded: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of a model's own chat template, if the recorded identity has that of one."""
    return {"own_template": tokenizer_identity(path)["chat_template"]} if "own_template" in recorded else {}


def check_same_tokenizer(target: str, draft: str, flag: str = "draft") -> None:
    """Raise InputError if two models give token ids another meaning. flag: option that named the draft."""
    target_hash, draft_hash = tokenizer_identity(target)["tokenizer"], tokenizer_identity(draft)["tokenizer"]
    if target_hash != draft_hash:
        found, expected = f"{draft} with tokenizer {draft_hash}", f"the tokenizer of {target} ({target_hash})"
        raise InputError(flag, found, expected, "Use a draft of the same family.")
