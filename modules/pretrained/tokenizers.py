"""Load tokenizers, and find the tokens that end an answer."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.modules.pretrained.reading import read_model_json
from draftsmith.modules.types import InputError, describe_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("draftsmith")
TRUST = "Pass --trust-remote-code if you trust it."
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


_trusted = False


def trust_code() -> None:
    """Allow code that comes with tokenizers for the rest of this process (--trust-remote-code)."""
    global _trusted
    _trusted = True


def read_tokenizer(directory: Path, config: Mapping[str, object], name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from its files. config: config.json of its model. name: of the model, for errors."""
    from transformers import AutoTokenizer, PreTrainedConfig

    # transformers reads the tokenizer's class from config.json, unless the tokenizer's own settings name it. Then it
    # needs the model's type only, and importing the class of the model's config takes longer than all else here.
    settings, model = directory / "tokenizer_config.json", None
    if settings.exists() and read_model_json(settings).get("tokenizer_class") and not _trusted:
        model = PreTrainedConfig()
        model.model_type = config.get("model_type", "")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), config=model, trust_remote_code=_trusted)
    except Exception as error:
        # The tokenizers library, written in Rust, raises plain Exceptions.
        if "trust_remote_code" in str(error):
            raise InputError("tokenizer", f"{name}, which runs its own code", "leave to run it", TRUST) from error
        found = f"{name}, which transformers cannot load ({describe_error(error)})"
        raise InputError("tokenizer", found, "a tokenizer's files", "Fetch or save it again.") from error
    # Processors of multimodal models have a file of their own.
    if not tokenizer.chat_template and (file := directory / "chat_template.json").exists():
        tokenizer.chat_template = read_model_json(file, {"chat_template": str})["chat_template"]
    # An editor's byte-order mark in the template's file would be the first token of every prompt.
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    return tokenizer


def closing_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
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


def end_tokens(
    directory: Path, text: Mapping[str, object], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Return the tokens that end an answer: those that the model's files list, and, as in vLLM and SGLang, the
    tokenizer's own; and the first one with which the chat template closes an answer, if all of these lack it.

    What the sources have is logged, if they disagree. text: config.json, or its part about text.
    """
    listed, file = listed_ends(directory, text)
    if tokenizer is None:
        return tuple(listed)
    eos, closing = tokenizer.eos_token_id, closing_tokens(tokenizer)
    ends = dict.fromkeys([*listed, *([] if eos is None or eos >= text.get("vocab_size", eos + 1) else [eos])])
    if closing and ends.keys().isdisjoint(closing):
        ends[closing[0]] = None
    known = text.get("eos_token_id")
    if not ends.keys() <= set(listed) or not set(known if isinstance(known, list) else [known]) <= {*ends, None}:
        sources = {file.name: listed, "config.json": known, "the tokenizer": eos, "its chat template": list(closing)}
        found = ", ".join(f"{name} {ids}" for name, ids in sources.items())
        logger.info("end tokens of %s disagree: %s. Answers end at each of %s", directory, found, list(ends))
    return tuple(ends)


def listed_ends(directory: Path, config: Mapping[str, object]) -> tuple[list[int], Path]:
    """Return the end tokens in generation_config.json or else config.json, in their order, and the file that has them.

    config: config.json, or its part about text.
    """
    ids, file = config.get("eos_token_id"), directory / "config.json"
    generation = directory / "generation_config.json"
    if generation.exists():
        settings = read_model_json(generation)
        if "eos_token_id" in settings:
            ids, file = settings["eos_token_id"], generation
    tokens, vocab_size = list[int](), config.get("vocab_size")
    for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if type(token) is not int or token < 0 or (isinstance(vocab_size, int) and token >= vocab_size):
            expected = "token ids" if vocab_size is None else f"token ids below {vocab_size}, the vocabulary's size"
            raise InputError(f"eos_token_id of {file}", repr(token)[:80], expected, "Correct the file.")
        tokens.append(token)
    return tokens, file
