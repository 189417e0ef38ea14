"""`draftsmith launch deepspeed`: the DeepSpeed launcher, which reaches the machines of a hostfile through ssh.

Between machines that launcher builds one line for a remote shell (pdsh), and quotes only words with blanks in them. So
the command travels as one word of letters and digits, which this module, started as a program, unpacks.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from draftsmith.launch.inner import Launched, check_command
from draftsmith.modules.types import InputError

LOCAL = ("localhost", "127.0.0.1")
HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@dataclass(frozen=True)
class DeepspeedConfig(Launched):
    """Starts a data or train command on the machines of a hostfile: draftsmith launch deepspeed --hostfile FILE -- ...

    Attributes:
        hostfile: One machine a line, `NAME slots=GPUS`; all of them see this folder and this Python at the same path.
        num_nodes: Use only the first so many machines; 0 takes all.
        num_gpus: Processes on each machine; 0 takes all of its slots.
        include: Machines and devices to use, as `worker-0@worker-1:0,2`; instead of num_nodes and num_gpus.
        master_port: Port on the first machine at which the processes meet.
    """

    hostfile: Path = field(kw_only=True)
    num_nodes: int = 0
    num_gpus: int = 0
    include: str = ""
    master_port: int = 29500

    def __post_init__(self) -> None:
        self.check_at_least(num_nodes=0, num_gpus=0)
        if self.include and (self.num_nodes or self.num_gpus):
            raise InputError("include", repr(self.include), "nothing beside num_nodes and num_gpus", "Pass one kind.")
        if not re.fullmatch(r"[\w.@:,-]*", self.include, re.ASCII):
            raise InputError("include", repr(self.include), "something like worker-0@worker-1:0,2", "Correct it.")
        if not 0 < self.master_port < 2**16:
            raise InputError("master_port", self.master_port, "a port, 1 to 65535", "Change it.")


def run(config: DeepspeedConfig) -> int:
    """Becomes the DeepSpeed launcher: signals, output and the exit code are its own. Returns only after help.

    Raises:
        UsageError, InputError: DeepSpeed is missing, the hostfile is wrong, or the command would not start.
    """
    if not check_command("launch deepspeed", config.command, None):
        return 0
    if find_spec("deepspeed") is None:
        remedy = 'Run `pip install "draftsmith[deepspeed]"`, or use draftsmith launch torchrun.'
        raise InputError("deepspeed", "no such package", "DeepSpeed, which is an extra", remedy)
    argv = arguments(config)
    print(f"draftsmith {shlex.join(config.command)}", flush=True)  # the launcher shows the packed form
    os.execv(argv[0], argv)


def arguments(config: DeepspeedConfig) -> list[str]:
    """The DeepSpeed launcher's words.

    Raises:
        InputError: the hostfile cannot be used, or the current folder cannot be named in a remote shell.
    """
    hosts = read_hosts(config.hostfile)
    words = [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={config.hostfile}"]
    words += [f"--master_port={config.master_port}", "--no_local_rank"]
    words += [f"--num_nodes={config.num_nodes}"] if config.num_nodes else []
    words += [f"--num_gpus={config.num_gpus}"] if config.num_gpus else []
    words += [f"--include={config.include}"] if config.include else []
    if all(host in {*LOCAL, socket.gethostname()} for host in hosts):
        words += ["--no_ssh_check", "--master_addr=127.0.0.1"]  # nothing is remote
    elif not re.fullmatch(r"[\w@%+=:,./-]+", str(Path.cwd()), re.ASCII):
        raise InputError("current folder", repr(str(Path.cwd())), "letters, digits and ._-", "Work in another one.")
    return [*words, "--module", "draftsmith.launch.deepspeed", pack(config.command)]


def read_hosts(hostfile: Path) -> list[str]:
    """Names of the machines.

    Raises:
        InputError: a line that is not `NAME slots=N` with N above 0, or none at all.
    """
    from draftsmith.data.store.reading import read_text

    hosts = []
    for number, line in enumerate(read_text(hostfile, "lines of NAME slots=GPUS", "Correct it.").splitlines(), 1):
        entry = line.partition("#")[0].strip()
        # DeepSpeed starts nothing on machines without slots, and still exits with 0.
        match = re.fullmatch(rf"({HOST})\s+slots=0*[1-9]\d{{0,3}}", entry, re.ASCII)
        if match is not None:
            hosts.append(match[1])
        elif entry:
            raise InputError(f"{hostfile}, line {number}", repr(line), "NAME slots=GPUS", "Correct it.")
    if not hosts:
        raise InputError(str(hostfile), "no machine", "lines of NAME slots=GPUS", "Add one.")
    return hosts


def pack(command: Sequence[str]) -> str:
    """Words as one of letters, digits, - and _, which no shell reads anything into."""
    return base64.urlsafe_b64encode(json.dumps(list(command)).encode()).decode().rstrip("=")


def unpack(packed: str) -> list[str]:
    return [str(word) for word in json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))]


if __name__ == "__main__":  # what the launcher starts in every process
    from draftsmith.launch.cli import main

    sys.exit(main(unpack(sys.argv[1])))
