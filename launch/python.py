"""Commands from Python: options as keyword arguments, read and checked as on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.launch.arguments import from_values
from draftsmith.launch.commands import COMMANDS, add_trainers
from draftsmith.launch.errors import did_you_mean
from draftsmith.launch.finished import run_once
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.train.config import TrainDrafterConfig


def run(command: str, **values: Any) -> Any:
    """Run a command of the command line: `run("data responses", data="runs/prompts", ...)`.

    Args:
        values: the command's options, with underscores; `config` takes a YAML file or a shipped name.

    Returns:
        The directory of the artifact or head that the command makes, or its exit code.

    Raises:
        InputError: as the command line prints it.
    """
    add_trainers()
    if command not in COMMANDS:
        expected = f"one of {', '.join(COMMANDS)}"
        raise InputError("command", repr(command), expected, f"Choose one.{did_you_mean(command, list(COMMANDS))}")
    config = from_values(f"draftsmith {command}", COMMANDS[command].config_class(), values)
    return run_once(command, COMMANDS[command].run, config)


def settings(kind: str, **values: Any) -> TrainDrafterConfig:
    """Build the config of `train KIND` for a `LitDrafter`; data and target may be omitted, and output until `fit`."""
    from draftsmith.modules.drafters import learned
    from draftsmith.train.config import drafter_config
    from draftsmith.train.module import IN_PYTHON

    if kind not in learned():
        expected = f"one of {', '.join(learned())}"
        raise InputError("kind", repr(kind), expected, f"Choose one.{did_you_mean(kind, list(learned()))}")
    given: dict[str, Any] = {"data": IN_PYTHON, "output": IN_PYTHON, "target": IN_PYTHON} | values
    config: TrainDrafterConfig = from_values(f"draftsmith train {kind}", drafter_config(kind), given)
    return config


def export(head: str | Path, format: str, output: str | Path, **values: Any) -> Path:
    """Write a head as another system loads it, checked; values: options of `draftsmith export`.

    Raises:
        InputError: `draftsmith export` refuses the head, or its check found a difference, which it printed.
    """
    if run("export", head=head, format=format, output=output, **values) != 0:
        raise InputError("export", f"differences from {head}, printed above", "none", "Nothing was written.")
    return Path(output).expanduser()
