"""`python benchmarks/llamacpp.py`: the speed of one call of a GGUF target, ours against llama.cpp's, one thread.

llama.cpp measures itself with `llama-bench`, on a file in bf16 that `llama-quantize` makes of the target. Both take
turns, and a call finds an empty cache. Time is CPU time: of llama-bench, the difference between many calls and one.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from draftsmith.data.console import print_table, table_from_cells
from draftsmith.data.engines.llamacpp import server_binary
from draftsmith.data.engines.own import set_threads
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.clock import clock_of
from draftsmith.launch.cli import main_of
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.provenance import package_versions
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import check_range

SECONDS = 0.5  # that the calls of one turn should take


@dataclass(frozen=True)
class SpeedConfig:
    """Measures how long llama.cpp takes for a call by how long our engine takes.

    Attributes:
        target: GGUF file.
        output: Directory that receives speed.json, and the target's other files.
        tokens: Tokens that a call reads.
        repeats: Turns of both; the median of the paired ratios counts.
        engine_path: llama-server, with llama-bench and llama-quantize beside it; by default that of `make engines`.
    """

    target: Path
    output: Path = field(kw_only=True)
    tokens: tuple[int, ...] = (1, 4, 6, 128)
    repeats: int = 7
    engine_path: Path | None = None

    def __post_init__(self) -> None:
        check_range("repeats", self.repeats, 1)
        for count in self.tokens:
            check_range("tokens", count, 1)


def their_seconds(binary: Path, file: Path, tokens: int, calls: int) -> float:
    """Return the CPU seconds of one call of llama.cpp."""
    seconds = []
    for repeats in (1, 1 + calls):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [binary, "-m", file, "-t", "1", "-p", tokens, "-n", "0", "-r", repeats]
        subprocess.run(list(map(str, words)), check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return (seconds[1] - seconds[0]) / calls


def our_seconds(lm: CausalLM, tokens: int, calls: int) -> float:
    """Return the CPU seconds of one call of our engine."""
    session, ids, clock = lm.session(1, tokens), list(range(100, 100 + tokens)), clock_of("cpu", 1)
    seconds = 0.0
    for call in range(2 + calls):
        started = clock()
        session.extend([ids])
        seconds += clock() - started if call > 1 else 0
        session.keep([0])
    return seconds / calls


@sole_writer()
def run(config: SpeedConfig) -> Path:
    """Measure, print a row for each number of tokens, write speed.json; return its path."""
    set_threads(1)
    folder = server_binary(config.engine_path).parent
    make_directory(config.output)
    file = config.output / f"{config.target.stem}.BF16.gguf"
    words = [folder / "llama-quantize", "--allow-requantize", config.target, file, "BF16", "1"]
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    lm = load_lm(str(config.target), dtype="bfloat16", packed=True)
    ours, theirs = partial(our_seconds, lm), partial(their_seconds, folder / "llama-bench", file)
    rows = []
    for tokens in config.tokens:
        calls = max(3, int(SECONDS / our_seconds(lm, tokens, 3)))
        pairs = [(theirs(tokens, calls), ours(tokens, calls)) for _ in range(config.repeats)]
        ratios = sorted(first / second for first, second in pairs)
        milliseconds = [1000 * statistics.median(part) for part in zip(*pairs, strict=True)]
        rows.append({"tokens": tokens, "llamacpp_ms": milliseconds[0], "ours_ms": milliseconds[1],
                     "speed": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]})  # fmt: skip
    cells = [[f"{value:.2f}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    print_table(table_from_cells("speed", list(rows[0]), cells, right=list(rows[0])[1:]))
    path = config.output / "speed.json"
    write_json(path, {"target": str(config.target), "packages": package_versions(), "threads": 1, "rows": rows})
    return path


if __name__ == "__main__":
    sys.exit(main_of(SpeedConfig, run))
