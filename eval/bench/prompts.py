"""Prompts to measure on: chat files, data sets, prompts artifacts, the embedded ones, or one file for each task."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.prompts import RowEncoder
from draftsmith.data.stages import PromptsConfig, Turns
from draftsmith.data.store.datasets import is_held_out, open_dataset
from draftsmith.data.store.manifest import MANIFEST, STARTED, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.conversations import LANGUAGE, row_label
from draftsmith.data.text.languages import classifier, language_of
from draftsmith.data.text.sources import BENCHMARKS, SUFFIXES, named_split, open_source
from draftsmith.data.text.template import RowError, TemplateInputs, follow_answer, load_chat_tokenizer
from draftsmith.modules.pretrained.checkpoint import Checkpoint, opened
from draftsmith.modules.pretrained.hub import EMBEDDED, resolve_model
from draftsmith.modules.pretrained.identity import template_hash
from draftsmith.modules.types import InputError

FASTCHAT = "question.jsonl"  # its name in the folder of each task
# What makes a directory one artifact, or one data set that `datasets` saved; and names of its files after splits.
WHOLE = (MANIFEST, STARTED, "state.json", "dataset_dict.json")
SPLIT_NAME = re.compile(r"(^|[-_.])(train|test|dev|val|valid|validation)([-_.]|$)", re.IGNORECASE)
TEMPLATE_TOKENS = 16  # estimate of what a template puts around a turn
Row = Mapping[str, Any]


@dataclass(frozen=True)
class BenchPrompt:
    """Prompt as the target reads it, with its chat template.

    messages: the conversation that `prompt_ids` hold. later: the user's later turns. turn: turn of the conversation,
    from 1. number: number of the question in its run, from 0, the same in all its turns. template_inputs: what the
    template reads beside the messages. labels: values of the row's columns that `--by` names.
    """

    id: str
    prompt_ids: list[int]
    task: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    later: tuple[str, ...] = ()
    turn: int = 1
    number: int = 0
    template_inputs: TemplateInputs = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def read_prompts(
    source: str,
    target: str | Checkpoint,
    split: str | None = None,
    tasks: str | None = None,
    limit: int = 0,
    turns: Turns = "last",
) -> list[BenchPrompt]:
    """Read prompts as token ids, numbered from 0: the target's chat template, applied up to where the answer begins.

    split: keep rows of this split; `none` keeps all. tasks: keep rows of these tasks, separated by commas.
    limit: keep the first so many, 0 all. turns: user turns of a conversation that are asked; a prompts artifact begins
    where `data prompts --turns` made it begin, and `all` asks its later turns too.

    Raises:
        InputError: no such source, rows of an unknown shape, an artifact of another tokenizer, or no row left.
    """
    return read_questions([("", source)], opened(target), split, tasks, limit, turns)[0]


def read_questions(
    sources: Sequence[tuple[str, str]],
    target: Checkpoint,
    split: str | None,
    tasks: str | None,
    limit: int,
    turns: Turns,
    columns: Sequence[str] = (),
) -> list[list[BenchPrompt]]:
    """Read the first `limit` prompts (0: all) of each (name, source), numbered through all of them.

    A name becomes the task of its prompts; an empty one leaves them their own. columns: of the rows, to be labels.

    Raises:
        InputError: as `read_prompts`; a column that no row has.
    """
    number = itertools.count()
    questions: list[list[BenchPrompt]] = []
    for name, source in sources:
        rows = itertools.islice(kept_rows(source, target, split, tasks, turns, columns), limit or None)
        questions.append([prompt_of(row, name, next(number), turns) for row in rows])
    check_labels([prompt.labels for file in questions for prompt in file], columns)
    return questions


def prompt_of(row: Row, task: str, number: int, turns: Turns) -> BenchPrompt:
    """Make the prompt of a row of `prompts`; a task that is given takes the place of its own."""
    # Up to a turn that is more than a user's text, such as one with a system message.
    later = json.loads(row["later"]) if turns == "all" else ()
    texts = itertools.takewhile(lambda messages: [message["role"] for message in messages] == ["user"], later)
    return BenchPrompt(
        str(row["id"]),
        list(row["prompt_ids"]),
        task or row["task"] or "",
        json.loads(row["messages"]),
        tuple(messages[0]["content"] for messages in texts),
        row["turn"],
        number,
        json.loads(row["template_inputs"]),
        row["labels"],
    )


def kept_rows(
    source: str, target: Checkpoint, split: str | None, tasks: str | None, turns: Turns, columns: Sequence[str]
) -> Iterator[Row]:
    """Yield rows of `prompts` of a split and of some tasks, at least one, with their `labels`."""
    # A directory that `data prompts` wrote or began, or a file or data set of chats.
    path, split = Path(resolve_model(source)), named_split(split)
    if (path / MANIFEST).exists() or (path / STARTED).exists():
        rows = artifact_rows(path, target, turns, columns)
        if split:
            held = is_held_out(open_dataset(path).hashes)
            rows = ({**row, "split": "val" if out else "train"} for row, out in zip(rows, held, strict=True))
    else:
        rows = chat_rows(source, target, turns, columns, split=split, tasks=tasks)
    empty = True
    for row in rows:
        if kept(row, split, tasks):
            empty = False
            yield row
    if empty:
        found = f"no row of split {split or 'any'} and tasks {tasks or 'any'} in {source}"
        remedy = "Check --split and --tasks; --split none takes all splits."
        raise InputError("data", found, "at least one", remedy)


def kept(row: Row, split: str | None, tasks: str | None) -> bool:
    """Return whether a row is of a split and of one of some tasks, as far as these are named."""
    wanted = {task.strip() for task in tasks.split(",")} if tasks else None
    return (not split or row["split"] == split) and (wanted is None or row["task"] in wanted)


def artifact_rows(directory: Path, target: Checkpoint, turns: Turns, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of an artifact of the target's tokenizer; later turns need its chat template as well."""
    manifest = open_artifact(directory, "prompts", target.text_identity())
    if turns == "all" and manifest.counts.get("later_turns"):
        ours, theirs = template_hash(load_chat_tokenizer(target)), manifest.identity.get("chat_template")
        if ours != theirs:
            found = f"{directory} made with chat template {theirs}"
            raise InputError("data", found, f"{ours}, the target's: later turns need it", "Pass --turns first.")
    yield from with_labels(({"split": "", **row} for row in Rows(manifest).iterate()), directory, columns)


def with_labels(rows: Iterable[Row], directory: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yield rows of an artifact with their `labels`, the values of these columns: its own, or that `--keep` kept."""
    for row in rows:
        columns_of_row = {**row, **json.loads(row.get("labels") or "{}")}
        with row_errors(str(directory), "a column of text or numbers"):
            labels = {name: row_label(columns_of_row, {}, name) for name in columns}
        yield {**row, "labels": labels}


def chat_rows(
    source: str,
    target: Checkpoint,
    turns: Turns,
    columns: Sequence[str] = (),
    *,
    split: str | None = None,
    tasks: str | None = None,
    supervised: bool = False,
) -> Iterator[Row]:
    """Yield rows of `prompts` of a file or data set of chats, with their `split` and `labels`.

    split, tasks: only rows of these are encoded. supervised: with recorded answers.
    """
    opened, tokenizer = open_source(source, split), load_chat_tokenizer(target)
    config = PromptsConfig(source=source, target=target.path, output=Path(), turns=turns, supervised=supervised)
    encoder = RowEncoder.of(config, target, tokenizer)
    expected = "a conversation with " + ("the target's answer" if supervised else "a user turn")
    for number in range(len(opened)):
        with row_errors(opened.where(number), expected):
            raw = opened.row(number)
            own: dict[str, Any] = {name: row_label(raw, {}, name) for name in ("task", "split")}
            own["split"] = (split or "") if opened.split_taken else own["split"]
            # Only rows that are kept apply the template, which takes most of the time.
            if not kept(own, split, tasks):
                continue
            rows, _ = encoder.encode(row_label(raw, {}, "id", str(number)), raw)
        with row_errors(opened.where(number), "a column of text or numbers"):
            own["labels"] = {name: row_label(raw, {}, name) for name in columns}
        yield from ({**row, **own} for row in rows)


def check_labels(labels: Sequence[Mapping[str, str]], columns: Sequence[str]) -> None:
    """Raise InputError for a column that none of the rows has, or a language that cannot be detected."""
    for name in (name for name in columns if not any(own[name] for own in labels)):
        if name == LANGUAGE:
            classifier()
            continue
        remedy = "Correct it. In an artifact are the columns that data prompts --keep keeps."
        raise InputError("by", name, "context, turn, kind, task, language, or a column of the rows", remedy)


def detect_language(labels: Sequence[dict[str, str]], answers: Iterable[tuple[str, str]]) -> None:
    """Set the language in answers' labels by their own text, where it is asked for and no row has a column of it.

    answers: text of each, and the end of its prompt.
    """
    if any(LANGUAGE in own for own in labels) and not any(own[LANGUAGE] for own in labels):
        for own, (text, prompt) in zip(labels, answers, strict=True):
            own[LANGUAGE] = language_of(text, prompt)


@contextmanager
def row_errors(where: str, expected: str) -> Iterator[None]:
    """Raise InputError, with the row's file and line, for a RowError."""
    try:
        yield
    except RowError as error:
        remedy = "Correct the row, or pass what `data prompts --invalid drop` makes of the file."
        raise InputError(where, error, expected, error.remedy or remedy) from error


def task_sources(data: str | None) -> list[tuple[str, str]]:
    """Return (name, source) pairs: one source without a name, or each of several with the name of its task.

    Several are separated by commas, the files of a directory, or the tasks of a published benchmark. A file is named by
    its stem, or by its folder in FastChat's layout, where all files have one name. A directory whose files are named
    after splits, or that `datasets` or `data prompts` wrote, is one source.

    Raises:
        InputError: no data, or two files of one name.
    """
    parts = [part for part in map(str.strip, (data or "").split(",")) if part]
    if not parts:
        raise InputError("data", "none", "prompts: a file, a directory, or a data set", "Pass --data.")
    sources: list[tuple[str, str]] = []
    for part in parts:
        path = Path(part)
        if part in BENCHMARKS and not path.exists():
            sources += [(task, "/".join(filter(None, (part, task)))) for task in BENCHMARKS[part]]
        elif files := task_files(path):
            sources += [
                (file.absolute().parent.name if file.name == FASTCHAT else file.stem, str(file)) for file in files
            ]
        else:
            sources.append((Path(part.removeprefix(EMBEDDED)).stem, part))
    if len(sources) == 1 and sources[0][1] == parts[0]:
        return [("", parts[0])]
    names = [name for name, _ in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError("data", f"two files named {twice[0]}", "one file a task", "Rename one of them.")
    return sources


def task_files(directory: Path) -> list[Path]:
    """Return the files of a directory of tasks; none for a file, an artifact or a data set."""
    if not directory.is_dir() or any((directory / name).exists() for name in WHOLE):
        return []
    files = sorted(file for file in directory.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    files += sorted(directory.glob(f"*/{FASTCHAT}"))
    return [] if all(SPLIT_NAME.search(file.stem) for file in files) else files


def next_turn(tokenizer: Any, prompt: BenchPrompt, answer: Sequence[int]) -> BenchPrompt:
    """Continue a conversation with an answer [tokens] and the user's next turn.

    Raises:
        RowError: the chat template refuses the conversation.
    """
    asked, following = list(map(dict, prompt.messages)), [{"role": "user", "content": prompt.later[0]}]
    messages, ids = follow_answer(tokenizer, prompt.prompt_ids, asked, prompt.template_inputs, answer, following)
    later, turn = prompt.later[1:], prompt.turn + 1
    return dataclasses.replace(prompt, prompt_ids=ids, messages=messages, later=later, turn=turn)


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
        raise InputError("data", found, f"at most {context - 1}, the target's context", "Shorten or remove it.")
    lengths = []
    for prompt in fitting:
        later = prompt.later if tokenizer is not None else ()
        turns = (len(tokenizer(text)["input_ids"]) + TEMPLATE_TOKENS + max_new_tokens for text in later)
        lengths.append(len(prompt.prompt_ids) + max_new_tokens + sum(turns))
    return min(max(lengths), context)
