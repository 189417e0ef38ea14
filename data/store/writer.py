"""One writer per directory: a second command that would write into it gets an error that names the first.

The lock is the operating system's (`flock`, through filelock), so it ends with its process, also after kill -9 or a
power cut. `.writer.json` beside it only names the holder. The ranks of a job (torchrun, SLURM, Lightning) are one
writer: rank 0 holds the lock. NFS 4 and Lustre mounted with `flock` hold it between machines.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from draftsmith.data.console import log_note
from draftsmith.data.ranks import place
from draftsmith.data.store.files import make_directory, write_json, writing
from draftsmith.modules.types import InputError, without_passwords

LOCK, HOLDER = ".writer.lock", ".writer.json"
# The children of a killed process may hold its lock for a moment longer.
GRACE_S = 2.0
# How long rank 0 may take to get the lock after another rank looks for it.
OWN_JOB_S = 20.0
T = TypeVar("T")


@dataclass(frozen=True)
class LockHolder:
    """The process that writes to a directory. job: identifies the job of its ranks; empty outside of one."""

    pid: int
    host: str
    command: str
    since: str
    job: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (`{self.command}`, since {self.since})"


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

    One process may hold a directory several times.

    Raises:
        InputError: another process writes there, or the file system has no locks.
    """
    directory, here, key = Path(directory), place(), os.path.realpath(directory)
    # Ranks above 0 write with their rank 0, which holds the lock.
    if shared and (here.rank or here.local_rank):
        _await_own_job(directory)
        yield
        return
    # A command may run another one that writes to the same output.
    if key in _held:
        yield
        return

    is_new = not directory.exists()
    make_directory(directory)
    lock = FileLock(directory / LOCK)
    with writing(directory, remedy="It has no locks: choose a place on another file system."):
        try:
            lock.acquire(timeout=GRACE_S)
        except Timeout as error:
            raise _taken(directory, read_holder(directory)) from error
    _held.add(key)
    try:
        # The lock was free, so its former holder was killed.
        if (before := read_holder(directory)) is not None:
            log_note(f"draftsmith: {directory}: {before} ended without releasing it; taking over")
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        command = without_passwords(shlex.join(["draftsmith", *sys.argv[1:]]))
        holder = LockHolder(os.getpid(), socket.gethostname(), command, since, _job())
        write_json(directory / HOLDER, asdict(holder))
        yield
    finally:
        _held.remove(key)
        # Delete both before the lock is released: a process that has opened this lock file before finds that it has
        # no name any more, and opens another.
        for name in (HOLDER, LOCK):
            with suppress(OSError):
                (directory / name).unlink(missing_ok=True)
        lock.release()
        if is_new:
            with suppress(OSError):
                # It holds something, as it should.
                directory.rmdir()


def occupied(directory: Path) -> bool:
    """Return whether a command must not write there: anything but an empty directory."""
    directory = Path(directory)
    if not directory.is_dir():
        return directory.exists() or directory.is_symlink()
    return any(path.name not in (LOCK, HOLDER) and ".tmp-" not in path.name for path in directory.iterdir())


def read_holder(directory: Path) -> LockHolder | None:
    """Return the lock holder's record, or None if it is missing or unreadable."""
    try:
        return LockHolder(**json.loads((Path(directory) / HOLDER).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _job() -> str:
    """Return what identifies the job of this rank; empty if nothing does."""
    env = os.environ
    if env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"torchrun {env['TORCHELASTIC_RUN_ID']}"
    if "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env:
        return f"slurm {env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    if "RANK" in env and "MASTER_PORT" in env:
        return f"{env.get('MASTER_ADDR', '')}:{env['MASTER_PORT']}"
    return ""


def _await_own_job(directory: Path) -> None:
    """Wait, on a rank above 0, until rank 0 of its job holds the directory or nobody does.

    Raises:
        InputError: another job holds it.
    """
    job, started = _job(), time.monotonic()
    while job:
        holder, waited = read_holder(directory), time.monotonic() - started
        if holder is not None and holder.job == job:
            return
        if holder is None and waited > OWN_JOB_S / 4:
            # Rank 0 has finished, or begins late.
            return
        if waited > OWN_JOB_S:
            raise _taken(directory, holder)
        time.sleep(0.05)


def _taken(directory: Path, holder: LockHolder | None) -> InputError:
    found = f"{directory}, where {holder or 'another process'} writes"
    remedy = "Wait for its end, or choose another output."
    return InputError("output", found, "a directory that nobody else writes to", remedy)
