"""Models and data with numbers that are none: one line that names the model, the prompt and the place."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

from bad_input.row import Ground, Row
from safetensors.torch import load_file, save_file

from draftsmith.launch.cli import main

INNER = "layers.0.mlp.down_proj.weight"


def spoil(file: Path, tensor: str, number: float = math.nan) -> None:
    """One number of one tensor, by the end of its name."""
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith(tensor)][:1]
    tensors[name].view(-1)[0] = number
    save_file(tensors, file, metadata={"format": "pt"})


def broken(ground: Ground, to: Path, name: str, tensor: str = INNER, number: float = math.nan) -> dict[str, object]:
    """A copy of a model, or of a head whose manifest does not tell, with one number that is none."""
    path = ground.copy(name, to)
    spoil(path / "model.safetensors", tensor, number)
    manifest = path / "manifest.json"
    if manifest.exists():
        kept = json.loads(manifest.read_text())
        del kept["sha256"]
        manifest.write_text(json.dumps(kept))
    return {"broken": path}


def of(name: str, *args: object) -> Callable[[Ground, Path], dict[str, object]]:
    return lambda ground, to: broken(ground, to, name, *args)


def spoiled_features(ground: Ground, to: Path) -> dict[str, object]:
    """Row 1 has a NaN at its third token, and nothing says so."""
    path = ground.copy("features", to)
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["0000001"][2, 0] = math.nan
    save_file(tensors, file)
    manifest = json.loads((path / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == file.name:
            entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
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
    return {"texts": to / "texts", **broken(ground, to, "target")}


DECODE = "decode Hi --target {target} --method "
PAIR = "--target {target} --draft {broken} --output {out} "
BENCH = "eval bench " + PAIR + "--prompts {chats} --methods spec:k=2 --repeats 1 "
LABELS = "data acceptance " + PAIR + "--responses {responses} "
ASK = "data responses --prompts {prompts} --target {broken} --output {out} "
TRAIN = "train eagle --target {target} --output {out} --max-steps 2 --tau-prompts 0 "
DRAFT, HEAD, TARGET = ("draft: found", "position"), ("eagle: found", "position"), ("target: found",)
HERE = "prompt on the command line"
ROWS = [
    Row("draft, sampled", DECODE + "spec:k=3 --draft {broken} --temperature 1", (*DRAFT, HERE), of("draft")),
    Row("M2", DECODE + "hsddw --draft {draft} --mid {broken}", ("mid: found", HERE), of("draft")),
    Row("EAGLE head", DECODE + "eagle --draft {broken}", HEAD, of("eagle")),
    Row("acceptance head", DECODE + "specdec++ --draft {draft} --acceptance {broken}", ("acceptance: found", HERE),
        of("acceptance", "out.weight")),
    Row("target", "decode Hi --target {broken}", (*TARGET, HERE, "position"), of("target")),
    Row("infinity", "decode Hi --target {broken} --temperature 1", TARGET, of("target", "lm_head.weight", math.inf)),
    Row("bench, prompt by prompt", BENCH, (*DRAFT, "row-"), of("draft")),
    Row("responses", ASK, (*TARGET, "position", "row-"), of("target")),
    Row("features", "data features --responses {texts} --target {broken} --output {out}",
        (*TARGET, "hidden states at position 0", "first"), supervised),
    Row("labels", LABELS, (*DRAFT, "row-"), of("draft")),
    Row("labels of rounds", LABELS + "--labels rollout", (*DRAFT, "row-"), of("draft")),
    Row("labels of an EAGLE head", "data acceptance --target {target} --draft {broken} --responses {responses} "
        "--output {out} --labels rollout", (*HEAD, "row-"), of("eagle")),
    Row("stored features", TRAIN + "--data {spoiled}", (".safetensors", "row-1, position 2"), spoiled_features),
    Row("features made in training", TRAIN.replace("target}", "broken}") + "--data {texts} --val-share 0.5",
        (*TARGET, "hidden states", "of prompt"), supervised),
]  # fmt: skip
