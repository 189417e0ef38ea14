"""Refuse fifos, sockets and devices as inputs and outputs.

Reading a fifo without a writer never returns, `/dev/zero` has no end, and an atomic write turns a device into a
regular file.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.modules.types import InputError

KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def special_kind(path: str | Path) -> str | None:
    """Return what kind of special file a path is; None for a regular file, a directory, or nothing."""
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except (OSError, ValueError):  # not there, or a text that is no path
        return None


def check_paths(config: Any) -> None:
    """Check the paths in a command's settings, and the files in those that are directories.

    Raises:
        InputError: one is a pipe, a socket or a device.
    """
    texts = ("command", "prompt")  # which name no file
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        values = value if isinstance(value, tuple | list) else (value,)
        paths = [path for path in values if isinstance(path, str | Path) and spec.name not in texts]
        for file in (*paths, *(entry for path in paths for entry in _unusual_entries(path))):
            if kind := special_kind(file):
                remedy = "Name a regular file; write what a pipe holds to one first."
                raise InputError(spec.name, f"{kind} at {file}", "a file or directory", remedy)


def _unusual_entries(directory: str | Path) -> Iterator[str]:
    """Yield the entries of a directory that are neither files nor folders, which a listing says of most by itself."""
    try:
        with os.scandir(directory) as entries:
            yield from (entry.path for entry in entries if not (entry.is_file() or entry.is_dir()))
    except (OSError, ValueError):  # no directory
        return
