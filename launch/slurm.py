"""`draftsmith launch slurm`: a job script, handed to sbatch, and the job's output while it runs.

sbatch itself and not submitit, which pickles the function that it runs; here nothing is pickled, and the script can be
read, kept and submitted by hand. No value of a user reaches a shell or an #SBATCH line unseen: the command's words
are quoted, and everything else has to match a pattern.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from draftsmith.launch.inner import Launched, check_command, with_resume
from draftsmith.modules.types import InputError

POLL_S = 2.0
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "REVOKED",
    "TIMEOUT",
}
NAME, PATH = r"[\w.+:,@-]+", r"[\w@+=:,./-]+"
# A word of an #SBATCH line: what sbatch would take for quotes, escapes or a comment is left out.
OPTION = r"--?[A-Za-z][\w-]*(=[!$-&(-\[\]-~]+)?"


@dataclass(frozen=True)
class SlurmConfig(Launched):
    """Submits a command as a SLURM job and follows its output: draftsmith launch slurm --nodes 2 -- train ...

    Before the time limit a training saves and the job is put back into the queue, where it goes on; so do data stages.
    An interrupted job of yours goes on with `scontrol requeue JOB`.

    Attributes:
        nodes: Machines.
        gpus_per_node: GPUs on each; 0 asks for none.
        tasks_per_node: Processes on each; 0 is one per GPU, and one without GPUs.
        time: Time limit of one start, as 24:00:00 or 2-12; without it the partition's.
        partition: Where to run; without it the cluster's default.
        account: What to charge.
        job_name: Of the job, its script and its log.
        cpus_per_task: CPU cores of each process; 0 leaves it to the cluster.
        mem: Memory of each node, as 64G; without it the cluster's default.
        signal_before: Seconds before the time limit at which a run saves and is requeued; 0 never does. SLURM may be
            up to a minute early.
        max_restarts: How often the job is requeued by itself after a process has failed.
        sbatch_args: Further options of sbatch, each as --sbatch-args=--name=value; those with commas as a JSON list.
        log_dir: Directory of the script and the log, seen by all nodes.
        dry_run: Print the script and stop.
        follow: Show the job's output until it ends; Ctrl-C stops that and not the job.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    tasks_per_node: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    job_name: str = "draftsmith"
    cpus_per_task: int = 0
    mem: str | None = None
    signal_before: int = 120
    max_restarts: int = 0
    sbatch_args: tuple[str, ...] = ()
    log_dir: Path = Path("runs/slurm")
    dry_run: bool = False
    follow: bool = True

    def __post_init__(self) -> None:
        self.check_at_least(
            nodes=1, gpus_per_node=0, tasks_per_node=0, cpus_per_task=0, signal_before=0, max_restarts=0
        )
        for name, pattern in {"partition": NAME, "account": NAME, "job_name": NAME, "mem": r"\d+[KMGT]?"}.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(pattern, value, re.ASCII):
                raise InputError(name, repr(value), f"text of the form {pattern}", "Change it.")
        if not re.fullmatch(PATH, str(self.log_dir.absolute()), re.ASCII):
            found = repr(str(self.log_dir.absolute()))
            raise InputError("log_dir", found, "a path of letters, digits and @+=:,./-", "Choose another.")
        for word in self.sbatch_args:
            if not re.fullmatch(OPTION, word, re.ASCII):
                raise InputError("sbatch_args", repr(word), "--name or --name=value, without blanks", "Correct it.")
        if self.time is not None and time_limit_seconds(self.time) <= self.signal_before + 60:
            found, expected = f"{self.time}", f"more than signal_before = {self.signal_before} seconds and a minute"
            raise InputError("time", found, expected, "Raise it, or lower --signal-before.")

    @property
    def tasks(self) -> int:
        """Processes on each node."""
        return self.tasks_per_node or max(1, self.gpus_per_node)


def run(config: SlurmConfig) -> int:
    """Write the script, submit it and follow the job: 0 when it completes or is left alone, 1 when it fails, 130 when
    following was interrupted.

    Raises:
        UsageError, InputError: the command would not start, or SLURM does not take the job.
    """
    if not check_command("launch slurm", config.command, config.nodes * config.tasks):
        return 0
    script = job_script(config)
    if config.dry_run:
        print(script, end="")
        return 0
    if shutil.which("sbatch") is None:
        remedy = "Call it where SLURM is, or see the script with --dry-run."
        raise InputError("sbatch", "no such program", "SLURM's commands", remedy)
    path = write_script(config, script)
    job = submit(path)
    log = config.log_dir.absolute() / f"{config.job_name}-{job}.log"
    print(f"job {job}: script {path}, output {log}", flush=True)
    if not config.follow:
        return 0
    try:
        return follow(job, log)
    except KeyboardInterrupt:
        print(f"\njob {job} goes on. Follow it: tail -F {log}   Cancel it: scancel {job}")
        return 130


def time_limit_seconds(time_limit: str) -> int:
    """A time limit in SLURM's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.

    Raises:
        InputError: none of them.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit, re.ASCII)
    if match is None:
        raise InputError("time", repr(time_limit), "something like 24:00:00, 90 (minutes) or 2-12", "Correct it.")
    days, *given = match.groups()
    parts = [int(part) for part in given if part is not None]
    if days is None and len(parts) < 3:
        parts.insert(0, 0)  # minutes come first
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def job_script(config: SlurmConfig) -> str:
    """The whole script: what is asked of SLURM, where the processes meet, and the command."""
    trains, makes_data = config.command[0] == "train", config.command[0] == "data"
    header = directives(config, goes_on=trains or makes_data, to_script=makes_data)
    srun = ["srun", "--kill-on-bad-exit=1"]
    srun += [f"--cpus-per-task={config.cpus_per_task}"] if config.cpus_per_task else []
    words = shlex.join([*srun, sys.executable, "-m", "draftsmith", *with_resume(config.command)])
    body = [
        "# Written by draftsmith launch slurm. One start of the job; it may be requeued and then runs this again.",
        'echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), nodes $SLURM_JOB_NODELIST, $(date)"',
        "",
        "# The processes meet on the first node, at a port that other jobs do not use.",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"',
        'export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"',
        "# Else every process of a node would take all of its cores.",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
        "",
    ]
    if makes_data and config.signal_before:
        body += [
            "# Shards are whole or not there, so a data stage is stopped anywhere and goes on.",
            """trap 'echo "time limit: requeued"; scontrol requeue "$SLURM_JOB_ID"; exit' USR1""",
            f"{words} &",
            "wait $!",
        ]
    else:
        body += ["# Before the time limit a training saves, and its first process requeues the job."] if trains else []
        body += [words]
    body += ["code=$?", *restarts(config), "exit $code", ""]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {word}" for word in header), *body])


def directives(config: SlurmConfig, goes_on: bool, to_script: bool) -> list[str]:
    """Options of sbatch. goes_on: the command can be stopped and started again. to_script: the warning before the
    time limit goes to the script instead of the processes."""
    words = [f"--job-name={config.job_name}", f"--nodes={config.nodes}", f"--ntasks-per-node={config.tasks}"]
    optional = {"gpus-per-node": config.gpus_per_node, "cpus-per-task": config.cpus_per_task, "mem": config.mem}
    optional |= {"time": config.time, "partition": config.partition, "account": config.account}
    words += [f"--{name}={value}" for name, value in optional.items() if value]
    words += [f"--output={config.log_dir.absolute() / config.job_name}-%j.log", "--open-mode=append"]
    words += ["--requeue"] if goes_on else ["--no-requeue"]
    if goes_on and config.signal_before:
        words.append(f"--signal={'B:' if to_script else ''}USR1@{config.signal_before}")
    return [*words, *config.sbatch_args]


def restarts(config: SlurmConfig) -> list[str]:
    """Lines that requeue a failed job; 2 is bad input, which no restart mends."""
    if not config.max_restarts:
        return []
    failures = f"{config.log_dir.absolute() / config.job_name}-$SLURM_JOB_ID.failures"
    return [
        "if ((code != 0 && code != 2)); then",
        f'    echo "$code" >>"{failures}"',
        f'    num_failures=$(wc -l <"{failures}")',
        f'    echo "failure $num_failures with code $code; it may be started again {config.max_restarts} time(s)"',
        f'    ((num_failures > {config.max_restarts})) || scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]


def write_script(config: SlurmConfig, script: str) -> Path:
    """Write the script to log_dir, under the job's name and the time."""
    from draftsmith.data.store.files import make_directory, write_text

    make_directory(config.log_dir)
    path = config.log_dir.absolute() / f"{config.job_name}-{datetime.now():%Y%m%d-%H%M%S-%f}.sh"
    write_text(path, script)
    return path


def submit(script: Path) -> str:
    """The job's number.

    Raises:
        InputError: sbatch refuses it.
    """
    result = slurm(["sbatch", "--parsable", str(script)])
    if result.returncode:
        found = (result.stderr or result.stdout).strip() or f"code {result.returncode}"
        raise InputError("sbatch", repr(found), "a job that the cluster takes", f"Change the settings ({script}).")
    return result.stdout.strip().split(";")[0]  # a federation adds the cluster's name


def slurm(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def follow(job: str, log: Path) -> int:
    """Print what the job writes, through all its requeues, until it has ended: 0 when it completed, else 1."""
    shown, printed = "", 0
    while True:
        state, reason = job_state(job)
        if state != shown:
            waits = f" ({reason})" if state == "PENDING" and reason not in {"", "None"} else ""
            print(f"job {job}: {state.lower()}{waits}", flush=True)
            shown = state
        ended = state in ENDED or state == "UNKNOWN"
        printed = print_new(log, printed, ended)
        if ended:
            if state != "COMPLETED":
                print(f"job {job} ended as {state.lower()}. Its output: {log}", flush=True)
            return 0 if state == "COMPLETED" else 1
        time.sleep(POLL_S)


def job_state(job: str) -> tuple[str, str]:
    """SLURM's name of the job's state, and why it waits; UNKNOWN when SLURM has forgotten the job.

    A controller that does not answer is asked again until it does.
    """
    while True:
        result = slurm(["scontrol", "--oneliner", "show", "job", job])
        found = {name: re.search(rf"\b{name}=(\S+)", result.stdout) for name in ("JobState", "Reason")}
        state, reason = found["JobState"], found["Reason"]
        if state is not None:
            return state[1], reason[1] if reason is not None else ""
        if "Invalid job id" in result.stderr:
            return "UNKNOWN", ""
        time.sleep(POLL_S)


def print_new(log: Path, printed: int, ended: bool) -> int:
    """Print what lies beyond the first `printed` bytes, whole lines only unless the job has ended; returns how many
    bytes are printed now."""
    try:
        with log.open("rb") as file:
            file.seek(printed)
            new = file.read()
    except FileNotFoundError:  # not started yet
        return printed
    if not ended:
        new = new[: new.rfind(b"\n") + 1]
    sys.stdout.write(new.decode("utf-8", errors="replace"))
    sys.stdout.flush()
    return printed + len(new)
