"""`python benchmarks/gpu.py --output DIR`: everything that is asked of a single GPU, in one command with a time limit.

A borrowed GPU is there for minutes. Each stage is a process with a limit of its own: one that fails or hangs does not
take the others with it, one that does not fit into the time left is not run. The summary is written after each stage.
With `--device cpu` all stages run at tiny shapes, to rehearse the command.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save

from draftsmith.benchmarks import gpu_head, gpu_report, gpu_zero
from draftsmith.benchmarks.gpu_head import GpuHeadConfig
from draftsmith.benchmarks.gpu_report import GpuReportConfig
from draftsmith.benchmarks.measured import Measured, report
from draftsmith.benchmarks.peers import speed
from draftsmith.data.console import log_note, markdown_lines, print_text
from draftsmith.data.store.writer import sole_writer
from draftsmith.launch.cli import main_of
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.types import InputError

ROOT = Path(__file__).resolve().parents[1]
TAU = 3.0  # of the best head
# A stage may take this many times its seconds; on a CPU they are that much longer still.
PATIENCE, CPU_PATIENCE = 2.0, 5.0
# Of `gpu_report.py` and `gpu_head.py` on a CPU.
TINY = {
    "shape": "tiny", "batches": "1,3", "prompt": 32, "new_tokens": 12, "repeats": 1, "tokens": 256, "document": 64,
    "ttt_steps": 2, "num_workers": 0,
}  # fmt: skip
TINY_HEAD = {
    "minutes": 1.5, "prompts": 64, "batch_size": 16, "max_new_tokens": 12, "tokens_per_batch": 512, "limit": 1,
    "dtype": "float32",
}  # fmt: skip
# Most files to bring back, and their bytes.
FILES, FILE_BYTES = 8, 15 * 2**20


@dataclass(frozen=True)
class GpuConfig:
    """Runs the tests and measurements of one GPU, stage by stage, within a given time.

    Attributes:
        output: Directory that receives gpu.md, gpu.json, log.txt, the files of each stage, and back/: the results in at
            most eight files of 15 MiB, the heads in bfloat16.
        minutes: Time in all. The stage head takes what the others leave.
        stages: Which, separated by commas, in the order of their worth.
        target: Target of the stage head: model directory, GGUF file or hub id.
        source: Its prompts: JSONL files of chats, separated by commas, or self.
        tasks: Directory of its task files; default: prompts that were held out.
        device: cuda, or cpu for a rehearsal at tiny shapes.
        speculators: Python of an environment with speculators; default: this one.
    """

    output: Path = field(kw_only=True)
    minutes: float = 13.0
    stages: str = "tests,rows,head,training,peers,zero,decoding"
    target: str | None = None
    source: str = "self"
    tasks: Path | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    speculators: Path | None = None

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise InputError("minutes", self.minutes, "a positive number", "Change it.")
        if unknown := [name for name in self.names if name not in STAGES]:
            raise InputError("stages", ", ".join(unknown), f"some of {', '.join(STAGES)}", "Change it.")

    @property
    def names(self) -> list[str]:
        return self.stages.split(",")


@dataclass(frozen=True)
class Stage:
    """Stage of the run.

    seconds: that it needs on an H200 or so; with fewer left it is not run. measure: yields its numbers; receives a
    directory of its own. lacks: returns what is missing for it, or nothing.
    """

    seconds: float
    measure: Callable[[GpuConfig, Path], Iterator[Measured]]
    lacks: Callable[[GpuConfig], str] = lambda config: ""


def run_tests(config: GpuConfig, output: Path) -> Iterator[Measured]:
    """Run the tests that need a GPU. Only files with such tests are read: others import what the machine need not
    have."""
    marked = re.compile(r"mark\.gpu|import DEVICES")
    files = [path for path in sorted((ROOT / "tests").rglob("*_test.py")) if marked.search(path.read_text("utf-8"))]
    results = make_directory(output) / "tests.xml"
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "--junitxml", str(results), *map(str, files)]
    code = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
    (suite,) = xml.etree.ElementTree.parse(results).getroot()
    counts = {name: int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")}
    failed = counts["failures"] + counts["errors"]
    yield Measured("passed", counts["tests"] - counts["skipped"] - failed)
    yield Measured("failed", failed, "", "<= 0")
    yield Measured("skipped" if config.device == "cuda" else "skipped: they need CUDA", counts["skipped"])
    if code:
        raise RuntimeError(f"pytest: exit code {code}")


def of_report(part: str) -> Callable[[GpuConfig, Path], Iterator[Measured]]:
    """Return the measuring of a part of `gpu_report.py`."""

    def measure(config: GpuConfig, output: Path) -> Iterator[Measured]:
        tiny: Any = TINY if config.device == "cpu" else {}
        yield from gpu_report.measure_all(GpuReportConfig(output=output, device=config.device, parts=part, **tiny))

    return measure


def make_heads(config: GpuConfig, output: Path, minutes: float) -> Iterator[Measured]:
    """Run `gpu_head.py`, whose stages are processes of their own."""
    tiny: dict[str, Any] = {}
    target, source = config.target, config.source
    if config.device == "cpu":
        tiny, target = TINY_HEAD, target or "embedded:target"
        source = resolve_model("embedded:prompts") if source == "self" else source
    options: dict[str, Any] = {
        "minutes": minutes,
        "device": config.device,
        "source": source,
        "tasks": config.tasks,
        **tiny,
    }
    gpu_head.run(GpuHeadConfig(str(target), output=output, **options))
    found = json.loads((output / "gpu_head.json").read_text())
    for method in found["methods"]:
        yield Measured(f"{method['method']}: tau", method["tau"])
        yield Measured(f"{method['method']}: tokens a second", method["tokens_per_s"], "tokens/s")
    if found["methods"]:
        yield Measured("tau of the best head", max(method["tau"] for method in found["methods"]), "", f">= {TAU}")
    if failed := [stage["stage"] for stage in found["stages"] if stage["outcome"] != "ok"]:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def compare_trainers(config: GpuConfig, output: Path) -> Iterator[Measured]:
    yield from speed.speeds(output, config.device, config.speculators or Path(sys.executable))


def use_zero(config: GpuConfig, output: Path) -> Iterator[Measured]:
    yield from gpu_zero.zero(output, config.device)


def without_target(config: GpuConfig) -> str:
    return "" if config.target or config.device == "cpu" else "no --target"


def without_speculators(config: GpuConfig) -> str:
    return "" if config.speculators or find_spec("speculators") else "no package speculators, or --speculators"


def without_deepspeed(config: GpuConfig) -> str:
    return "" if find_spec("deepspeed") else "no package deepspeed"


HEAD = "head"
STAGES = {
    "tests": Stage(60, run_tests),
    "rows": Stage(30, of_report("rows")),
    # Runs in this process; its seconds are the least.
    HEAD: Stage(120, lambda config, output: iter(()), without_target),
    "training": Stage(60, of_report("training")),
    "peers": Stage(150, compare_trainers, without_speculators),
    "zero": Stage(60, use_zero, without_deepspeed),
    "decoding": Stage(60, of_report("decoding")),
}


@sole_writer()
def run(config: GpuConfig) -> int:
    """Run the stages, write the summary after each; return 1 if one failed, else 0."""
    stages, out = gpu_head.Stages(config.output, config.minutes), make_directory(config.output)
    # What an earlier run left to bring back.
    shutil.rmtree(out / "back", ignore_errors=True)
    stages.log.unlink(missing_ok=True)
    gpu_head.import_all()
    done, scale = list[dict[str, Any]](), 1 if config.device == "cuda" else CPU_PATIENCE
    for number, name in enumerate(config.names):
        stage, started = STAGES[name], time.monotonic()
        # Of an earlier run, with other limits.
        shutil.rmtree(out / name, ignore_errors=True)
        (out / f"{name}.json").unlink(missing_ok=True)
        if lacking := stage.lacks(config):
            outcome = f"not run: {lacking}"
        elif stages.left < scale * stage.seconds:
            outcome = f"not run: {stages.left:.0f} s left, it needs {scale * stage.seconds:.0f}"
        elif name == HEAD:
            later = sum(scale * STAGES[other].seconds for other in config.names[number + 1 :])
            outcome = head_outcome(config, max(scale * stage.seconds, stages.left - later) / 60)
        else:
            limit = min(stages.left, PATIENCE * scale * stage.seconds)
            outcome = stage_outcome(config, stages, name, limit)
        done.append(
            {"stage": name, "seconds": time.monotonic() - started, "outcome": outcome, "rows": rows_of(out, name)}
        )
        write_summary(out, done)
    print_text((out / "gpu.md").read_text())
    return int(any(stage["outcome"].startswith(("failed", "stopped")) for stage in done))


def stage_outcome(config: GpuConfig, stages: gpu_head.Stages, name: str, limit_s: float) -> str:
    """Run a stage in a process of its own for at most so many seconds; return how it ended."""

    def work() -> int:
        report(config, name, STAGES[name].measure(config, make_directory(config.output / name)))
        return 0

    stages.run(name, work, limit_s)
    return str(stages.done[-1]["outcome"])


def head_outcome(config: GpuConfig, minutes: float) -> str:
    """Make heads in so many minutes; return how that ended."""
    rows = list[Measured]()
    try:
        for row in make_heads(config, config.output / HEAD, minutes):
            rows.append(row)
        outcome = "ok"
    except Exception as error:  # whatever it is, later stages shall run
        log_note(traceback.format_exc())
        outcome = f"failed ({error})"
    write_json(config.output / f"{HEAD}.json", {"rows": [vars(row) for row in rows]})
    return outcome


def rows_of(output: Path, name: str) -> list[dict[str, Any]]:
    """Return the numbers that a stage has written, also one that failed later."""
    path = output / f"{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def write_summary(output: Path, done: Sequence[dict[str, Any]]) -> None:
    """Write gpu.json, gpu.md and back/."""
    lines = []
    for stage in done:
        lines.append((stage["stage"], f"{stage['seconds']:.0f}", stage["outcome"], "", "", ""))
        for row in (Measured(**row) for row in stage["rows"]):
            what, value, aim = row.cells
            lines.append(("", "", what, value, aim, {True: "yes", False: "no", None: ""}[row.reached]))
    write_json(output / "gpu.json", {"stages": list(done)})
    table = markdown_lines(("stage", "seconds", "what", "value", "aim", "reached"), lines)
    write_text(output / "gpu.md", "\n".join(table) + "\n")
    bring_back(output)


def bring_back(output: Path) -> None:
    """Write back/: the summary, all logs, and the last heads that were made in pieces, if they fit.

    `cat heads.tar.* | tar x` puts them together again.
    """
    back = make_directory(output / "back")
    for name in ("gpu.md", "gpu.json"):
        write_text(back / name, (output / name).read_text())
    logs = "".join(f"==> {path}\n{path.read_text(errors='replace')}\n" for path in sorted(output.glob("**/log.txt")))
    (back / "logs.xz").write_bytes(lzma.compress(logs.encode()))
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for head in sorted((output / HEAD).glob("*/best")):
            for file in sorted(path for path in head.iterdir() if path.is_file()):
                content = file.read_bytes()
                if file.suffix == ".safetensors":
                    content = save({name: halved(weight) for name, weight in load_file(file).items()})
                entry = tarfile.TarInfo(f"{head.parent.name}/{file.name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    whole = tar.getvalue()
    pieces = [whole[begin : begin + FILE_BYTES] for begin in range(0, len(whole), FILE_BYTES)]
    if len(pieces) > FILES - 3:
        log_note(f"The heads take {len(whole):,} bytes: they stay in {output / HEAD}")
        return
    for number, piece in enumerate(pieces):
        (back / f"heads.tar.{number}").write_bytes(piece)


def halved(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16() if weight.is_floating_point() else weight


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main_of(GpuConfig, run))
