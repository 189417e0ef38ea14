"""`python benchmarks/gpu_head.py --target MODEL --output DIR`: draft heads from one card in so many minutes.

Prompts, answers, an EAGLE-3 and a DSpark head, both measured: the whole way of a user with one GPU, stage by stage.
Each stage is a command in a process of its own with a time limit; one that fails does not take the others with it. They
share what has been imported, so that none waits for it.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.console import Column, Table, log_note, print_table
from draftsmith.data.engines.own import generate_all
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.tables import results_tables
from draftsmith.launch.cli import main, main_of
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError, SamplingParams, check_range

# Shares of the time: answers at most, then what is kept for measuring; training has the rest, half for each head.
ANSWERS_SHARE, BENCH_SHARE = 0.35, 0.14
PILOT = 1024  # prompts whose answers are timed first
WORKERS = 4  # that read training data
METHODS = {"eagle3": "eagle3:k=3,eagle3:k=5", "dspark": "dspark"}
IMPORTED = (  # by the stages
    "transformers", "lightning.pytorch", "draftsmith.data.prompts", "draftsmith.data.responses",
    "draftsmith.train.fit", "draftsmith.train.module", "draftsmith.train.callbacks", "draftsmith.eval.bench.command",
)  # fmt: skip
RECIPES = {
    "eagle3": "--version 3-norm --draft-vocab 8192 --unknown keep --ttt-steps 3 --ttt-steps-after 0.3 "
    "--normalizer tokens",
    "dspark": "--num-layers 2 --markov-rank 64 --anchors 64 --loss-vocab 4096",
}


@dataclass(frozen=True)
class GpuHeadConfig:
    """Makes and measures draft heads for a target in a given time.

    Attributes:
        target: Model directory, GGUF file or hub id.
        output: Directory that receives everything: log.txt, gpu_head.json, the heads.
        minutes: Time in all.
        source: JSONL files of chats, separated by commas, or self: the target writes its own prompts.
        tasks: Directory of task files to measure on, as of eval bench --data; default: prompts that were held out.
        prompts: Most prompts.
        batch_size: Answers at a time.
        max_new_tokens: Longest answer.
        tokens_per_batch: Tokens of a training step.
        limit: Prompts of each task that are measured.
        device: cuda or cpu.
        dtype: Of the target.
    """

    target: str
    output: Path = field(kw_only=True)
    minutes: float = 10.0
    source: str = "self"
    tasks: Path | None = None
    prompts: int = 40000
    batch_size: int = 256
    max_new_tokens: int = 256
    tokens_per_batch: int = 8192
    limit: int = 24
    device: str = "cuda"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("prompts", "batch_size", "max_new_tokens", "tokens_per_batch", "limit"):
            check_range(name, getattr(self, name), 1)
        if not self.minutes > 0:
            raise InputError("minutes", self.minutes, "a positive number", "Change it.")
        for name in ("target", "output", "tasks"):
            if len(str(getattr(self, name)).split()) > 1:  # they become words of commands
                raise InputError(name, getattr(self, name), "a path without spaces", "Give it a link: ln -s.")


class Stages:
    """Commands that run one after the other, their seconds and how they ended."""

    def __init__(self, output: Path, minutes: float):
        self.began, self.limit_s = time.monotonic(), 60 * minutes
        self.log, self.done = output / "log.txt", list[dict[str, Any]]()

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.limit_s - (time.monotonic() - self.began)

    def run(self, name: str, words: str | Callable[[], int], most_s: float) -> bool:
        """Run a command line, or a function, in a process of its own for at most so many seconds; return whether it
        succeeded."""
        log_note(f"{name}: {words if isinstance(words, str) else ''}")
        started, child = time.monotonic(), os.fork()
        if not child:
            code = 1
            try:
                os.setsid()
                output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                print(f"\n==> {name}: {words}", flush=True)
                code = main(words.split()) if isinstance(words, str) else words()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        ended, status = 0, 0
        try:
            while not ended and time.monotonic() - started < most_s:
                ended, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.02)
        finally:  # also when it is interrupted
            if not ended:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
        outcome = "ok" if ended and not status else f"failed ({status})" if ended else f"stopped after {most_s:.0f} s"
        self.done.append({"stage": name, "seconds": time.monotonic() - started, "outcome": outcome})
        log_note(f"{name}: {outcome}, {self.done[-1]['seconds']:.1f} s")
        return outcome == "ok"


@sole_writer()
def run(config: GpuHeadConfig) -> Path:
    """Run all stages, print their seconds and the acceptance lengths, and return the output directory."""
    stages, out = Stages(config.output, config.minutes), make_directory(config.output)
    import_all()
    log_note(f"imports: {time.monotonic() - stages.began:.1f} s")
    answers = answer(config, stages)
    heads = []
    for number, kind in enumerate(RECIPES) if answers else ():
        seconds = max(1.0, (stages.left - BENCH_SHARE * stages.limit_s) / (len(RECIPES) - number))
        words = (
            f"train {kind} --data {answers} --target {config.target} --output {out / kind} {RECIPES[kind]} "
            f"--minutes {seconds / 60:.3f} --tokens-per-batch {config.tokens_per_batch} --max-length 512 "
            f"--optimizer muon --lr 3e-3 --schedule hold --val-share 0.01 --val-every 500 --tau-prompts 8 "
            f"--num-workers {WORKERS} --loggers csv "
            f"--dtype {config.dtype} --device {'cuda' if config.device.startswith('cuda') else 'cpu'}"
        )
        stages.run(f"train {kind}", words, seconds + 30)
        if (out / kind / "training.json").exists():
            heads.append(kind)
    measured = heads and stages.run("bench", bench_words(config, heads), max(stages.left, 60.0) + 30)

    results = read_object(out / "bench" / "results.json", {}) if measured else {}
    for table in results_tables(results) if results else ():
        print_table(table, bold="fastest")
    total = time.monotonic() - stages.began
    shown = [{**own, "seconds": f"{own['seconds']:.1f}"} for own in stages.done]
    columns = [Column(name, name) for name in ("stage", "seconds", "outcome")]
    print_table(Table("stages", f"{total:.0f} s in all", columns, shown))
    write_json(out / "gpu_head.json", {"seconds": total, "stages": stages.done, "methods": results.get("methods", [])})
    return out


def import_all() -> None:
    """Import what the stages need, before they are forked; nothing here may touch the GPU."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in IMPORTED:
        importlib.import_module(name)


def answer(config: GpuHeadConfig, stages: Stages) -> Path | None:
    """Make prompts and, in their share of the time, answers; return the artifact of the answers, or None."""
    out, how = config.output, f"--target {config.target}"
    model = f"{how} --dtype {config.dtype} --device {config.device} --batch-size {config.batch_size}"
    fits = "--max-length 384 --overlong drop --invalid drop"
    if config.source == "self":
        begun, turns = out / "begun", out / "turns"
        if not stages.run("begin", f"data prompts --source self --limit {config.prompts} {how} --output {begun}", 120):
            return None
        written = f"data responses --data {begun} {model} --temperature 0.8 --top-p 0.95 --max-new-tokens 64"
        if not stages.run("write prompts", f"{written} --rows-per-shard 4096 --output {turns}", stages.left / 3):
            return None
        source = str(turns)
    else:
        source = str(mixed(config.source.split(","), out / "source.jsonl", config.prompts))
    if not stages.run("prompts", f"data prompts --source {source} {fits} {how} --output {out / 'prompts'}", 180):
        return None
    # A few are timed, to know how many fit.
    timed = out / "pilot.json"
    if not stages.run("pilot", lambda: pilot(config, timed), stages.left / 3):
        return None
    found = read_object(timed, {"load_s": float, "per_s": float})
    left = min(ANSWERS_SHARE * stages.limit_s, 0.6 * stages.left) - found["load_s"]
    wanted = max(1, int(found["per_s"] * left))
    ask = f"data responses {model} --max-new-tokens {config.max_new_tokens} --rows-per-shard 4096"
    words = f"{ask} --data {out / 'prompts'} --limit {wanted} --temperature 0 --output {out / 'answers'}"
    return out / "answers" if stages.run("answers", words, stages.left * 0.7) else None


def pilot(config: GpuHeadConfig, path: Path) -> int:
    """Answer a few prompts; write the seconds that loading took and the prompts answered a second."""
    began, folder = time.monotonic(), config.output / "prompts"
    lm = load_lm(config.target, config.dtype, config.device, packed=True)
    load_s = time.monotonic() - began
    prompts = [row["prompt_ids"] for row in Rows(Manifest.read(folder), limit=PILOT).iterate()]
    generate_all(lm, prompts, SamplingParams(), config.max_new_tokens, config.batch_size)
    write_json(path, {"load_s": load_s, "per_s": len(prompts) / (time.monotonic() - began - load_s)})
    return 0


def mixed(paths: Sequence[str], target: Path, most: int) -> Path:
    """Write the lines of JSONL files in random order, under ids of their own."""
    lines = [line for path in paths for line in Path(path).read_text("utf-8").split("\n") if line.strip()]
    random.Random(0).shuffle(lines)
    rows = ({**json.loads(line), "id": str(number)} for number, line in enumerate(lines[:most]))
    write_text(target, "".join(json.dumps(row) + "\n" for row in rows))
    return target


def bench_words(config: GpuHeadConfig, heads: Sequence[str]) -> str:
    """Return the command that measures all heads in one run, one prompt at a time."""
    out = config.output
    if config.tasks is not None:
        prompts = f"--data {config.tasks}"
    else:
        prompts = f"--data {out / 'prompts'}"
    drafts = " ".join(f"--head {out / kind / 'best'}" for kind in heads)
    methods = ",".join(METHODS[kind] for kind in heads)
    return (
        f"eval bench --target {config.target} {drafts} --methods {methods} {prompts} --turns first "
        f"--limit {config.limit} --max-new-tokens 128 --repeats 1 --dtype {config.dtype} --device {config.device} "
        f"--output {out / 'bench'}"
    )


if __name__ == "__main__":
    sys.exit(main_of(GpuHeadConfig, run))
