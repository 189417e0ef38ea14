"""Run the mutants: each in a copy of the tree, with the tests that are to notice it.

    python tests/mutants/run.py [--only NAME ...] [--jobs N] [--timeout SECONDS]

The checkout itself is never changed. First all tests that are named have to pass on the copy as it is. Exits 1 where a
mutant survives without a reason, dies in spite of one, or runs out of time.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.mutant import Mutant  # noqa: E402
from mutants.table import MUTANTS  # noqa: E402

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
    return tree


def pytest(tree: Path, tests: Iterable[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """The tests, in the tree, up to the first that fails."""
    # No bytecode: a file that is put back within a second would be taken for the mutant's.
    env = {**os.environ, "PYTHONPATH": str(tree.parent), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=timeout)


def check_tree(tree: Path, tests: Sequence[str], timeout: float) -> None:
    """Exits where the tests do not pass, or import another package than the tree's."""
    env = {**os.environ, "PYTHONPATH": str(tree.parent)}
    code = "import draftsmith; print(draftsmith.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd="/", env=env, capture_output=True, text=True, check=True)
    if Path(found.stdout.strip()).parent != tree:
        sys.exit(f"the tests would import {found.stdout.strip()}, not the copy in {tree}")
    done = pytest(tree, tests, timeout)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\nthe tests do not pass without any mutant")


def try_mutant(mutant: Mutant, tree: Path, timeout: float) -> Result:
    """Change the tree, run the tests, put the file back."""
    path, started = tree / mutant.file, time.monotonic()
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return Result(mutant, BROKEN, 0.0, f"its text is there {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        done = pytest(tree, mutant.tests, timeout)
        # 1: tests failed; 2: they could not be collected, as the mutant cannot be imported.
        verdict = {0: SURVIVED, 1: KILLED, 2: KILLED}.get(done.returncode, BROKEN)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        said = failed[0].split(" - ")[0] if failed else done.stdout.strip().splitlines()[-1]
    except subprocess.TimeoutExpired:
        verdict, said = TIMEOUT, f"{timeout:.0f} s"
    finally:
        path.write_text(text)
    return Result(mutant, verdict, time.monotonic() - started, said)


def run(mutants: Sequence[Mutant], jobs: int, timeout: float) -> list[Result]:
    """All of them, `jobs` at a time, each job in a tree of its own; a line for each as it is done."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        trees: queue.Queue[Path] = queue.Queue()
        made = [copy_tree(Path(directory) / str(number)) for number in range(jobs)]
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        print(f"{len(mutants)} mutants; {len(tests)} test files have to pass without any ...", flush=True)
        check_tree(made[0], tests, timeout * len(tests))
        for tree in made:
            trees.put(tree)

        def one(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                result = try_mutant(mutant, tree, timeout)
            finally:
                trees.put(tree)
            print(f"{result.verdict:8} {result.seconds:5.0f} s  {mutant.name}  {result.said}", flush=True)
            return result

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutants))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one mutant")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.only or any(part in m.name for part in args.only)]
    if not chosen:
        parser.error(f"no mutant's name contains {' or '.join(args.only)}")
    results = run(chosen, args.jobs, args.timeout)
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
