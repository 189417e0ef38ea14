"""Files that a disk, an editor or another program has damaged, and model directories that are no models."""

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


def journal(ground: Ground, to: Path) -> dict[str, object]:
    """An interrupted bench whose journal is nested without end."""
    (to / "run").mkdir()
    (to / "run" / "journal.jsonl").write_text("[" * 100_000 + "\n")
    return {"d": to / "run"}


def unfinished(ground: Ground, to: Path) -> dict[str, object]:
    """A stage that was killed before its manifest, and whose record of its beginning is damaged."""
    directory = ground.copy("features", to)
    (directory / "manifest.json").unlink()
    cut(directory / "started.json")
    return {"d": directory}


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

ROWS = [
    # Manifests: not JSON, no text, another type, keys that are absent, null or of another type.
    *(
        Row(f"manifest {name}", INSPECT, ("manifest.json", said), spoilt("features", "manifest.json", spoil))
        for name, spoil, said in [
            ("cut", cut, "damaged"),
            ("whose counts are text", changed(counts={"rows": "5"}), "counts.rows"),
        ]
    ),
    # An unfinished stage: what says how it was begun, and what says that a shard is whole.
    Row("started.json cut, continued", FEATURES, ("started.json", "damaged"), unfinished),
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
            ("model.safetensors", "cut", cut, ("model.safetensors",)),
        ]
    ),
    # Results of a bench.
    Row("report: results.json cut", REPORT, ("results.json", "damaged"), spoilt("bench", "results.json", cut)),
    Row("compare: prompts.parquet cut", COMPARE, ("prompts.parquet", "unreadable"),
        spoilt("bench", "prompts.parquet", cut)),
    # An interrupted bench.
    Row("journal: nested without end", BENCH, ("journal.jsonl", "line 1"), journal),
    # A training that is to go on.
    Row("training: finished, with another rate", RESUME + " --val-share 0.3 --tau-prompts 0 --lr 0.1",
        ("output", "config.lr: 0.1, begun with"), spoilt("eagle_run", "best/README.md", text("card"))),
    # Exports.
    Row("check: draftsmith.json cut", "check {d} --format vllm --target {target}", ("draftsmith.json", "damaged"),
        exported("draftsmith.json", cut)),
    Row("import: another width", "import {d} --target {target} --output {out}", ("hidden_size", "the target's"),
        exported("config.json", changed(hidden_size=2**24))),
    Row("import: weights of int8", "import {d} --target {target} --output {out}", ("fc.weight is int8", "float32"),
        exported("model.safetensors", of_type(torch.int8))),
    # A config file, as an editor may leave it.
    Row("decode.yaml cut", "decode Hi --config {d}/decode.yaml", ("decode.yaml", "YAML"),
        lambda ground, to: {"d": to, "x": (to / "decode.yaml").write_text("target: [a")}),
    # A file where a directory is to be.
    Row("data features: the output is a file", FEATURES, ("taken",), a_file),
]  # fmt: skip

MODELS: list[tuple[str, str, Spoil, str]] = [
    ("an unknown model type", "config.json", changed(model_type="zebra"), "zebra"),
    ("heads that do not divide", "config.json", changed(num_key_value_heads=3), "num_key_value_heads: found 3"),
    ("text for a width", "config.json", changed(hidden_size="32"), '"32"'),
    ("yarn without a factor", "config.json", changed(rope_parameters={"rope_type": "yarn"}), "factor"),
    ("a text eos id", "generation_config.json", changed(eos_token_id="</s>"), "eos_token_id"),
    ("no config", "config.json", Path.unlink, "without config.json"),
    ("a damaged tokenizer", "tokenizer.json", text('{"model": {'), "JSONDecodeError"),
    ("pickled weights only", "model.safetensors", lambda file: file.rename(file.with_name("pytorch_model.bin")),
        "without safetensors"),
    ("damaged weights", "model.safetensors", text("no"), "damaged"),
    ("an adapter beside it", "config.json",
        lambda file: file.with_name("adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}'), "PEFT"),
]  # fmt: skip
ROWS += [
    Row(f"a model: {name}", "decode Hi --target {d} --method ar", (says,), spoilt("target", file, spoil))
    for name, file, spoil, says in MODELS
]
ROWS += [Row("a model that is not there", "decode Hi --target ./no/model --method ar", ("no directory ./no/model",))]
