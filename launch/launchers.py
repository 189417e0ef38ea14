"""`draftsmith launch torchrun`, and what every launcher checks about the command it starts.

The command is parsed where the launcher is called, so that a typing error costs one line and no place in a queue.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.data.ranks import LAUNCHER
from draftsmith.launch.commands import command_name, configure, unknown_command
from draftsmith.launch.errors import UsageError
from draftsmith.modules.types import InputError, check_range

# Groups whose commands divide their work among ranks, except commands that only print or run in one process.
SHARED_GROUPS, SINGLE_PROCESS = ("data", "train"), ("data inspect",)
MAX_PROCESSES = 1024  # on one machine; torchrun itself has no limit
SAVING_S = 600  # torchrun's own limit, 30 s, is too short to save a large head on a slow disk


@dataclass(frozen=True)
class LaunchConfig:
    """Options of every launcher.

    Attributes:
        command: The command that every process runs, after a lone --. A restarted training continues from its
            checkpoint.
    """

    command: tuple[str, ...] = ()


def check_command(launcher: str, command: Sequence[str], num_processes: int) -> bool:
    """Check that `command` would start; return False if it only printed help.

    Args:
        num_processes: number of processes that run it.

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
    """Run torchrun in this process, which sets up the others, and return the exit code.

    Raises:
        InputError: the command after `--` would not start.
    """
    if not check_command("launch torchrun", config.command, config.nproc_per_node * config.nnodes):
        return 0
    options = [f"--nproc-per-node={config.nproc_per_node}", f"--max-restarts={config.max_restarts}"]
    if config.rdzv_endpoint is None:
        meeting = ["--standalone"]
    else:
        options += [f"--nnodes={config.nnodes}", f"--rdzv-endpoint={config.rdzv_endpoint}"]
        meeting = ["--rdzv-backend=c10d", "--rdzv-id=draftsmith"]
    os.environ[LAUNCHER] = shlex.join(["draftsmith", "launch", "torchrun", *options, "--"])
    # After a signal torchrun kills the processes that have not ended in this time.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        # Restarted processes find the checkpoint of the previous ones.
        torchrun.main([*options, *meeting, "--module", "draftsmith", *config.command])
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0
