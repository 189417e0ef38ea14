"""Prompts to measure on: a chat file or data set, a prompts artefact, or the shipped ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.models.hub import resolve_model
from draftsmith.data.models.loading import text_identity
from draftsmith.data.store.manifest import MANIFEST, STARTED, open_artefact
from draftsmith.data.text.conversations import Turns, label_columns, label_of, layout_of, up_to_last, user_turns
from draftsmith.data.text.sources import named_split, open_source
from draftsmith.data.text.template import RowError, load_chat_tokenizer, prompt_ids, template_hash
from draftsmith.data.text.turns import has_later_turns, later_turns
from draftsmith.eval.bench.measure import BenchPrompt
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class Row:
    """One prompt before it is selected; its token ids are made only when it is.

    content: the row as it was found, of an artefact or a file. where: its file and line.
    """

    id: str
    task: str
    split: str
    content: Any
    where: str = ""


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
    prompt_of = artefact_prompt(turns) if is_artefact(source) else chat_prompt(target, turns)
    rows = kept_rows(source, target, split, keep_tasks, turns)
    return [prompt_of(row) for row in itertools.islice(rows, skip, skip + limit if limit else None)]


def kept_rows(
    source: str, target: str, split: str | None, keep_tasks: str | None, turns: Turns = "last"
) -> Iterator[Row]:
    """Rows of this split and these tasks, as of `read_prompts`; at least one."""
    path, split = Path(resolve_model(source)), named_split(split)
    wanted = {task.strip() for task in keep_tasks.split(",")} if keep_tasks else None
    seen_tasks, seen_splits = set(), set()
    places: dict[str, str] = {}
    found = False
    for row in artefact_rows(path, target, turns) if is_artefact(source) else chat_rows(source, split):
        seen_tasks.add(row.task)
        seen_splits.add(row.split)
        if (split and row.split != split) or (wanted is not None and row.task not in wanted):
            continue
        if row.where and places.setdefault(row.id, row.where) != row.where:  # results are told apart by ids
            again = f"the id {row.id[:80]!r}, which {places[row.id]} has too"
            raise InputError(row.where, again, "an id of its own", "Correct the row.")
        found = True
        yield row
    if not found:
        there = f"tasks {listed(seen_tasks)}; splits {listed(seen_splits)}"
        remedy = "Check --split and --keep-tasks; --split none takes all splits."
        asked = " and ".join(f"{name} {value}" for name, value in (("split", split), ("tasks", keep_tasks)) if value)
        found_none = f"no matching row{f' of {asked}' if asked else ''} in {source} ({there})"
        raise InputError("prompts", found_none, "at least one", remedy)


def is_artefact(source: str) -> bool:
    """A directory that `data prompts` wrote, or began."""
    path = Path(resolve_model(source))
    return (path / MANIFEST).exists() or (path / STARTED).exists()


def has_splits(source: str, target: str) -> bool:
    """Whether its rows, or those of some, say which split they are of."""
    if is_artefact(source):
        return any(row.split for row in artefact_rows(Path(resolve_model(source)), target))
    try:
        return any(row.split for row in chat_rows(source, None))
    except InputError as error:
        if error.field == "split":  # a data set of several splits, each of its own files
            return True
        raise


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(name for name in names if name)) or "none"


def artefact_prompt(turns: Turns) -> Callable[[Row], BenchPrompt]:
    """Row of an artefact -> prompt; with turns all, with its later turns, up to one that is more than a user's."""

    def prompt(row: Row) -> BenchPrompt:
        found = row.content
        later = user_texts(found) if turns == "all" else ()
        messages = tuple(json.loads(found["messages"])) if later else ()
        return BenchPrompt(row.id, list(found["prompt_ids"]), row.task, messages, later)

    return prompt


def artefact_rows(directory: Path, target: str, turns: Turns = "last") -> Iterator[Row]:
    """Rows of a prompts artefact made with the target's tokenizer, and where later turns are asked its template."""
    import pyarrow.parquet as pq

    manifest = open_artefact(directory, "prompts", text_identity(target))
    if turns == "all" and has_later_turns(manifest):
        ours, theirs = template_hash(load_chat_tokenizer(target)), manifest.identity.get("chat_template")
        if ours != theirs:
            found = f"{directory} made with chat template {theirs}"
            raise InputError("prompts", found, f"{ours}, the target's: later turns need it", "Pass --turns first.")
    for entry in manifest.files:
        if not entry.name.endswith(".parquet"):
            continue
        for row in pq.read_table(directory / entry.name).to_pylist():
            yield Row(str(row["id"]), row.get("task") or "", row.get("split") or "", row)


def user_texts(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Later turns of a row of prompts, up to one that is more than a user's."""
    plain = itertools.takewhile(lambda said: [message["role"] for message in said] == ["user"], later_turns(row))
    return tuple(said[0]["content"] for said in plain)


def chat_rows(source: str, split: str | None) -> Iterator[Row]:
    """Rows of a file or data set of chats; `content` is the row as it was found."""
    opened = open_source(source, split)
    for number in range(len(opened)):
        where = opened.where(number)
        try:
            raw = opened.row(number)
            columns = label_columns([name for name, value in raw.items() if value is not None], {})
            row_id, task, own = (label_of(raw, columns, name) for name in ("id", "task", "split"))
        except RowError as error:
            raise unusable(where, error) from error
        yield Row(row_id or str(number), task, (split or "") if opened.split_taken else own, raw, where)


def unusable(where: str, error: RowError) -> InputError:
    """A row that cannot be asked."""
    remedy = "Correct the row, or pass what `data prompts --invalid drop` makes of the file."
    return InputError(where, error, "a conversation with a user turn", remedy)


def chat_prompt(target: str, turns: Turns) -> Any:
    """Row -> prompt by the target's chat template; with its messages where more turns may follow them."""
    tokenizer = load_chat_tokenizer(target)
    # Prompts that are too long are told by their ids, by whoever asks them.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True

    def prompt(row: Row) -> BenchPrompt:
        try:
            conversation = layout_of(row.content, {}).conversation(row.content)
            messages, later = (
                (up_to_last("user", conversation.messages), ()) if turns == "last" else user_turns(conversation)
            )
            later = later if turns == "all" else ()
            ids = list(prompt_ids(tokenizer, messages))
        except RowError as error:
            raise unusable(row.where, error) from error
        return BenchPrompt(row.id, ids, row.task, tuple(messages) if later else (), later)

    return prompt
