"""A real SLURM cluster of two nodes on this one machine, all of it below one temporary directory."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parent
NODES = ("n1", "n2")
START_S = 60.0


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start munge, a controller and two nodes, and yield the environment in which SLURM's commands find them.

    Runs as root or as a user: the daemons belong to whoever starts them. At the end every job and daemon is stopped
    and the directory deleted.
    """
    # munge refuses sockets below directories that others may write to without the sticky bit.
    state = Path(tempfile.mkdtemp(prefix="draftsmith-slurm-"))
    state.chmod(0o755)
    environment = {**os.environ, "SLURM_CONF": str(state / "slurm.conf")}
    for name in [name for name in environment if name.startswith("SLURM_") and name != "SLURM_CONF"]:
        del environment[name]
    try:
        with ExitStack() as daemons:
            _start_munge(state, daemons)
            _configure(state)
            _daemon(["slurmctld", "-D", "-i"], state, environment, daemons)
            for node in NODES:
                _daemon(["slurmd", "-D", "-N", node], state, environment, daemons)
            _await_nodes(state, environment)
            daemons.callback(_end_jobs, environment)
            yield environment
    finally:
        shutil.rmtree(state, ignore_errors=True)


def _start_munge(state: Path, daemons: ExitStack) -> None:
    key = state / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    paths = {"key-file": key, "socket": state / "munge.socket", "pid-file": state / "munge.pid"}
    paths |= {"log-file": state / "munge.log", "seed-file": state / "munge.seed"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    _daemon(["munged", "--foreground", "--force", *options], state, dict(os.environ), daemons)
    _wait(lambda: (state / "munge.socket").exists(), state, "munge's socket")


def _configure(state: Path) -> None:
    (state / "controller").mkdir()
    for node in NODES:
        (state / node).mkdir()
    controller, first, second = _free_ports()
    values = {"HOST": socket.gethostname().split(".")[0], "USER": getpass.getuser(), "STATE": state}
    values |= {"CONTROLLER_PORT": controller, "NODE_PORT_1": first, "NODE_PORT_2": second}
    text = (HERE / "slurm.conf").read_text("utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    (state / "slurm.conf").write_text(text, "utf-8")


def _free_ports() -> tuple[int, int, int]:
    """One free port for the controller, and two in a row for the nodes."""
    for base in range(17000, 30000, 3):
        with ExitStack() as sockets:
            try:
                for port in range(base, base + 3):
                    sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return base, base + 1, base + 2
    raise AssertionError("no free ports")


def _daemon(argv: list[str], state: Path, environment: dict[str, str], daemons: ExitStack) -> None:
    """Start a daemon in the foreground of a process of its own, and end it with the stack."""
    program = shutil.which(argv[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert program, f"{argv[0]} is not installed; run {HERE / 'install.sh'}"
    log = daemons.enter_context((state / f"{argv[0]}-{argv[-1].lstrip('-').replace('/', '_')[:20]}.out").open("w"))
    process = subprocess.Popen([program, *argv[1:]], env=environment, stdout=log, stderr=log, start_new_session=True)

    def stop() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    daemons.callback(stop)


def _await_nodes(state: Path, environment: dict[str, str]) -> None:
    def idle() -> bool:
        command = ["sinfo", "--noheader", "--Node", "--format=%N %t"]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
        return sorted(found.split("\n")) == ["", *(f"{node} idle" for node in NODES)]

    _wait(idle, state, "two idle nodes")


def _end_jobs(environment: dict[str, str]) -> None:
    """Cancel what runs and wait for it: a slurmd that ends leaves its steps behind."""
    subprocess.run(["scancel", "--user", getpass.getuser()], env=environment, check=False)
    deadline = time.monotonic() + START_S
    while subprocess.run(["squeue", "-h"], env=environment, capture_output=True, check=False).stdout.strip():
        if time.monotonic() > deadline:
            print("jobs did not end", file=sys.stderr)
            return
        time.sleep(0.5)


def _wait(there: Callable[[], bool], state: Path, what: str) -> None:
    deadline = time.monotonic() + START_S
    while not there():
        if time.monotonic() > deadline:
            files = [file for file in state.iterdir() if file.suffix in {".log", ".out"}]
            logs = "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)
            raise AssertionError(f"no {what} after {START_S:.0f} s\n{logs}")
        time.sleep(0.1)
