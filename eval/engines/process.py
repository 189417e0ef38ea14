"""A server that runs as a process of its own for as long as it is asked."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import NoReturn

from draftsmith.data.console import log_note
from draftsmith.modules.types import InputError

STARTS_S, ENDS_S = 1800.0, 20.0
SHOWN_LINES = 12
PARENT_DIES = 1  # PR_SET_PDEATHSIG of prctl(2)


@contextmanager
def running(words: Sequence[str], settings: Mapping[str, str]) -> Iterator[str]:
    """A server's address, once it answers /health; the server ends with the context, whatever ends that.

    words: what starts it; `--host` and `--port` are added. settings: of its environment, where that has no own.

    Raises:
        InputError: it ends before it answers; its last lines are on stderr, all of them in a file that is named.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    handle, name = tempfile.mkstemp(prefix="draftsmith-engine-", suffix=".log")
    log_note(f"starting the engine; its log: {name}")
    before = signal.signal(signal.SIGTERM, _leave)
    process = None
    try:
        with os.fdopen(handle, "wb") as log:
            process = subprocess.Popen(
                [*words, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**settings, **os.environ},
                start_new_session=True,  # Ctrl-C is ours alone, and all its processes are one group
                preexec_fn=_die_with_parent(),
            )
        _wait(process, port, Path(name))
        yield f"http://127.0.0.1:{port}"
    finally:
        if process is not None:
            _end(process)
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _die_with_parent():  # type: ignore[no-untyped-def]  # of `preexec_fn`
    """For the child of a process that is killed: SIGTERM then. Linux only."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # here: the child of a process with threads must not load anything
    return lambda: libc.prctl(PARENT_DIES, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + STARTS_S
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=5.0)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == HTTPStatus.OK:
                return
        time.sleep(0.2)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-SHOWN_LINES:]), file=sys.stderr)
    found = f"no answer in {STARTS_S:.0f} s" if process.poll() is None else f"exit status {process.returncode}"
    said = next((f", {line.strip()[:300]}" for line in reversed(lines) if "Error: " in line), "")
    raise InputError("engine", f"{found}{said}", "a server that starts", f"Read {log}.")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, then end all of its group."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDS_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
