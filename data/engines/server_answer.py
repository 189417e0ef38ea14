"""What a server's reply must be to count as an answer: checked against the vocabulary, the limits and itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.modules.types import InputError

SHOWN_CHARS = 200
ENDS = ("stop", "length")
LONGER = 8  # a text may have so many times the tokens that were sampled: half letters are tokenised as others
MOST_INT32 = 2**31 - 1


class BadAnswer(Exception):
    """What came back for this prompt cannot be stored; other prompts may fare better."""


@dataclass(frozen=True)
class Question:
    """One prompt as the server was asked. name: as errors call it. max_tokens: the longest answer."""

    name: str
    prompt_ids: list[int]
    max_tokens: int
    model: str


@dataclass(frozen=True)
class ReplyReader:
    """Reads replies for one model."""

    tokenizer: Any
    vocab_size: int
    eos_ids: tuple[int, ...]

    def read(self, asked: Question, reply: Any) -> dict[str, Any]:
        """Columns of a row of responses: input_ids, prompt_length, ended, retokenised, text, server_tokens.

        Raises:
            BadAnswer: another shape, tokens that are none or too many, or parts that contradict each other.
            InputError: another model or another chat template answers: all that it says is of no use.
        """
        choice, usage = _parts(reply)
        self._check_model(asked, reply, choice, usage)
        text, ended = _text(choice), choice["finish_reason"] == "stop"
        counted = _count(usage.get("completion_tokens"), asked.max_tokens)
        given = choice.get("token_ids")
        if given is None and text is None:
            raise BadAnswer("neither text nor token ids")
        if given is None:
            ids = self._tokenised(str(text), asked)
        else:
            ids = checked_ids(given, asked.max_tokens, self.vocab_size)
            self._agree(ids, text, counted, choice)
        # A text has no end token. Of ids one may be hidden, which the count of tokens then shows.
        hidden = given is None or counted is None or counted > len(ids)
        if ended and hidden and self.eos_ids and (not ids or ids[-1] not in self.eos_ids):
            ids = [*ids, self.eos_ids[0]]
        if not ids:
            raise BadAnswer("an empty answer")
        return {
            "input_ids": asked.prompt_ids + ids,
            "prompt_length": len(asked.prompt_ids),
            "ended": ids[-1] in self.eos_ids,
            "retokenised": given is None,
            "text": text,
            "server_tokens": counted,
        }

    def _check_model(
        self, asked: Question, reply: dict[str, Any], choice: dict[str, Any], usage: dict[str, Any]
    ) -> None:
        answered = reply.get("model")
        # `transformers serve` adds the revision.
        if isinstance(answered, str) and asked.model not in (answered, answered.rpartition("@")[0]):
            remedy = "Serve the model of --target, and pass the name by which the server calls it."
            raise InputError("server.model", f"an answer by {answered[:SHOWN_CHARS]!r}", repr(asked.model), remedy)
        counted, own = usage.get("prompt_tokens"), len(asked.prompt_ids)
        read = choice.get("prompt_token_ids", reply.get("prompt_token_ids"))
        remedy = "Serve the same model and chat template as --target, or pass --server.dialect vllm."
        if counted is not None and counted != own:
            raise InputError(asked.name, f"{_short(counted)} tokens at the server", f"{own}, as here", remedy)
        if read is not None and read != asked.prompt_ids:
            raise InputError(asked.name, f"the prompt {_short(read)} at the server", "the ids that were sent", remedy)

    def _tokenised(self, text: str, asked: Question) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > LONGER * asked.max_tokens:
            raise BadAnswer(f"a text of {len(ids):,} tokens where at most {asked.max_tokens:,} were asked for")
        return ids

    def _agree(self, ids: list[int], text: str | None, counted: int | None, choice: dict[str, Any]) -> None:
        """Raises BadAnswer where the ids are not those of the text, of the count or of the log-probabilities."""
        if counted is not None and counted not in (len(ids), len(ids) + 1):
            raise BadAnswer(f"{len(ids):,} token ids and completion_tokens {counted:,}")
        logprobs = choice.get("logprobs")
        listed = (logprobs.get("tokens") or logprobs.get("content")) if isinstance(logprobs, dict) else None
        if isinstance(listed, list) and len(listed) not in (len(ids), len(ids) + 1):
            raise BadAnswer(f"{len(ids):,} token ids and log-probabilities of {len(listed):,}")
        # A server may hold back a stop string or the bytes of half a letter, so its text may be the shorter one.
        said = _bare(text or "")
        if not any(
            _bare(self.tokenizer.decode(ids, skip_special_tokens=skip)).startswith(said) for skip in (True, False)
        ):
            own = self.tokenizer.decode(ids)
            raise BadAnswer(f"text {_short(text)} with token ids that read {_short(own)}: another tokenizer?")


def checked_ids(ids: Any, most: int, vocab_size: int) -> list[int]:
    """Return token ids of the vocabulary, at most `most`; raise BadAnswer for anything else."""
    if not isinstance(ids, list):
        raise BadAnswer(f"token_ids are {_short(ids)}, expected a list")
    if len(ids) > most:
        raise BadAnswer(f"{len(ids):,} token ids where at most {most:,} were asked for")
    odd = [token for token in ids if type(token) is not int or not 0 <= token < vocab_size]
    if odd:
        raise BadAnswer(f"token id {_short(odd[0])}, expected whole numbers below {vocab_size:,}")
    return ids


def _parts(reply: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first choice, whose finish reason is one of ENDS, and the usage (empty where there is none)."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise BadAnswer(f"no completion but {_short(reply)}; check --server.url and --server.dialect")
    if choice.get("finish_reason") not in ENDS:
        raise BadAnswer(f"finish_reason {_short(choice.get('finish_reason'))}, expected {' or '.join(ENDS)}")
    usage = reply.get("usage")
    return choice, usage if isinstance(usage, dict) else {}


def _text(choice: dict[str, Any]) -> str | None:
    """The answer's text, which is all that was sampled."""
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    for aside in ("reasoning_content", "reasoning", "tool_calls"):
        if isinstance(message, dict) and message.get(aside):
            raise BadAnswer(f"a part of the answer in {aside}; serve without a parser, or pass --server.dialect vllm")
    if text is not None and not isinstance(text, str):
        raise BadAnswer(f"text is {_short(text)}")
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise BadAnswer("text with half of a surrogate pair") from error
    return text


def _count(value: Any, most: int) -> int | None:
    """completion_tokens, which a server need not give."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MOST_INT32:
        raise BadAnswer(f"completion_tokens {_short(value)}, expected a count")
    if value > most:
        raise BadAnswer(f"{value:,} tokens by its own count where at most {most:,} were asked for")
    return value


def _bare(text: str) -> str:
    """The text without white space and replacement characters, which decoders treat differently."""
    return "".join(text.replace("\ufffd", "").split())


def _short(value: Any) -> str:
    return json.dumps(value)[:SHOWN_CHARS]


def named_failures(failures: Sequence[tuple[str, str]], shown: int = 3) -> str:
    """(name, reason) of each as `A, B: status 400; C: an empty answer`, the first so many names and reasons."""
    names: dict[str, list[str]] = {}
    for name, why in failures:
        names.setdefault(why, []).append(name)
    groups = [f"{', '.join(own[:shown])}{_more(len(own) - shown)}: {why}" for why, own in names.items()]
    return "; ".join(groups[:shown]) + _more(len(groups) - shown)


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
