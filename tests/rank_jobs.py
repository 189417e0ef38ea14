"""Several trainings one after the other on the ranks of one launch: `python rank_jobs.py JOBS.json`.

Each job is {"head": "eagle" or "acceptance", "config": {...}}, with optional keys that the functions below explain. A
job that is refused leaves its message in output/error-RANK.txt. Starting processes is what costs time in these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
PATHS = ("data", "output", "val")


def run_on_ranks(jobs: Sequence[dict[str, Any]], ranks: int, work: Path, timeout_s: float = 600) -> list[str]:
    """Run the jobs on so many processes, which a launcher of its own starts; returns what each rank printed."""
    work.mkdir(parents=True, exist_ok=True)
    listed = work / "jobs.json"
    listed.write_text(json.dumps(list(jobs), default=str))
    processes = [start(rank, ranks, work, [str(HERE), str(listed)]) for rank in range(ranks)]
    said = [process.communicate(timeout=timeout_s)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return said


def start(rank: int, ranks: int, work: Path, arguments: Sequence[str], **more: str) -> subprocess.Popen:
    """One rank, as a launcher starts it: it is told its place through the environment."""
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    environment = {**os.environ, **{name: str(value) for name, value in names.items()}, "OMP_NUM_THREADS": "1", **more}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(work))}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port(work: Path) -> int:
    """The same for all ranks of a launch."""
    import socket

    chosen = work / "port"
    if not chosen.exists():
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            chosen.write_text(str(found.getsockname()[1]))
    return int(chosen.read_text())


def run_job(job: dict[str, Any]) -> None:
    from draftsmith.modules.types import InputError
    from draftsmith.train import acceptance, deepspeed, eagle

    deepspeed.KEPT_WHOLE = job.get("kept_whole", 0)  # stage 3 partitions even the smallest tensors
    module, name = (eagle, "TrainEagleConfig") if job["head"] == "eagle" else (acceptance, "TrainAcceptanceConfig")
    settings = {key: Path(value) if key in PATHS else value for key, value in job["config"].items()}
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    try:
        module.run(getattr(module, name)(**settings))
    except (InputError, SystemExit) as error:
        (settings["output"] / f"error-{os.environ.get('RANK', 0)}.txt").write_text(str(error))


def main(listed: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for job in json.loads(listed.read_text()):
        run_job(job)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's stage 3 sometimes aborts while Python shuts down
