"""The shapes in which prompts are found, told apart by their columns and brought to one: a list of chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
MAPPABLE = ("id", "task", "split", "prompt", "answer", "messages")
# Which user turns of a conversation the target is to answer. `last`: after the recorded answers to those before it.
Turns = Literal["all", "first", "last"]
ID_COLUMNS = ("id", "question_id", "conversation_id", "prompt_id", "conv_id")
TASK_COLUMNS = ("task", "category")
CHAT_COLUMNS = ("messages", "conversations", "conversation")
# Columns of NVIDIA's SPEED-Bench, beside `turns` (Parquet) or `messages` (JSONL). Where its licence forbids a copy of a
# text, a placeholder stands in its place until a script fetches it.
SPEED_BENCH = {"question_id", "category", "sub_category", "source", "src_id", "difficulty", "multiturn"}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
FETCH = (
    "Fetch the texts with SPEED-Bench's prepare_data.py (NVIDIA/Model-Optimizer, examples/specdec_bench) or prepare.py "
    "(NVIDIA-NeMo/Skills, nemo_skills/dataset/speed-bench), and pass the file that it writes."
)
KNOWN_COLUMNS = "messages, conversations, turns, instruction (Alpaca) or prompt"


@dataclass(frozen=True)
class Conversation:
    """One row of the input. `later`: what the user says in later turns, as it was found: nobody has answered those."""

    messages: Messages
    later: tuple[Any, ...] = ()


@dataclass(frozen=True)
class OpenTurns:
    """What the target is to answer of a conversation.

    opening: waits for its first answer. later: what is said after each of its answers, up to where the next begins.
    not_asked: user turns that it does not answer.
    """

    opening: Messages
    later: tuple[Messages, ...] = ()
    not_asked: int = 0


@dataclass(frozen=True)
class Layout:
    """How a data set's rows are read. `columns`: our name -> theirs, for what can be mapped."""

    columns: Mapping[str, str]
    read: Callable[[Mapping[str, Any], Mapping[str, str]], Conversation]

    def conversation(self, row: Mapping[str, Any]) -> Conversation:
        """Raises RowError where the row is empty or not what its layout promises."""
        return self.read(row, self.columns)


def label_columns(columns: Sequence[str], mapping: Mapping[str, str]) -> dict[str, str]:
    """Our name -> theirs of `id`, `task` and `split`, as far as there are such columns."""
    usual = {"id": ID_COLUMNS, "task": TASK_COLUMNS, "split": ("split",)}
    guessed = {ours: _first(candidates, columns) for ours, candidates in usual.items()}
    mapped = {ours: theirs for ours, theirs in mapping.items() if ours in usual and theirs in columns}
    return {ours: theirs for ours, theirs in guessed.items() if theirs and ours not in mapping} | mapped


def label_of(row: Mapping[str, Any], columns: Mapping[str, str], name: str, default: str = "") -> str:
    """`id`, `task` or `split` of a row, as a string.

    Raises:
        RowError: it is a list or an object.
    """
    value = row.get(columns[name]) if name in columns else None
    if isinstance(value, list | tuple | Mapping):
        raise RowError(f"{columns[name]} is {kind_name(value)}, expected text or a number")
    return default if value is None else well_formed(str(value), columns[name])


def is_speed_bench(row: Mapping[str, Any]) -> bool:
    """Return whether a row has the columns of SPEED-Bench."""
    return row.keys() >= SPEED_BENCH


def parse_columns(text: str) -> dict[str, str]:
    """`prompt=question,id=key` -> {"prompt": "question", "id": "key"}.

    Raises:
        InputError: another spelling, or a name of ours that is not one.
    """
    mapping: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        ours, separator, theirs = pair.partition("=")
        if not separator or ours not in MAPPABLE or not theirs:
            expected = f"NAME=COLUMN with NAME one of {', '.join(MAPPABLE)}"
            raise InputError("columns", pair, expected, "For example --columns prompt=question.")
        mapping[ours] = theirs
    return mapping


def check_mapping(columns: Sequence[str], mapping: Mapping[str, str]) -> None:
    """Raises InputError for a mapping to a column that no row has, and for columns of no shape that is known; it names
    the columns found and the flag that maps them."""
    found = shortened_names(columns)
    absent = sorted(set(mapping.values()) - set(columns))
    if absent:
        raise InputError("columns", absent[0], f"a column of the data: {found}", "Correct --columns.")
    if _fitting(columns, {}, mapping) is None:
        raise InputError("columns", found, KNOWN_COLUMNS, "Map them: --columns prompt=NAME[,answer=NAME].")


def layout_of(row: Mapping[str, Any], mapping: Mapping[str, str]) -> Layout:
    """The layout of one row of a data set whose rows may differ. Columns that are null in it do not count where others
    fit: a table has every column of rows of several shapes.

    Raises:
        RowError: nothing fits.
    """
    mapped = mapping.values()
    filled = [name for name, value in row.items() if value is not None or name in mapped]
    layout = _fitting(filled, row, mapping) or _fitting(list(row), row, mapping)
    if layout is None:
        raise RowError(f"columns {shortened_names(list(row))}, none of {KNOWN_COLUMNS}")
    return layout


def _fitting(columns: Sequence[str], sample: Mapping[str, Any], mapping: Mapping[str, str]) -> Layout | None:
    """The first layout that fits these columns."""
    names = label_columns(columns, mapping) | dict(mapping)

    def has(*wanted: str) -> bool:
        return all(name in columns for name in wanted)

    chat = mapping.get("messages") or (None if "prompt" in mapping else _first(CHAT_COLUMNS, columns))
    if chat:
        names["messages"] = chat
        return Layout(names, _read_messages)
    if "prompt" not in mapping:
        if has("turns"):
            return Layout(names, _read_turns)
        if has("instruction"):
            return Layout(names, _read_alpaca)
    if "prompt" in mapping or has("prompt"):
        names.setdefault("prompt", "prompt")
        if has("answer"):
            names.setdefault("answer", "answer")
        if isinstance(sample.get(names["prompt"]), list):
            names["messages"] = names["prompt"]
            return Layout(names, _read_messages)
        return Layout(names, _read_prompt)
    return None


def up_to_last(role: str, messages: Messages) -> Messages:
    """Everything up to the last turn of a role: of the user, what waits for an answer; of the assistant, what can be
    learned from.

    Raises:
        RowError: there is no such turn.
    """
    last = max((i for i, message in enumerate(messages) if message["role"] == role), default=-1)
    if last < 0:
        raise RowError(f"no {role} turn")
    return messages[: last + 1]


def asked_of(conversation: Conversation, turns: Turns) -> OpenTurns:
    """What the target is to answer.

    all: every user turn, and tool messages that were answered; system messages stay where they are. The recorded
    answers are left out, for the target's own take their places.

    Raises:
        RowError: there is no user turn, or one without text.
    """
    further = [[{"role": "user", "content": _filled(text, "a later turn")}] for text in conversation.later]
    if turns == "last":
        opening = up_to_last("user", conversation.messages)
        before = sum(message["role"] == "user" for message in opening) - 1
        return OpenTurns(opening, not_asked=before + len(further))
    stretches = [*_stretches(conversation.messages), *further]
    opening, later = stretches[0], stretches[1:]
    return OpenTurns(opening, tuple(later)) if turns == "all" else OpenTurns(opening, not_asked=len(later))


def _stretches(messages: Messages) -> list[Messages]:
    """What is said between the assistant's turns, each stretch up to where the assistant is to speak: after every user
    turn, and after a tool message that it went on from."""
    stretches: list[Messages] = []
    said: Messages = []
    for i, message in enumerate(messages):
        role, following = message["role"], messages[i + 1]["role"] if i + 1 < len(messages) else None
        if role != "assistant":
            said.append(message)
        if role == "user" or (role == "tool" and following == "assistant"):
            stretches.append(said)
            said = []
    if not any(message["role"] == "user" for message in messages):
        raise RowError("no user turn")
    return stretches


def user_turns(conversation: Conversation) -> tuple[Messages, tuple[str, ...]]:
    """What the user says, without what was answered: the messages that open the conversation (system messages and the
    first user turn), and the texts of the later user turns.

    Raises:
        RowError: there is no user turn, or one without text.
    """
    roles = [message["role"] for message in conversation.messages]
    if "user" not in roles:
        raise RowError("no user turn")
    first = roles.index("user")
    opening = [message for message in conversation.messages[: first + 1] if message["role"] in ("system", "user")]
    said = (message["content"] for message in conversation.messages[first + 1 :] if message["role"] == "user")
    return opening, (*said, *(_filled(text, "a later turn") for text in conversation.later))


def _first(names: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _read_messages(row: Mapping[str, Any], columns: Mapping[str, str]) -> Conversation:
    turns = _turns(row, columns["messages"])
    # A system turn without text is common, and means none.
    said = (turn for turn in turns if not (_role(turn) == "system" and _content(turn) in (None, "")))
    messages = [_message(turn) for turn in said]
    if all(message["role"] == "user" for message in messages):  # no answers: `turns` in another layout
        return Conversation(messages[:1], tuple(message["content"] for message in messages[1:]))
    return Conversation(messages)


def _turns(row: Mapping[str, Any], column: str) -> list[Any]:
    """Raises RowError where there is no list, or nothing in it."""
    turns = row.get(column)
    if turns is not None and not isinstance(turns, list):
        raise RowError(f"{column} is {kind_name(turns)}, expected a list")
    if not turns:
        raise RowError(f"{column} is empty")
    return turns


def _role(turn: Any) -> str:
    if not isinstance(turn, Mapping):
        raise RowError(f"a turn is {kind_name(turn)}, expected role and content (or from and value)")
    said = turn.get("role", turn.get("from"))
    role = ROLES.get(str(said).lower())
    if role is None:
        raise RowError(f"unknown role {repr(said)[:60]}, expected one of {', '.join(ROLES)}")
    return role


def _content(turn: Mapping[str, Any]) -> Any:
    content = turn.get("content", turn.get("value"))
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):  # OpenAI's content parts
        raise RowError("a turn holds something other than text")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise RowError("a part of a turn says it is text and has none")
    return "".join(texts)


def _message(turn: Any) -> dict[str, str]:
    role = _role(turn)
    return {"role": role, "content": _filled(_content(turn), f"a {role} turn")}


def _filled(value: Any, what: str) -> str:
    if value is not None and not isinstance(value, str):
        raise RowError(f"{what} is {kind_name(value)}, expected text")
    if value is None or not value.strip():
        raise RowError(f"{what} has no text")
    if value.startswith(PLACEHOLDER):
        raise RowError(f"{what} is a placeholder ({PLACEHOLDER} ...)", FETCH)
    return well_formed(value, what)


def _optional(value: Any, what: str) -> str | None:
    """A text that a row may lack; None where it does, or where it is blank.

    Raises:
        RowError: it is something else.
    """
    return None if value is None or value == "" or str(value).isspace() else _filled(value, what)


def well_formed(text: str, what: str) -> str:
    """
    Raises:
        RowError: half of a surrogate pair stands in it, which no tokenizer and no file takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])
        raise RowError(f"{what} holds half of a surrogate pair ({found}), expected Unicode text") from error
    return text


def shortened_names(columns: Sequence[str], shown: int = 12) -> str:
    """The first so many names, shortened; what a file holds need not be short."""
    more = f" and {len(columns) - shown} more" if len(columns) > shown else ""
    return ", ".join(name if len(name) <= 40 else f"{name[:40]}..." for name in columns[:shown]) + more or "none"


def kind_name(value: Any) -> str:
    """What a JSON value is, in words."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _read_turns(row: Mapping[str, Any], columns: Mapping[str, str]) -> Conversation:
    turns = _turns(row, "turns")
    return Conversation([{"role": "user", "content": _filled(turns[0], "the first turn")}], tuple(turns[1:]))


def _read_alpaca(row: Mapping[str, Any], columns: Mapping[str, str]) -> Conversation:
    instruction, given = _filled(row.get("instruction"), "instruction"), _optional(row.get("input"), "input")
    content = f"{instruction}\n\n{given}" if given is not None else instruction
    return _exchange(content, row.get("output"))


def _read_prompt(row: Mapping[str, Any], columns: Mapping[str, str]) -> Conversation:
    answer = row.get(columns["answer"]) if "answer" in columns else None
    return _exchange(_filled(row.get(columns["prompt"]), columns["prompt"]), answer)


def _exchange(prompt: str, answer: Any) -> Conversation:
    """answer: of another type (the number of a choice) it is none, which is told where answers are learned from."""
    messages = [{"role": "user", "content": prompt}]
    if isinstance(answer, str) and answer.strip():
        messages.append({"role": "assistant", "content": well_formed(answer, "the answer")})
    return Conversation(messages)
