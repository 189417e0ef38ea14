"""A row of the table of bad input, and the good files that rows spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from worlds import make_tiny_world

from draftsmith.launch.cli import main


@dataclass(frozen=True)
class Row:
    """A command line that must end with exit code 2 and one line that says what is wrong.

    id: what is wrong, unique in its file.
    words: the command line behind `draftsmith`, split at spaces. `{name}` is a property of `Ground` or a file that
        `make` returned; `{out}` is where the command is to write.
    says: parts of the line: what was found, and where.
    make: spoils files of its own; what it returns is named in `words`.
    """

    id: str
    words: str
    says: tuple[str, ...]
    make: Callable[[Ground, Path], dict[str, object]] | None = None


class Ground:
    """Small good inputs of every command; each is made when the first row asks for it. Rows spoil copies only.

    target, draft: models of one tokenizer. eagle: a head of the target's. acceptance: one of the draft's. chats: a
    JSONL file of conversations.
    """

    def __init__(self, root: Path):
        self._root, world = root, make_tiny_world(root)
        self.target, self.draft, self.chats = world["target"], world["draft"], world["data"]
        self.eagle, self.acceptance = world["eagle"], world["acceptance"]

    def __getitem__(self, name: str) -> str:
        """So that `str.format_map` finds what a row names."""
        return str(getattr(self, name))

    @cached_property
    def prompts(self) -> Path:
        return self._stage("prompts", f"data prompts --source {self.chats} --target {self.target}")

    @cached_property
    def responses(self) -> Path:
        words = f"data responses --data {self.prompts} --target {self.target} --max-new-tokens 24 --temperature 1"
        return self._stage("responses", words)

    @cached_property
    def features(self) -> Path:
        return self._stage("features", f"data features --data {self.responses} --target {self.target}")

    @cached_property
    def labels(self) -> Path:
        words = f"data acceptance --data {self.responses} --target {self.target} --head {self.draft}"
        return self._stage("labels", words)

    @cached_property
    def eagle_run(self) -> Path:
        """A finished training of an EAGLE head: config, checkpoints, best head."""
        return self._stage(
            "eagle-run",
            f"train eagle --data {self.features} --target {self.target} --max-steps 2 --batch-size 2 --val-share 0.3 "
            "--tau-prompts 0 --loggers csv",
        )

    @cached_property
    def exported(self) -> Path:
        """An EAGLE head as vLLM loads it."""
        return self._stage("exported", f"export --format vllm --head {self.eagle} --target {self.target}")

    @cached_property
    def bench(self) -> Path:
        """Results of the bench, with traced rounds."""
        return self._stage(
            "bench",
            f"eval bench --target {self.target} --head {self.draft} --data {self.chats} --methods ar,spec:k=2 "
            "--repeats 1 --limit 2 --max-new-tokens 8 --traces 1",
        )

    def _stage(self, name: str, words: str) -> Path:
        path = self._root / name
        assert main([*words.split(), "--output", str(path)]) == 0, words
        return path

    def copy(self, name: str, to: Path) -> Path:
        """A copy of a good directory or file below `to`, to be spoiled."""
        source = Path(self[name])
        if source.is_dir():
            return Path(shutil.copytree(source, to / source.name))
        return Path(shutil.copy(source, to / source.name))
