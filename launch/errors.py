"""Which exceptions are the user's to mend, and the one line that says how."""

from __future__ import annotations

import difflib
import errno
import sys
from collections.abc import Iterable, Mapping

import yaml

from draftsmith.modules.types import InputError, without_passwords

# What the operating system says about a path that a user named.
PATH_ERRORS = {
    FileNotFoundError: ("no such file or directory", "Check the path."),
    IsADirectoryError: ("is a directory, expected a file", "Name a file in it."),
    NotADirectoryError: ("is not a directory", "Check the path."),
    FileExistsError: ("is a file, expected a directory", "Choose another path."),
    PermissionError: ("permission denied", "Choose a path that you may read and write."),
}
# And of a disk, wherever a library below meets it (what this program writes itself is in data/store/files.py).
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


class UsageError(Exception):
    """The command line itself is wrong; the message is one line for the user."""


def user_message(error: BaseException) -> str | None:
    """One line for an error that its user can mend; None for a defect of ours, which deserves a traceback."""
    message = _message(error)
    return None if message is None else without_passwords(message)


def _message(error: BaseException) -> str | None:
    if isinstance(error, UsageError | InputError):
        return one_line(str(error))
    if isinstance(error, OSError) and error.filename is not None:
        for kind, (what, remedy) in PATH_ERRORS.items():
            if isinstance(error, kind):
                return one_line(f"{error.filename}: {what}. {remedy}")
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        where = f"{error.filename}: " if error.filename is not None else ""
        remedy = "Free some space or choose another place, then give the command again."
        return one_line(f"{where}found {error.strerror or error}, expected a disk that can be written. {remedy}")
    if isinstance(error, yaml.YAMLError):
        return yaml_message(error)
    return None


def yaml_message(error: yaml.YAMLError) -> str:
    """What is wrong with a YAML text, and where."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or one_line(str(error))
    name = getattr(mark, "name", None) or "YAML"
    place = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else name
    return one_line(f"{place}: found invalid YAML ({problem}), expected `key: value` lines. Correct the file.")


def name_model(error: BaseException, config: object) -> None:
    """Name in the error the model whose numbers are none, as the user passed it."""
    finite = sys.modules.get("draftsmith.modules.finite")  # it needs torch, and so does who raises it
    if finite is not None and isinstance(error, finite.NonFinite) and error.path is None:
        paths = getattr(config, "paths", None)  # of a command that uses drafters
        name = error.model or ""
        # A head is named by its kind in the error, and was passed as --draft.
        passed = getattr(config, name, getattr(config, "draft", None))
        path = paths.get(name) if isinstance(paths, Mapping) else passed
        error.path = None if path is None else str(path)


def one_line(text: str) -> str:
    return " ".join(text.split())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean X?` or nothing; put right after a full stop."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""
