"""Files that a disk, an editor or another program has damaged, and directories in the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bad_input.row import Ground, Row
from safetensors.torch import load_file, save_file

Spoil = Callable[[Path], object]
BENCH = "eval bench --target {target} --draft {draft} --prompts {chats} --methods ar,spec:k=2 --repeats 1 --limit 2 "
BENCH += "--max-new-tokens 8 --output {d}"


def text(content: str) -> Spoil:
    """Another content."""
    return lambda file: file.write_text(content)


def cut(file: Path) -> None:
    """As a disk that was full, or a copy that was broken off, leaves it."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def changed(**values: Any) -> Spoil:
    """Valid JSON with other values; `...` takes a key away."""

    def spoil(file: Path) -> None:
        found = json.loads(file.read_text())
        for key, value in values.items():
            found.pop(key, None) if value is ... else found.update({key: value})
        file.write_text(json.dumps(found))

    return spoil


def of_type(dtype: torch.dtype) -> Spoil:
    """The same tensors, cast."""

    def spoil(file: Path) -> None:
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})

    return spoil


def spoilt(name: str, file: str, spoil: Spoil) -> Callable[[Ground, Path], dict[str, object]]:
    """A copy of a good directory, one file of it spoilt: `{d}`."""

    def make(ground: Ground, to: Path) -> dict[str, object]:
        directory = ground.copy(name, to)
        spoil(directory / file)
        return {"d": directory}

    return make


def head(file: str, spoil: Spoil) -> Callable[[Ground, Path], dict[str, object]]:
    """The same of an EAGLE head whose hashes are not checked, as in heads that were copied by hand."""

    def make(ground: Ground, to: Path) -> dict[str, object]:
        directory = ground.copy("eagle", to)
        changed(sha256=...)(directory / "manifest.json")
        spoil(directory / file)
        return {"d": directory}

    return make


def journal(*lines: object) -> Callable[[Ground, Path], dict[str, object]]:
    """An interrupted bench with this journal."""

    def make(ground: Ground, to: Path) -> dict[str, object]:
        (to / "run").mkdir()
        (to / "run" / "journal.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return {"d": to / "run"}

    return make


def unfinished(spoil: Spoil, file: str = "started.json", source: str = "features") -> Callable[..., dict[str, object]]:
    """A stage that was killed before its manifest."""

    def make(ground: Ground, to: Path) -> dict[str, object]:
        directory = ground.copy(source, to)
        (directory / "manifest.json").unlink()
        spoil(directory / file)
        return {"d": directory}

    return make


def training(file: str, content: bytes) -> Callable[[Ground, Path], dict[str, object]]:
    """A finished training with another content in one of its files."""

    def make(ground: Ground, to: Path) -> dict[str, object]:
        whole = {"metrics.csv": b"step,val/loss\n10,6.5\n", "config.yaml": b"target: t\n", "training.json": b"{}"}
        for name, own in (whole | {file: content}).items():
            (to / name).write_bytes(own)
        return {"d": to}

    return make


def a_file(ground: Ground, to: Path) -> dict[str, object]:
    (to / "taken").write_text("mine")
    return {"d": to / "taken"}


def exported(file: str, spoil: Spoil) -> Callable[[Ground, Path], dict[str, object]]:
    """What `export --format vllm` wrote."""

    def make(ground: Ground, to: Path) -> dict[str, object]:
        directory = Path(shutil.copytree(ground.exported, to / "exported"))
        spoil(directory / file)
        return {"d": directory}

    return make


INSPECT = "data inspect {d}"
FEATURES = "data features --responses {responses} --target {target} --output {d}"
REPORT = "eval report {d} --output {out}/report.html"
COMPARE = "eval compare {d} {bench}"
DECODE = "decode Hi --target {target} --draft {d} --method eagle:k=2 --max-new-tokens 4"
RESUME = "train eagle --data {features} --target {target} --max-steps 2 --batch-size 2 --output {d} --loggers csv"
SHARD = "shard-00000"
DEEP = "[" * 100_000

ROWS = [
    # Manifests: not JSON, no text, another type, keys that are absent, null or of another type.
    *(
        Row(f"manifest {name}", INSPECT, ("manifest.json", said), spoilt("features", "manifest.json", spoil))
        for name, spoil, said in [
            ("cut", cut, "damaged"),
            ("that is a list", text("[]"), "an object"),
            ("without files", changed(files=...), "no files"),
            ("whose counts are text", changed(counts={"rows": "5"}), "counts.rows"),
        ]
    ),
    # An unfinished stage: what says how it was begun, and what says that a shard is whole.
    Row("started.json cut, continued", FEATURES, ("started.json", "damaged"), unfinished(cut)),
    Row("started.json without state", FEATURES, ("started.json", "state"), unfinished(changed(state=...))),
    *(
        Row(f"done.json {name}", FEATURES, (f"{SHARD}.done.json", said), unfinished(spoil, f"{SHARD}.done.json"))
        for name, spoil, said in [
            ("cut", cut, "damaged"),
            ("without files", changed(files=...), "no files"),
        ]
    ),
    # Shards, with the size they had.
    Row("a Parquet shard of zeros", INSPECT, (f"{SHARD}.parquet",), spoilt("features", f"{SHARD}.parquet",
        lambda file: file.write_bytes(bytes(file.stat().st_size)))),
    Row("a safetensors shard of zeros", "train eagle --data {d} --target {target} --output {out} --max-steps 1",
        (f"{SHARD}.safetensors",), spoilt("features", f"{SHARD}.safetensors",
        lambda file: file.write_bytes(bytes(file.stat().st_size)))),
    # Heads.
    *(
        Row(f"head: {file} {name}", DECODE, said, head(file, spoil))
        for file, name, spoil, said in [
            ("manifest.json", "cut", cut, ("manifest.json", "damaged")),
            ("config.json", "without head", changed(head=...), ("config.json", "no head")),
            ("config.json", "of an unknown kind", changed(kind=["eagle"]), ("kind",)),
            ("model.safetensors", "cut", cut, ("model.safetensors",)),
        ]
    ),
    # Results of a bench.
    *(
        Row(f"{command.split()[1]}: results.json {name}", command, ("results.json", said),
            spoilt("bench", "results.json", spoil))
        for command in (REPORT, COMPARE)
        for name, spoil, said in [
            ("cut", cut, "damaged"),
        ]
    ),
    Row("report: a method without a name", REPORT, ("results.json", "methods[0].method"),
        spoilt("bench", "results.json", changed(methods=[{}]))),
    Row("report: tables of something else", REPORT, ("results.json", "tables"),
        spoilt("bench", "results.json", changed(tables=[{"type": "table"}], meta={"kind": "schedule"}))),
    Row("compare: prompts.parquet cut", COMPARE, ("prompts.parquet", "unreadable"),
        spoilt("bench", "prompts.parquet", cut)),
    Row("report: trace.jsonl cut", REPORT, ("trace.jsonl", "damaged in line"), spoilt("bench", "trace.jsonl", cut)),
    Row("report: texts.json null", REPORT, ("texts.json",), spoilt("bench", "texts.json", text("null"))),
    Row("report: a bench of nothing", REPORT, ("results.json", "nothing measured"),
        spoilt("bench", "results.json", changed(methods=[]))),
    *(
        Row(f"report: {file} {name}", REPORT, (file, said), training(file, content))
        for file, name, content, said in [
            ("metrics.csv", "of words", b"step,a\n10,high\n", "line 2 (ValueError"),
            ("config.yaml", "cut", b"target: [a", "damaged"),
        ]
    ),
    # An interrupted bench.
    Row("journal: a head of another type", BENCH, ("journal.jsonl", "line 1"), journal([])),
    Row("journal: nested without end", BENCH, ("journal.jsonl", "line 1"),
        lambda ground, to: journal()(ground, to) | {"x": (to / "run" / "journal.jsonl").write_text(DEEP + "\n")}),
    # A training that is to go on.
    Row("training: started.json cut", RESUME, ("started.json", "damaged"), spoilt("interrupted", "started.json", cut)),
    Row("training: finished, with another rate", RESUME + " --val-share 0.3 --tau-prompts 0 --lr 0.1",
        ("output", "config.lr: 0.1, begun with"), spoilt("eagle_run", "best/README.md", text("card"))),
    *(
        Row(f"training: {words}", f"train eagle --data {{features}} --target {{target}} --output {{out}} --{words}",
            says)
        for words, says in {
            "betas 0.9 1.0": ("betas", "1.0"), "lr fast": ("lr", "fast"), "max-length 3": ("max_length",),
        }.items()
    ),
    # Exports.
    Row("check: draftsmith.json cut", "check {d} --format vllm --target {target}", ("draftsmith.json", "damaged"),
        exported("draftsmith.json", cut)),
    Row("import: config.json a list", "import {d} --target {target} --output {out}", ("config.json",),
        exported("config.json", text("[]"))),
    Row("import: another width", "import {d} --target {target} --output {out}", ("hidden_size", "the target's"),
        exported("config.json", changed(hidden_size=2**24))),
    Row("import: weights of int8", "import {d} --target {target} --output {out}", ("fc.weight is int8", "float32"),
        exported("model.safetensors", of_type(torch.int8))),
    Row("import: weights cut", "import {d} --target {target} --output {out}", ("model.safetensors", "damaged"),
        exported("model.safetensors", cut)),
    # A config file, as an editor may leave it.
    Row("decode.yaml of a list", "decode Hi --config {d}/decode.yaml", ("decode.yaml", "list"),
        lambda ground, to: {"d": to, "x": (to / "decode.yaml").write_text("- a\n")}),
    Row("decode.yaml cut", "decode Hi --config {d}/decode.yaml", ("decode.yaml", "YAML"),
        lambda ground, to: {"d": to, "x": (to / "decode.yaml").write_text("target: [a")}),
    # A file where a directory is to be.
    *(
        Row(f"{command.split(' --')[0]}: the output is a file", command, ("taken",), a_file)
        for command in (
            FEATURES,
            BENCH,
            "data prompts --source {chats} --target {target} --output {d}",
            "export --format vllm --head {eagle} --target {target} --output {d}",
        )
    ),
]  # fmt: skip
