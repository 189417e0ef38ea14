"""Chat messages to token ids and loss masks, by the tokenizer's chat template."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
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
# Value of --chat-template for models that continue a text: messages one after the other, behind what the tokenizer
# itself puts first.
NO_TEMPLATE = "none"
PLAIN_TEXT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
# What templates write around messages and their parts.
MARKUP = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
# A warning of transformers, once for each tokenizer.
LONG_TEXT = "sequence-length-is-longer-than-the-specified-maximum"
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
    # Stages and benches report prompts that are too long, by their ids.
    tokenizer.deprecation_warnings[LONG_TEXT] = True
    if not tokenizer.chat_template:
        remedy = "Pass --chat-template FILE, or --chat-template none to let it continue plain text (decode: --raw)."
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


def marked_call(call: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """Return a call whose arguments, or the only one if it has none, are a mark."""
    if not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    names = arguments if isinstance(arguments, Mapping) and arguments else [mark]
    return {**call, "function": {**function, "arguments": dict.fromkeys(names, mark)}}


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
) -> tuple[Messages, list[int]]:
    """Return a conversation with an answer and the messages behind it, and its tokens up to the next answer.

    The answer is shown as a server shows it: its text, through the template. An answer whose special tokens say more
    than where it ends (channels, calls of tools) would lose that: its tokens are repeated as they were sampled.

    asked: tokens of `messages`, that were answered.

    Raises:
        RowError: the template refuses the conversation.
    """
    special = special_tokens(tokenizer)
    body = answer[:-1] if answer and answer[-1] in special else answer
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
