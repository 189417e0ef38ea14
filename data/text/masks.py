"""Loss masks of conversations: which tokens of a template's text the assistant says.

Few templates mark them with generation tags. For the others prompts and beginnings of the conversation are rendered, if
need be with a mark in place of a message's words, and compared with the whole text.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from draftsmith.data.text.template import (
    MARKUP,
    PLACEHOLDER,
    PROBE,
    Messages,
    RowError,
    TemplateInputs,
    encode,
    marked_call,
    render,
    special_pattern,
    template_of,
)
from draftsmith.modules.types import InputError

TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TAG_REMEDY = "Pass --chat-template FILE with {% generation %} tags around the assistant's words, or without any."


def check_mask(tokenizer: Any, inputs: TemplateInputs) -> None:
    """Raise InputError for generation tags that are not on the assistant's words, or on others too."""
    with contextlib.suppress(RowError):
        text, spans = answer_spans(tokenizer, PROBE, inputs)
        learned = "".join(text[start:end] for start, end in spans)
        shown = [said for said in PROBE if said["content"] in text]
        wrong = [said for said in shown if (said["content"] in learned) != (said["role"] == "assistant")]
        if wrong:
            found = f"a mask on {learned!r}, which is wrong about the {wrong[0]['role']}'s {wrong[0]['content']!r}"
            raise InputError("chat_template", found, "a mask on the assistant's words alone", TAG_REMEDY)


def supervised_ids(
    tokenizer: Any,
    messages: Messages,
    inputs: TemplateInputs | None = None,
    not_learned: Sequence[int] = (),
    ends: Collection[int] = (),
) -> tuple[list[int], list[bool]]:
    """Tokenize a whole conversation; return ids and a mask that is true on the assistant's tokens.

    A token that holds the end of one part and the beginning of another is not in the mask. not_learned: numbers of
    messages whose answers are left out of it. ends: end tokens of the target. One behind an answer that has none is in
    the mask: GLM ends a call with the token in front of its result.

    Raises:
        RowError: the template refuses these messages, or no token is left to learn from.
    """
    return masked_ids(tokenizer, inputs or {}, *answer_spans(tokenizer, messages, inputs or {}, not_learned), ends)


def masked_ids(
    tokenizer: Any, inputs: TemplateInputs, text: str, spans: Sequence[tuple[int, int]], ends: Collection[int]
) -> tuple[list[int], list[bool]]:
    """Tokenize a text; return ids and a mask that is true on the tokens of its spans; see `supervised_ids`."""
    ids = encode(tokenizer, text)
    cuts = [0, *itertools.chain.from_iterable(spans), len(text)]
    parts = [encode(tokenizer, text[start:end]) for start, end in itertools.pairwise(cuts)]
    if list(itertools.chain.from_iterable(parts)) == ids:
        mask = [number % 2 == 1 for number, part in enumerate(parts) for _ in part]
    else:
        # A tokenizer joins two parts, or begins each with a blank.
        mask = joined_mask(tokenizer, text, ids, spans)
    if TAG.search(template_of(tokenizer, inputs)) is None:
        for end in [i for i, (left, right) in enumerate(itertools.pairwise(mask), 1) if left and not right]:
            mask[end] = ids[end] in ends and ids[end - 1] not in ends
    if not any(mask):
        raise RowError("no answer to learn from: the template shows none, or all have weight 0")
    return ids, mask


def answered_ids(
    tokenizer: Any, messages: Messages, inputs: TemplateInputs, ends: Collection[int] = ()
) -> tuple[list[int], list[bool]]:
    """Tokenize a prompt and the recorded answer to it, the last message; return ids and a mask that is true on it.

    Some templates drop thoughts from the prompt once the answer stands behind it (gpt-oss), or the thought that the
    prompt opens (DeepSeek-R1): here they stay.

    Raises:
        RowError: as `supervised_ids`.
    """
    earlier = [i for i, message in enumerate(messages[:-1]) if message["role"] == "assistant"]
    text, spans = answer_spans(tokenizer, messages, inputs, earlier)
    prompt = render(tokenizer, messages[:-1], inputs, add_generation_prompt=True)
    if len(spans) != 1:
        return masked_ids(tokenizer, inputs, text, spans, ends)
    answer, written = text[slice(*spans[0])], continued_thought(prompt, messages[-1])
    kept = text.startswith(prompt) and answer.lstrip().startswith(written.partition("</think>")[0].strip())
    if written and not kept:
        closing = re.search(rf"(?:{special_pattern(tokenizer)})*\Z", answer)
        answer = written + (closing[0] if closing else "")
    elif text.startswith(prompt) or not text[: spans[0][0]].endswith(prompt[-8:]):
        return masked_ids(tokenizer, inputs, text, spans, ends)
    asked, said = encode(tokenizer, prompt), encode(tokenizer, answer)
    return [*asked, *said], [False] * len(asked) + [True] * len(said)


def continued_thought(prompt: str, message: Mapping[str, Any]) -> str:
    """Return what an answer says behind a prompt that opens its thought; empty if the prompt opens none, or the answer
    has none. A thought of its own field is put in front of the text, as the model wrote it."""
    content, thought = message["content"], message.get("reasoning_content", "").strip()
    if not prompt.rstrip().endswith("<think>") or message.get("tool_calls"):
        return ""
    gap = prompt[len(prompt.rstrip()) :]
    if "</think>" in content:
        written = content.lstrip().removeprefix("<think>")
        return written.lstrip() if gap else written
    return f"{thought}{gap}</think>{2 * gap}{content.lstrip()}" if thought else ""


def joined_mask(tokenizer: Any, text: str, ids: list[int], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return the mask of spans of a text, by the tokens that the text has up to their ends, or from their beginnings.

    transformers' own mask runs to the end of the text where the last letter has no token (transformers#47325).
    """
    mask = [False] * len(ids)
    for start, end in spans:
        before, stop = encode(tokenizer, text[:start]), num_common(encode(tokenizer, text[:end]), ids)
        first = len(before)
        if ids[:first] != before:
            first = len(ids) - num_common(reversed(encode(tokenizer, text[start:])), reversed(ids))
        mask[first:stop] = [True] * (stop - first)
    return mask


def num_common(left: Iterable[object], right: Iterable[object]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def answer_spans(
    tokenizer: Any, messages: Messages, inputs: TemplateInputs, not_learned: Sequence[int] = ()
) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation's text, and [start, end) of the answers in it: between generation tags, if the template
    has them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    text = render(tokenizer, messages, inputs)
    template = template_of(tokenizer, inputs)
    tagged = TAG.search(template) is not None
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    searched = not_learned if tagged else [number for number in answers if number not in not_learned]
    found = [answer_span(tokenizer, messages, inputs, number, text) for number in searched]
    if tagged:
        variables = {**tokenizer.special_tokens_map, **(inputs.get("variables") or {})}
        options = {"tools": inputs.get("tools"), "chat_template": template, "return_assistant_tokens_mask": True}
        (again,), (spans,) = render_jinja_template([messages], **options, **variables)
        assert again == text
        return text, [(s, e) for s, e in spans if s < e and not any(s < stop and start < e for start, stop in found)]
    return text, [(start, end) for start, end in found if start < end]


def answer_span(tokenizer: Any, messages: Messages, inputs: TemplateInputs, number: int, text: str) -> tuple[int, int]:
    """Return [start, end) of answer `number` in the conversation's text, with its end token.

    It begins where the prompt for it ends, and ends where the conversation up to it ends, if these are the beginning of
    the whole. Else a mark is put into the message before it, or into the answer itself: the answer begins where what
    stands behind the mark differs from a prompt, and ends where it differs from the end of a conversation. That is so
    for templates that show earlier answers otherwise than the last one, list tools in the last question, or open a
    prompt with a thought that they leave out later.

    Raises:
        RowError: neither shows where it is.
    """
    special = special_pattern(tokenizer)
    start, end = (
        answer_start(tokenizer, messages, inputs, number, text),
        shown(tokenizer, messages[: number + 1], inputs, text),
    )
    if end is None and (found := behind_mark(tokenizer, messages, inputs, number, text)):
        place, tail, last = found
        length, more = agreement(tail, last)
        # The last answer may be closed by another token (<|return|>) than those before it.
        if (
            more
            and not re.search(special, tail[:length])
            and (closing := re.match(rf"\s*(?:{special})", tail[length:]))
        ):
            length += closing.end()
        end = place + length
    if start is None or end is None:
        remedy = "Pass --chat-template FILE with {% generation %} tags, or --invalid drop."
        raise RowError(f"the chat template does not show where the answer in message {number} is", remedy)
    # The target samples nothing behind its end token; behind others some templates write a line break.
    eos = tokenizer.eos_token
    if eos and (cut := text.find(eos, start, end)) >= 0:
        end = cut + len(eos)
    elif ended := re.fullmatch(rf"(.*(?:{special}))\s+", text[start:end], re.DOTALL):
        end = start + ended.end(1)
    # An answer that the template leaves empty has an end token at most.
    return (start, end) if re.sub(special, "", text[start:end]).strip() else (start, start)


def answer_start(tokenizer: Any, messages: Messages, inputs: TemplateInputs, number: int, text: str) -> int | None:
    """Return where answer `number` begins in the conversation's text; None if the template does not show it."""
    start = shown(tokenizer, messages[:number], inputs, text, add_generation_prompt=True)
    if start is not None:
        return start
    found = number and behind_mark(tokenizer, messages, inputs, number - 1, text, add_generation_prompt=True)
    if found:
        place, tail, last = found
        length, more = agreement(tail, last)
        # A prompt may open a thought, but not end a turn, where the whole does not.
        if not tokenizer.eos_token or tokenizer.eos_token not in more:
            return place + length
    # Put another answer into its place.
    other = [*messages[:number], {"role": "assistant", "content": PLACEHOLDER}, *messages[number + 1 :]]
    with contextlib.suppress(RowError):
        head, mark, _ = render(tokenizer, other, inputs).partition(PLACEHOLDER)
        return len(head) if mark and text.startswith(head) else None
    return None


def shown(tokenizer: Any, part: Messages, inputs: TemplateInputs, text: str, **options: Any) -> int | None:
    """Return the length of the text of a conversation's first messages if the whole text begins with it."""
    with contextlib.suppress(RowError):
        if part and text.startswith(beginning := render(tokenizer, part, inputs, **options)):
            return len(beginning)
    return None


def behind_mark(
    tokenizer: Any, messages: Messages, inputs: TemplateInputs, number: int, text: str, **options: Any
) -> tuple[int, str, str] | None:
    """Return a place in the conversation's text behind the last words of a message, what stands there, and what would
    stand there if the message were the last. None if the template does not show the message's words."""
    for marked in marked_messages(messages[number]):
        with contextlib.suppress(RowError):
            begun = [*messages[:number], marked]
            _, mark, tail = render(tokenizer, [*begun, *messages[number + 1 :]], inputs).rpartition(PLACEHOLDER)
            last = render(tokenizer, begun, inputs, **options).rpartition(PLACEHOLDER)[2]
            # A mark where nothing was (no arguments) may have brought markup with it; the rest must be the same.
            if mark and text.endswith(tail[len(last) :] or tail):
                return len(text) - len(tail), tail, last
    return None


def marked_messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a message with PLACEHOLDER as its last words: in the last call's arguments, if it has any; as its text."""
    calls = message.get("tool_calls") or []
    # Some templates show the first call only.
    for i, call in reversed(list(enumerate(calls))):
        yield {**message, "tool_calls": [*calls[:i], marked_call(call, PLACEHOLDER), *calls[i + 1 :]]}
    yield {**message, "content": PLACEHOLDER}


def agreement(left: str, right: str) -> tuple[int, str]:
    """Return how far one text agrees with another but for white space, up to a token in whose midst they part; and how
    the other goes on."""
    # Letters of both, and their places.
    (letters, places), (others, other_places) = (
        ("".join(text.split()), [0, *(i for i, letter in enumerate(text, 1) if not letter.isspace())])
        for text in (left[: 2 * len(right)], right)
    )
    length = num_common(letters, others)
    if length < len(others):
        tags = (tag.span() for text in (letters, others) for tag in MARKUP.finditer(text))
        length = min([length, *(start for start, end in tags if start < length < end)])
    behind, more = left[places[length] :], right[other_places[length] :]
    return places[length] + num_common(behind, more[: len(more) - len(more.lstrip())]), more
