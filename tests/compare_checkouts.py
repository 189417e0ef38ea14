"""Compare the speed of two checkouts: they decode in turn, in processes that run side by side.

    python tests/compare_checkouts.py OLD NEW [REPEATS]

OLD and NEW are checkouts named `draftsmith` (git worktree add /tmp/old/draftsmith COMMIT). Each answers the same
embedded prompts on one thread, by turns, and reports its own CPU time. Prints the medians of the pairs' ratios, new by
old, and their quartiles.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = [f"{method}, {mode}{rows}" for method in ("ar", "spec:k=5", "eagle3:k=5") for rows in ("", ", 4 rows")
         for mode in ("greedy", "T=1")]  # fmt: skip
PROMPTS, NEW_TOKENS = 4, 32


def serve() -> None:
    """The child: a line with a case's number in, its CPU seconds out."""
    import torch

    from draftsmith.eval.bench.prompts import read_prompts
    from draftsmith.eval.bench.runner import EngineRunner
    from draftsmith.modules.drafters import head_class
    from draftsmith.modules.drafters.method import Models
    from draftsmith.modules.drafters.methods import parse_method
    from draftsmith.modules.pretrained.models import load_lm
    from draftsmith.modules.types import SamplingParams

    torch.set_num_threads(1)
    torch.manual_seed(0)
    target, draft = (load_lm(f"embedded:{name}", packed=True) for name in ("target", "draft"))
    made: Any = head_class("eagle3")  # untrained: what it drafts costs the same
    new_config = getattr(made, "new_config", None) or made.shape  # the old name
    head = made(new_config(made.Settings(), target.config)).requires_grad_(False)
    models = Models(target, draft, heads={"eagle3": head}, capacity=1024)
    prompts = [row.prompt_ids for row in read_prompts("embedded:prompts", "embedded:target", "dev", None, PROMPTS)]
    sessions = {
        method: target.session(PROMPTS, 1024, head.aux_layers if method == "eagle3:k=5" else ())
        for method in ("ar", "spec:k=5", "eagle3:k=5")
    }

    def work(case: str) -> None:
        method, mode, *rows = case.split(", ")
        params = SamplingParams(0.0 if mode == "greedy" else 1.0)
        if rows:
            drafter = parse_method(method).build(models, PROMPTS)
            EngineRunner(target, drafter, params, (), session=sessions[method])(prompts, NEW_TOKENS, range(PROMPTS))
            return
        EngineRunner(target, parse_method(method).build(models), params, ())([prompts[0]], NEW_TOKENS, [0])

    for line in sys.stdin:
        started = time.process_time()
        work(CASES[int(line)])
        print(json.dumps(time.process_time() - started), flush=True)


def main(old: str, new: str, repeats: int = 100) -> None:
    children = []
    for checkout in (old, new):
        path = Path(checkout).absolute()
        environment = {**os.environ, "PYTHONPATH": str(path.parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "serve"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": path.parent}
        children.append(subprocess.Popen(command, env=environment, **pipes))

    def ask(child: subprocess.Popen, case: int) -> float:
        assert child.stdin is not None and child.stdout is not None
        print(case, file=child.stdin, flush=True)
        return json.loads(child.stdout.readline())

    for number, case in enumerate(CASES):
        pairs = []
        for repeat in range(repeats + 1):
            order = children if repeat % 2 else children[::-1]
            times = {id(child): ask(child, number) for child in order}
            pairs.append([times[id(child)] for child in children])
        ratios = [after / before for before, after in pairs[1:]]  # the first one warms up
        low, middle, high = statistics.quantiles(ratios, n=4)
        seconds = statistics.median(before for before, _ in pairs[1:])
        print(f"{case:26s} {seconds:7.3f} s   ratio {middle:.4f}   quartiles {low:.4f} {high:.4f}", flush=True)
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main(*sys.argv[1:3], *map(int, sys.argv[3:]))
