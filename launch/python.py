"""Commands from Python: their settings as keyword arguments, read and checked as the command line reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.launch.arguments import from_values
from draftsmith.launch.commands import COMMANDS
from draftsmith.launch.errors import did_you_mean
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.train.config import TrainDrafterConfig
    from draftsmith.train.lit_drafter import LitDrafter


def config_of(command: str, values: dict[str, Any]) -> Any:
    """The settings of a command, such as `train eagle3`."""
    if command not in COMMANDS:
        expected = f"one of {', '.join(COMMANDS)}"
        raise InputError("command", repr(command), expected, f"Choose one.{did_you_mean(command, list(COMMANDS))}")
    return from_values(f"draftsmith {command}", COMMANDS[command].config_class(), values)


def training_config(kind: str, values: dict[str, Any]) -> Any:
    """The settings of `train KIND`, of a drafter of one's own too (`draftsmith.add_drafters`)."""
    from draftsmith.modules.drafters import learned
    from draftsmith.train.config import drafter_config

    if kind not in learned():
        expected = f"one of {', '.join(learned())}"
        raise InputError("kind", repr(kind), expected, f"Choose one.{did_you_mean(kind, list(learned()))}")
    return from_values(f"draftsmith train {kind}", drafter_config(kind), values)


def run(command: str, **values: Any) -> Any:
    """What a command of the command line does: `run("data responses", prompts="runs/prompts", ...)`.

    values: its settings by their names with underscores; `config` takes a YAML file or a shipped name. Gives what the
    command makes: the directory of an artefact or head, or its exit code.

    Raises:
        InputError, UsageError: as the command line prints them.
    """
    return COMMANDS[command].run(config_of(command, values))


def settings(kind: str, **values: Any) -> TrainDrafterConfig:
    """The settings of `train KIND`, for a `LitDrafter` in a Trainer of one's own: what says where data and output lie
    may be left out."""
    from draftsmith.train.lit_drafter import IN_PYTHON

    return training_config(kind, {"data": IN_PYTHON, "output": IN_PYTHON, "target": IN_PYTHON} | values)


def fit(kind: str, learner: type[LitDrafter] | None = None, **values: Any) -> Path:
    """Train a head as `draftsmith train KIND` does, with checkpoints, tau and best/, whose directory it gives.

    learner: a subclass of `LitDrafter` with a loss of its own. values: settings of the command, `data`, `target` and
    `output` among them.
    """
    from draftsmith.train.run import run as train

    return train(training_config(kind, values), learner)


def export(head: str | Path, format: str, output: str | Path, **values: Any) -> Path:
    """Write a head as another system loads it, checked by that system's rules; values: as of `draftsmith export`.

    Raises:
        InputError: what `draftsmith export` refuses, or a check that found a difference, which it printed.
    """
    if run("export", head=head, format=format, output=output, **values) != 0:
        raise InputError("export", f"differences from {head}, told above", "none", "Nothing was written.")
    return Path(output)
