"""The command that a launcher starts in every process: known, well written, and one that can be shared out.

All of it is checked where the launcher is called, so that a typing error costs one line and no place in a queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.launch.commands import command_name, configure, unknown_command
from draftsmith.launch.errors import UsageError
from draftsmith.modules.types import at_least

# Groups whose commands share their work out by rank, but for those that show something, or work in one process.
SHARED, ALONE = ("data", "train"), ("data inspect",)


@dataclass(frozen=True)
class Launched:
    """What every launcher is told.

    Attributes:
        command: The command, written behind a lone --, which every process runs. A training that may be started again
            gets --resume added, so that it goes on from its checkpoint.
    """

    command: tuple[str, ...] = ()

    def check_at_least(self, **least: int) -> None:
        """Raises InputError for a setting below its least value."""
        for name, smallest in least.items():
            at_least(name, getattr(self, name), smallest)


def check_dashes(launcher: str, args: Sequence[str]) -> None:
    """See that a command is set off by `--`; without it, its settings would be taken for the launcher's.

    Raises:
        UsageError: a command's name is there and `--` is not.
    """
    if "--" in args:
        return
    for start, word in enumerate(args):
        if not word.startswith("-") and command_name(args[start:]) is not None:
            before, after = " ".join(args[:start]), " ".join(args[start:])
            shown = " ".join(part for part in (f"draftsmith {launcher}", before, "--", after) if part)
            raise UsageError(f"command: found {word!r} without `--` before it. Write `{shown}`.")


def check_command(launcher: str, command: Sequence[str], num_processes: int | None) -> bool:
    """See that `command` would start; False when it only printed help.

    num_processes: how many will run it; None where the launcher does not know yet, which counts as several.

    Raises:
        UsageError: there is none, it is unknown, badly written, or it cannot be shared out.
        InputError: its settings contradict each other.
    """
    if not command:
        example = f"draftsmith {launcher} -- train eagle --config FILE"
        raise UsageError(f"command: found nothing, expected a data or train command behind `--`: `{example}`.")
    name = command_name(command)
    if name is None:
        raise unknown_command(command)
    if name.startswith("launch "):
        raise UsageError(f"command: found {name!r}, expected a data or train command. Launch once.")
    if num_processes != 1 and (name.split()[0] not in SHARED or name in ALONE):
        remedy = f"Run `draftsmith {name}` by itself."
        expected = "a data or train command that shares its work out"
        raise UsageError(f"command: found {name!r} for several processes, expected {expected}. {remedy}")
    words = [word for word in command[len(name.split()) :] if word != "--debug"]
    return configure(name, words)[1] is not None


def with_resume(command: Sequence[str]) -> list[str]:
    """The command as it must be to be started again: a training goes on from its checkpoint, and begins where there is
    none. Data stages always go on; a `--resume` or `--no-resume` of the user's stays."""
    written = any(word.partition("=")[0] in {"--resume", "--no-resume", "--no_resume"} for word in command)
    return [*command, "--resume"] if command[0] == "train" and not written else [*command]
