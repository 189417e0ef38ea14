"""A pipeline of commands: each is done when the file exists that it writes last, and is skipped from then on."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class PipelineStep:
    """One command of a pipeline. It is done when `done` exists, which its command writes last."""

    title: str
    argv: tuple[str, ...]
    done: Path

    @classmethod
    def of(cls, title: str, command: str, done: Path, /, **settings: object) -> PipelineStep:
        """The step of `draftsmith COMMAND --name value ...`. Settings that are None are left out, those that are True
        are flags, and several values are joined by commas."""
        argv = command.split()
        for name, value in settings.items():
            if value is not None:
                text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
                argv += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
        return cls(title, tuple(argv), done)


def execute(step: PipelineStep, console: Console) -> None:
    """Run a step's command through the command line's own parser, unless it is done."""
    from draftsmith.launch.cli import dispatch

    console.print(f"\n[bold]{step.title}[/bold]" + (" [dim](done before)[/dim]" if step.done.exists() else ""))
    console.print(f"  draftsmith {shlex.join(step.argv)}", style="cyan", soft_wrap=True)
    if step.done.exists():
        return
    started = time.monotonic()
    code = dispatch(list(step.argv))
    if code:  # what it found is on the screen
        raise SystemExit(code)
    console.print(f"  [dim]{time.monotonic() - started:.0f} s[/dim]")
