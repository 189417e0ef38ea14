"""Prepare a base model and its texts for gemma3-270m.sh.

A GGUF file of an architecture that Draftsmith does not read becomes a directory as transformers saves it. Of
conversations the beginnings of answers are kept, for a model that continues text.

`python benchmarks/base_model.py --files FILE.gguf --output DIR`, or FILES.jsonl of conversations (ShareGPT's form).
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.launch.cli import main_of
from draftsmith.modules.pretrained.files import make_directory, whole, write_json, write_tensors, write_text

WORDS = 16  # of an answer, which the model continues
HELD_OUT = 10  # one answer of so many is in test.jsonl


@dataclass(frozen=True)
class BaseModelConfig:
    """Prepares a base model, or text for it.

    Attributes:
        files: A GGUF file, a directory with the parts of one, or files of conversations, separated by
            commas.
        output: Directory of the model, or of train.jsonl and test.jsonl.
    """

    files: str
    output: Path = field(kw_only=True)


def run(config: BaseModelConfig) -> Path:
    """Write the model's directory, or both splits of the beginnings of texts."""
    make_directory(config.output)
    files = [Path(name) for name in config.files.split(",")]
    file = files[0]
    if file.is_dir():
        parts = sorted(file.glob("**/*.gguf.part*"), key=lambda part: part.name)
        with whole(file := config.output / "model.gguf") as temporary:
            temporary.write_bytes(b"".join(part.read_bytes() for part in parts))
    if file.suffix == ".gguf":
        dequantize(file, config.output)
        return config.output
    answers = (json.loads(line)["conversations"][1]["value"] for file in files for line in file.open(encoding="utf-8"))
    rows: dict[str, list[str]] = {"train": [], "test": []}
    for answer in dict.fromkeys(answers):
        words = answer.split(" ")
        if len(words) >= 2 * WORDS:
            # By its content, so that a text of two files is in one split.
            held_out = int(hashlib.sha256(answer.encode()).hexdigest(), 16) % HELD_OUT == 0
            rows["test" if held_out else "train"].append(" ".join(words[:WORDS]))
    for split, texts in rows.items():
        random.Random(0).shuffle(texts)
        lines = (json.dumps({"id": f"{split}-{i}", "prompt": text}) for i, text in enumerate(texts))
        write_text(config.output / f"{split}.jsonl", "\n".join(lines) + "\n")
    return config.output


def dequantize(file: Path, output: Path) -> None:
    """Write config.json, the weights in float32 and the tokenizer."""
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers takes the model for a quantized one, which it does not save.
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    tied = model.config.tie_word_embeddings
    weights = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    write_tensors(output / "model.safetensors", weights, {"format": "pt"})
    write_json(output / "config.json", config | {"architectures": [type(model).__name__], "dtype": "float32"})
    model.generation_config.save_pretrained(output)
    AutoTokenizer.from_pretrained(**source).save_pretrained(str(output))


if __name__ == "__main__":
    sys.exit(main_of(BaseModelConfig, run))
