"""Devices that are not there, and model directories that are no models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_input.row import Ground, Row

PAIR = "--target {target} --draft {draft} "
DEVICES = {
    "decode": "decode Hi --target {target} --method ar ",
    "data features": "data features --responses {responses} --target {target} --output {out} ",
    "eval bench": "eval bench " + PAIR + "--prompts {chats} --output {out} ",
    "check": "check {eagle} --format vllm --target {target} ",
}
ROWS = [Row(f"{name} on cuda", words + "--device cuda", ("device", "cuda")) for name, words in DEVICES.items()]
ROWS += [
    Row(f"a device like {device}", DEVICES["decode"] + f"--device {device}", ("device", device))
    for device in ("toaster", "meta", "cpu:3", "cuda:x")
]
ROWS += [
    Row("train on no GPU", "train eagle --data {features} --target {target} --output {out} --accelerator gpu",
        ("CUDA",)),
    Row("train on a toaster", "train eagle --data {features} --target {target} --output {out} --accelerator toaster",
        ("accelerator", "toaster")),
]  # fmt: skip


def spoiled(spoil: Callable[[Path], object]) -> Callable[[Ground, Path], dict[str, object]]:
    """A copy of the target with something changed, as `{model}`."""

    def make(ground: Ground, folder: Path) -> dict[str, object]:
        model = ground.copy("target", folder)
        spoil(model)
        return {"model": model}

    return make


def setting(file: str = "config.json", **values: Any) -> Callable[[Path], object]:
    def spoil(model: Path) -> None:
        raw = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps({**raw, **values}))

    return spoil


def text(file: str, content: str) -> Callable[[Path], object]:
    return lambda model: (model / file).write_text(content)


def without(pattern: str) -> Callable[[Path], object]:
    return lambda model: [file.unlink() for file in model.glob(pattern)]


def bin_only(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def adapter_beside(model: Path) -> None:
    text("adapter_config.json", '{"base_model_name_or_path": "gpt2"}')(model)


DECODE = "decode Hi --target {model} --method ar"
MODELS: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("no tokenizer", without("tokenizer*"), ("tokenizer", "without tokenizer files")),
    ("a damaged tokenizer", text("tokenizer.json", '{"model": {'), ("tokenizer", "JSONDecodeError")),
    ("an unknown model type", setting(model_type="zebra"), ("model", "zebra")),
    ("a width of a billion", setting(hidden_size=10**9), ("hidden_size", "1000000000")),
    ("heads that do not divide", setting(num_key_value_heads=3), ("num_key_value_heads: found 3",)),
    ("text for a width", setting(hidden_size="32"), ("hidden_size", '"32"')),
    ("a rope theta of zero", setting(rope_parameters={"rope_type": "default", "rope_theta": 0}), ("rope_theta", "0")),
    ("yarn without a factor", setting(rope_parameters={"rope_type": "yarn"}), ("rope_parameters", "factor")),
    ("a text eos id", setting("generation_config.json", eos_token_id="</s>"), ("eos_token_id", "</s>")),
    ("a config that is no text", lambda model: (model / "config.json").write_bytes(b"\xff\xfe"), ("config.json",)),
    ("no config", without("config.json"), ("without config.json",)),
    ("pickled weights only", bin_only, ("without safetensors",)),
    ("damaged weights", text("model.safetensors", "no"), ("model.safetensors", "damaged")),
    ("an adapter beside a model", adapter_beside, ("PEFT", "merge_and_unload")),
]  # fmt: skip
ROWS += [Row(id, DECODE, says, spoiled(spoil)) for id, spoil, says in MODELS]
ROWS += [
    Row("int8 on the hf engine", DEVICES["decode"] + "--target-precision int8 --engine hf", ("precision", "hf engine")),
    Row("bits that are not offered", DEVICES["decode"] + "--target-precision int3", ("target-precision", "int3")),
    Row("a text eos id in data", "data responses --prompts {prompts} --target {model} --output {out}",
        ("eos_token_id",), spoiled(setting("generation_config.json", eos_token_id="</s>"))),
    Row("a text context in data", "data prompts --source {chats} --target {model} --output {out}",
        ("max_position_embeddings",), spoiled(setting(max_position_embeddings="long"))),
    Row("a path that is not there", "decode Hi --target ./no/model --method ar", ("no directory ./no/model",)),
]  # fmt: skip
