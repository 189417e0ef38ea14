"""`draftsmith launch torchrun`: one process per device of this machine, and the same call on each further machine."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from draftsmith.launch.inner import Launched, check_command, with_resume
from draftsmith.modules.types import InputError, at_most

MAX_PROCESSES = 1024  # on one machine; torchrun starts whatever it is told


@dataclass(frozen=True)
class TorchrunConfig(Launched):
    """Starts a data or train command in many processes: draftsmith launch torchrun --nproc-per-node 8 -- train ...

    Attributes:
        nproc_per_node: Processes on each machine, one per GPU.
        nnodes: Machines; with more than one, make the same call on each of them.
        rdzv_endpoint: HOST:PORT of the machine where the others meet; needed with several.
        rdzv_id: Any name that the machines of one run share, and no other run uses.
        node_rank: Number of this machine, from 0; without it the order in which they arrive decides.
        max_restarts: How often all processes are started again when one has died; a training then goes on from its
            last checkpoint.
    """

    nproc_per_node: int = 1
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str = "draftsmith"
    node_rank: int | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        self.check_at_least(nproc_per_node=1, nnodes=1, max_restarts=0)
        at_most("nproc_per_node", self.nproc_per_node, MAX_PROCESSES)
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise InputError("rdzv_endpoint", "nothing", "HOST:PORT, with several machines", "Name one of them.")
        if self.rdzv_endpoint is not None:
            found = re.fullmatch(r"[\w.-]+:(\d{1,5})", self.rdzv_endpoint, re.ASCII)  # torchrun takes no other names
            if found is None or not 0 < int(found[1]) < 2**16:
                raise InputError("rdzv_endpoint", repr(self.rdzv_endpoint), "HOST:PORT", "Correct it.")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise InputError("node_rank", self.node_rank, f"0 to nnodes - 1 = {self.nnodes - 1}", "Correct it.")


def run(config: TorchrunConfig) -> int:
    """Becomes torchrun: signals, output and the exit code are its own. Returns only when help was asked for.

    Raises:
        UsageError, InputError: the command behind `--` would not start.
    """
    if not check_command("launch torchrun", config.command, config.nproc_per_node * config.nnodes):
        return 0
    argv = arguments(config)
    sys.stdout.flush()
    os.execv(argv[0], argv)


def arguments(config: TorchrunConfig) -> list[str]:
    """torchrun's words; the command's words follow as they were written."""
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={config.nproc_per_node}"]
    words += [f"--max-restarts={config.max_restarts}"]
    if config.rdzv_endpoint is None:
        words += ["--standalone"]
    else:
        words += [f"--nnodes={config.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={config.rdzv_endpoint}"]
        words += [f"--rdzv-id={config.rdzv_id}"]
    if config.node_rank is not None:
        words += [f"--node-rank={config.node_rank}"]
    # Processes that are started again find the checkpoint of those before them.
    command = with_resume(config.command) if config.max_restarts else list(config.command)
    return [*words, "--module", "draftsmith", *command]
