"""Runs stages that die, or that share their work: a helper process of interruption_test.py.

    python broken_runs.py JOBS.json TARGET

Each job is forked, so that torch is imported once: {"args": command line, "ranks": how many processes, "die": null or
[rank, file name, "before" or "after"]}. A process that is to die kills itself with SIGKILL when it is about to publish
that file, or just has: nothing is flushed, closed or cleaned up. Prints the wait status of every rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from draftsmith.data import acceptance, features, prompts, responses  # noqa: F401
from draftsmith.data.text import template
from draftsmith.launch.cli import main
from draftsmith.modules.pretrained import files
from draftsmith.modules.pretrained import models as models


def die_at(file_name: str, moment: str) -> None:
    """Replace `publish` by one that kills this process at that file."""
    publish = files.publish

    def deadly(temporary: Path, path: Path) -> None:
        if path.name != file_name:
            return publish(temporary, path)
        if path.name.startswith("shard-"):
            # Shards are written side by side: the one before has to be whole.
            number, ranks = int(path.name[6:11]), int(os.environ["WORLD_SIZE"])
            before = path.with_name(f"shard-{number - ranks:05d}.done.json")
            while number >= ranks and not before.exists():
                time.sleep(0.01)
        if moment == "after":
            publish(temporary, path)
        os.kill(os.getpid(), signal.SIGKILL)

    files.publish = deadly


def warm_up(target: str) -> None:
    """Let transformers import what it imports late, once and not in every child."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive the fork
    template.prompt_ids(template.load_chat_tokenizer(target), [{"role": "user", "content": "a"}])
    models.load_lm(target)


def start(job: dict, rank: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job["ranks"]), "LOCAL_RANK": str(rank)}
        if job["die"] and job["die"][0] == rank:
            die_at(*job["die"][1:])
        code = main(job["args"])
    finally:
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm_up(sys.argv[2])
    for job in json.loads(Path(sys.argv[1]).read_text()):
        children = [start(job, rank) for rank in range(job["ranks"])]
        if job["die"]:
            victim = children[job["die"][0]]
            print(os.waitpid(victim, 0)[1], flush=True)
            for child in set(children) - {victim}:  # the others wait for shards that will never come
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        else:
            print(*(os.waitpid(child, 0)[1] for child in children), flush=True)
