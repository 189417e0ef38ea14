"""Read rows of every known shape, told apart by their columns, as one: a list of chat messages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.data.stages import Turns
from draftsmith.data.text.agents import EMPTY, TEXTS, openai_tool, openai_turns, parse_json
from draftsmith.data.text.languages import language_of
from draftsmith.data.text.logs import bodies, is_secret, look_up, read_log
from draftsmith.data.text.template import Messages, RowError
from draftsmith.modules.types import InputError

# Role of a turn -> its usual names.
ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai"),
    "system": ("system", "developer"),
    "tool": ("tool", "observation", "tool_response", "function", "ipython"),
}
# Columns beside the chat: our name -> usual names.
COLUMNS = {
    "id": ("id", "custom_id", "response.id", "question_id", "conversation_id", "prompt_id", "conv_id", "request_id"),
    "task": ("task", "category"),
    "split": ("split",),
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "tools": ("tools", "functions"),
    "chat_template_kwargs": ("chat_template_kwargs",),
}
LANGUAGE = "language"  # the column that is detected where a row has none
MAPPABLE = (*COLUMNS, "prompt", "answer", "messages")
# Keys of a turn that templates read beside role and content; those of reasoning mean the same.
REASONING = ("reasoning_content", "reasoning", "thinking")
TURN_KEYS = ("tool_calls", "tool_call_id", "name")
# An answer with 0 or false under one of these is not learned (OpenAI, ms-swift, axolotl).
WEIGHTS = ("weight", "loss", "train")
READ_KEYS = {"role", "content", *TURN_KEYS, *REASONING, *WEIGHTS}
CHAT_COLUMNS = ("messages", "conversations", "conversation", "trajectory")
KNOWN_COLUMNS = "messages, conversations, trajectory, turns, instruction (Alpaca), prompt, or request (and response)"
# Where the license of NVIDIA's SPEED-Bench forbids a copy of a text, this stands for it until a script fetches it.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
FETCH = (
    "Fetch the texts with SPEED-Bench's prepare_data.py (NVIDIA/Model-Optimizer, examples/specdec_bench) or prepare.py "
    "(NVIDIA-NeMo/Skills, nemo_skills/dataset/speed-bench), and pass the file that it writes."
)
# What LiteLLM and OpenInference write in place of a text, and into one that they shorten.
REDACTED = re.compile(r"redacted-by-litellm|__REDACTED__|.*\(litellm_truncated ", re.DOTALL)
SHOWN_CHARS = 200  # of a row, in errors
# Columns of rows, keys of turns and types of their parts that hold images, videos and sound.
MEDIA = re.compile(r"(input_)?(image|img|picture|photo|video|audio)s?(_(url|path|file|\d+))*|pixel_values")
TEXT_ONLY = "Heads learn from text alone: take it out where it does not matter, or pass --invalid drop."


# Columns beside a chat that are read if they hold this; else they are counted as ignored.
READABLE: dict[str, Callable[[Any], bool]] = {
    "system": lambda value: isinstance(value, str | list),
    "history": lambda pairs: isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 2 for p in pairs),
    "tools": lambda tools: isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools),
    "chat_template_kwargs": lambda values: isinstance(values, Mapping),
}


@dataclass(frozen=True)
class Chat:
    """Messages of one row.

    later: texts of later user turns without recorded answers, unchecked. inputs: what the template reads beside the
    messages. not_learned: numbers of messages whose answers have weight 0. ignored: names of fields that say something
    and are not read. logged: a request of a log, the last answer is its own. cut: that ends before its model ended it.
    """

    messages: Messages
    later: tuple[Any, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    not_learned: tuple[int, ...] = ()
    ignored: frozenset[str] = frozenset()
    logged: bool = False
    cut: bool = False


@dataclass(frozen=True)
class OpenTurns:
    """Turns of a chat that the target answers.

    opening: waits for the first answer. later: messages that follow each answer, up to where the next one begins. turn:
    of the first answer among the chat's, from 1. not_asked: number of turns that it does not answer.
    """

    opening: Messages
    later: tuple[Messages, ...] = ()
    turn: int = 1
    not_asked: int = 0


def parse_columns(text: str) -> dict[str, str]:
    """Parse `prompt=question,id=key` to {"prompt": "question", "id": "key"}.

    Raises:
        InputError: another spelling, or an unknown name.
    """
    mapping: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        ours, separator, theirs = pair.partition("=")
        if not separator or ours not in MAPPABLE or not theirs or is_secret(theirs):
            expected = f"NAME=COLUMN with NAME one of {', '.join(MAPPABLE)}"
            raise InputError("columns", pair, expected, "For example --columns prompt=question.")
        mapping[ours] = theirs
    return mapping


def row_label(row: Mapping[str, Any], mapping: Mapping[str, str], name: str, default: str = "") -> str:
    """Return a row's `id`, `task`, `split` or any other column as a string, empty if it looks like a secret.

    Raises:
        RowError: it is a list or an object.
    """
    value, column = named_value(row, mapping, name), mapping.get(name, name)
    if isinstance(value, list | tuple | Mapping):
        remedy = "Write its value as text, or name another column."
        raise RowError(f"a {type(value).__name__} in column {column}, which is no text and no number", remedy)
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else well_formed(str(value), column)
    return default if not text or is_secret(column, text) else text


def kept_label(row: Mapping[str, Any], mapping: Mapping[str, str], name: str) -> str:
    """Return `row_label`; for a row without a `language` that of its answer, or of its last question.

    Raises:
        RowError: as `row_label`; no chat.
        InputError: a language is to be detected, without the extra `languages`.
    """
    text = row_label(row, mapping, name)
    if text or name != LANGUAGE:
        return text
    messages = read_chat(row, mapping).messages
    said = [message["content"] for message in messages if message["role"] == "user"]
    said += [messages[-1]["content"]] if messages[-1]["role"] == "assistant" else []
    return language_of(next(filter(None, reversed(said)), ""))


def named_value(row: Mapping[str, Any], mapping: Mapping[str, str], name: str) -> Any:
    """Return a row's value under one of the usual names of COLUMNS, or of any other column; None if it has none.

    That may be the row's, its metadata's, or those of a logged request or its response; dots lead into objects.
    """
    if name in COLUMNS and name not in mapping:
        return next((value for column in COLUMNS[name] if (value := look_up(row, column)) is not None), None)
    columns = [name := mapping.get(name, name), f"metadata.{name}"]
    found = (look_up(part, column) for part in itertools.chain([row], bodies(row) or ()) for column in columns)
    return next((value for value in found if value is not None), None)


def chat_shape(row: Mapping[str, Any], mapping: Mapping[str, str]) -> tuple[str, str]:
    """Return the shape of a row, which is messages, turns, alpaca or prompt, and the column that holds its chat.

    Raises:
        RowError: no known shape.
    """
    # A table has the columns of all its rows, null where a row has another shape: null columns count only if no
    # other shape fits.
    filled = [name for name, value in row.items() if value is not None or name in mapping.values()]
    for columns in (filled, row):
        if "messages" in mapping:
            return "messages", mapping["messages"]
        if "prompt" not in mapping:
            for column in (name for name in CHAT_COLUMNS if name in columns):
                return "messages", column
            if "turns" in columns:
                return "turns", "turns"
            if "instruction" in columns:
                return "alpaca", "instruction"
        column = mapping.get("prompt", "prompt")
        if "prompt" in mapping or column in columns:
            # Preference data has messages under the name prompt.
            return ("messages" if isinstance(row.get(column), list) else "prompt"), column
    found = f"columns {', '.join(row)[:SHOWN_CHARS] or 'none'}, none of {KNOWN_COLUMNS}"
    raise RowError(found, "Map them: --columns prompt=NAME[,answer=NAME].")


def read_chat(row: Mapping[str, Any], mapping: Mapping[str, str], between: str = "\n") -> Chat:
    """Read the chat of a row, which may be a logged request with its answer. Else as `read_row`."""
    logged = None if {"prompt", "messages"} & mapping.keys() else read_log(row)
    if logged is None:
        return read_row(row, mapping, between)
    as_row, cut, names = logged
    chat = read_row(as_row, {}, between)
    # What users said one after the other is one request, and earlier answers belong to other requests.
    messages = [*chat.messages, *({"role": "user", "content": text} for text in chat.later)]
    earlier = tuple(i for i, message in enumerate(messages[:-1]) if message["role"] == "assistant")
    ignored = chat.ignored.union(name if name.isidentifier() else "fields" for name in names)
    return replace(chat, messages=messages, later=(), not_learned=earlier, ignored=ignored, logged=True, cut=cut)


def read_row(row: Mapping[str, Any], mapping: Mapping[str, str], between: str = "\n") -> Chat:
    """Read the chat of a row. between: see `part_separator`.

    Answers may be empty, as where a call of a tool is all that is said: `check_answers` refuses them where they are
    read.

    Raises:
        RowError: no known shape, an empty row, or values of another type than the shape's.
    """
    shape, column = chat_shape(row, mapping)
    _check_text_only(row)
    beside = _beside(row, mapping)
    readable = {name: beside.pop(name) for name, fits in READABLE.items() if name in beside and fits(beside[name])}
    system, tools = readable.get("system"), [openai_tool(tool) for tool in readable.get("tools", ())]
    inputs = {"tools": tools, "variables": readable.get("chat_template_kwargs")}
    inputs = {name: value for name, value in inputs.items() if value}
    later: tuple[Any, ...] = ()
    spoken: list[Any] = []
    ignored: set[str] = set()
    if shape == "turns":
        first, *others = _listed(row.get(column), column)
        messages, later = [{"role": "user", "content": _filled(first, "the first turn")}], tuple(others)
    elif shape == "messages":
        # A system turn without text is common, and means none.
        turns, ignored = openai_turns(_listed(parse_json(row.get(column)), column))
        turns = [_with_text(turn, between) for turn in turns]
        spoken = [turn for turn in turns if not (_role(turn) == "system" and turn.get("content") in (None, ""))]
        messages = [_message(turn) for turn in spoken]
        if all(message["role"] == "user" for message in messages):
            # No recorded answers: the same as `turns`.
            messages, later = messages[:1], tuple(message["content"] for message in messages[1:])
    else:
        # Earlier turns are pairs of a question and its answer.
        texts = [_filled(text, "a turn of history") for pair in readable.pop("history", ()) for text in pair]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        messages += _prompt(row, mapping, shape, column)

    not_learned = [i for i, turn in enumerate(spoken) if _role(turn) == "assistant" and _weight(turn) == 0]
    ignored |= {key for turn in spoken for key, value in turn.items() if key not in READ_KEYS and value not in EMPTY}
    thoughts = ((key, turn.get(key), _thought(turn)) for turn in spoken for key in REASONING)
    ignored |= {key for key, value, read in thoughts if not _blank(value) and value != read}
    # A weight is all or nothing.
    weights = ((key, turn.get(key), _weight(turn)) for turn in spoken for key in WEIGHTS)
    ignored |= {key for key, value, read in weights if value not in (None, 0, 1) or value not in (None, read)}
    ignored |= beside.keys() | ({"history"} & readable.keys())
    # The chat's own system message is nearer to it than a column.
    if system is not None:
        (first_turn,), unread = openai_turns([{"role": "system", "content": system}])
        opening = _message(_with_text(first_turn, between))
        if messages and messages[0]["role"] == "system":
            ignored |= {"system"} if opening != messages[0] else set()
        else:
            messages, ignored = [opening, *messages], ignored | unread
            not_learned = [i + 1 for i in not_learned]
    # A name goes into the counts of the stage.
    names = frozenset(name if name.isidentifier() else "fields" for name in ignored)
    return Chat(messages, later, inputs, tuple(not_learned), names)


def check_answers(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RowError for an answer without text, calls or reasoning, where recorded answers are read."""
    for message in messages:
        if message["role"] == "assistant" and not any(map(message.get, ("content", "tool_calls", "reasoning_content"))):
            raise RowError("an assistant turn has no text")


def up_to_last(role: str, messages: Messages) -> Messages:
    """Return the messages up to the last one of a role.

    Raises:
        RowError: the role has no turn.
    """
    last = max((i for i, message in enumerate(messages) if message["role"] == role), default=-1)
    if last < 0:
        raise RowError(f"no {role} turn")
    return messages[: last + 1]


def open_turns(chat: Chat, turns: Turns) -> list[OpenTurns]:
    """Choose the turns that the target answers, together or each by itself.

    all: every user turn, together. Recorded answers are left out: the target's own take their place. A recorded result
    of a tool does not fit another call, so a chat with such results is asked as by `each`. each, last: as
    `recorded_turns`.

    Raises:
        RowError: no user turn, or one without text; or a recorded answer without text, where these are read.
    """
    later = tuple([{"role": "user", "content": _filled(text, "a later turn")}] for text in chat.later)
    up_to_last("user", chat.messages)
    tools = any(message["role"] == "tool" for message in chat.messages)
    if turns in ("each", "last") or (turns == "all" and tools):
        asked = recorded_turns(chat.messages)
        check_answers(asked[-1].opening)
        begin = len(asked) - 1 if turns == "last" else 0
        asked[-1] = replace(asked[-1], not_asked=begin + len(later))
        return asked[begin:]

    # Collect what is said between the assistant's turns, each stretch up to where the assistant speaks.
    stretches: list[Messages] = []
    stretch: Messages = []
    for message in chat.messages:
        if message["role"] != "assistant":
            stretch.append(message)
        if message["role"] == "user":
            stretches.append(stretch)
            stretch = []
    stretches += later
    first, others = stretches[0], stretches[1:]
    return [OpenTurns(first, not_asked=len(others)) if turns == "first" else OpenTurns(first, tuple(others))]


def recorded_turns(messages: Messages) -> list[OpenTurns]:
    """Return every turn that the assistant answered, and one at the end that it did not, each behind all recorded
    messages before it.

    Such a turn ends with what a user said, or with the results of tools.
    """
    asked: list[OpenTurns] = []
    turn, spoken = 1, False
    for i, message in enumerate([*messages, {"role": "assistant"}]):
        if message["role"] == "assistant":
            asked += [OpenTurns(messages[:i], turn=turn)] if spoken else []
            turn, spoken = turn + 1, False
        spoken = spoken or message["role"] in ("user", "tool")
    return asked


def _prompt(row: Mapping[str, Any], mapping: Mapping[str, str], shape: str, column: str) -> Messages:
    """Read one prompt, with its answer if there is one."""
    content = _filled(row.get(column), column)
    if shape == "alpaca":
        further, answer = row.get("input"), row.get("output")
        if further is not None and further != "" and not str(further).isspace():
            content = f"{content}\n\n{_filled(further, 'input')}"
    else:
        answer = row.get(mapping.get("answer", "answer"))
    messages = [{"role": "user", "content": content}]
    # An answer of another type (the number of a choice) counts as none; --supervised then reports the row.
    if isinstance(answer, str) and answer.strip():
        messages.append({"role": "assistant", "content": well_formed(answer, "the answer")})
    return messages


def _beside(row: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """Return what a row says in columns beside its chat; lists and objects may be written as JSON."""
    values = {name: named_value(row, mapping, name) for name in READABLE}
    values = {name: value if name == "system" else parse_json(value) for name, value in values.items()}
    return {name: value for name, value in values.items() if value not in EMPTY and not str(value).isspace()}


def _listed(turns: Any, column: str) -> list[Any]:
    if turns is not None and not isinstance(turns, list):
        raise RowError(f"{column} is {turns!r:.60}, expected a list")
    if not turns:
        raise RowError(f"{column} is empty")
    return turns


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Read a turn as a message, with what templates read beside its text."""
    role, content = _role(turn), turn.get("content")
    # A tool may print nothing, and an answer be a call.
    if role in ("assistant", "tool") and not _is_text(content) and isinstance(content, str | None):
        content = ""
    else:
        content = _filled(content, f"a {role} turn")
    message: dict[str, Any] = {"role": role, "content": content}
    message |= {key: turn[key] for key in TURN_KEYS if turn.get(key) not in EMPTY}
    if thought := _thought(turn):
        message["reasoning_content"] = well_formed(thought, "the reasoning of a turn")
    if "tool_calls" in message:
        _listed(message["tool_calls"], "tool_calls")
    return message


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _blank(value: Any) -> bool:
    """Return whether a field says nothing: tables and servers leave fields null, empty or blank."""
    return value in EMPTY or (isinstance(value, str) and not value.strip())


def _thought(turn: Mapping[str, Any]) -> str | None:
    """Return the first text among the fields of reasoning."""
    return next((turn[key] for key in REASONING if _is_text(turn.get(key))), None)


def _weight(turn: Mapping[str, Any]) -> Any:
    """Return the weight of an answer in the loss: 0 or false if it is not learned."""
    return next((turn[key] for key in WEIGHTS if not _blank(turn.get(key))), 1)


def _role(turn: Any) -> str:
    if not isinstance(turn, Mapping):
        raise RowError(f"a turn is {turn!r:.60}, expected role and content (or from and value)")
    name = turn.get("role")
    for role, names in ROLES.items():
        if str(name).lower() in names:
            return role
    raise RowError(f"unknown role {repr(name)[:60]}, expected one of {', '.join(itertools.chain(*ROLES.values()))}")


def _with_text(turn: Mapping[str, Any], between: str) -> Mapping[str, Any]:
    """Return a turn whose content, if it is OpenAI's list of text parts, is one text."""
    role, content = _role(turn), turn.get("content")
    _check_text_only(turn)
    if not isinstance(content, list):
        return turn
    for part in content:
        # Of OpenAI a part names its type, of DashScope it is a field.
        _check_text_only({str(part["type"]): part} if "type" in part else part) if isinstance(part, Mapping) else None
    if not all(isinstance(part, Mapping) and part.get("type") in TEXTS for part in content):
        raise RowError("a turn holds something other than text")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise RowError("a part of a turn says it is text and has none")
    # Servers write a tool's parts one below the other with any template.
    return {**turn, "content": ("\n" if role == "tool" else between).join(texts)}


def _check_text_only(fields: Mapping[str, Any]) -> None:
    """Raise RowError for images, videos or sound among these fields, which tables hold as bytes or a path."""
    for name, value in fields.items():
        stored = isinstance(value, Mapping) and value.keys() == {"bytes", "path"}
        if (stored or MEDIA.fullmatch(str(name))) and not _is_empty(value):
            raise RowError(f"text with {name}, expected text alone", TEXT_ONLY, "media")


def _is_empty(value: Any) -> bool:
    """Return whether a field says nothing: nothing, false, or a list or object of such."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return value in (*EMPTY, False) if parts is None else all(map(_is_empty, parts))


def _filled(value: Any, what: str) -> str:
    """Return a text that must be there. what: names it in the error."""
    if value is not None and not isinstance(value, str):
        raise RowError(f"{what} is {value!r:.60}, expected text")
    if value is None or not value.strip():
        raise RowError(f"{what} has no text")
    if value.startswith(PLACEHOLDER):
        raise RowError(f"{what} is a placeholder ({PLACEHOLDER} ...)", FETCH)
    if REDACTED.match(value):
        raise RowError(f"{what} was redacted or shortened where it was logged", "Log whole texts.", "redacted")
    return well_formed(value, what)


def well_formed(text: str, what: str) -> str:
    """Return the text; raise RowError if it holds half of a surrogate pair, which no tokenizer and no file takes."""
    # Python holds half of a pair, from JSON escapes, that UTF-8 cannot.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])
        raise RowError(f"{what} holds half of a surrogate pair ({found}), expected Unicode text") from error
    return text
