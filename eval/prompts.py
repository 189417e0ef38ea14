"""Prompts to measure on: a chat file or data set, a prompts artefact, or the shipped ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.data.manifest import MANIFEST, STARTED, open_artefact
from draftsmith.data.models import resolve_model, text_identity
from draftsmith.data.sources import open_source
from draftsmith.data.template import Messages, RowError, load_chat_tokenizer, prompt_ids
from draftsmith.eval.measure import BenchPrompt
from draftsmith.modules.types import InputError

# Which user turns of a conversation are asked. `last`: its last one only, after the recorded answers to those before.
# `first`, `all`: from the first on, without recorded answers.
Turns = Literal["first", "all", "last"]


@dataclass(frozen=True)
class Row:
    """One prompt before it is selected; its token ids are made only when it is.

    content: token ids, or messages that wait for an answer. later: what the user says after it.
    """

    id: str
    task: str
    split: str
    content: Any
    later: tuple[str, ...] = ()


def read_prompts(
    source: str,
    target: str,
    split: str | None = None,
    keep_tasks: str | None = None,
    limit: int = 0,
    turns: Turns = "last",
) -> list[BenchPrompt]:
    """Prompts as token ids: the target's chat template, applied up to where the answer begins.

    split: keep rows whose own `split` is this one. keep_tasks: keep rows of these tasks, separated by commas. limit:
    keep the first so many, 0 all. turns: which user turns of a conversation; a prompts artefact has only the last one.

    Raises:
        InputError: nothing there, rows of an unknown shape, another tokenizer's artefact, or no row left.
    """
    path = Path(resolve_model(source))
    if (path / MANIFEST).exists() or (path / STARTED).exists():
        rows, prompt_of = artefact_rows(path, target), lambda row: BenchPrompt(row.id, row.content, row.task)
    else:
        rows, prompt_of = chat_rows(source, split, turns), chat_prompt(target)
    wanted = {task.strip() for task in keep_tasks.split(",")} if keep_tasks else None
    found: list[BenchPrompt] = []
    seen_tasks, seen_splits = set(), set()
    for row in rows:
        seen_tasks.add(row.task)
        seen_splits.add(row.split)
        if (split and row.split != split) or (wanted is not None and row.task not in wanted):
            continue
        found.append(prompt_of(row))
        if len(found) == limit:
            break
    if not found:
        there = f"tasks {listed(seen_tasks)}; splits {listed(seen_splits)}"
        remedy = "Check --split and --keep-tasks."
        raise InputError("prompts", f"no matching row in {source} ({there})", "at least one", remedy)
    return found


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(name for name in names if name)) or "none"


def artefact_rows(directory: Path, target: str) -> Iterator[Row]:
    """Rows of a prompts artefact made with the target's tokenizer; `content` are token ids."""
    import pyarrow.parquet as pq

    manifest = open_artefact(directory, "prompts", text_identity(target))
    for entry in manifest.files:
        if not entry.name.endswith(".parquet"):
            continue
        for row in pq.read_table(directory / entry.name).to_pylist():
            yield Row(str(row["id"]), row.get("task") or "", row.get("split") or "", list(row["prompt_ids"]))


def chat_rows(source: str, split: str | None, turns: Turns) -> Iterator[Row]:
    """Rows of a file or data set of chats; `content` are messages that wait for an answer."""
    from draftsmith.data.conversations import recognise, up_to_last_user, user_turns

    opened = open_source(source, split)
    layout = recognise(opened.columns, opened.row(0), {})
    for number in range(len(opened)):
        raw = opened.row(number)
        own_split = (split or "") if opened.split_taken else layout.text(raw, "split")
        try:
            conversation = layout.conversation(raw)
            messages, later = (
                (up_to_last_user(conversation.messages), ()) if turns == "last" else user_turns(conversation)
            )
        except RowError as error:
            expected = "a conversation with a user turn"
            raise InputError("prompts", f"row {number} of {source}: {error}", expected, "Correct the row.") from error
        row_id, task = layout.text(raw, "id", str(number)), layout.text(raw, "task")
        yield Row(row_id, task, own_split, messages, later if turns == "all" else ())


def chat_prompt(target: str) -> Any:
    """Row -> prompt by the target's chat template; with its messages where more turns may follow them."""
    tokenizer = load_chat_tokenizer(target)
    # Prompts that are too long are told by their ids, by whoever asks them.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True

    def prompt(row: Row) -> BenchPrompt:
        messages: Messages = row.content
        try:
            ids = list(prompt_ids(tokenizer, messages))
        except RowError as error:
            expected = "messages that it takes"
            raise InputError("prompts", f"row {row.id}: {error}", expected, "Correct the row.") from error
        return BenchPrompt(row.id, ids, row.task, tuple(messages) if row.later else (), row.later)

    return prompt
