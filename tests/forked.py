"""Processes that are forked from this one: importing everything anew takes longer than most of what they are to do."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from draftsmith.launch.cli import main


def forked(work: Callable[..., Any], *args: Any) -> ForkProcess:
    """A process that has begun to do this."""
    process = multiprocessing.get_context("fork").Process(target=work, args=args, daemon=True)
    process.start()
    return process


def commanded(words: Sequence[str], said: Path) -> ForkProcess:
    """`draftsmith WORDS`, which prints to the file `said` whatever it prints, and ends as the command does."""
    return forked(_command, words, said)


def _command(words: Sequence[str], said: Path) -> None:
    sys.stdout = sys.stderr = said.open("w", buffering=1)
    sys.exit(main(words))
