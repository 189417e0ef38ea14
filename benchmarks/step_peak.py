"""Peak memory of one call, in a process of its own where the steps before it would be measured with it."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.benchmarks.step_variants import Bare, Padded, PlainLoop, Shape, Work, padded_loss, train_ours
from draftsmith.modules.drafters.eagle.head import eagle_loss
from draftsmith.train.planning.estimate import own_memory

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# A step more shows what the optimizer's averages add, which are made in the first.
STEPS = 3


def peak_above(call: Callable[[], object]) -> int:
    """Bytes that the process held at most during the call, above what it held before.

    What was freed goes back to the system first. The C library keeps freed blocks below any that is still used, and of
    those the call would be given pages that are counted already.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = own_memory()
    try:
        RESET.write_text("5")  # the kernel's high-water mark begins anew
        call()
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 - before
    except OSError:  # not permitted: the mark is that of the whole process
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def in_new_process(what: str, shape: Shape) -> int:
    """`peak_of` in a new process, so that it begins with nothing."""
    words = [sys.executable, __file__, what, json.dumps(dataclasses.asdict(shape))]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def peak_of(what: str, shape: Shape) -> int:
    """Bytes above what is there before: of a few steps of a variant (ours, bare, padded), models and documents aside;
    or of the loss alone over `shape.tokens` tokens, which all count, and its gradient (loss, naive loss)."""
    torch.set_num_threads(1)
    return peak_above(_loss(what, shape) if what.endswith("loss") else _steps(what, shape))


def _steps(what: str, shape: Shape) -> Callable[[], object]:
    work = Work(shape)
    folder = tempfile.TemporaryDirectory(prefix="draftsmith-peak-")
    settings = work.settings(Path(folder.name), STEPS)
    if what == "ours":

        def ours() -> None:
            with folder:
                train_ours(work, settings)

        return ours
    kinds: dict[str, type[PlainLoop]] = {"bare": Bare, "padded": Padded}
    loop = kinds[what](work, settings)

    def steps() -> None:
        for _ in range(STEPS):
            loop.step()

    return steps


def _loss(what: str, shape: Shape) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(shape.seed)

    def random(*size: int) -> Tensor:
        return torch.empty(size).uniform_(-1, 1, generator=generator)

    weight = random(shape.vocab, shape.hidden)
    hidden, wanted = (random(1, shape.tokens, shape.hidden) for _ in range(2))
    hidden.requires_grad_()
    mask = torch.ones(1, shape.tokens, dtype=torch.bool)

    def lm_head(states: Tensor) -> Tensor:
        return states @ weight.T

    def chunked() -> None:
        eagle_loss([hidden], wanted, [mask], lm_head).loss.backward()

    def naive() -> None:
        padded_loss(hidden, wanted, mask, lm_head, 1.0, 0.1).backward()

    return naive if what == "naive loss" else chunked


if __name__ == "__main__":
    print(peak_of(sys.argv[1], Shape(**json.loads(sys.argv[2]))))
