"""`draftsmith launch slurm`: write a job script, submit it with sbatch, and follow the job's output.

sbatch is called directly rather than through submitit, which pickles the function it runs: here the script can be read,
kept and submitted by hand. No user value reaches a shell or an #SBATCH line unchecked: the command's words are quoted,
and everything else has to match a pattern.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from draftsmith.launch.launchers import LaunchConfig, check_command
from draftsmith.modules.types import InputError, check_range

POLL_S = 2.0
FINAL_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
    "UNKNOWN",  # `job_state`'s
)
NAME, PATH = r"[\w.+:,@-]+", r"[\w@+=:,./-]+"
TIME = r"(\d+-)?\d+(:\d+){0,2}"  # M, M:S, H:M:S, D-H, D-H:M or D-H:M:S
# A word of an #SBATCH line, without what sbatch would take for quotes, escapes or a comment.
OPTION = r"--?[A-Za-z][\w-]*(=[!$-&(-\[\]-~]+)?"


@dataclass(frozen=True)
class SlurmConfig(LaunchConfig):
    """Submit a command as a SLURM job and follow its output: draftsmith launch slurm --nodes 2 -- train ...

    Before the time limit a training saves a checkpoint and the job is requeued, where it continues; so do data stages.
    To continue an interrupted job of yours: `scontrol requeue JOB`.

    Attributes:
        nodes: Machines.
        gpus_per_node: GPUs on each machine; 0 requests none.
        tasks_per_node: Processes on each machine; 0 means one per GPU, or one without GPUs.
        time: Time limit of one start, such as 24:00:00 or 2-12; by default the partition's.
        job_name: Name of the job, its script and its log.
        cpus_per_task: CPU cores of each process; 0 leaves it to the cluster.
        signal_before: Seconds before the time limit at which a run saves and is requeued; 0 disables it. SLURM may be
            up to a minute early.
        max_restarts: How often the job is requeued automatically after a process has failed.
        sbatch_args: Further options of sbatch, as --sbatch-args=--partition=gpu; those with commas as a JSON list.
        log_dir: Directory of the script and the log, visible to all nodes.
        dry_run: Print the script and stop.
        follow: Print the job's output until it ends; Ctrl-C stops the printing, not the job.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    tasks_per_node: int = 0
    time: str | None = None
    job_name: str = "draftsmith"
    cpus_per_task: int = 0
    signal_before: int = 120
    max_restarts: int = 0
    sbatch_args: tuple[str, ...] = ()
    log_dir: Path = Path("runs/slurm")
    dry_run: bool = False
    follow: bool = True

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 1)
        for name in ("gpus_per_node", "tasks_per_node", "cpus_per_task", "signal_before", "max_restarts"):
            check_range(name, getattr(self, name), 0)
        for name, pattern in (("job_name", NAME), ("time", TIME)):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(pattern, value, re.ASCII):
                raise InputError(name, repr(value), f"text of the form {pattern}", "Change it.")
        if not re.fullmatch(PATH, str(self.log_dir.absolute()), re.ASCII):
            found = repr(str(self.log_dir.absolute()))
            raise InputError("log_dir", found, "a path of letters, digits and @+=:,./-", "Choose another.")
        for word in self.sbatch_args:
            if not re.fullmatch(OPTION, word, re.ASCII):
                raise InputError("sbatch_args", repr(word), "--name or --name=value, without blanks", "Correct it.")

    @property
    def tasks(self) -> int:
        """Processes on each node."""
        return self.tasks_per_node or max(1, self.gpus_per_node)


def run(config: SlurmConfig) -> int:
    """Write the script, submit it and follow the job.

    Returns 0 if the job completes or is not followed, 1 if it fails, and 130 if following was interrupted.

    Raises:
        InputError: the command would not start, or SLURM rejects the job.
    """
    if not check_command("launch slurm", config.command, config.nodes * config.tasks):
        return 0
    script = job_script(config)
    if config.dry_run:
        print(script, end="")
        return 0
    if shutil.which("sbatch") is None:
        remedy = "Run this where SLURM is installed, or print the script with --dry-run."
        raise InputError("sbatch", "no such program", "SLURM's commands", remedy)
    from draftsmith.modules.pretrained.files import make_directory, write_text

    make_directory(config.log_dir)
    path = config.log_dir.absolute() / f"{config.job_name}-{datetime.now():%Y%m%d-%H%M%S-%f}.sh"
    write_text(path, script)
    result = slurm(["sbatch", "--parsable", str(path)])
    if result.returncode:
        found = (result.stderr or result.stdout).strip() or f"code {result.returncode}"
        raise InputError("sbatch", repr(found), "a job that the cluster takes", f"Change the settings ({path}).")
    job = result.stdout.strip().split(";")[0]  # a federation appends the cluster's name
    log = config.log_dir.absolute() / f"{config.job_name}-{job}.log"
    print(f"job {job}: script {path}, output {log}", flush=True)
    if not config.follow:
        return 0
    try:
        return follow(job, log)
    except KeyboardInterrupt:
        print(f"\njob {job} keeps running. Follow it: tail -F {log}   Cancel it: scancel {job}")
        return 130


def job_script(config: SlurmConfig) -> str:
    """Build the script: sbatch's options, the processes' meeting point, and the command."""
    trains, makes_data = config.command[0] == "train", config.command[0] == "data"
    can_resume = trains or makes_data
    header = [f"--job-name={config.job_name}", f"--nodes={config.nodes}", f"--ntasks-per-node={config.tasks}"]
    optional = {"gpus-per-node": config.gpus_per_node, "cpus-per-task": config.cpus_per_task, "time": config.time}
    header += [f"--{name}={value}" for name, value in optional.items() if value]
    header += [f"--output={config.log_dir.absolute() / config.job_name}-%j.log", "--open-mode=append"]
    header += ["--requeue"] if can_resume else ["--no-requeue"]
    if can_resume and config.signal_before:
        # A training handles the signal in its processes; a data stage is stopped by the script.
        header.append(f"--signal={'B:' if makes_data else ''}USR1@{config.signal_before}")
    header += config.sbatch_args

    srun = ["srun", "--kill-on-bad-exit=1"]
    srun += [f"--cpus-per-task={config.cpus_per_task}"] if config.cpus_per_task else []
    command = shlex.join([*srun, sys.executable, "-m", "draftsmith", *config.command])
    body = [
        "# Written by draftsmith launch slurm. One start of the job; it may be requeued and then runs this again.",
        'echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), nodes $SLURM_JOB_NODELIST, $(date)"',
        "",
        "# The processes meet on the first node, at a port that other jobs do not use.",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"',
        'export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"',
        "# Otherwise every process of a node would use all of its cores.",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
        "",
    ]
    if makes_data and config.signal_before:
        body += [
            "# Shards are complete or absent, so a data stage can be stopped at any time and resumes.",
            """trap 'echo "time limit: requeued"; scontrol requeue "$SLURM_JOB_ID"; exit' USR1""",
            f"{command} &",
            "wait $!",
        ]
    else:
        body += ["# Before the time limit a training saves, and its first process requeues the job."] if trains else []
        body += [command]
    body += ["code=$?"]

    if config.max_restarts:
        failures = f"{config.log_dir.absolute() / config.job_name}-$SLURM_JOB_ID.failures"
        body += [
            "if ((code != 0 && code != 2)); then  # 2 is bad input, which a restart does not fix",
            f'    echo "$code" >>"{failures}"',
            f'    num_failures=$(wc -l <"{failures}")',
            f'    echo "failure $num_failures with code $code; it may be restarted {config.max_restarts} time(s)"',
            f'    ((num_failures > {config.max_restarts})) || scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {word}" for word in header), *body, "exit $code", ""])


def slurm(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def follow(job: str, log: Path) -> int:
    """Print what the job writes, through all its requeues, until it has ended; return 0 if it completed, else 1."""
    printed_state, num_printed, ended = "", 0, False
    while not ended:
        state, reason = job_state(job)
        if state != printed_state:
            waits = f" ({reason})" if state == "PENDING" and reason not in {"", "None"} else ""
            print(f"job {job}: {state.lower()}{waits}", flush=True)
            printed_state = state
        ended = state in FINAL_STATES

        # The log exists once the job has started. Whole lines only, unless the job has ended.
        with suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(num_printed)
            new = file.read()
            new = new if ended else new[: new.rfind(b"\n") + 1]
            print(new.decode("utf-8", errors="replace"), end="", flush=True)
            num_printed += len(new)
        if not ended:
            time.sleep(POLL_S)
    if state != "COMPLETED":
        print(f"job {job} ended as {state.lower()}. Its output: {log}", flush=True)
    return 0 if state == "COMPLETED" else 1


def job_state(job: str) -> tuple[str, str]:
    """Return SLURM's name of the job's state and the reason why it waits; UNKNOWN if SLURM has purged the job.

    A controller that does not answer is asked again until it does.
    """
    while True:
        result = slurm(["scontrol", "--oneliner", "show", "job", job])
        state, reason = (re.search(rf"\b{name}=(\S+)", result.stdout) for name in ("JobState", "Reason"))
        if state is not None:
            return state[1], reason[1] if reason is not None else ""
        if "Invalid job id" in result.stderr:
            return "UNKNOWN", ""
        time.sleep(POLL_S)
