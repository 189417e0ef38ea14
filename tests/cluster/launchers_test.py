"""Real launches: SLURM jobs on two nodes, submitted as a user would, stopped, killed, requeued and continued; and the
other launchers on this machine.

Run by `make test-cluster`, not by `make test`: it needs SLURM (install.sh).
"""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cluster.daemons import cluster
from safetensors.torch import load_file
from trainings import NUM_PROMPTS, answered_prompts

NUM_SHARDS = 8
STEPS, LOG_EVERY, SAVE_EVERY = 400, 10, 7
# Far below the half hour after which ranks give up waiting for a dead one.
PATIENCE_S = 90.0
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "0", "--tasks-per-node", "1")


def draftsmith(*words: object) -> list[str]:
    return [sys.executable, "-m", "draftsmith", *map(str, words)]


def labels(inputs: dict[str, Path], output: Path) -> list[str]:
    settings = {"data": inputs["responses"], "target": inputs["target"], "head": inputs["draft"]}
    settings |= {"output": output, "rows_per_shard": NUM_PROMPTS // NUM_SHARDS, "num_threads": 1}
    return ["data", "acceptance", *(str(word) for name, value in settings.items() for word in (f"--{name}", value))]


def training(inputs: dict[str, Path], data: Path, output: Path) -> list[str]:
    settings = {"data": data, "head": inputs["draft"], "output": output, "max_steps": STEPS, "batch_size": 8}
    # A learning rate at which two runs that add up in another order stay together for all steps.
    settings |= {"lr": 2e-4, "val_share": 0.25, "val_every": 100, "log_every": LOG_EVERY, "save_every": SAVE_EVERY}
    settings |= {"loggers": "csv", "num_threads": 1, "device": "cpu"}
    return ["train", "acceptance", *(str(word) for name, value in settings.items() for word in (f"--{name}", value))]


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands find two idle nodes, whose names resolve to nothing."""
    with cluster() as environment:
        one_thread = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1"}
        yield {**environment, **one_thread, "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return answered_prompts(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def artifact(slurm, inputs, tmp_path_factory) -> tuple[Path, str]:
    """Labels made by a job of two nodes, and what `draftsmith launch slurm` printed."""
    root = tmp_path_factory.mktemp("stage")
    words = ["launch", "slurm", *TWO_NODES, "--log-dir", root / "logs", "--", *labels(inputs, root / "labels")]
    result = subprocess.run(draftsmith(*words), env=slurm, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return root / "labels", result.stdout


def test_tasks_know_their_places(slurm):
    """Three tasks on two nodes, so not as many on each."""
    code = "import os; from draftsmith.data.ranks import place; "
    code += "print(os.environ['SLURMD_NODENAME'], place())"
    words = ["srun", "--nodes=2", "--ntasks=3", "--overcommit", sys.executable, "-c", code]
    result = subprocess.run(words, env=slurm, check=True, timeout=PATIENCE_S, capture_output=True, text=True)
    form = r"(n\d) ProcessPlace\(rank=(\d), world=3, local_rank=(\d), local_world=(\d), launched=True"
    shown = [(node, *map(int, numbers)) for node, *numbers in re.findall(form, result.stdout)]
    assert sorted(rank for _, rank, _, _ in shown) == [0, 1, 2]
    for node in ("n1", "n2"):
        here = [(local_rank, local_world) for name, _, local_rank, local_world in shown if name == node]
        assert sorted(here) == [(i, len(here)) for i in range(len(here))] != []


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory) -> Path:
    """The same labels by one process."""
    output = tmp_path_factory.mktemp("alone") / "labels"
    subprocess.run(draftsmith(*labels(inputs, output)), check=True, capture_output=True, timeout=PATIENCE_S)
    return output


def assert_shared_by_two(directory: Path, said: str, alone: Path) -> None:
    assert f"{NUM_PROMPTS // 2} of {NUM_PROMPTS} rows here, the others by 1 more" in said  # the first rank's half
    shards = sorted(path.name for path in directory.glob("*.parquet"))
    assert len(shards) == NUM_SHARDS
    assert all((directory / name).read_bytes() == (alone / name).read_bytes() for name in shards)


def test_a_data_stage_is_shared_by_two_nodes(artifact, alone):
    directory, said = artifact
    assert "completed" in said and "nodes n[1-2]" in said
    assert_shared_by_two(directory, said, alone)


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_data_stage_is_shared_by_two_processes_here(launcher, inputs, alone, tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    stage = labels(inputs, tmp_path / "labels")
    words = draftsmith("launch", "torchrun", "--nproc-per-node", "2", "--", *stage)
    if launcher == "deepspeed":  # its own launcher starts any module
        words = [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={tmp_path / 'hosts'}"]
        words += ["--no_local_rank", "--no_ssh_check", "--master_addr=127.0.0.1", "--module", "draftsmith"]
        words += map(str, stage)
    result = subprocess.run(words, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert result.returncode == 0, result.stderr
    assert_shared_by_two(tmp_path / "labels", result.stdout + result.stderr, alone)


@dataclass
class Job:
    """A job that `draftsmith launch slurm` follows."""

    follower: subprocess.Popen[str]
    output: Path
    said: Path
    environment: dict[str, str]

    def text(self) -> str:
        return self.said.read_text()

    @property
    def number(self) -> str:
        return self.text().split(":")[0].removeprefix("job ")

    def wait_for(self, what: Callable[[], object], wanted: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert self.follower.poll() is None, f"{self.text()}\n{self.controller_log()}"
            assert time.monotonic() < deadline, f"no {wanted} within {PATIENCE_S:.0f} s\n{self.text()}"
            time.sleep(0.05)

    def controller_log(self) -> str:
        """What the controller did last; its files are deleted with the cluster."""
        return "\n".join(Path(self.environment["SLURM_CONF"]).with_name("slurmctld.log").read_text().splitlines()[-60:])

    def wait_for_steps(self, more: int) -> None:
        """Until so many steps more than now are logged."""
        before = last_logged(self.output)
        self.wait_for(lambda: last_logged(self.output) >= before + more, f"{more} steps beyond {before}")

    def wait_for_text(self, pattern: str) -> None:
        self.wait_for(lambda: re.search(pattern, self.text()), pattern)

    def start_now(self) -> None:
        """SLURM makes a requeued job wait for two minutes; not here.

        Not at once either: a node revokes a job's credentials to the second, and one issued within that second is
        refused, which ends the job ("Killing non-startable batch JobId: Job credential revoked").
        """
        shown = lambda: self.slurm("scontrol", "--oneliner", "show", "job", self.number)  # noqa: E731
        self.wait_for(lambda: "JobState=PENDING" in shown(), "pending job")
        self.slurm("scontrol", "update", f"jobid={self.number}", "StartTime=now+3")

    def slurm(self, *words: str) -> str:
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, check=True).stdout


def last_logged(output: Path) -> int:
    try:
        with (output / "metrics.csv").open() as file:
            return max((int(row["step"]) for row in csv.DictReader(file)), default=0)
    except FileNotFoundError:
        return 0


@pytest.fixture
def job(slurm, artifact, inputs, tmp_path) -> Iterator[Job]:
    output, said = tmp_path / "run", tmp_path / "said"
    words = ["launch", "slurm", *TWO_NODES, "--max-restarts", "1", "--log-dir", tmp_path / "logs"]
    command = draftsmith(*words, "--", *training(inputs, artifact[0], output))
    with said.open("w") as file:
        follower = subprocess.Popen(command, env=slurm, stdout=file, stderr=subprocess.STDOUT, text=True)
    yield Job(follower, output, said, slurm)
    if follower.poll() is None:
        follower.kill()
        follower.wait()


def test_a_training_survives_the_time_limit_and_a_killed_rank(job, artifact, inputs, tmp_path):
    """Its losses and its head are those of one process that nothing has happened to."""
    alone = subprocess.Popen(
        draftsmith(*training(inputs, artifact[0], tmp_path / "alone")), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    job.wait_for_steps(LOG_EVERY)
    job.slurm("scancel", "--signal=USR1", job.number)  # what SLURM sends to the job's steps before the time limit
    job.wait_for_text(r"SIGUSR1: saved step \d+\.")
    job.wait_for_text(r"asking SLURM to requeue job \d+, which resumes from there")
    job.start_now()
    job.wait_for_text(r"resuming at step \d+ of")
    job.wait_for_steps(2 * LOG_EVERY)
    os.kill(pid_of_rank(1, job.output), signal.SIGKILL)
    job.wait_for_text(r"failure 1 with code 1(37|43)")  # of the killed rank, or of the one that srun ended then
    job.start_now()
    assert job.follower.wait(PATIENCE_S) == 0, job.text()
    said = job.text()
    assert [int(n) for n in re.findall(r"^job \d+, start (\d)", said, re.M)] == [1, 2, 3]
    saved, *went_on = (int(n) for n in re.findall(r"saved step (\d+)|resuming at step (\d+)", said) for n in n if n)
    assert went_on[0] == saved and saved < went_on[1] < STEPS
    assert "Killed" in said and "Timed out" not in said  # the dead rank is named, and nobody waited for it
    alone.communicate(timeout=PATIENCE_S)
    assert alone.returncode == 0
    assert_close(job.output, tmp_path / "alone")


def pid_of_rank(rank: int, output: Path) -> int:
    """The process that srun started with this SLURM_PROCID for the run that writes to `output`."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # not a process, or one that has ended
            continue
        trains = str(output).encode() in words and b"-m" in words and b"launch" not in words and b"srun" not in words
        if trains and f"SLURM_PROCID={rank}".encode() in environment and b"SLURM_STEP_ID=0" in environment:
            return int(entry.name)
    raise AssertionError(f"no rank {rank}")


def assert_close(ours: Path, theirs: Path) -> None:
    """Sums are formed in another order: 1e-7 of a gradient. At this learning rate that stays far below 1e-4."""
    rows = [list(csv.DictReader((output / "metrics.csv").open())) for output in (ours, theirs)]
    losses = [{row["step"]: float(row["train/loss"]) for row in run if row["train/loss"]} for run in rows]
    assert len(losses[0]) == STEPS // LOG_EVERY
    assert losses[0] == pytest.approx(losses[1], abs=1e-4, rel=0)
    heads = [load_file(output / "last" / "model.safetensors") for output in (ours, theirs)]
    assert all(torch.allclose(heads[0][name], heads[1][name], atol=1e-4, rtol=0) for name in heads[0])
