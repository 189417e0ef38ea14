"""What a stage shows while it runs: a bar with rate and time left, and one line when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

Advance = Callable[[float], None]


class RateColumn(ProgressColumn):
    """Units a second over the last moments; skipped shards do not count as speed."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s", style="progress.data.speed")


@contextmanager
def bar(description: str, total: int, unit: str, done: int = 0, enabled: bool = True) -> Iterator[Advance]:
    """A progress bar on stderr; yields a function that advances it by so many units. done: already there before."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        RateColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as progress:
        task = progress.add_task(description, total=total, completed=done, unit=unit)
        yield lambda amount: progress.advance(task, amount)


def say(text: str) -> None:
    """One line for the user, on stdout."""
    Console(soft_wrap=True, highlight=False, markup=False).print(text)
