"""One writer per directory: a second command that would write into it gets an error.

The lock is the operating system's (`flock`, through filelock), so it ends with its process, also after kill -9 or a
power cut. NFS 4 and Lustre mounted with `flock` hold it between machines. The ranks of a job (torchrun, SLURM,
Lightning) are one writer: rank 0 holds the lock.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from draftsmith.data.ranks import place
from draftsmith.modules.pretrained.files import clear_files, make_directory, writing
from draftsmith.modules.types import InputError

LOCK = ".writer.lock"
# The children of a killed process may hold its lock for a moment longer.
GRACE_S = 2.0
T = TypeVar("T")

# Directories that this process holds.
_held: set[str] = set()


def sole_writer(shared: bool = False) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate `run(config, ...)`: hold `config.output` while it runs. shared: all ranks write together."""

    def decorate(run: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(run)
        def locked(config: Any, *others: Any) -> T:
            with writing_alone(config.output, shared):
                return run(config, *others)

        return locked

    return decorate


@contextmanager
def writing_alone(directory: Path, shared: bool = False) -> Iterator[None]:
    """Hold a directory; make it if it is missing, and remove it again if nothing was written.

    Raises:
        InputError: another process writes there, or the file system has no locks.
    """
    directory, here, key = Path(directory), place(), os.path.realpath(directory)
    # Ranks above 0 write beside their rank 0; and a command may run another one with the same output.
    if key in _held or (shared and (here.rank or here.local_rank)):
        yield
        return

    is_new = not directory.exists()
    make_directory(directory)
    lock = FileLock(directory / LOCK)
    with writing(directory):
        try:
            lock.acquire(timeout=GRACE_S)
        except Timeout as error:
            found, remedy = f"{directory}, where another process writes", "Wait for its end, or choose another output."
            raise InputError("output", found, "a directory that no other process writes to", remedy) from error
    _held.add(key)
    try:
        clear_files(directory)
        yield
    finally:
        _held.remove(key)
        # Delete it before the lock is released: a process that has opened this file before finds that it has no name
        # any more, and opens another.
        with suppress(OSError):
            (directory / LOCK).unlink(missing_ok=True)
        lock.release()
        # A directory that holds something is not removed.
        if is_new:
            with suppress(OSError):
                directory.rmdir()


def occupied(directory: Path) -> bool:
    """Return whether a command must not write there: anything but an empty directory."""
    directory = Path(directory)
    if not directory.is_dir():
        return directory.exists() or directory.is_symlink()
    return any(path.name != LOCK and ".tmp-" not in path.name for path in directory.iterdir())
