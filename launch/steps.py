"""A pipeline of commands: each is done when the file exists that it writes last, and is skipped from then on."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from draftsmith.modules.types import InputError

STARTED = "settings.json"


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


def execute(step: PipelineStep, partly: bool = False) -> None:
    """Run a step's command through the command line's own parser, unless it is done. partly: go on where it says that
    some of its work failed and the rest is written."""
    from draftsmith.data.console import log_note
    from draftsmith.launch.cli import dispatch

    log_note(Text.assemble("\n", (step.title, "bold"), (" (done before)" if step.done.exists() else "", "dim")))
    log_note(Text(f"  draftsmith {shlex.join(step.argv)}", "cyan"))
    if step.done.exists():
        return
    started = time.monotonic()
    code = dispatch(list(step.argv))
    if code and not (partly and step.done.exists()):  # what it found is on the screen
        raise SystemExit(code)
    log_note(Text(f"  {time.monotonic() - started:.0f} s", "dim"))


def remember_settings(config: Any) -> None:
    """Remember the settings of a pipeline in its `output`, so that stages of other settings are never mixed.

    Raises:
        InputError: the output holds what was begun with other settings.
    """
    from draftsmith.data.store.files import make_directory, write_json
    from draftsmith.data.store.manifest import decisive, differences
    from draftsmith.data.store.reading import read_object

    started = config.output / STARTED
    if started.exists():
        differing = differences(decisive(config), read_object(started, {}, "Restore it, or choose another output."))
        if differing:
            found = f"{config.output}, begun with " + "; ".join(f"{key} {was}" for key, _, was in differing)
            expected = "; ".join(f"{key} {now}" for key, now, _ in differing)
            raise InputError("output", found, expected, "Choose another output, or restore the settings.")
        return
    make_directory(config.output)
    write_json(started, decisive(config))
