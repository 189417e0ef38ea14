"""`draftsmith launch torchrun` and `launch deepspeed`, and what every launcher checks about the command it starts.

The command is parsed where the launcher is called, so that a typing error costs one line and no place in a queue.
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

from draftsmith.launch.commands import command_name, configure, unknown_command
from draftsmith.launch.errors import UsageError
from draftsmith.modules.types import InputError, check_range

# Groups whose commands divide their work among ranks, except commands that only print or run in one process.
SHARED_GROUPS, SINGLE_PROCESS = ("data", "train"), ("data inspect",)
MAX_PROCESSES = 1024  # on one machine; torchrun itself has no limit
LOCAL_HOSTS = ("localhost", "127.0.0.1")
HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@dataclass(frozen=True)
class LaunchConfig:
    """Options of every launcher.

    Attributes:
        command: The command that every process runs, after a lone --. A restarted training continues from its
            checkpoint.
    """

    command: tuple[str, ...] = ()


def check_command(launcher: str, command: Sequence[str], num_processes: int | None) -> bool:
    """Check that `command` would start; return False if it only printed help.

    Args:
        num_processes: number of processes that run it; None if unknown, which counts as several.

    Raises:
        UsageError: the command is missing, unknown, badly written, or cannot be divided among processes.
        InputError: its options contradict each other.
    """
    if not command:
        example = f"draftsmith {launcher} -- train eagle --config FILE"
        raise UsageError(f"command: found nothing, expected a data or train command behind `--`: `{example}`.")
    name = command_name(command)
    if name is None:
        raise unknown_command(command)
    if name.startswith("launch "):
        raise UsageError(f"command: found {name!r}, expected a data or train command. Launch once.")
    if num_processes != 1 and (name.split()[0] not in SHARED_GROUPS or name in SINGLE_PROCESS):
        expected = "a data or train command, which several processes can divide"
        remedy = f"Run `draftsmith {name}` by itself."
        raise UsageError(f"command: found {name!r} for several processes, expected {expected}. {remedy}")
    words = [word for word in command[len(name.split()) :] if word != "--debug"]
    return configure(name, words)[1] is not None


@dataclass(frozen=True)
class TorchrunConfig(LaunchConfig):
    """Start a data or train command in many processes: draftsmith launch torchrun --nproc-per-node 8 -- train ...

    Attributes:
        nproc_per_node: Processes on each machine, one per GPU.
        nnodes: Machines; with more than one, run the same command on each of them.
        rdzv_endpoint: HOST:PORT of the machine where the processes meet; required with several machines.
        max_restarts: How often all processes are restarted after one has died; a training then continues from its
            last checkpoint.
    """

    nproc_per_node: int = 1
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("nproc_per_node", 1), ("nnodes", 1), ("max_restarts", 0)):
            check_range(name, getattr(self, name), minimum)
        check_range("nproc_per_node", self.nproc_per_node, high=MAX_PROCESSES)
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise InputError("rdzv_endpoint", "nothing", "HOST:PORT, with several machines", "Name one of them.")
        if self.rdzv_endpoint is not None:
            endpoint = re.fullmatch(r"[\w.-]+:(\d{1,5})", self.rdzv_endpoint, re.ASCII)  # torchrun's own rule
            if endpoint is None or not 0 < int(endpoint[1]) < 2**16:
                raise InputError("rdzv_endpoint", repr(self.rdzv_endpoint), "HOST:PORT", "Correct it.")


def run_torchrun(config: TorchrunConfig) -> int:
    """Replace this process by torchrun, which then owns signals, output and the exit code.

    Returns only if the command printed help.

    Raises:
        UsageError, InputError: the command after `--` would not start.
    """
    if not check_command("launch torchrun", config.command, config.nproc_per_node * config.nnodes):
        return 0
    argv = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={config.nproc_per_node}"]
    argv += [f"--max-restarts={config.max_restarts}"]
    if config.rdzv_endpoint is None:
        argv += ["--standalone"]
    else:
        argv += [f"--nnodes={config.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={config.rdzv_endpoint}"]
        argv += ["--rdzv-id=draftsmith"]
    # Restarted processes find the checkpoint of the previous ones.
    argv += ["--module", "draftsmith", *config.command]
    sys.stdout.flush()
    os.execv(argv[0], argv)


@dataclass(frozen=True)
class DeepspeedConfig(LaunchConfig):
    """Start a data or train command on the machines of a hostfile: draftsmith launch deepspeed --hostfile FILE -- ...

    Attributes:
        hostfile: One machine per line, `NAME slots=GPUS`; all of them see this folder and this Python at the same path.
        master_port: Port on the first machine at which the processes meet.
    """

    hostfile: Path = field(kw_only=True)
    master_port: int = 29500

    def __post_init__(self) -> None:
        if not 0 < self.master_port < 2**16:
            raise InputError("master_port", self.master_port, "a port, 1 to 65535", "Change it.")


def run_deepspeed(config: DeepspeedConfig) -> int:
    """Replace this process by the DeepSpeed launcher, which then owns signals, output and the exit code.

    Returns only if the command printed help.

    Raises:
        UsageError, InputError: DeepSpeed is missing, the hostfile is wrong, or the command would not start.
    """
    if not check_command("launch deepspeed", config.command, None):
        return 0
    if find_spec("deepspeed") is None:
        remedy = 'Run `pip install "draftsmith[deepspeed]"`, or use draftsmith launch torchrun.'
        raise InputError("deepspeed", "no such package", "DeepSpeed, which is an extra", remedy)
    argv = deepspeed_words(config)
    print(f"draftsmith {shlex.join(config.command)}", flush=True)  # the launcher prints the packed form
    os.execv(argv[0], argv)


def deepspeed_words(config: DeepspeedConfig) -> list[str]:
    """Build the DeepSpeed launcher's command line.

    Between machines the launcher builds one line for a remote shell (pdsh) and quotes only words with blanks. The
    command therefore travels as one word of letters and digits, which this module, run as a program, unpacks.

    Raises:
        InputError: the hostfile cannot be used, or a remote shell would misread the current folder's name.
    """
    hosts = read_hosts(config.hostfile)
    words = [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={config.hostfile}"]
    words += [f"--master_port={config.master_port}", "--no_local_rank"]
    if all(host in {*LOCAL_HOSTS, socket.gethostname()} for host in hosts):
        words += ["--no_ssh_check", "--master_addr=127.0.0.1"]  # nothing is remote
    elif not re.fullmatch(r"[\w@%+=:,./-]+", str(Path.cwd()), re.ASCII):
        raise InputError("current folder", repr(str(Path.cwd())), "letters, digits and ._-", "Work in another one.")
    return [*words, "--module", "draftsmith.launch.launchers", pack(config.command)]


def read_hosts(hostfile: Path) -> list[str]:
    """Read the names of the machines from a hostfile.

    Raises:
        InputError: a line is not `NAME slots=N` with N above 0, or there is no machine.
    """
    from draftsmith.modules.pretrained.reading import read_text

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
    """Encode words as one word of letters, digits, - and _, which every shell leaves alone."""
    return base64.urlsafe_b64encode(json.dumps(list(command)).encode()).decode().rstrip("=")


def unpack(packed: str) -> list[str]:
    """Decode the words of `pack`."""
    return [str(word) for word in json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))]


if __name__ == "__main__":  # the DeepSpeed launcher starts this in every process
    from draftsmith.launch.cli import main

    sys.exit(main(unpack(sys.argv[1])))
