"""Prompts to measure on: chat files, data sets, prompts artifacts, the embedded ones, or one file for each task."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.settings import Turns
from draftsmith.data.store.manifest import MANIFEST, STARTED, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.conversations import open_turns, read_chat, row_label
from draftsmith.data.text.sources import BENCHMARKS, SUFFIXES, named_split, open_source
from draftsmith.data.text.template import (
    Messages,
    RowError,
    TemplateInputs,
    follow_answer,
    load_chat_tokenizer,
    part_separator,
    prompt_ids,
)
from draftsmith.modules.pretrained.checkpoint import Checkpoint, opened
from draftsmith.modules.pretrained.hub import EMBEDDED, resolve_model
from draftsmith.modules.pretrained.identity import template_hash
from draftsmith.modules.types import InputError

FASTCHAT = "question.jsonl"  # its name in the folder of each task
# A warning of transformers, once for each tokenizer. The bench reports prompts that are too long by their ids.
LONG_TEXT = "sequence-length-is-longer-than-the-specified-maximum"
TEMPLATE_TOKENS = 16  # estimate of what a template puts around a turn


Keep = Callable[[str, str], bool]  # whether rows of a task and split are wanted


@dataclass(frozen=True)
class BenchPrompt:
    """Prompt as the target reads it, with its chat template.

    messages: the conversation that `prompt_ids` hold. later: the user's later turns. turn: turn of the conversation,
    from 1: one more than it has answers. number: number of the question in its run, from 0, the same in all its
    turns. template_inputs: what the template reads beside the messages.
    """

    id: str
    prompt_ids: list[int]
    task: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    later: tuple[str, ...] = ()
    turn: int = 1
    number: int = 0
    template_inputs: TemplateInputs = field(default_factory=dict)

    @classmethod
    def of(
        cls, row_id: str, ids: list[int], task: str, opening: Messages, later: tuple[str, ...], inputs: TemplateInputs
    ) -> BenchPrompt:
        """Make a prompt of an opening, whose tokens these are, and the user's turns behind it."""
        turn = 1 + sum(message["role"] == "assistant" for message in opening)
        return cls(row_id, ids, task, tuple(opening), later, turn, template_inputs=inputs)


def read_prompts(
    source: str,
    target: str | Checkpoint,
    split: str | None = None,
    keep_tasks: str | None = None,
    limit: int = 0,
    turns: Turns = "last",
) -> list[BenchPrompt]:
    """Read prompts as token ids, numbered from 0: the target's chat template, applied up to where the answer begins.

    split: keep rows of this split; `none` keeps all. keep_tasks: keep rows of these tasks, separated by commas.
    limit: keep the first so many, 0 all. turns: user turns of a conversation that are asked; a prompts artifact begins
    where `data prompts --turns` made it begin, and `all` asks its later turns too.

    Raises:
        InputError: no such source, rows of an unknown shape, an artifact of another tokenizer, or no row left.
    """
    return read_questions([("", source)], opened(target), split, keep_tasks, limit, turns)[0]


def read_questions(
    sources: Sequence[tuple[str, str]],
    target: Checkpoint,
    split: str | None,
    keep_tasks: str | None,
    limit: int,
    turns: Turns,
) -> list[list[BenchPrompt]]:
    """Read the first `limit` prompts (0: all) of each (name, source), numbered through all of them.

    A name becomes the task of its prompts; an empty one leaves them their own.

    Raises:
        InputError: as `read_prompts`.
    """
    number = itertools.count()
    questions: list[list[BenchPrompt]] = []
    for name, source in sources:
        kept = itertools.islice(kept_prompts(source, target, split, keep_tasks, turns), limit or None)
        questions.append(
            [dataclasses.replace(prompt, task=name or prompt.task, number=next(number)) for prompt in kept]
        )
    return questions


def kept_prompts(
    source: str, target: Checkpoint, split: str | None, keep_tasks: str | None, turns: Turns
) -> Iterator[BenchPrompt]:
    """Yield the prompts of a split and of some tasks, at least one, as `read_prompts` does."""
    split = named_split(split)
    wanted = {task.strip() for task in keep_tasks.split(",")} if keep_tasks else None

    def keep(task: str, row_split: str) -> bool:
        return (not split or row_split == split) and (wanted is None or task in wanted)

    # A directory that `data prompts` wrote or began, or a file or data set of chats.
    path = Path(resolve_model(source))
    if (path / MANIFEST).exists() or (path / STARTED).exists():
        prompts = artifact_prompts(path, target, turns, keep)
    else:
        prompts = chat_prompts(source, target, split, turns, keep)
    empty = True
    for prompt in prompts:
        empty = False
        yield prompt
    if empty:
        found = f"no row of split {split or 'any'} and tasks {keep_tasks or 'any'} in {source}"
        remedy = "Check --split and --keep-tasks; --split none takes all splits."
        raise InputError("prompts", found, "at least one", remedy)


def artifact_prompts(directory: Path, target: Checkpoint, turns: Turns, keep: Keep) -> Iterator[BenchPrompt]:
    """Yield prompts of an artifact of the target's tokenizer; later turns need its chat template as well."""
    manifest = open_artifact(directory, "prompts", target.text_identity())
    if turns == "all" and manifest.counts.get("later_turns"):
        ours, theirs = template_hash(load_chat_tokenizer(target)), manifest.identity.get("chat_template")
        if ours != theirs:
            found = f"{directory} made with chat template {theirs}"
            raise InputError("prompts", found, f"{ours}, the target's: later turns need it", "Pass --turns first.")
    for row in Rows(manifest.directory, manifest).iterate():
        task = row.get("task") or ""
        if keep(task, row.get("split") or ""):
            later = user_texts(json.loads(row["later"])) if turns == "all" else ()
            opening, inputs = json.loads(row["messages"]), json.loads(row.get("template_inputs") or "{}")
            yield BenchPrompt.of(str(row["id"]), list(row["prompt_ids"]), task, opening, later, inputs)


def user_texts(later: Sequence[Messages]) -> tuple[str, ...]:
    """Return the user's texts of later turns, up to a turn that is more, such as one with a system message."""
    only_user = itertools.takewhile(lambda messages: [message["role"] for message in messages] == ["user"], later)
    return tuple(messages[0]["content"] for messages in only_user)


def chat_prompts(source: str, target: Checkpoint, split: str | None, turns: Turns, keep: Keep) -> Iterator[BenchPrompt]:
    """Yield prompts of a file or data set of chats."""
    opened, tokenizer = open_source(source, split), load_chat_tokenizer(target)
    tokenizer.deprecation_warnings[LONG_TEXT] = True
    between = part_separator(tokenizer)
    for number in range(len(opened)):
        with row_errors(opened.where(number)):
            raw = opened.row(number)
            row_id, task, row_split = (row_label(raw, {}, name) for name in ("id", "task", "split"))
            # Only the rows that are kept apply the template, which takes most of the time.
            if not keep(task, (split or "") if opened.split_taken else row_split):
                continue
            chat = read_chat(raw, {}, between)
            asked = open_turns(chat, turns)
        for turn in asked:
            with row_errors(opened.where(number)):
                ids = prompt_ids(tokenizer, turn.opening, chat.inputs)
            name = f"{row_id or number}/turn-{turn.turn}" if turn is not asked[0] else row_id or str(number)
            yield BenchPrompt.of(name, ids, task, turn.opening, user_texts(turn.later), chat.inputs)


@contextmanager
def row_errors(where: str, expected: str = "a conversation with a user turn") -> Iterator[None]:
    """Raise InputError, with the row's file and line, for a RowError."""
    try:
        yield
    except RowError as error:
        remedy = "Correct the row, or pass what `data prompts --invalid drop` makes of the file."
        raise InputError(where, error, expected, error.remedy or remedy) from error


def task_sources(prompts: str | None, tasks: str | None) -> list[tuple[str, str]]:
    """Return (name, source) pairs: `prompts` without a name, or each file or benchmark's task of `tasks` with its name.

    A file is named by its stem, or by its folder in FastChat's layout, where all files have one name.

    Raises:
        InputError: both or neither, a directory without files of prompts, or two files of one name.
    """
    if (prompts is None) == (tasks is None):
        found = "neither --prompts nor --tasks" if prompts is None else "--prompts and --tasks"
        remedy = "--prompts reads one file; --tasks reads several, each a task named by its file."
        raise InputError("prompts", found, "exactly one of them", remedy)
    if prompts is not None:
        return [("", prompts)]
    sources: list[tuple[str, str]] = []
    for part in filter(None, (part.strip() for part in str(tasks).split(","))):
        path = Path(part)
        if part.startswith(EMBEDDED):
            sources.append((part.removeprefix(EMBEDDED), part))
            continue
        if not path.exists() and part in BENCHMARKS:
            sources += [(task, "/".join(filter(None, (part, task)))) for task in BENCHMARKS[part]]
            continue
        if not path.exists():
            expected = f"files, a directory, or {', '.join(BENCHMARKS)}"
            raise InputError("tasks", f"{part}, which does not exist", expected, "Check the path.")
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
            files += sorted(path.glob(f"*/{FASTCHAT}"))
            if not files:
                expected = f"a directory with files of {', '.join(SUFFIXES)}"
                raise InputError("tasks", f"{part} without one", expected, "Check the path.")
        for file in files:
            name = file.absolute().parent.name if file.name == FASTCHAT else file.stem
            sources.append((name, str(file)))
    names = [name for name, _ in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError("tasks", f"two files named {twice[0]}", "one file a task", "Rename one of them.")
    return sources


def next_turn(tokenizer: Any, prompt: BenchPrompt, answer: Sequence[int]) -> BenchPrompt:
    """Continue a conversation with an answer [tokens] and the user's next turn.

    Raises:
        RowError: the chat template refuses the conversation.
    """
    asked, following = list(map(dict, prompt.messages)), [{"role": "user", "content": prompt.later[0]}]
    messages, ids = follow_answer(tokenizer, prompt.prompt_ids, asked, prompt.template_inputs, answer, following)
    now, later = tuple(messages), prompt.later[1:]
    return dataclasses.replace(prompt, prompt_ids=ids, messages=now, later=later, turn=prompt.turn + 1)


def longest_sequence(prompts: Sequence[BenchPrompt], max_new_tokens: int, context: int, tokenizer: Any = None) -> int:
    """Return the tokens of the longest prompt with its answer, at most `context`.

    tokenizer: count later turns and their answers too, and leave out prompts that do not fit. The length of an answer
    that is read again depends on its text, so this is an estimate.

    Raises:
        InputError: a prompt that leaves no room in the context; with a tokenizer, all of them.
    """
    fitting = [prompt for prompt in prompts if len(prompt.prompt_ids) < context]
    if not fitting or (tokenizer is None and len(fitting) < len(prompts)):
        longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
        found = f"{len(longest.prompt_ids)} tokens in prompt {longest.id}"
        raise InputError("prompts", found, f"at most {context - 1}, the target's context", "Shorten or remove it.")
    lengths = []
    for prompt in fitting:
        later = prompt.later if tokenizer is not None else ()
        turns = (len(tokenizer(text)["input_ids"]) + TEMPLATE_TOKENS + max_new_tokens for text in later)
        lengths.append(len(prompt.prompt_ids) + max_new_tokens + sum(turns))
    return min(max(lengths), context)
