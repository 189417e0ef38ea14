"""What a bench asks: one file of prompts, or several files, each a task of its own; in groups, turn by turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.models.hub import EMBEDDED
from draftsmith.data.text.sources import OPENERS, plain_stem, suffix_of
from draftsmith.data.text.template import load_chat_tokenizer, prompt_ids
from draftsmith.eval.bench.measure import BenchPrompt
from draftsmith.eval.bench.prompts import Turns, read_prompts
from draftsmith.modules.types import InputError

FASTCHAT = "question.jsonl"  # its name in the folder of each task
WITH_TEMPLATE = 16  # tokens that a template may put around a turn, for an estimate


@dataclass(frozen=True)
class Questions:
    """files: for each file its prompts, numbered through all files. spare: prompts that are not measured, to warm up
    with."""

    files: list[list[BenchPrompt]]
    spare: list[BenchPrompt]

    @property
    def all(self) -> list[BenchPrompt]:
        return [prompt for file in self.files for prompt in file]

    def groups(self, size: int) -> list[list[BenchPrompt]]:
        """Consecutive questions of one file, `size` together; the last group of a file may be smaller."""
        return [file[start : start + size] for file in self.files for start in range(0, len(file), size)]


def read_questions(
    sources: Sequence[tuple[str, str]],
    target: str,
    split: str | None,
    keep_tasks: str | None,
    limit: int,
    turns: Turns,
) -> Questions:
    """The prompts of (name, source) pairs, the first `limit` of each (0: all). A name becomes the task of its prompts;
    an empty one leaves them their own.

    Raises:
        InputError: as `read_prompts`.
    """
    files: list[list[BenchPrompt]] = []
    spare: list[BenchPrompt] = []
    number = 0
    for name, source in sources:
        # One prompt more than is measured, where there is one, is the warm-up.
        found = read_prompts(source, target, split, keep_tasks, limit + 1 if limit else 0, turns)
        if limit:
            found, left = found[:limit], found[limit:]
            spare += left
        if name:
            found = [dataclasses.replace(prompt, task=name) for prompt in found]
        files.append([dataclasses.replace(prompt, number=number + i) for i, prompt in enumerate(found)])
        number += len(found)
    return Questions(files, spare)


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
