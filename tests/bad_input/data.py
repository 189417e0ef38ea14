"""Prompts as they are found, templates that do not fit, values that are no numbers, and servers that are none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from bad_input.row import Ground, Row
from safetensors.torch import load_file, save_file

from draftsmith.launch.cli import main
from draftsmith.modules.pretrained.provenance import file_sha256

Make = Callable[[Ground, Path], dict[str, object]]
GOOD = b'{"id": "a", "prompt": "Hi"}\n'


def file(content: bytes, name: str = "x.jsonl") -> Make:
    def make(ground: Ground, folder: Path) -> dict[str, object]:
        (folder / name).write_bytes(content)
        return {"file": folder / name}

    return make


TURNS = [
    {"role": "user", "content": "Explain."},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Why?"},
]


def conversations(ground: Ground, tmp: Path) -> dict[str, object]:
    """Prompts of two turns, with a template that is a copy of the tokenizer's own and then disappears."""
    source, template, made = tmp / "chats.jsonl", tmp / "template.jinja", tmp / "made"
    source.write_text(json.dumps({"messages": TURNS}) + "\n")
    template.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>")
    words = f"data prompts --source {source} --target {ground.target} --chat-template {template} --output {made}"
    assert main(words.split()) == 0
    template.rename(tmp / "moved.jinja")
    (tmp / "other.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return {"made": made, "source": source}


def templates(ground: Ground, tmp: Path) -> dict[str, object]:
    """A template that loses the user's words."""
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (parts := tmp / "parts.jinja").write_text(said.replace("m.content", "m.content[0].text"))
    return {"parts": parts}


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


def beyond_the_vocabulary(ground: Ground, to: Path) -> dict[str, object]:
    """A copy of responses in which one row has an id that no token has: `{d}`."""
    directory = ground.copy("responses", to)
    file = next(directory.glob("*.parquet"))
    table = pq.read_table(file)
    rows = table.to_pylist()
    rows[1]["input_ids"][0] = 999_999
    pq.write_table(table.from_pylist(rows, table.schema), file)
    rehash(directory, file)
    return {"d": directory}


PROMPTS = "data prompts --source {file} --target {target} --output {out} "
CHATS = PROMPTS.replace("{file}", "{chats}")
SERVER = "data responses --engine openai --prompts {prompts} --target {target} --output {out} --server.retries 0 "
AGAIN = "data responses --prompts {made} --target {target} --output {out}"
DECODE = "decode Hi --target {target} --method "
PAIR = "--target {target} --draft {broken} --output {out} "
BENCH = "eval bench " + PAIR + "--prompts {chats} --methods spec:k=2 --repeats 1 "
LABELS = "data acceptance " + PAIR + "--responses {responses} "
ASK = "data responses --prompts {prompts} --target {broken} --output {out} "
TRAIN = "train eagle --target {target} --output {out} --max-steps 2 --tau-prompts 0 "
DRAFT, HEAD, TARGET = ("draft: found", "position"), ("eagle: found", "position"), ("target: found",)
HERE = "prompt on the command line"
ROWS = [
    # Files of prompts, and templates.
    Row("prompts: no JSON", PROMPTS, ("x.jsonl, line 2", "not JSON"), file(GOOD + b"{")),
    Row("a file of nothing usable", PROMPTS + "--invalid drop", ("dropped 2: invalid 2",), file(b'{"prompt": 1}\n{')),
    Row("columns that nobody knows", PROMPTS, ("question", "--columns"), file(b'{"question": "a"}')),
    Row("no such split", PROMPTS + "--split dev", ("no rows with split dev",), file(b'{"prompt": "a", "split": "b"}')),
    Row("an id twice", PROMPTS, ("x.jsonl, line 2", "x.jsonl, line 1", "'a'"), file(GOOD + GOOD)),
    Row("a template that fails", PROMPTS + "--chat-template {tmp}/t", ("line 1", "chat template", "TypeError"),
        lambda ground, folder: {**file(b"{{ 1 + messages }}", "t")(ground, folder), **file(GOOD)(ground, folder)}),
    Row("server: a password in the address", SERVER + "--server.url http://me:secret@127.0.0.1:9/v1",
        ("server.url", "found an address with @", "no user, password or query")),
    Row("decode: half of a surrogate pair", "decode a\udce9 --target {target} --method ar", ("prompt", "surrogate")),
    Row("a template that reads lists of parts only", CHATS + "--chat-template {parts}",
        ("parts.jinja", "the user's words", "--chat-template"), templates),
    Row("another template for later turns", AGAIN + " --chat-template {tmp}/other.jinja", ("chat_template",),
        conversations),
    Row("end tokens that a server cannot ignore",
        "data responses --prompts {prompts} --target {target} --output {out} --engine openai --server.dialect openai "
        "--ignore-eos", ("ignore_eos",)),
    # Ids and numbers.
    Row("an id beyond the vocabulary", "data features --target {target} --output {out} --responses {d}",
        ("input_ids", "found 999999"), beyond_the_vocabulary),
    Row("draft, sampled", DECODE + "spec:k=3 --draft {broken} --temperature 1", (*DRAFT, HERE), broken("draft")),
    Row("target", "decode Hi --target {broken}", (*TARGET, HERE, "position"), broken("target")),
    Row("responses", ASK, (*TARGET, "position", "row-"), broken("target")),
    Row("features", "data features --responses {texts} --target {broken} --output {out}",
        (*TARGET, "hidden states at position 0", "first"), supervised),
    Row("labels of rounds", LABELS + "--labels rollout", (*DRAFT, "row-"), broken("draft")),
    Row("stored features", TRAIN + "--data {spoiled}", (".safetensors", "row-1, position 2"), spoiled_features),
    Row("a key that YAML reads as true", "decode Hi --target {target} --config {yaml}", ("key", "True", "c.yaml"),
        lambda ground, to: {"yaml": to / "c.yaml", "x": (to / "c.yaml").write_text("server:\n  true: 2")}),
]  # fmt: skip
