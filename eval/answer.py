"""Decoding in Python, for scripts and notebooks: drafters, and answers that are decoded round by round."""

from __future__ import annotations

import dataclasses
import html
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from draftsmith.data.text.conversations import well_formed
from draftsmith.data.text.template import RowError, load_chat_tokenizer, prompt_ids
from draftsmith.eval.bench.runner import load_models
from draftsmith.eval.settings import DraftSettings
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.loop import DecodeOptions, Decoder, Generation, Round
from draftsmith.modules.decoding.plain import PromptAnswer
from draftsmith.modules.decoding.trace import Totals, pool
from draftsmith.modules.drafters.method_names import LabeledMethod, parse_method
from draftsmith.modules.drafters.methods import chain_method
from draftsmith.modules.pretrained.checkpoint import Checkpoint, checkpoint_of
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, check_ids
from draftsmith.modules.types import InputError, SamplingParams, check_range

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
MOST_SEED = 2**63 - 1  # as on the command line; torch takes as many
# Backgrounds that are legible on a page of either theme.
DRAFTED, OWN = "rgba(46, 160, 67, 0.28)", "rgba(212, 167, 44, 0.32)"

# Drafter -> id of the answer that it drafts for: it holds the state of one sequence.
_drafting: WeakKeyDictionary[Drafter, int] = WeakKeyDictionary()


def load_drafter(
    head: str | Path,
    target: CausalLM,
    method: str = "",
    *,
    acceptance: str | Path | None = None,
    longest: int = 4096,
    temperature: float = 0.0,
) -> Drafter:
    """Load a drafter for a target, for `generate`. It drafts for one sequence at a time.

    head: directory of a trained head, or a draft model. method: as of `eval bench`, such as eagle3:k=7; by default
    the chain of the draft, of its own length. acceptance: directory of an acceptance head, for methods that use one.
    longest: tokens of a prompt with its answer. temperature: of its use, where a head was trained for one mode.

    Raises:
        InputError: no such model, or one that does not fit the target.
    """
    paths = DraftSettings(head=str(head)).paths | {"target": checkpoint_of(target).path}
    if acceptance is not None:
        paths["acceptance"] = str(acceptance)
    kind = next(name for name in paths if name != "target")
    label = method or chain_method(kind)
    parsed = parse_method(label)
    loading: dict[str, Any] = {"dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device)}
    models = load_models([LabeledMethod(label, parsed)], paths, longest, SamplingParams(temperature), target, **loading)
    drafter = parsed.build(models)
    if drafter is None:
        raise InputError("method", repr(method), "one that drafts", "Pass None to generate in the place of a drafter.")
    return drafter


def encode(target: CausalLM, prompt: Prompt) -> list[int]:
    """Encode a prompt: text as a user's message, or messages, by the chat template; token ids as they are.

    Raises:
        InputError: anything else, ids that the target does not have, or messages that the chat template refuses.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not any(isinstance(part, Mapping) for part in prompt):
        return token_ids("prompt", prompt, target)
    return encode_messages(checkpoint_of(target), prompt)


def encode_messages(target: Checkpoint, messages: Sequence[Any]) -> list[int]:
    """Encode chat messages, each with a role and a content of text; InputError as `encode`."""
    for number, message in enumerate(messages):
        of_text = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not of_text:
            expected = "messages, each with a role and a content of text"
            raise InputError(f"prompt, message {number}", repr(message)[:80], expected, "Correct it.")
    try:
        said = [{**message, "content": well_formed(message["content"], "the prompt")} for message in messages]
        return list(prompt_ids(load_chat_tokenizer(target), said))
    except RowError as error:
        raise InputError("prompt", str(error), "messages that the chat template takes", "Correct it.") from error


def token_ids(field: str, values: Any, target: CausalLM) -> list[int]:
    """Return token ids of the target as a list of ints; ids of numpy and torch are converted.

    Raises:
        InputError: something else, such as floats, or ids that the target does not have.
    """
    try:
        ids = [operator.index(value) for value in values]
    except TypeError as error:
        raise InputError(field, repr(values)[:80], "token ids, which are whole numbers", "Correct it.") from error
    check_ids(ids, target.info.vocab_size)
    return ids


def generate(
    target: CausalLM,
    prompt: Prompt,
    drafter: Drafter | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Answer:
    """Return an answer from the target's distribution, whatever drafts. It is decoded while it is iterated over.

    prompt: text, messages, or token ids. drafter: of `load_drafter`; None decodes without one.

    Raises:
        InputError: a prompt that the chat template or the context does not take.
    """
    check_range("seed", seed, 0, MOST_SEED)
    ids = encode(target, prompt)
    params = SamplingParams(temperature, top_k, top_p)
    tokenizer = checkpoint_of(target).tokenizer if target.info.files else None
    return Answer(target, drafter, ids, params, max_new_tokens, seed, tokenizer)


class Answer:
    """Stream of rounds, each with its emitted tokens, of which the first `num_accepted` were drafted.

    `tokens`, `text` and `totals` of the whole answer decode the rest of it first. A notebook shows the text with
    drafted tokens in one color and the target's own in another.
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        prompt: Sequence[int],
        params: SamplingParams,
        max_new_tokens: int,
        seed: int,
        tokenizer: Any = None,
        ends: Sequence[int] | None = None,
    ):
        """ends: tokens that end the answer; None takes the target's."""
        self.prompt, self._tokenizer = list(prompt), tokenizer
        self._answer = PromptAnswer(target.info, prompt, max_new_tokens, TorchSource(seed), ends)
        self._rounds: list[Round] = []
        self._last: list[Round] = []
        self._drafter = drafter
        options = DecodeOptions(self._last.append)
        self._decoder: Decoder | None = Decoder(target, drafter, params, self._answer, options)

    def __iter__(self) -> Iterator[Round]:
        """Yield the rounds so far, then decode further ones.

        A round holds the target's `logits` only when it is new: all of them would fill the memory.
        """
        number = 0
        while (done := self._rounds[number] if number < len(self._rounds) else self._decode_round()) is not None:
            yield done
            number += 1

    def _decode_round(self) -> Round | None:
        if self._decoder is None:
            return None
        if self._rounds:
            if self._drafter is not None and _drafting.get(self._drafter) != id(self):
                found = "one that another answer has begun with since"
                raise InputError("drafter", found, "its own until it is complete", "Finish it first, or load another.")
            self._decoder.round()
        else:
            if self._drafter is not None:
                _drafting[self._drafter] = id(self)
            self._decoder.begin()
        done = self._last.pop()
        self._rounds.append(dataclasses.replace(done, logits=None))
        # A finished answer needs no caches any more.
        if self._answer.done:
            self._decoder = None
        return done

    def finish(self) -> Answer:
        """Decode the rest."""
        for _ in self:
            pass
        return self

    @property
    def generation(self) -> Generation:
        """Tokens and counts, as `eval bench` has them."""
        row = self.finish()._answer
        return Generation(list(row.tokens), row.trace, row.ended)

    @property
    def tokens(self) -> list[int]:
        """Token ids of the whole answer."""
        return self.generation.tokens

    @property
    def totals(self) -> Totals:
        """Counts of the whole answer, such as tau, target calls, drafted and accepted tokens."""
        return pool([self.generation.trace])

    @property
    def text(self) -> str:
        """Text of the whole answer without special tokens; InputError if the target has no tokenizer."""
        if self._tokenizer is None:
            raise InputError("target", "a model without a tokenizer", "one of draftsmith.load_target", "Read .tokens.")
        return self._tokenizer.decode(self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Render the answer for a notebook, one span a piece of text."""
        spans: list[str] = []

        def add(pieces: Iterator[tuple[str, bool]], number: int) -> None:
            for text, drafted in pieces:
                style = f"background:{DRAFTED if drafted else OWN};box-shadow:-1px 0 0 0 rgba(127,127,127,.45)"
                spans.append(f'<span title="round {number}" style="{style}">{html.escape(text)}</span>')

        stream, number = TokenStream(self._tokenizer), 0
        for number, done in enumerate(self):
            add(stream.push(done.tokens, done.num_accepted), number)
        add(stream.finish(), number)
        totals = self.totals
        legend = (
            f'<span style="background:{DRAFTED}">drafted and accepted</span> · '
            f'<span style="background:{OWN}">the target\'s own</span> · {totals.num_tokens} tokens in '
            f"{totals.num_target_calls} target calls, tau {totals.tau:.2f}"
        )
        style = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.5"
        return f'<div><div style="{style}">{"".join(spans)}</div><p><small>{legend}</small></p></div>'


class TokenStream:
    """Text of a growing answer, in whole characters.

    A token of a byte-level vocabulary may be a part of a character: it is held back until the character is complete,
    which then belongs to the token that completes it.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Text up to `_shown` is on the screen; decoding begins at `_context`, a little before.
        self._context, self._shown = 0, 0

    def push(self, tokens: Sequence[int], num_accepted: int) -> Iterator[tuple[str, bool]]:
        """Yield (text, drafted?) of each token that completes some; the first `num_accepted` tokens were drafted."""
        for number, token in enumerate(tokens):
            self._ids.append(token)
            if piece := self._new_text(flush=False):
                yield piece, number < num_accepted

    def finish(self) -> Iterator[tuple[str, bool]]:
        """Yield an incomplete last character, as the replacement character."""
        if piece := self._new_text(flush=True):
            yield piece, False

    def _new_text(self, flush: bool) -> str:
        # The difference of two decodings: a tokenizer may decode the beginning of a text unlike its middle.
        before = self._decode(self._ids[self._context : self._shown])
        now = self._decode(self._ids[self._context :])
        if len(now) <= len(before) or (now.endswith("\ufffd") and not flush):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
