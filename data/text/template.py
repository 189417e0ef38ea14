"""Chat messages to token ids and loss masks, by the tokenizer's chat template."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.modules.pretrained.checkpoint import Checkpoint, opened
from draftsmith.modules.pretrained.reading import read_text
from draftsmith.modules.types import InputError, without_controls

# Each has a role and a content, and may have tool_calls, tool_call_id, name and reasoning_content.
Messages = list[dict[str, Any]]
# What a template reads beside the messages, as JSON: tools (a list), variables (such as enable_thinking), and the date
# that strftime_now shows. All may be absent.
TemplateInputs = Mapping[str, Any]
TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TAG_REMEDY = "Pass --chat-template FILE with {% generation %} tags around the assistant's words, or without any."
# Value of --chat-template for models that continue a text: messages one after the other, behind what the tokenizer
# itself puts first.
NO_TEMPLATE = "none"
PLAIN_TEXT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
# What templates write around messages and their parts.
MARKUP = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
TOO_LONG_REMEDY = "Raise --max-length within the target's context, or pass --overlong drop."
# Stands for an answer where the text around it is looked for.
PLACEHOLDER = "draftsmith-answer"
# Two turns that any template for chats can show.
PROBE = [
    {"role": role, "content": f"draftsmith {role} {turn}"} for turn in ("one", "two") for role in ("user", "assistant")
]
DATE_FORMATS = ["%-d", "%-m", *(f"%{letter}" for letter in "aAdebBmyYjwuHIMSpxXcFDTZz")]


class RowError(ValueError):
    """A row that cannot be used: stages count it, or raise an InputError that names it.

    message: printed in one line, and no terminal obeys what the row says in it. remedy: what to do; empty if the row
    itself must be corrected. reason: name under which it is counted.
    """

    def __init__(self, message: str, remedy: str = "", reason: str = "invalid"):
        super().__init__(without_controls(message.replace("\n", "\\n")))
        self.remedy, self.reason = remedy, reason


def load_chat_tokenizer(target: str | Checkpoint, chat_template: Path | None = None) -> Any:
    """Load the target's tokenizer with a chat template: its own, the one in the file `chat_template`, or with
    `NO_TEMPLATE` one that writes the plain text.

    Raises:
        InputError: no template, or one that does not show what the user says.
    """
    checkpoint = opened(target)
    tokenizer = checkpoint.tokenizer if chat_template is None else copy.deepcopy(checkpoint.tokenizer)
    if str(chat_template) == NO_TEMPLATE:
        # <bos>, if the tokenizer puts it in front of a text: many base models write nonsense without it.
        first = tokenizer.decode(tokenizer("")["input_ids"])
        tokenizer.chat_template = f"{{{{ {json.dumps(first)} }}}}{PLAIN_TEXT}"
    elif chat_template is not None:
        if not Path(chat_template).is_file():
            raise InputError("chat_template", chat_template, "a file with a Jinja template", "Check the path.")
        tokenizer.chat_template = read_text(chat_template, "a Jinja template", "Check the path.")
    if not tokenizer.chat_template:
        remedy = "Pass --chat-template FILE, or --chat-template none to let it continue plain text."
        raise InputError("chat_template", f"none in {checkpoint.path}", "a chat template", remedy)
    # Templates of models that see pictures may read lists of parts only. A template that refuses the probe refuses its
    # rows, or wants other ones.
    with contextlib.suppress(RowError):
        if (words := PROBE[0]["content"]) not in render(tokenizer, PROBE[:1]):
            found = f"that of {chat_template or checkpoint.path}, which drops a message of plain text ({words!r})"
            remedy = "Pass --chat-template FILE with one that prints message.content."
            raise InputError("chat_template", found, "a template that shows the user's words", remedy)
    return tokenizer


def part_separator(tokenizer: Any) -> str:
    """Return what stands between text parts of a message: what the template writes there, if it reads lists of parts;
    else a line break, as vLLM and llama.cpp join them."""
    first, second = (said["content"] for said in PROBE[::2])
    parts = [{"type": "text", "text": text} for text in (first, second)]
    with contextlib.suppress(RowError):
        behind = render(tokenizer, [{"role": "user", "content": parts}]).partition(first)[2]
        between, found, _ = behind.partition(second)
        # A template that reads texts may print the list as Python writes it.
        if found and not between.strip():
            return between
    return "\n"


def check_length(tokenizer: Any, text: str, context: int | None) -> None:
    """Raise RowError for a text that its beginning shows to be longer than the context.

    A tokenizer takes hundreds of bytes of memory for each character.
    """
    size = 16 * (context or len(text))
    while context and size < len(text):
        # A cut changes the tokens around it, so its beginning must have far too many.
        if (length := len(encode(tokenizer, text[:size]))) > 2 * context:
            found = f"{len(text):,} characters, of which the first {size:,} have {length:,} tokens, more than {context}"
            raise RowError(found, TOO_LONG_REMEDY, "overlong")
        size *= 4


def check_context(row: int, length: int, max_position: int | None) -> None:
    """Raise InputError for a prompt that leaves no room for an answer."""
    if max_position is not None and length >= max_position:
        expected = f"fewer than the target's context, {max_position}"
        remedy = "Make the prompts for this target: data prompts --overlong drop."
        raise InputError(f"prompt {row}", f"{length} tokens", expected, remedy)


def shows_date(tokenizer: Any) -> bool:
    """Return whether the template may show the date of the day on which it is applied."""
    return "strftime_now" in str(tokenizer.chat_template)


@functools.lru_cache(maxsize=8)
def pin_date(template: str, date: str | None) -> str:
    """Return the template with `strftime_now` at midnight of a date, such as 2026-11-27; unchanged without one."""
    if date is None or "strftime_now" not in template:
        return template
    day = datetime.datetime.fromisoformat(date)
    # transformers passes no functions to templates: a macro takes the place of its own function.
    values = "".join(f"|replace({json.dumps(form)}, {json.dumps(day.strftime(form))})" for form in DATE_FORMATS)
    return f"{{% macro strftime_now(format) %}}{{{{ format{values} }}}}{{% endmacro %}}\n{template}"


def template_of(tokenizer: Any, inputs: TemplateInputs) -> str:
    """Return the tokenizer's template for these inputs, with their date."""
    return pin_date(tokenizer.get_chat_template(tools=inputs.get("tools")), inputs.get("date"))


def render(
    tokenizer: Any, messages: Messages, inputs: TemplateInputs | None = None, add_generation_prompt: bool = False
) -> str:
    """Return the chat template's text of messages.

    Raises:
        RowError: the template refuses the messages.
    """
    from jinja2 import TemplateError

    tools, variables = map((inputs or {}).get, ("tools", "variables"))
    try:
        options: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": add_generation_prompt}
        options["chat_template"] = template_of(tokenizer, inputs or {})
        if "length != 9" in options["chat_template"]:
            messages = nine_letter_ids(messages)
        text = tokenizer.apply_chat_template(messages, **options, **(variables or {}))
        # No tokenizer takes half of a surrogate pair.
        text.encode()
    except TemplateError as error:
        raise RowError(f"the chat template refuses it: {error}") from error
    except (
        TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError
    ) as error:  # fmt: skip
        # Expressions in the template raise these.
        raise RowError(f"the chat template fails on it ({type(error).__name__}: {error})") from error
    return text


def nine_letter_ids(messages: Messages) -> Messages:
    """Return messages with ids of calls as Mistral's templates want them: the last nine letters, as vLLM takes them."""

    def short(part: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {**part, name: str(part[name])[-9:].rjust(9, "0")} if part.get(name) is not None else dict(part)

    return [
        {**short(message, "tool_call_id"), **({"tool_calls": [short(call, "id") for call in calls]} if calls else {})}
        for message in messages
        for calls in (message.get("tool_calls"),)
    ]


def prompt_ids(tokenizer: Any, messages: Messages, inputs: TemplateInputs | None = None) -> list[int]:
    """Tokenize messages up to and including the generation prompt; RowError if the template refuses them."""
    return encode(tokenizer, render(tokenizer, messages, inputs, add_generation_prompt=True))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenize text that a template has written, whose special tokens are in it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def not_shown(tokenizer: Any, messages: Messages, inputs: TemplateInputs) -> set[str]:
    """Return what could be left out, and the text be the same: fields beside role and content, tools, and messages but
    the user's, or a part of one between tags, such as a thought."""
    template = tokenizer.get_chat_template(tools=inputs.get("tools"))
    names = {"chat_template_kwargs"} if any(name not in template for name in inputs.get("variables", ())) else set()
    text = render(tokenizer, messages, inputs)

    def is_same(messages: Messages, inputs: TemplateInputs) -> bool:
        # A template that refuses less than this reads it.
        with contextlib.suppress(RowError):
            return render(tokenizer, messages, inputs) == text
        return False

    # Sessions are long: marks in all messages tell by one rendering which parts may be dropped.
    marked, parts = list(map(dict, messages)), list[tuple[int, str, int]]()
    for i, message in enumerate(messages):
        for name in message.keys() - {"role"}:
            values = split_field(message, name)
            for j in range(0, len(values), 2 if name == "content" else 1):
                if name != "content" or (message["role"] != "user" and values[j].strip()):
                    mark = f"mark{len(parts):05d}"
                    values[j] = marked_call(values[j], mark) if name == "tool_calls" else mark
                    parts.append((i, name, j))
            marked[i] |= join_field(name, values)
    shown = ""
    with contextlib.suppress(RowError):
        shown = render(tokenizer, marked, inputs)
    for number, (i, name, j) in enumerate(parts):
        label = f"{messages[i]['role']}_message" if name == "content" else name
        if label not in names and f"mark{number:05d}" not in shown:
            values = split_field(messages[i], name)
            other = {key: value for key, value in messages[i].items() if key != name}
            other |= join_field(name, [*values[:j], *values[j + 1 :]])
            names |= {label} if is_same([*messages[:i], other, *messages[i + 1 :]], inputs) else set()
    if "tools" in inputs and is_same(messages, {**inputs, "tools": None}):
        names.add("tools")
    return names


def split_field(message: Mapping[str, Any], name: str) -> list[Any]:
    """Return the parts of a message's field: calls of tools, texts with the tags between them, or the value."""
    if name == "content":
        return re.split(f"({MARKUP.pattern})", message[name])
    return list(message[name]) if name == "tool_calls" else [message[name]]


def join_field(name: str, parts: Sequence[Any]) -> dict[str, Any]:
    """Return the field of these parts; none without a part, but a text."""
    if name == "content":
        return {name: "".join(parts)}
    return {name: parts if name == "tool_calls" else parts[0]} if parts else {}


def user_turn(tokenizer: Any, inputs: TemplateInputs | None = None) -> tuple[list[int], str]:
    """Return the token ids in front of a first user message, and the first word that the template writes behind it.

    Raises:
        InputError: a template that shows the user's words otherwise.
    """
    text = render(tokenizer, PROBE[:1], inputs, add_generation_prompt=True)
    before, found, behind = text.partition(PROBE[0]["content"])
    if not found or not behind.split():
        expected = "a template that shows a user's words, and where they end"
        raise InputError("chat_template", repr(text[-80:]), expected, "Use prompts of your own.")
    return encode(tokenizer, before), behind.split()[0]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return id -> text of the tokens that stand for structure, not for text."""
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def special_pattern(tokenizer: Any) -> str:
    """Return a regular expression for one special token."""
    return "|".join(map(re.escape, sorted(special_tokens(tokenizer).values(), key=len, reverse=True))) or "(?!)"


def follow_answer(
    tokenizer: Any,
    asked: Sequence[int],
    messages: Messages,
    inputs: TemplateInputs,
    answer: Sequence[int],
    following: Messages,
    text: str | None = None,
) -> tuple[Messages, list[int]]:
    """Return a conversation with an answer and the messages behind it, and its tokens up to the next answer.

    The answer is shown as a server shows it: its text, through the template. An answer whose special tokens say more
    than where it ends (channels, calls of tools) would lose that: its tokens are repeated as they were sampled.

    asked: tokens of `messages`, that were answered. text: of the answer, if a server returned it.

    Raises:
        RowError: the template refuses the conversation.
    """
    special = special_tokens(tokenizer)
    body = answer[:-1] if answer and answer[-1] in special else answer
    if text is None:
        text = tokenizer.decode(list(answer), skip_special_tokens=True)
    answered = [*messages, {"role": "assistant", "content": text}, *following]
    repeated = any(message["role"] == "assistant" for message in messages) and list(asked) != prompt_ids(
        tokenizer, messages, inputs
    )
    if not repeated and special.keys().isdisjoint(body):
        return answered, prompt_ids(tokenizer, answered, inputs)

    # The template says what stands behind an answer. Its end token replaces the sampled one, which may be for sampling
    # only (<|return|>).
    replaced = [*messages, {"role": "assistant", "content": PLACEHOLDER}, *following]
    whole = render(tokenizer, replaced, inputs, add_generation_prompt=True)
    behind = encode(tokenizer, whole.rpartition(PLACEHOLDER)[2])
    if PLACEHOLDER not in whole or encode(tokenizer, whole)[-len(behind) :] != behind:
        raise RowError("the chat template does not show where an answer ends")
    return answered, [*asked, *body, *behind]


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


def marked_call(call: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """Return a call whose arguments, or the only one if it has none, are a mark."""
    if not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    names = arguments if isinstance(arguments, Mapping) and arguments else [mark]
    return {**call, "function": {**function, "arguments": dict.fromkeys(names, mark)}}


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
