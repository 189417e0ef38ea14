"""Inputs that do not fit: prompts, templates, numbers that are none, damaged files, directories that are no models."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bad_input.row import Ground, Row
from safetensors.torch import load_file, save_file

from draftsmith.launch.cli import main
from draftsmith.modules.pretrained.provenance import file_sha256

Make = Callable[[Ground, Path], dict[str, object]]
TREE = "eval bench --target {target} --head {eagle} --data {chats} --methods eagle-static:tree={file} --output {out}"
GOOD = b'{"id": "a", "prompt": "Hi"}\n'


def file(content: bytes, name: str = "x.jsonl") -> Make:
    def make(ground: Ground, folder: Path) -> dict[str, object]:
        (folder / name).write_bytes(content)
        return {"file": folder / name}

    return make


def put_nan(file: Path, tensor: str, place: tuple[int, int]) -> None:
    """Replace one number of a tensor, by the end of its name."""
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith(tensor)][:1]
    tensors[name][place] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})


def broken(name: str) -> Make:
    """A copy of a model with a NaN in its first layer: `{broken}`."""

    def make(ground: Ground, to: Path) -> dict[str, object]:
        path = ground.copy(name, to)
        put_nan(path / "model.safetensors", "layers.0.mlp.down_proj.weight", (0, 0))
        return {"broken": path}

    return make


def rehash(directory: Path, file: Path) -> None:
    """Let the manifest have the file's new hash, so that nothing tells that it was changed."""
    manifest = json.loads((directory / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == file.name:
            entry |= {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def spoiled_features(ground: Ground, to: Path) -> dict[str, object]:
    """Row 1 has a NaN at its third token."""
    path = ground.copy("features", to)
    file = next(path.glob("*.safetensors"))
    put_nan(file, "0000001", (2, 0))
    rehash(path, file)
    return {"spoiled": path}


def supervised(ground: Ground, to: Path) -> dict[str, object]:
    """Texts that any target of this tokenizer may read, and a target with a NaN."""
    source = to / "chats.jsonl"
    rows = [
        {"id": name, "prompt": "What is a?", "answer": "a is a letter, and so is b."} for name in ("first", "other")
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"data prompts --supervised --source {source} --target {ground.target} --output {to / 'texts'}"
    assert main(words.split()) == 0
    return {"texts": to / "texts", **broken("target")(ground, to)}


PROMPTS = "data prompts --source {file} --target {target} --output {out} "
DECODE = "decode Hi --target {target} --method "
ASK = "data responses --data {prompts} --target {broken} --output {out} "
TRAIN = "train eagle --target {target} --output {out} --max-steps 2 --tau-prompts 0 "
ROWS = [
    # Files of prompts, and templates.
    Row("a file of nothing usable", PROMPTS + "--invalid drop", ("dropped 2: invalid 2",), file(b'{"prompt": 1}\n{')),
    Row("a template that fails", PROMPTS + "--chat-template {tmp}/t", ("line 1", "chat template", "TypeError"),
        lambda ground, folder: {**file(b"{{ 1 + messages }}", "t")(ground, folder), **file(GOOD)(ground, folder)}),
    Row("a template of more than the memory", PROMPTS + "--chat-template {tmp}/t", ("line 1", "MemoryError"),
        lambda ground, folder: {**file(b"{{ 'x' * 10 ** 18 }}", "t")(ground, folder), **file(GOOD)(ground, folder)}),
    Row("a tree of aliases of aliases", TREE, ("x.yaml", "or an alias"), file(b"- &a [0]\n- [*a, *a]", "x.yaml")),
    Row("a tree of numbers without end", TREE, ("x.yaml", "100,001 characters"), file(b"0" * 100_001, "x.yaml")),
    Row("a tree of one long path", TREE, ("x.yaml: path [0, 0,", ", expected a list of paths"),
        file(b"[[" + b"0," * 9999 + b"]]", "x.yaml")),
    Row("decode: half of a surrogate pair", "decode a\udce9 --target {target} --method ar", ("prompt", "surrogate")),
    # Ids and numbers.
    Row("draft, sampled", DECODE + "spec:k=3 --head {broken} --temperature 1",
        ("draft: found", "position", "prompt on the command line"), broken("draft")),
    Row("responses", ASK, ("target: found", "position", "row-"), broken("target")),
    Row("features", "data features --data {texts} --target {broken} --output {out}",
        ("target: found", "hidden states at position 0", "first"), supervised),
    Row("stored features", TRAIN + "--data {spoiled}", (".safetensors", "row-1, position 2"), spoiled_features),
    Row("a key that YAML reads as true", "decode Hi --target {target} --config {yaml}", ("key", "True", "c.yaml"),
        lambda ground, to: {"yaml": to / "c.yaml", "x": (to / "c.yaml").write_text("server:\n  true: 2")}),
]  # fmt: skip


# -- damaged files


Spoil = Callable[[Path], object]
BENCH_ON = "eval bench --target {target} --head {draft} --data {chats} --methods ar,spec:k=2 --repeats 1 --limit 2 "
BENCH_ON += "--max-new-tokens 8 --output {d}"


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


INSPECT = "data inspect {d}"
FEATURES = "data features --data {responses} --target {target} --output {d}"
REPORT = "eval report {d} --output {out}/report.html"
COMPARE = "eval compare {d} {bench}"
DECODE_HEAD = "decode Hi --target {target} --head {d} --method eagle:k=2 --max-new-tokens 4"
SHARD = "shard-00000"

ROWS += [
    # An unfinished stage: what says how it was begun, and what says that a shard is whole.
    Row("started.json cut, continued", FEATURES, ("started.json", "damaged"), unfinished),
    # Shards, with the size they had.
    Row("a Parquet shard of zeros", INSPECT, (f"{SHARD}.parquet",), spoilt("features", f"{SHARD}.parquet",
        lambda file: file.write_bytes(bytes(file.stat().st_size)))),
    Row("a safetensors shard of zeros", "train eagle --data {d} --target {target} --output {out} --max-steps 1",
        (f"{SHARD}.safetensors",), spoilt("features", f"{SHARD}.safetensors",
        lambda file: file.write_bytes(bytes(file.stat().st_size)))),
    # A head.
    Row("head: config.json without head", DECODE_HEAD, ("config.json", "no head"),
        head("config.json", changed(head=...))),
    # Results of a bench.
    Row("report: results.json cut", REPORT, ("results.json", "damaged"), spoilt("bench", "results.json", cut)),
    Row("compare: prompts.parquet cut", COMPARE, ("prompts.parquet", "unreadable"),
        spoilt("bench", "prompts.parquet", cut)),
    # An interrupted bench.
    Row("journal: nested without end", BENCH_ON, ("journal.jsonl", "line 1"), journal),
    # Exports.
    Row("check: draftsmith.json cut", "check {d} --format vllm --target {target}", ("draftsmith.json", "damaged"),
        spoilt("exported", "draftsmith.json", cut)),
    Row("import: another width", "import {d} --target {target} --output {out}", ("hidden_size", "the target's"),
        spoilt("exported", "config.json", changed(hidden_size=2**24))),
    Row("import: weights of int8", "import {d} --target {target} --output {out}", ("fc.weight is int8", "float32"),
        spoilt("exported", "model.safetensors", of_type(torch.int8))),
    # A config file, as an editor may leave it.
    Row("decode.yaml cut", "decode Hi --config {d}/decode.yaml", ("decode.yaml", "YAML"),
        lambda ground, to: {"d": to, "x": (to / "decode.yaml").write_text("target: [a")}),
    # A file where a directory is to be.
    Row("data features: the output is a file", FEATURES, ("taken",), a_file),
]  # fmt: skip

MODELS: list[tuple[str, str, Spoil, str]] = [
    ("an unknown model type", "config.json", changed(model_type="zebra", architectures=["ZebraForCausalLM"]), "zebra"),
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
BOMB = {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": "(?:(?:a|a)+)+$"}}
ROWS += [
    Row("a tokenizer whose library panics", f"decode {'a' * 60}! --target {{d}} --method ar", ("retry-limit-in-match",),
        spoilt("target", "tokenizer.json", changed(pre_tokenizer=BOMB))),
]  # fmt: skip
ROWS += [Row("a model that is not there", "decode Hi --target ./no/model --method ar", ("no directory ./no/model",))]


# -- files that a reader would wait for, or that would fill the memory


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def zeros(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def terabyte(file: Path) -> None:
    os.truncate(file, 2**40)


ENDLESS: list[tuple[str, Callable[..., Callable[[Ground, Path], dict[str, object]]], tuple[str, ...], Spoil]] = [
    ("decode Hi --target {d} --method ar", partial(spoilt, "target"),
        ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"), pipe),
    ("decode Hi --target {d} --method ar", partial(spoilt, "target"), ("config.json",), zeros),
    ("decode Hi --target {d} --method ar", partial(spoilt, "target"), ("config.json", "tokenizer.json"), terabyte),
    (DECODE_HEAD, head, ("model.safetensors",), zeros),
    (INSPECT, partial(spoilt, "features"), ("manifest.json", f"{SHARD}.parquet", f"{SHARD}.safetensors"), pipe),
    (COMPARE, partial(spoilt, "bench"), ("prompts.parquet",), pipe),
]  # fmt: skip
ROWS += [
    Row(f"{words.split()[0]} {words.split()[1]}: {name} as a {spoil.__name__}", words, (name,), make(name, spoil))
    for words, make, names, spoil in ENDLESS
    for name in names
]
