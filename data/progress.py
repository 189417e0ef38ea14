"""What a stage shows while it runs: a bar with rate and time left, or a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from draftsmith.data.console import is_quiet, note

Advance = Callable[[float], None]
LINE_EVERY_S = 30  # in a log


class RateColumn(ProgressColumn):
    """Units a second over the last moments; skipped shards do not count as speed."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s", style="progress.data.speed")


@contextmanager
def bar(
    description: str, total: int, unit: str, done: int = 0, enabled: bool = True, moving: bool = True
) -> Iterator[Advance]:
    """A progress bar on stderr; yields a function that advances it by so many units. In a log, lines instead.

    done: already there before. moving: draw it also while it is not advanced, which takes time from what is measured.
    """
    console, shown = Console(stderr=True), enabled and not is_quiet()
    if shown and not console.is_terminal:
        yield Lines(description, total, unit, done).advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        RateColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=moving, disable=not shown) as progress:
        task = progress.add_task(description, total=total, completed=done, unit=unit)
        yield lambda amount: progress.update(task, advance=amount, refresh=not moving)


class Lines:
    """Progress as lines of a log: one every LINE_EVERY_S, so that a short stage writes none."""

    def __init__(self, description: str, total: int, unit: str, done: int, clock: Callable[[], float] = time.monotonic):
        self.description, self.total, self.unit, self.clock = description, total, unit, clock
        self.done: float = done
        self.before, self.began = done, clock()
        self.told = self.began

    def advance(self, amount: float) -> None:
        self.done += amount
        now = self.clock()
        if now - self.told >= LINE_EVERY_S:
            self.told = now
            rate = (self.done - self.before) / (now - self.began)
            left = f", about {(self.total - self.done) / rate:,.0f} s left" if rate else ""
            speed = f"{rate:.3g} {self.unit}/s"
            note(f"{self.description}: {self.done:,.0f}/{self.total:,.0f} {self.unit}, {speed}{left}")
