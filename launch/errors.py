"""Errors that users can fix, as one line each."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import TYPE_CHECKING

import yaml

from draftsmith.modules.types import InputError, without_controls, without_passwords

if TYPE_CHECKING:
    from cyclopts import CycloptsError

# Message and remedy for what the operating system reports about a path that a user named.
PATH_ERRORS = {
    FileNotFoundError: ("no such file or directory", "Check the path."),
    IsADirectoryError: ("is a directory, expected a file", "Name a file in it."),
    NotADirectoryError: ("is not a directory", "Check the path."),
    FileExistsError: ("is a file, expected a directory", "Choose another path."),
    PermissionError: ("permission denied", "Choose a path that you may read and write."),
}
# A library below may meet these too; modules/pretrained/files.py handles them for our own writes.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


class UsageError(InputError):
    """Error in the command line itself, or in options given from Python; the message is one line for the user."""

    def __init__(self, message: str):
        ValueError.__init__(self, message)
        self.field, self.found, self.expected, self.remedy = "command", message, "", ""


def user_message(error: BaseException) -> str | None:
    """Return one line for an error that the user can fix; None for a bug, which deserves a traceback."""
    message = None
    if isinstance(error, InputError):
        message = str(error)
    elif isinstance(error, OSError) and error.filename is not None and isinstance(error, tuple(PATH_ERRORS)):
        what, remedy = next(PATH_ERRORS[kind] for kind in PATH_ERRORS if isinstance(error, kind))
        message = f"{error.filename}: {what}. {remedy}"
    elif isinstance(error, OSError) and error.errno in DISK_ERRORS:
        place = f"{error.filename}: " if error.filename is not None else ""
        remedy = "Free some space or choose another place, then give the command again."
        message = f"{place}found {error.strerror or error}, expected a disk that can be written. {remedy}"
    elif type(error).__name__ == "PanicException":  # of a library in Rust, and no Exception: its class has no module
        what = " ".join(str(error).split())[:200]
        message = f"tokenizer: found a text on which it fails ({what}), expected tokens. Use another one's files."
    elif isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        place = getattr(mark, "name", None) or "YAML"
        if mark is not None:
            place += f", line {mark.line + 1}, column {mark.column + 1}"
        message = f"{place}: found invalid YAML ({problem}), expected `key: value` lines. Correct the file."
    return None if message is None else without_controls(without_passwords(one_line(message)))


def one_line(text: str) -> str:
    return " ".join(text.split())


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ` Did you mean X?` or an empty text, to follow a full stop."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def explain_error(error: CycloptsError) -> str:
    """Return cyclopts' message as one line that names the option."""
    from cyclopts.exceptions import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    text = one_line(str(error))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"found {error.unused_tokens[0]!r} without a name, expected --name value."
    if isinstance(error, UnknownOptionError) and error.token.source != "cli":
        key = str(error.token.keyword).strip("[]")
        names = [argument.name.removeprefix("--").replace("-", "_") for argument in error.argument_collection]
        return f"{error.token.source}: unknown key {key}.{did_you_mean(key, names)}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return f"found no {error.argument.name}, expected it with a value."
    name = error.argument.name if error.argument is not None else ""
    return text if name.removeprefix("--").replace("-", "_") in text.replace("-", "_") else f"{name}: {text}"
