"""Steps of both trainers on the same stored states of a target of random weights: seconds, tokens, memory. On a GPU the
target has the width of Llama 3 8B, elsewhere a tiny one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.benchmarks.measured import Measured
from draftsmith.benchmarks.peers.compare import CompareConfig, record_of, write_states
from draftsmith.benchmarks.synthetic import SHAPES, random_weights
from draftsmith.launch.cli import main
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.hub import resolve_model

# Their layers are read by the head, or are only there; the tokenizer is that of `embedded:target`.
LAYERS = {"num_hidden_layers": 3, "max_position_embeddings": 8192}
WIDE = {**SHAPES["llama-3-8b"], **LAYERS}
TINY = {**SHAPES["tiny"], **LAYERS, "vocab_size": 2048, "hidden_size": 64}
ROPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
# Texts, of which one is held out; their tokens; tokens of a step; those that EAGLE-3 drafts; blocks of a step.
SIZES = {"cuda": (17, 2000, 8192, 32000, 512), "cpu": (5, 200, 512, 512, 16)}
WARM_UP, TIMED = 5, 10  # steps


def speeds(output: Path, device: str, speculators: Path) -> Iterator[Measured]:
    """Make a target, texts and states, then train each kind of head by both trainers.

    speculators: Python of an environment that has it.
    """
    texts, tokens, pack, vocab, anchors = SIZES[device]
    dtype = "bfloat16" if device == "cuda" else "float32"
    target = make_target(output / "target", WIDE if device == "cuda" else TINY, getattr(torch, dtype), device)
    write_texts(target, output / "texts.jsonl", texts, tokens)
    command(
        f"data prompts --source {output / 'texts.jsonl'} --supervised --target {target} --output {output / 'prompts'}"
    )
    command(
        f"data features --data {output / 'prompts'} --target {target} --drafter eagle3 --layers 0 1 2 --dtype {dtype} "
        f"--device {device} --output {output / 'features'}"
    )  # fmt: skip
    base = CompareConfig(
        output, str(target), output / "features", output / "prompts", speculators, steps=WARM_UP + TIMED,
        optimizer="adamw", anchors=anchors, pack=pack, vocab=vocab, device="cuda" if device == "cuda" else "cpu",
    )  # fmt: skip
    write_states(base, base.their_states)
    for kind in ("eagle3", "dspark"):
        config = CompareConfig(**{**vars(base), "kind": kind})
        found = {name: train(config, name) for name in ("draftsmith", "speculators")}
        for name, values in found.items():
            for what, value in values.items():
                yield Measured(f"{kind}, {name}: {what}", value)
        ours, theirs = (found[name]["tokens/s"] for name in ("draftsmith", "speculators"))
        yield Measured(f"{kind}, tokens/s: Draftsmith / speculators", ours / theirs, "", ">= 1")


def command(words: str) -> None:
    """Run a command line in this process. Raises RuntimeError if it fails."""
    if main(words.split()):
        raise RuntimeError(words)


def make_target(path: Path, shape: Mapping[str, Any], dtype: torch.dtype, device: str) -> Path:
    """Write a Llama of random weights with the tokenizer of `embedded:target`."""
    raw = {**ROPE, **shape, "tie_word_embeddings": False, "torch_dtype": str(dtype).removeprefix("torch.")}
    own, tokenizer = random_weights(raw, dtype, device), Path(resolve_model("embedded:target"))
    state = {name: tensor.cpu() for name, tensor in own.state.items()}
    save_file(state, make_directory(path) / "model.safetensors", {"format": "pt"})
    special = json.loads((tokenizer / "config.json").read_text())
    write_json(path / "config.json", raw | {name: value for name, value in special.items() if "token_id" in name})
    for file in (*tokenizer.glob("tokenizer*"), *tokenizer.glob("chat_template*")):
        write_text(path / file.name, file.read_text("utf-8"))
    return path


def write_texts(target: Path, path: Path, count: int, tokens: int) -> None:
    """Write chats of one answer with so many tokens, cut from the prompts of `embedded:prompts`."""
    coder = Checkpoint(target).tokenizer
    rows = Path(resolve_model("embedded:prompts")).read_text("utf-8").splitlines()[:1000]
    ids = coder.encode("\n".join(json.loads(row)["prompt"] for row in rows))
    with path.open("w") as file:
        for number in range(count):
            begin = number * tokens % (len(ids) - tokens)
            answer = {"role": "assistant", "content": coder.decode(ids[begin : begin + tokens])}
            messages = [{"role": "user", "content": f"Go on, {number}."}, answer]
            file.write(json.dumps({"id": str(number), "messages": messages}) + "\n")


def train(config: CompareConfig, name: str) -> dict[str, float]:
    """Return what a trainer's steps after the warm-up took."""
    path = make_directory(config.output / f"{config.kind}-{name}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(config.training(name, config.steps, 0, path), env=environment, check=True)
    record = record_of(path)
    seconds, tokens = (record[key][WARM_UP:] for key in ("seconds", "tokens"))
    speed = sum(tokens) / sum(seconds)
    return {"s a step": statistics.median(seconds), "tokens/s": speed, "peak memory in GB": record["peak_mb"] / 1e3}
