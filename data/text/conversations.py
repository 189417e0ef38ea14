"""Read rows of every known shape, told apart by their columns, as one: a list of chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from draftsmith.data.text.template import Messages, RowError
from draftsmith.modules.types import InputError

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
}
# User turns of a conversation that the target answers. `last`: after the recorded answers to those before.
Turns = Literal["all", "first", "last"]
LABEL_COLUMNS = {
    "id": ("id", "question_id", "conversation_id", "prompt_id", "conv_id"),
    "task": ("task", "category"),
    "split": ("split",),
}
MAPPABLE = (*LABEL_COLUMNS, "prompt", "answer", "messages")
CHAT_COLUMNS = ("messages", "conversations", "conversation")
KNOWN_COLUMNS = "messages, conversations, turns, instruction (Alpaca) or prompt"
# Where the licence of NVIDIA's SPEED-Bench forbids a copy of a text, this stands for it until a script fetches it.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
FETCH = (
    "Fetch the texts with SPEED-Bench's prepare_data.py (NVIDIA/Model-Optimizer, examples/specdec_bench) or prepare.py "
    "(NVIDIA-NeMo/Skills, nemo_skills/dataset/speed-bench), and pass the file that it writes."
)
SHOWN_CHARS = 200  # of a row, in errors


@dataclass(frozen=True)
class Chat:
    """Messages of one row. later: texts of later user turns without recorded answers, unchecked."""

    messages: Messages
    later: tuple[Any, ...] = ()


@dataclass(frozen=True)
class OpenTurns:
    """Turns of a chat that the target answers.

    opening: waits for the first answer. later: messages that follow each answer, up to where the next one begins.
    not_asked: number of user turns that it does not answer.
    """

    opening: Messages
    later: tuple[Messages, ...] = ()
    not_asked: int = 0


class ChatShape(NamedTuple):
    """Shape of a row, and the column that holds its chat."""

    name: Literal["messages", "turns", "alpaca", "prompt"]
    column: str


def parse_columns(text: str) -> dict[str, str]:
    """Parse `prompt=question,id=key` to {"prompt": "question", "id": "key"}.

    Raises:
        InputError: another spelling, or an unknown name.
    """
    mapping: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        ours, separator, theirs = pair.partition("=")
        if not separator or ours not in MAPPABLE or not theirs:
            expected = f"NAME=COLUMN with NAME one of {', '.join(MAPPABLE)}"
            raise InputError("columns", pair, expected, "For example --columns prompt=question.")
        mapping[ours] = theirs
    return mapping


def label_column(row: Mapping[str, Any], mapping: Mapping[str, str], name: str) -> str | None:
    """Return the column of a row's `id`, `task` or `split`; None if it has none."""
    candidates = (mapping[name],) if name in mapping else LABEL_COLUMNS[name]
    return next((column for column in candidates if row.get(column) is not None), None)


def row_label(row: Mapping[str, Any], mapping: Mapping[str, str], name: str, default: str = "") -> str:
    """Return a row's `id`, `task` or `split` as a string.

    Raises:
        RowError: it is a list or an object.
    """
    column = label_column(row, mapping, name)
    if column is None:
        return default
    value = row[column]
    if isinstance(value, list | tuple | Mapping):
        raise RowError(f"{column} is {value!r:.60}, expected text or a number")
    return well_formed(str(value), column)


def chat_shape(row: Mapping[str, Any], mapping: Mapping[str, str]) -> ChatShape:
    """Return the shape of a row; rows of one source may differ.

    Raises:
        RowError: no known shape.
    """
    # A table has the columns of all its rows, null where a row has another shape: null columns count only if no
    # other shape fits.
    filled = [name for name, value in row.items() if value is not None or name in mapping.values()]
    for columns in (filled, row):
        if "messages" in mapping:
            return ChatShape("messages", mapping["messages"])
        if "prompt" not in mapping:
            for column in (name for name in CHAT_COLUMNS if name in columns):
                return ChatShape("messages", column)
            if "turns" in columns:
                return ChatShape("turns", "turns")
            if "instruction" in columns:
                return ChatShape("alpaca", "instruction")
        column = mapping.get("prompt", "prompt")
        if "prompt" in mapping or column in columns:
            # Preference data has messages under the name prompt.
            return ChatShape("messages" if isinstance(row.get(column), list) else "prompt", column)
    found = f"columns {', '.join(row)[:SHOWN_CHARS] or 'none'}, none of {KNOWN_COLUMNS}"
    raise RowError(found, "Map them: --columns prompt=NAME[,answer=NAME].")


def read_chat(row: Mapping[str, Any], mapping: Mapping[str, str]) -> Chat:
    """Read the chat of a row.

    Raises:
        RowError: no known shape, an empty row, or values of another type than the shape's.
    """
    shape, column = chat_shape(row, mapping)
    if shape in ("messages", "turns"):
        turns = row.get(column)
        if turns is not None and not isinstance(turns, list):
            raise RowError(f"{column} is {turns!r:.60}, expected a list")
        if not turns:
            raise RowError(f"{column} is empty")
        if shape == "turns":
            return Chat([{"role": "user", "content": _filled(turns[0], "the first turn")}], tuple(turns[1:]))
        # A system turn without text is common, and means none.
        spoken = [turn for turn in turns if not (_role(turn) == "system" and _content(turn) in (None, ""))]
        roles = [_role(turn) for turn in spoken]
        messages = [
            {"role": role, "content": _filled(_content(turn), f"a {role} turn")}
            for role, turn in zip(roles, spoken, strict=True)
        ]
        if all(role == "user" for role in roles):
            # No recorded answers: the same as `turns`.
            return Chat(messages[:1], tuple(message["content"] for message in messages[1:]))
        return Chat(messages)

    # One prompt, with its answer if there is one.
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
    return Chat(messages)


def up_to_last(role: str, messages: Messages) -> Messages:
    """Return the messages up to the last one of a role.

    Raises:
        RowError: the role has no turn.
    """
    last = max((i for i, message in enumerate(messages) if message["role"] == role), default=-1)
    if last < 0:
        raise RowError(f"no {role} turn")
    return messages[: last + 1]


def open_turns(chat: Chat, turns: Turns) -> OpenTurns:
    """Choose the turns that the target answers.

    all: every user turn, and tool messages that an assistant turn followed. Recorded answers are left out: the target's
    own take their place.

    Raises:
        RowError: no user turn, or one without text.
    """
    later = [[{"role": "user", "content": _filled(text, "a later turn")}] for text in chat.later]
    # The recorded answers stay as context, so only the last turn is asked.
    if turns == "last":
        opening = up_to_last("user", chat.messages)
        before = sum(message["role"] == "user" for message in opening) - 1
        return OpenTurns(opening, not_asked=before + len(later))

    # Collect what is said between the assistant's turns, each stretch up to where the assistant speaks.
    stretches: list[Messages] = []
    stretch: Messages = []
    up_to_last("user", chat.messages)
    for message, following in zip(chat.messages, [*chat.messages[1:], None], strict=True):
        role = message["role"]
        if role != "assistant":
            stretch.append(message)
        answered_tool = role == "tool" and following is not None and following["role"] == "assistant"
        if role == "user" or answered_tool:
            stretches.append(stretch)
            stretch = []
    stretches += later
    if turns == "first":
        return OpenTurns(stretches[0], not_asked=len(stretches) - 1)
    return OpenTurns(stretches[0], tuple(stretches[1:]))


def _role(turn: Any) -> str:
    if not isinstance(turn, Mapping):
        raise RowError(f"a turn is {turn!r:.60}, expected role and content (or from and value)")
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(str(name).lower())
    if role is None:
        raise RowError(f"unknown role {repr(name)[:60]}, expected one of {', '.join(ROLES)}")
    return role


def _content(turn: Mapping[str, Any]) -> Any:
    content = turn.get("content", turn.get("value"))
    if not isinstance(content, list):
        return content
    # OpenAI's content parts.
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        raise RowError("a turn holds something other than text")
    # Parts of one turn are one text.
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise RowError("a part of a turn says it is text and has none")
    return "".join(texts)


def _filled(value: Any, what: str) -> str:
    """Return a text that must be there. what: names it in the error."""
    if value is not None and not isinstance(value, str):
        raise RowError(f"{what} is {value!r:.60}, expected text")
    if value is None or not value.strip():
        raise RowError(f"{what} has no text")
    if value.startswith(PLACEHOLDER):
        raise RowError(f"{what} is a placeholder ({PLACEHOLDER} ...)", FETCH)
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
