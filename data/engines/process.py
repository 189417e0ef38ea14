"""A server of an engine as a child process: started, awaited, and ended with the command that needs it."""

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
from draftsmith.modules.types import InputError, without_controls

START_S, END_S = 1800.0, 20.0
LOG_LINES = 12  # of a server that did not start
PR_SET_PDEATHSIG = 1  # prctl(2)
# Loaded here: the child of a process with threads must not load anything.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by leaving all contexts, so that the processes that they started end too."""
    raise SystemExit(128 + number)


def end_with_parent() -> None:
    """End this process, a child, with the one that started it, also where that is killed. On Linux only."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def running(words: Sequence[str], settings: Mapping[str, str]) -> Iterator[str]:
    """Start a server, yield its address once it answers /health, and end it with the context.

    Args:
        words: the command; `--host` and `--port` are added.
        settings: defaults of its environment variables.

    Raises:
        InputError: it ends before it answers; its last lines go to stderr, and the log file is named.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    handle, name = tempfile.mkstemp(prefix="draftsmith-engine-", suffix=".log")
    log_note(f"starting the engine; its log: {name}")
    previous = signal.signal(signal.SIGTERM, leave)
    process = None
    try:
        with os.fdopen(handle, "wb") as log:
            process = subprocess.Popen(
                [*words, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**settings, **os.environ},
                start_new_session=True,  # Ctrl-C reaches us alone, and all its processes are one group
                preexec_fn=end_with_parent,
            )
        until = time.monotonic() + START_S
        while not answers_health(port):
            if process.poll() is not None or time.monotonic() > until:
                lines = [line for line in Path(name).read_text(errors="replace").splitlines() if line.strip()]
                print(without_controls("\n".join(lines[-LOG_LINES:])), file=sys.stderr)
                ended = process.poll() is not None
                found = f"exit status {process.returncode}" if ended else f"no answer in {START_S:.0f} s"
                message = next((f", {line.strip()[:300]}" for line in reversed(lines) if "Error: " in line), "")
                raise InputError("engine", f"{found}{message}", "a server that starts", f"Read {name}.")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process is not None:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        signal.signal(signal.SIGTERM, previous)


def answers_health(port: int) -> bool:
    with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=5.0)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == HTTPStatus.OK
    return False
