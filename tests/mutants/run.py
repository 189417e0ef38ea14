"""Run the mutants: each in a copy of the tree, with the tests that are to notice it.

    python tests/mutants/run.py [--only NAME ...] [--jobs N] [--timeout SECONDS] [--unchecked]

The checkout itself is never changed. First all tests that are named have to pass on a copy as it is. Exits 1 where a
mutant survives without a reason, dies in spite of one, or runs out of time.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import multiprocessing
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess as Process
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is there

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.mutant import Mutant  # noqa: E402
from mutants.table import MUTANTS  # noqa: E402

# What takes a test's process longest to import is imported once, before the processes part: nothing of the package.
PRELOADED = ("torch", "pytest", "hypothesis", "pyarrow.parquet", "lightning", "transformers.models.auto.modeling_auto",
             "transformers.models.llama.modeling_llama", "transformers.generation.utils", "rich.table")  # fmt: skip
# No asserts are rewritten, and no plugins loaded that no test needs: that takes longer than most of the tests.
OPTIONS = ("-x", "-q", "--no-header", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio")
fork = multiprocessing.get_context("fork")
KILLED, SURVIVED, TIMEOUT, BROKEN = "killed", "SURVIVED", "TIMEOUT", "BROKEN"


@dataclass(frozen=True)
class Result:
    """What became of a mutant, in how long, and the first test that failed or what else was said."""

    mutant: Mutant
    verdict: str
    seconds: float
    said: str

    @property
    def fine(self) -> bool:
        """As the list says."""
        return self.verdict == (SURVIVED if self.mutant.reason else KILLED)


def copy_tree(to: Path) -> Path:
    """The files of the checkout that git knows or would take, as a package of their own; its path."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    tree = to / "draftsmith"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    # By their contents: by its time, a file that is put back within a second would be taken for the mutant's.
    compileall.compile_dir(tree, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return tree


def start(tree: Path, tests: Sequence[str]) -> tuple[Process, Path]:
    """The tests, in the tree, up to the first that fails: a process, and the file that its output goes to."""
    log = tree.parent / "log"
    process = fork.Process(target=_run_tests, args=(tree, tests, log))
    process.start()
    return process, log


def _run_tests(tree: Path, tests: Sequence[str], log: Path) -> None:
    os.setpgid(0, 0)  # a test's own processes end with it
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path[:] = [
        str(tree.parent),
        str(tree / "tests"),
        *(place for place in sys.path if place != str(ROOT / "tests")),
    ]
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutants"]:
        del sys.modules[name]  # the copy's own
    os.environ.update(PYTHONPATH=str(tree.parent), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    import pytest

    import draftsmith

    if Path(draftsmith.__file__).parent != tree:
        sys.exit(f"the tests would import {draftsmith.__file__}, not the copy in {tree}")
    code = int(pytest.main([*OPTIONS, *tests]))
    sys.stdout.flush()
    os._exit(code)


def end(process: Process) -> None:
    """With whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def check_tree(tree: Path, tests: Sequence[str]) -> None:
    """Exits where the tests do not pass without any mutant."""
    process, log = start(tree, tests)
    process.join()
    if process.exitcode:
        sys.exit(f"{log.read_text()[-4000:]}\nthe tests do not pass without any mutant")


class Trial:
    """A mutant in a tree, and its tests on their way."""

    def __init__(self, mutant: Mutant, tree: Path, timeout: float):
        self.mutant, self.tree, self._timeout, self._started = mutant, tree, timeout, time.monotonic()
        self._path = tree / mutant.file
        self._text = self._path.read_text()
        self._count = self._text.count(mutant.old)
        self._path.write_text(self._text.replace(mutant.old, mutant.new))
        self._process, self._log = start(tree, mutant.tests)

    def result(self) -> Result | None:
        """None while they run; after them the tree is as it was."""
        taken = time.monotonic() - self._started
        if self._process.is_alive() and taken < self._timeout:
            return None
        late = self._process.is_alive()
        end(self._process)
        self._path.write_text(self._text)
        lines = self._log.read_text().strip().splitlines()
        said = next((line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
        if late:
            return Result(self.mutant, TIMEOUT, taken, f"{self._timeout:.0f} s")
        if self._count != 1:
            return Result(self.mutant, BROKEN, taken, f"its text is there {self._count} times")
        # 1: tests failed; 2: they could not be collected, as the mutant cannot be imported.
        verdict = {0: SURVIVED, 1: KILLED, 2: KILLED}.get(self._process.exitcode or 0, BROKEN)
        return Result(self.mutant, verdict, taken, said)


def run(mutants: Sequence[Mutant], jobs: int, timeout: float, unchecked: bool) -> list[Result]:
    """All of them, `jobs` at a time, each job in a tree of its own; a line for each as it is done."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        free = [copy_tree(Path(directory) / str(number)) for number in range(jobs)]
        for module in PRELOADED:
            importlib.import_module(module)
        if not unchecked:
            tests = sorted({test for mutant in mutants for test in mutant.tests})
            print(f"{len(tests)} test files without any mutant ...", flush=True)
            check_tree(free[0], tests)
        waiting, running, results = list(mutants), list[Trial](), list[Result]()
        while waiting or running:
            while waiting and free:
                running.append(Trial(waiting.pop(0), free.pop(), timeout))
            time.sleep(0.1)
            for trial in list(running):
                if (result := trial.result()) is not None:
                    running.remove(trial)
                    free.append(trial.tree)
                    results.append(result)
                    print(
                        f"{result.verdict:8} {result.seconds:5.0f} s  {result.mutant.name}  {result.said}", flush=True
                    )
        return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one mutant")
    parser.add_argument("--unchecked", action="store_true", help="take it that the tests pass without any mutant")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.only or any(part in m.name for part in args.only)]
    if not chosen:
        parser.error(f"no mutant's name contains {' or '.join(args.only)}")
    results = run(chosen, args.jobs, args.timeout, args.unchecked)
    counts = Counter(result.verdict for result in results)
    print(f"\n{len(results)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    for result in results:
        if result.mutant.reason:
            print(f"known to survive: {result.mutant.name}: {result.mutant.reason}")
    wrong = [result for result in results if not result.fine]
    for result in wrong:
        print(f"NOT as the list says: {result.verdict} {result.mutant.name} ({result.said})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
