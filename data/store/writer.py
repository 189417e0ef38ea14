"""One writer a directory: a second command that would write into it is told who is there.

The lock is the operating system's (`flock`, through filelock), so that it ends with its process, also by kill -9 or a
power cut; `.writer.json` beside it only says whose it is. Processes that share a job out (torchrun, SLURM, Lightning)
are one writer: their rank 0 holds the lock.

Network file systems: NFS (version 4, or 3 with its lock daemon) and Lustre mounted with `flock` hold the lock between
machines. One that holds it on its own machine only is caught by a sign of life: the holder touches `.writer.json`
every few seconds, and on another machine a writer that finds the lock free watches whether it still does. A SLURM job
that is started again on another machine need not wait: SLURM runs a job once.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import shlex
import socket
import sys
import threading
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
BEAT_S = 10.0  # between signs of life
SILENT_S = 35.0  # without one, on another machine, a holder is dead: three beats and what a network file system caches
GRACE_S = 3.0  # what outlives a killed process by a moment: its children
OWN_JOB_S = 20.0  # how long rank 0 may take to get the lock after another rank looks for it
T = TypeVar("T")


@dataclass(frozen=True)
class Holder:
    """Who writes. job: what its ranks have in common; slurm: the SLURM job; both empty where there is none."""

    pid: int
    host: str
    command: str
    since: str
    job: str = ""
    slurm: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (`{self.command}`, since {self.since})"


_held: set[str] = set()  # directories, by this process


def sole_writer(shared: bool = False) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorates `run(config, ...)`: while it runs, nobody else writes to `config.output`.

    shared: the command's ranks write together.
    """

    def decorate(run: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(run)
        def alone(config: Any, *others: Any) -> T:
            with writing_alone(config.output, shared):
                return run(config, *others)

        return alone

    return decorate


@contextmanager
def writing_alone(directory: Path, shared: bool = False) -> Iterator[None]:
    """Hold a directory, which is made if it is not there (and removed again where nothing was written). Within one
    process it may be held again.

    Raises:
        InputError: another process writes there, or the file system has no locks.
    """
    directory = Path(directory)
    here = place()
    if shared and (here.rank or here.local_rank):
        _await_own_job(directory)
        yield
        return
    key = os.path.realpath(directory)
    if key in _held:
        yield
        return
    with _sole_holder(directory):
        _held.add(key)
        try:
            yield
        finally:
            _held.remove(key)


def occupied(directory: Path) -> bool:
    """True where something is that a command may not write over: anything but an empty directory."""
    directory = Path(directory)
    if not directory.is_dir():
        return directory.exists() or directory.is_symlink()
    return any(path.name not in (LOCK, HOLDER) and ".tmp-" not in path.name for path in directory.iterdir())


@contextmanager
def _sole_holder(directory: Path) -> Iterator[None]:
    made = not directory.exists()
    make_directory(directory)
    lock = _locked(directory)
    try:
        before = read_holder(directory)
        if before is not None:
            _see_that_it_is_gone(directory, before)
        write_json(directory / HOLDER, asdict(_this_process()))
    except BaseException:
        lock.release()
        raise
    ended = threading.Event()
    threading.Thread(target=_beat, args=(directory / HOLDER, ended), daemon=True, name="sign of life").start()
    try:
        yield
    finally:
        ended.set()
        # The files go while the lock is held: whoever opened this one before finds that it has no name, and opens
        # another.
        for name in (HOLDER, LOCK):
            with suppress(OSError):
                (directory / name).unlink(missing_ok=True)
        lock.release()
        if made:
            with suppress(OSError):  # it holds something, as it should
                directory.rmdir()


def _locked(directory: Path) -> FileLock:
    """The directory's lock, held. A killed process' children may hold it for a moment longer."""
    lock = FileLock(directory / LOCK)
    deadline = time.monotonic() + GRACE_S
    with writing(directory, remedy="It has no locks: choose a place on another file system."):
        while True:
            try:
                lock.acquire(timeout=0.5)
                return lock
            except Timeout as error:
                holder = read_holder(directory)
                if time.monotonic() > deadline or (holder is not None and _alive(holder)):
                    raise _taken(directory, holder) from error


def _this_process() -> Holder:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    command = without_passwords(shlex.join(["draftsmith", *sys.argv[1:]]))
    return Holder(os.getpid(), socket.gethostname(), command, now, _job(), os.environ.get("SLURM_JOB_ID", ""))


def _job() -> str:
    """What the ranks of a job have in common; empty where nothing says so."""
    env = os.environ
    if env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"torchrun {env['TORCHELASTIC_RUN_ID']}"
    if "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env:
        return f"slurm {env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    if "RANK" in env and "MASTER_PORT" in env:
        return f"{env.get('MASTER_ADDR', '')}:{env['MASTER_PORT']}"
    return ""


def read_holder(directory: Path) -> Holder | None:
    """Who says that it writes there; None where nobody does, or nobody knows."""
    try:
        return Holder(**json.loads((Path(directory) / HOLDER).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _alive(holder: Holder) -> bool:
    """False where it is known to be gone: a process of this machine that is no more."""
    if holder.host != socket.gethostname():
        return True
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _see_that_it_is_gone(directory: Path, before: Holder) -> None:
    """The lock was free, and yet somebody has not said goodbye: killed, or on a file system without common locks."""
    own = _this_process()
    if before.host != own.host and not (before.slurm and before.slurm == own.slurm):
        _tell(f"{directory}: looking for {SILENT_S:.0f} s whether {before} still writes there")
        if _shows_life(directory / HOLDER):
            raise _taken(directory, before)
    _tell(f"{directory}: {before} has gone without an end; taking over")


def _tell(text: str) -> None:
    log_note(f"draftsmith: {text}")


def _shows_life(path: Path) -> bool:
    """Opened anew for each look, which is when a network file system asks its server."""
    seen, deadline = _touched(path), time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(min(1.0, SILENT_S / 5))
        if _touched(path) != seen:
            return True
    return False


def _touched(path: Path) -> float | None:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):
            os.utime(path)


def _await_own_job(directory: Path) -> None:
    """A rank above 0 goes on when rank 0 of its job holds the directory, or nobody does.

    Raises:
        InputError: another job holds it.
    """
    job = _job()
    if not job:
        return
    started = time.monotonic()
    while True:
        holder = read_holder(directory)
        if holder is not None and holder.job == job:
            return
        waited = time.monotonic() - started
        if holder is None and waited > OWN_JOB_S / 4:  # rank 0 has finished, or begins late
            return
        if waited > OWN_JOB_S:
            raise _taken(directory, holder)
        time.sleep(0.05)


def _taken(directory: Path, holder: Holder | None) -> InputError:
    found = f"{directory}, where {holder or 'another process'} writes"
    remedy = "Wait for its end, or choose another output."
    return InputError("output", found, "a directory that nobody else writes to", remedy)
