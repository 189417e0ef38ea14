"""Prompts to measure on: a chat file or data set, a prompts artefact, the shipped ones, or several files, each a task;
in groups, turn by turn."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from draftsmith.data.models.hub import EMBEDDED, resolve_model
from draftsmith.data.models.identity import template_hash
from draftsmith.data.models.loading import text_identity
from draftsmith.data.store.manifest import MANIFEST, STARTED, open_artefact
from draftsmith.data.text.conversations import (
    Turns,
    is_speed_bench,
    read_chat,
    row_label,
    up_to_last,
    user_turns,
)
from draftsmith.data.text.sources import OPENERS, named_split, open_source, plain_stem, suffix_of
from draftsmith.data.text.template import RowError, load_chat_tokenizer, prompt_ids
from draftsmith.data.text.turns import has_later_turns, later_turns
from draftsmith.modules.types import InputError

FASTCHAT = "question.jsonl"  # its name in the folder of each task
WITH_TEMPLATE = 16  # tokens that a template may put around a turn, for an estimate


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as the target reads it, chat template included.

    messages: what `prompt_ids` were made of, where the user goes on. later: what the user says in the turns that
    follow. turn: of the conversation, from 1. number: of the question in its run, from 0, the same in all its turns.
    speed_bench: its task is a category of SPEED-Bench.
    """

    id: str
    prompt_ids: list[int]
    task: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    later: tuple[str, ...] = ()
    turn: int = 1
    number: int = 0
    speed_bench: bool = False


@dataclass(frozen=True)
class PromptRow:
    """One prompt before it is selected. prompt: makes its token ids, once it is. where: its file and line. speed_bench:
    it has the columns of SPEED-Bench, and its category as its task."""

    id: str
    task: str
    split: str
    prompt: Callable[[], BenchPrompt]
    where: str = ""
    speed_bench: bool = False


def read_prompts(
    source: str,
    target: str,
    split: str | None = None,
    keep_tasks: str | None = None,
    limit: int = 0,
    turns: Turns = "last",
    skip: int = 0,
) -> list[BenchPrompt]:
    """Prompts as token ids: the target's chat template, applied up to where the answer begins.

    split: keep rows whose own `split` is this one; `none` keeps all. keep_tasks: keep rows of these tasks, separated by
    commas. limit: keep the first so many, 0 all. turns: which user turns of a conversation. A prompts artefact begins
    where it was made to begin (`data prompts --turns`); all asks its later turns too. skip: leave out the first so many
    of what would be kept.

    Raises:
        InputError: nothing there, rows of an unknown shape, two of one id, an artefact of another tokenizer, or no row
            left.
    """
    rows = kept_rows(source, target, split, keep_tasks, turns)
    return [row.prompt() for row in itertools.islice(rows, skip, skip + limit if limit else None)]


def kept_rows(
    source: str, target: str, split: str | None, keep_tasks: str | None, turns: Turns = "last"
) -> Iterator[PromptRow]:
    """Rows of this split and these tasks, as of `read_prompts`; at least one."""
    split = named_split(split)
    wanted = {task.strip() for task in keep_tasks.split(",")} if keep_tasks else None
    seen: dict[str, set[str]] = {"tasks": set(), "splits": set()}
    places: dict[str, str] = {}
    found = False
    for row in all_rows(source, target, split, turns):
        seen["tasks"].add(row.task)
        seen["splits"].add(row.split)
        if (split and row.split != split) or (wanted is not None and row.task not in wanted):
            continue
        if row.where and places.setdefault(row.id, row.where) != row.where:  # results are told apart by ids
            again = f"the id {row.id[:80]!r}, which {places[row.id]} has too"
            raise InputError(row.where, again, "an id of its own", "Correct the row.")
        found = True
        yield row
    if not found:
        there = "; ".join(f"{name} {', '.join(sorted(filter(None, own))) or 'none'}" for name, own in seen.items())
        remedy = "Check --split and --keep-tasks; --split none takes all splits."
        asked = " and ".join(f"{name} {value}" for name, value in (("split", split), ("tasks", keep_tasks)) if value)
        found_none = f"no matching row{f' of {asked}' if asked else ''} in {source} ({there})"
        raise InputError("prompts", found_none, "at least one", remedy)


def has_splits(source: str, target: str) -> bool:
    """Whether its rows, or those of some, say which split they are of."""
    try:
        return any(row.split for row in all_rows(source, target))
    except InputError as error:
        if error.field == "split":  # a data set of several splits, each of its own files
            return True
        raise


def all_rows(source: str, target: str, split: str | None = None, turns: Turns = "last") -> Iterator[PromptRow]:
    """Rows of a directory that `data prompts` wrote, or began, or of a file or data set of chats. split: of a data
    set."""
    path = Path(resolve_model(source))
    if (path / MANIFEST).exists() or (path / STARTED).exists():
        return artefact_rows(path, target, turns)
    return chat_rows(source, target, split, turns)


def artefact_rows(directory: Path, target: str, turns: Turns) -> Iterator[PromptRow]:
    """Rows of a prompts artefact made with the target's tokenizer, and where later turns are asked its template."""
    manifest = open_artefact(directory, "prompts", text_identity(target))
    if turns == "all" and has_later_turns(manifest):
        ours, theirs = template_hash(load_chat_tokenizer(target)), manifest.identity.get("chat_template")
        if ours != theirs:
            found = f"{directory} made with chat template {theirs}"
            raise InputError("prompts", found, f"{ours}, the target's: later turns need it", "Pass --turns first.")

    def prompt(row: Mapping[str, Any], task: str) -> BenchPrompt:
        later = user_texts(row) if turns == "all" else ()
        messages = tuple(json.loads(row["messages"])) if later else ()
        return BenchPrompt(str(row["id"]), list(row["prompt_ids"]), task, messages, later)

    for entry in manifest.files:
        if entry.name.endswith(".parquet"):
            for row in pq.read_table(directory / entry.name).to_pylist():
                task = row.get("task") or ""
                yield PromptRow(str(row["id"]), task, row.get("split") or "", functools.partial(prompt, row, task))


def user_texts(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Later turns of a row of prompts, up to one that is more than a user's."""
    plain = itertools.takewhile(lambda said: [message["role"] for message in said] == ["user"], later_turns(row))
    return tuple(said[0]["content"] for said in plain)


def chat_rows(source: str, target: str, split: str | None, turns: Turns) -> Iterator[PromptRow]:
    """Rows of a file or data set of chats, read by the target's chat template; a prompt has its messages where more
    turns may follow them."""
    opened, tokenizer = open_source(source, split), load_chat_tokenizer(target)
    # Prompts that are too long are told by their ids, by whoever asks them.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True

    def prompt(raw: Mapping[str, Any], name: str, task: str, where: str) -> BenchPrompt:
        with usable(where):
            chat = read_chat(raw, {})
            last = turns == "last"
            messages, later = (up_to_last("user", chat.messages), ()) if last else user_turns(chat)
            ids = list(prompt_ids(tokenizer, messages))
        goes_on = turns == "all" and bool(later)
        return BenchPrompt(name, ids, task, tuple(messages) if goes_on else (), later if goes_on else ())

    for number in range(len(opened)):
        where = opened.where(number)
        with usable(where):
            raw = opened.row(number)
            row_id, task, own = (row_label(raw, {}, name) for name in ("id", "task", "split"))
        name, own = row_id or str(number), (split or "") if opened.split_taken else own
        made = functools.partial(prompt, raw, name, task, where)
        yield PromptRow(name, task, own, made, where, is_speed_bench(raw))


@contextmanager
def usable(where: str) -> Iterator[None]:
    """Raises:
    InputError: a row that cannot be asked.
    """
    try:
        yield
    except RowError as error:
        remedy = "Correct the row, or pass what `data prompts --invalid drop` makes of the file."
        raise InputError(where, error, "a conversation with a user turn", error.remedy or remedy) from error


def read_questions(
    sources: Sequence[tuple[str, str]], target: str, split: str | None, keep_tasks: str | None, limit: int, turns: Turns
) -> list[list[BenchPrompt]]:
    """The prompts of (name, source) pairs, the first `limit` of each (0: all), numbered through all of them. A name
    becomes the task of its prompts; an empty one leaves them their own. SPEED-Bench without a name is read as a source
    for each category.

    Raises:
        InputError: as `read_prompts`.
    """
    number = itertools.count()
    questions: list[list[BenchPrompt]] = []
    for name, source in sources:
        parts: dict[str, list[BenchPrompt]] = {}
        for row in kept_rows(source, target, split, keep_tasks, turns):
            category = row.task if row.speed_bench and not name else ""
            part = parts.setdefault(category, [])
            if not limit or len(part) < limit:
                part.append(dataclasses.replace(row.prompt(), task=name or row.task, speed_bench=bool(category)))
            if not category and len(part) == limit:
                break
        questions += parts.values()
    return [[dataclasses.replace(prompt, number=next(number)) for prompt in part] for part in questions]


def task_sources(prompts: str | None, tasks: str | None) -> list[tuple[str, str]]:
    """(name, source) of what is measured: `prompts` under its own tasks, or each file of `tasks` under its name.

    Raises:
        InputError: both or neither, a directory without files of prompts, or two files of one name.
    """
    if (prompts is None) == (tasks is None):
        found = "neither --prompts nor --tasks" if prompts is None else "--prompts and --tasks"
        remedy = "--prompts reads one file; --tasks reads several, each a task named by its file."
        raise InputError("prompts", found, "exactly one of them", remedy)
    if prompts is not None:
        return [("", prompts)]
    sources = list(_task_files(str(tasks)))
    names = [name for name, _ in sources]
    for name in names:
        if not name.isprintable():  # bytes that are no UTF-8, among others: no table and no file can name it
            raise InputError("tasks", f"a file named {name!r}", "a name of printable letters", "Rename it.")
        if names.count(name) > 1:
            raise InputError("tasks", f"two files named {name}", "one file a task", "Rename one of them.")
    return sources


def _task_files(tasks: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, (part.strip() for part in tasks.split(","))):
        path = Path(part)
        if part.startswith(EMBEDDED):
            yield part.removeprefix(EMBEDDED), part
        elif path.is_dir():
            files = sorted(file for file in path.iterdir() if suffix_of(file) in OPENERS and file.is_file())
            files += sorted(path.glob(f"*/{FASTCHAT}"))
            if not files:
                expected = f"a directory with files of {', '.join(OPENERS)}"
                raise InputError("tasks", f"{part} without one", expected, "Check the path.")
            yield from ((task_name(file), str(file)) for file in files)
        elif path.is_file():
            yield task_name(path), part
        else:
            raise InputError("tasks", f"{part}, which does not exist", "files or a directory", "Check the path.")


def task_name(file: Path) -> str:
    """The file's stem; of a set in FastChat's layout, where every file has one name, its folder's."""
    return file.absolute().parent.name if file.name == FASTCHAT else plain_stem(file)


class Chat:
    """Writes the prompts of later turns."""

    def __init__(self, target: str):
        self._tokenizer: Any = load_chat_tokenizer(target)

    def next_turn(self, prompt: BenchPrompt, answer: Sequence[int]) -> BenchPrompt:
        """The conversation up to the user's next turn, after this answer [tokens].

        Raises:
            RowError: the chat template refuses it.
        """
        said = self._tokenizer.decode(list(answer), skip_special_tokens=True)
        goes_on = ({"role": "assistant", "content": said}, {"role": "user", "content": prompt.later[0]})
        messages = (*prompt.messages, *goes_on)
        ids = list(prompt_ids(self._tokenizer, [dict(message) for message in messages]))
        return dataclasses.replace(
            prompt, prompt_ids=ids, messages=messages, later=prompt.later[1:], turn=prompt.turn + 1
        )

    def longest(self, prompt: BenchPrompt, max_new_tokens: int) -> int:
        """Tokens of the conversation with the longest answers to all turns: an estimate, since what an answer is when
        it is read again depends on its text."""
        later = sum(len(self._tokenizer(text)["input_ids"]) + WITH_TEMPLATE for text in prompt.later)
        return len(prompt.prompt_ids) + later + (1 + len(prompt.later)) * max_new_tokens


def longest_sequence(prompts: Sequence[BenchPrompt], max_new_tokens: int, context: int) -> int:
    """Tokens of the longest prompt with its answer.

    Raises:
        InputError: a prompt that leaves no room in the context.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    length = len(longest.prompt_ids)
    if length >= context:
        found = f"{length} tokens in prompt {longest.id}"
        raise InputError("prompts", found, f"at most {context - 1}, the target's context", "Shorten or remove it.")
    return min(length + max_new_tokens, context)


def longest_conversation(prompts: Sequence[BenchPrompt], chat: Chat, max_new_tokens: int, context: int) -> int:
    """Tokens of the longest question, its later turns and all their answers; questions that do not fit left out.

    Raises:
        InputError: none fits.
    """
    fitting = [prompt for prompt in prompts if len(prompt.prompt_ids) < context]
    if not fitting:
        found = f"{context} or more tokens in each prompt, prompt {prompts[0].id} the first"
        raise InputError("prompts", found, f"at most {context - 1}, the target's context", "Shorten them.")
    return min(max(chat.longest(prompt, max_new_tokens) for prompt in fitting), context)
