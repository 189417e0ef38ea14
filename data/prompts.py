"""Stage `data prompts`: chat data of any known shape to token ids of prompts, with the target's chat template."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.data.console import Advance
from draftsmith.data.models.identity import template_hash
from draftsmith.data.models.loading import text_identity
from draftsmith.data.settings import RemoteCode, check_not_negative, check_positive
from draftsmith.data.store.manifest import Field, volatile
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text.conversations import (
    Layout,
    Turns,
    asked_of,
    check_mapping,
    label_columns,
    label_of,
    layout_of,
    parse_columns,
    shortened_names,
    up_to_last,
)
from draftsmith.data.text.sources import Row, RowSource, first_rows, named_split, open_source
from draftsmith.data.text.template import RowError, context_length, load_chat_tokenizer, prompt_ids, supervised_ids
from draftsmith.modules.types import InputError

FIELDS = (
    Field("id", "string"),
    Field("prompt_ids", "list<int32>", ("P",)),
    Field("messages", "string"),
    Field("task", "string"),
    Field("later", "string"),
)
SUPERVISED_FIELDS = (*FIELDS, Field("input_ids", "list<int32>", ("T",)), Field("loss_mask", "list<bool>", ("T",)))


@dataclass(frozen=True)
class PromptsConfig(RemoteCode):
    """Which prompts, for which target.

    Attributes:
        source: A .jsonl, .json or .parquet file, a directory or hub id of `datasets`, or embedded:prompts. Rows are
            ShareGPT conversations, OpenAI messages, FastChat turns, Alpaca columns, or prompt (and answer).
        target: Directory or hub id of the target model, or embedded:target; its tokenizer and context length are used.
        output: Directory to write.
        columns: Names of the source's columns where they are not the usual ones: prompt=question,answer=reply,id=key.
        split: Only this split: of a `datasets` source, or by the rows' column `split`.
        task: Only rows whose column `task` (or `category`) is this, or one of these, separated by commas.
        limit: Only the first so many rows that pass the filters; 0 takes all.
        subset: Configuration name of a `datasets` source.
        revision: Revision of a hub data set.
        turns: Which user turns of a conversation the target is to answer: all, each after its own answers to those
            before; the first; or the last, after the answers that the source has to those before.
        supervised: Keep the source's answers: input_ids of whole conversations, and a loss mask on the assistant's
            tokens, of all turns.
        chat_template: File with a Jinja chat template to use instead of the tokenizer's own.
        max_length: Longest prompt (supervised: conversation) in tokens, those of later turns with the answers before
            them included; 0 is the target's context.
        overlong: What happens to longer ones: an error, or dropped and counted.
        invalid: What happens to rows that cannot be used (no user turn, no text): an error, or dropped and counted.
        rows_per_shard: Rows of the source in each shard.
    """

    source: str = volatile()
    target: str = volatile()
    output: Path = volatile()
    columns: str = ""
    split: str | None = None
    task: str | None = None
    limit: int = 0
    subset: str | None = None
    revision: str | None = None
    turns: Turns = "all"
    supervised: bool = False
    chat_template: Path | None = volatile(None)
    max_length: int = 0
    overlong: Literal["error", "drop"] = "error"
    invalid: Literal["error", "drop"] = "error"
    rows_per_shard: int = 4096
    trust_remote_code: bool = volatile(False, kw_only=True)

    def __post_init__(self) -> None:
        check_positive(self, "rows_per_shard")
        check_not_negative(self, "limit", "max_length")
        if self.supervised and self.turns != "all":
            expected = "all with --supervised: the mask is on every answer"
            raise InputError("turns", self.turns, expected, "Leave --turns or --supervised out.")


@sole_writer(shared=True)
def run(config: PromptsConfig) -> Path:
    """Write the artefact `prompts`; returns its directory."""
    source = open_source(config.source, config.split, config.subset, config.revision)
    mapping = parse_columns(config.columns)
    check_columns(source, mapping)
    selected, repeated = select(source, mapping, config)
    tokenizer = load_chat_tokenizer(config.target, config.chat_template, config.supervised)
    context = config.max_length or context_length(config.target)
    identity = {**text_identity(config.target), "chat_template": template_hash(tokenizer)}
    plan = StagePlan(
        kind="prompts",
        stage="data prompts",
        config=config,
        num_rows=len(selected),
        fields=SUPERVISED_FIELDS if config.supervised else FIELDS,
        inputs={"source": source.digest},
        identity=identity,
    )

    def make(shard: Shard, advance: Advance) -> ShardContent:
        rows, counts = [], Counter[str]()
        for index in selected[shard.start : shard.stop]:
            try:
                if index in repeated:
                    raise Repeated("an id that was there before")
                read = source.row(index)
                row = prompt_row(index, read, layout_of(read, mapping), tokenizer, config, context, counts)
            except RowError as error:
                drop(source.where(index), error, config, counts)
            else:
                rows.append(row)
                counts["prompt_tokens"] += len(row["prompt_ids"])
                counts["tokens"] += len(row.get("input_ids", ()))
            advance(1)
        return ShardContent(rows, dict(counts))

    run_stage(plan, make)
    return config.output


class Overlong(RowError):
    """Longer than the context."""


class Repeated(RowError):
    """The id is that of an earlier row."""


def drop(where: str, error: RowError, config: PromptsConfig, counts: Counter[str]) -> None:
    """Count the row as dropped, or say where it is.

    Raises:
        InputError: it is not to be dropped.
    """
    reason, wanted = "invalid", config.invalid
    expected, remedy = "a usable row", error.remedy or "Correct it, or pass --invalid drop."
    if isinstance(error, Overlong):
        reason, wanted = "overlong", config.overlong
        expected, remedy = "at most the target's context or --max-length", "Pass --overlong drop."
    elif isinstance(error, Repeated):
        reason = "duplicate"
        remedy = "Map another column (--columns id=NAME), or pass --invalid drop, which keeps the first."
    if wanted == "error":
        raise InputError(where, error, expected, remedy) from error
    counts[f"{reason}_dropped"] += 1


def check_columns(source: RowSource, mapping: Mapping[str, str]) -> None:
    """Raises InputError where no row has a mapped column, or none a shape that is known."""
    absent, fits = set(mapping.values()), False
    for _, row in first_rows(source):
        absent -= row.keys()
        try:
            fits = fits or bool(layout_of(row, mapping))
        except RowError:
            pass
        if fits and not absent:
            return
    if not source.columns:  # no row can be read at all
        try:
            source.row(0)
        except RowError as error:
            raise InputError(source.where(0), error, "a usable row", "Correct the file.") from error
    check_mapping(source.columns, mapping)


def select(source: RowSource, mapping: Mapping[str, str], config: PromptsConfig) -> tuple[list[int], set[int]]:
    """Numbers of the rows that pass split, task and limit, in order, and of those that cannot be read, which are
    dropped later; and which among them have an id that an earlier one has.

    Raises:
        InputError: a filter on a column that no row has, nothing left, or a row to be dropped where none is to be.
    """
    filters = {"task": config.task, "split": None if source.split_taken else named_split(config.split)}
    allowed = {
        name: {part.strip() for part in value.split(",")} for name, value in filters.items() if value is not None
    }
    rows: list[int] = []
    repeated: set[int] = set()
    first: dict[str, int] = {}
    labelled: set[str] = set()
    for index in range(len(source)):
        try:
            row = source.row(index)
            columns = label_columns([name for name, value in row.items() if value is not None], mapping)
            labelled |= columns.keys()
            if not all(label_of(row, columns, name) in values for name, values in allowed.items()):
                continue
            own_id = label_of(row, columns, "id", default_id(index))
            if first.setdefault(own_id, index) != index:
                earlier = source.where(first[own_id])
                raise Repeated(f"the id {own_id[:80]!r}, which {earlier} has too")
        except RowError as error:
            drop(source.where(index), error, config, Counter())
            if isinstance(error, Repeated):
                repeated.add(index)
        rows.append(index)
        if len(rows) == config.limit:
            break
    for name in allowed.keys() - labelled:
        found = f"rows without it: {shortened_names(source.columns)}"
        raise InputError(name, found, f"a column {name}", f"Map it (--columns {name}=NAME) or drop the filter.")
    if not rows:
        found = f"no rows with {', '.join(f'{name} {filters[name]}' for name in allowed)}"
        raise InputError("source", found, "at least one row", "Correct the filters.")
    return rows, repeated


def default_id(index: int) -> str:
    """The id of a row that has none."""
    return f"{index:07d}"


def prompt_row(
    index: int,
    row: Row,
    layout: Layout,
    tokenizer: Any,
    config: PromptsConfig,
    context: int | None,
    counts: Counter[str],
) -> dict[str, Any]:
    """One row of the artefact.

    Raises:
        RowError: the row cannot be used. Overlong: it is too long.
    """
    conversation = layout.conversation(row)
    asked = asked_of(conversation, config.turns)
    encoded: dict[str, Any] = {
        "id": label_of(row, layout.columns, "id", default_id(index)),
        "prompt_ids": prompt_ids(tokenizer, asked.opening),
        "messages": json.dumps(asked.opening, ensure_ascii=False),
        "task": label_of(row, layout.columns, "task"),
        "later": json.dumps(asked.later, ensure_ascii=False),
    }
    length = len(encoded["prompt_ids"]) + 1  # room for one token of an answer
    if config.supervised:
        whole = up_to_last("assistant", conversation.messages)
        encoded["input_ids"], encoded["loss_mask"] = supervised_ids(tokenizer, whole)
        length = len(encoded["input_ids"])
    if context is not None and length > context:
        raise Overlong(f"{length} tokens (one for an answer included), more than {context}")
    counts["later_turns"] += len(asked.later)
    counts["turns_not_asked"] += asked.not_asked
    return encoded
