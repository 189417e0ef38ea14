"""Several trainings one after the other on the ranks of one launch: `python rank_jobs.py JOBS.json`.

A job is {"head": "eagle", "eagle3" or "acceptance", "config": {...}} and what it says besides:
    resumes: {"output", "step"}: goes on from what a run killed with -9 after that step has left.
    poison: {"row", "how"}: the sample of that dataset row gives a `loss` or a `gradient` that is not finite.
    signal: {"step", "rank"}: that rank is sent SIGTERM during that step, or with "validating" during its validation.
    full: {"from", "to"}: in steps from..to files cannot grow beyond a few hundred bytes.
facts-RANK.json in its output tells what the trainer's state was. A job that is refused or stopped leaves its message in
stopped-RANK.txt. All this in one launch, because it is starting processes that costs time.

`python rank_jobs.py dying RANK train ...` is `draftsmith train ...` with a rank that is killed.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve()
PATHS = ("data", "output", "val")
SMALL_FILE = 600  # bytes: less than any checkpoint, head or metrics file of these tests


def run_on_ranks(jobs: Sequence[dict[str, Any]], ranks: int, work: Path, timeout_s: float = 900) -> list[str]:
    """Run the jobs on so many processes, told their places as launchers do; returns what each rank printed."""
    work.mkdir(parents=True, exist_ok=True)
    listed = work / "jobs.json"
    listed.write_text(json.dumps(list(jobs), default=str))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(ranks):
        names = {**shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
        command = [sys.executable, str(HERE), str(listed)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [process.communicate(timeout=timeout_s)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return said


def run_job(job: dict[str, Any]) -> None:
    from draftsmith.modules.types import InputError
    from draftsmith.train import deepspeed
    from draftsmith.train.command import run
    from draftsmith.train.config import TrainAcceptanceConfig, drafter_config

    deepspeed.KEPT_WHOLE = 0  # stage 3 partitions even the smallest tensors
    config_class = TrainAcceptanceConfig if job["head"] == "acceptance" else drafter_config(job["head"])
    settings = {key: Path(value) if key in PATHS else value for key, value in job["config"].items()}
    settings |= {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
    rank, output = int(os.environ.get("RANK", 0)), settings["output"]
    if "resumes" in job:
        leave_as_killed(Path(job["resumes"]["output"]), job["resumes"]["step"], output, rank)
    with ExitStack() as stack:
        facts = stack.enter_context(watched())
        if "poison" in job:
            stack.enter_context(poisoned(**job["poison"]))
        if "signal" in job:
            signaled = job["signal"]
            send = partial(send_sigterm, rank, signaled["rank"])
            stack.enter_context(at_step(signaled["step"], send, signaled.get("validating", False)))
        if "full" in job:
            stack.enter_context(full_disk(job["full"]["from"], job["full"]["to"]))
        try:
            run(config_class(**settings))
        except (InputError, SystemExit) as error:
            limit_files(resource.RLIM_INFINITY)
            (output / f"stopped-{rank}.txt").write_text(str(error))
    (output / f"facts-{rank}.json").write_text(json.dumps(facts))


def leave_as_killed(source: Path, step: int, output: Path, rank: int) -> None:
    """What a kill -9 after the checkpoint of `step` leaves: that checkpoint, half of the next one, and more metrics."""
    ready = output / "ready"
    if rank == 0:
        name = f"step-{step:08d}"
        shutil.copytree(source / "checkpoints" / name, output / "checkpoints" / name)
        half = output / "checkpoints" / f"step-{step + 1:08d}.tmp"
        half.mkdir()
        (half / "state.pt").write_bytes((source / "checkpoints" / name / "state.pt").read_bytes()[:1000])
        for left in ("started.json", "metrics.csv"):
            shutil.copy(source / left, output)
        ready.touch()
    while not ready.exists():
        time.sleep(0.01)


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Collects what the trainer had: norms of the gradient, and what is partitioned."""
    from draftsmith.train.module import LitHead

    facts: dict[str, Any] = {"grad_norms": []}

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        facts["grad_norms"].append(self.grad_norm)
        reader = getattr(self, "reader", None)
        frozen = self.target if reader is None else getattr(reader, "drafts", reader).drafter.lm
        # Of a target whose states are stored only the embeddings are here.
        outer = [] if hasattr(frozen, "model") else [own for own in vars(frozen.weights).values() if own is not None]
        frozen_params = outer or list(frozen.model.parameters())
        facts["frozen_elements"] = sum(p.numel() for p in frozen_params)
        facts["frozen_partitioned"] = any(hasattr(p, "ds_id") for p in frozen_params)
        facts["head_partitioned"] = [p.numel() == 0 for p in self.head.parameters()]
        groups = self.trainer.optimizers[0].param_groups
        facts["optimized"] = sum(p.numel() for group in groups for p in group["params"])
        zero = getattr(self.trainer.optimizers[0], "optimizer", None)
        if zero is not None:
            facts["optimized"] = sum(flat.numel() for flat in zero.state)

    with mock.patch.object(LitHead, "on_train_batch_end", on_train_batch_end, create=True):
        yield facts


@contextmanager
def poisoned(row: int, how: str, most: int = 10) -> Iterator[None]:
    """Loss, or gradient under a finite loss, of any part that holds the row is not a number. most: such steps."""
    from draftsmith.train import metrics
    from draftsmith.train.acceptance import LitAcceptance
    from draftsmith.train.module import LitDrafter

    def read(self: Any, part: Any) -> Any:
        train = self.trainer.datamodule.train
        rows = [train.indices[key.index] for key in part.keys] if self.trainer.training else []
        true_loss = type(self).loss

        def loss(*args: Any, **kwargs: Any) -> Any:
            import dataclasses

            output = true_loss(self, *args, **kwargs)
            # The square root has the value 0 and an infinite slope at 0.
            bad = float("nan") if how == "loss" else (output.loss * 0).abs().sqrt()
            return dataclasses.replace(output, loss=output.loss + bad)

        # The loss of this part is computed next.
        self.loss = loss if row in rows else true_loss.__get__(self)
        return true_read[type(self)](self, part)

    true_read = {kind: kind.read for kind in (LitAcceptance, LitDrafter)}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(metrics, "MOST_BAD_STEPS", most))
        for kind in true_read:
            patches.enter_context(mock.patch.object(kind, "read", read))
        yield


@contextmanager
def at_step(step: int, action: Any, validating: bool = False) -> Iterator[None]:
    """Calls `action` during the step with that number, counted from 1, or during the validation after it."""
    from draftsmith.train.module import LitHead

    name = "on_validation_batch_start" if validating else "training_step"
    original = getattr(LitHead, name)

    def called(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step + (not validating) == step:
            action()
        return original(self, batch, batch_idx)

    with mock.patch.object(LitHead, name, called):
        yield


@contextmanager
def full_disk(first: int, last: int) -> Iterator[None]:
    """A limit that the operating system enforces stands for the disk's end: the same error from the same calls."""
    with (
        at_step(first, lambda: limit_files(SMALL_FILE)),
        at_step(last + 1, lambda: limit_files(resource.RLIM_INFINITY)),
    ):
        try:
            yield
        finally:
            limit_files(resource.RLIM_INFINITY)


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def send_sigterm(rank: int, to: int) -> None:
    if rank == to:
        os.kill(os.getpid(), signal.SIGTERM)


def main(listed: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for job in json.loads(listed.read_text()):
        run_job(job)


def dying(dies: str, words: Sequence[str]) -> int:
    """Run `draftsmith WORDS`; the rank with this local number is killed in the last part of its fourth step."""
    from draftsmith.launch.cli import main as draftsmith
    from draftsmith.train.module import LitHead

    read, parts = LitHead.train_step, [0]

    def train_step(self: Any, part: Any, span: Any = None) -> Any:
        parts[0] = parts[0] + 1 if self.trainer.global_step == 3 else 0
        if os.environ.get("LOCAL_RANK", "0") == dies and parts[0] == self.config.accumulate:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, part, span)

    with mock.patch.object(LitHead, "train_step", train_step):
        return draftsmith(words)


if __name__ == "__main__":
    if sys.argv[1] == "dying":
        sys.exit(dying(sys.argv[2], sys.argv[3:]))
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's stage 3 sometimes aborts while Python shuts down
