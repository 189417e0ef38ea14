"""`python benchmarks/embedded/mtp_rates.py --output runs/mtp-rates`: learning rates for a trained MTP module.

A module for the prose target learns from its answers until little is left to gain. Then it is trained on, from few
answers: on the same kind of prompts, on another (code), and for a target that was tuned on code since. Each rate starts
from the same weights, and tau is read along the target's answers to test prompts that no training has seen. The target
is a Llama, and its module has a Qwen3.5 layer of the target's sizes, as no Llama ships one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from draftsmith.benchmarks.embedded import families
from draftsmith.benchmarks.embedded.build import fitting, read_prompts
from draftsmith.benchmarks.embedded.language_model import Recipe
from draftsmith.benchmarks.measured import describe_run
from draftsmith.data.console import log_note
from draftsmith.data.engines.own import set_threads
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.launch.cli import main_of
from draftsmith.launch.python import run as command
from draftsmith.modules.along import Answer, TargetText, along_head, read
from draftsmith.modules.drafters.branches import as_decoding
from draftsmith.modules.drafters.mtp import MtpConfig, MtpHead
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.heads import load_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.shape import plain_shape
from draftsmith.modules.types import SamplingParams

GREEDY, DEPTH, RESAMPLES = SamplingParams(), 3, 2000
PROSE, TUNED = "embedded:prose/target", "tuned"
TUNING = Recipe(steps=50, tokens_per_step=1024, lr=1e-3, warmup=5, decay_from=1.0 - 1e-9, prompt_weight=0.3)
# Case -> target, prompts to train on, test prompts.
CASES = {
    "same": (PROSE, "prose-few", "prose-test"),
    "other": (PROSE, "code-few", "code-test"),
    "stale": (TUNED, "code-few", "code-test"),
}
# Sizes of a target that its module's layer takes.
SIZES = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
}
SIZES |= {name: name for name in ("hidden_size", "vocab_size", "intermediate_size", "head_dim")}


@dataclass(frozen=True)
class RatesConfig:
    """Trains an MTP module on at several learning rates.

    Attributes:
        output: Directory that receives data, module, runs and rates.json.
        cases: Which ones of same, other and stale, separated by commas.
        rates: Learning rates, separated by commas.
        seeds: Trainings of each: 0, 1, ...
        answers: That a module is trained on from.
        module_answers: That the module learned from before.
        module_steps: Optimizer steps of the module before.
        options: Further options of `train mtp` as JSON.
        name: Of the runs, beside others with other options.
        test_prompts: To read tau along.
    """

    output: Path
    cases: str = ",".join(CASES)
    rates: str = "1e-5,2e-5,5e-5,1e-4,3e-4,1e-3,3e-3"
    seeds: int = 2
    answers: int = 600
    module_answers: int = 1000
    module_steps: int = 450
    options: str = "{}"
    name: str = "default"
    test_prompts: int = 64


def run(config: RatesConfig) -> Path:
    """Make what is missing, and write rates.json."""
    set_threads(1)
    modules_for_llamas()
    make_directory(config.output)
    write_prompts(config)
    start = module(config)
    rows, began = [], time.process_time()
    for case in config.cases.split(","):
        name, few, test = CASES[case]
        model = tuned(config) if name == TUNED else name
        data, target = features(config, model, few), load_lm(model)
        texts = test_texts(target, responses(config, model, test))
        old = counts(target, start, texts)
        for rate in config.rates.split(","):
            for seed in range(config.seeds):
                output = config.output / "runs" / config.name / f"{case}-{rate}-{seed}"
                options: dict[str, Any] = {
                    "lr": float(rate),
                    "seed": seed,
                    "init": str(start),
                    **json.loads(config.options),
                }
                command(
                    "train mtp",
                    data=str(data),
                    target=model,
                    output=str(output),
                    loggers=["csv"],
                    num_threads=1,
                    keep=1,
                    **options,
                )
                row = {"case": case, "lr": rate, "seed": seed, "old": old.tolist()}
                row |= {name: counts(target, output / name, texts).tolist() for name in ("best", "last")}
                row["step"] = json.loads((output / "training.json").read_text())["best"]["step"]
                rows.append(row)
                log_note(f"{case} {rate} {seed}: {line([row])}; {time.process_time() - began:.0f} CPU s")
    write_json(config.output / f"{config.name}.json", {"meta": describe_run(config), "rows": rows})
    for case in config.cases.split(","):
        for rate in config.rates.split(","):
            print(f"{case} {rate}: {line([row for row in rows if (row['case'], row['lr']) == (case, rate)])}")
    return config.output


def write_prompts(config: RatesConfig) -> None:
    """Write files of prompts that do not overlap."""
    for name, path in {
        "prose": families.PROSE / "prompts.jsonl",
        "code": families.PROSE.parent / "prompts.jsonl",
    }.items():
        lines = [json.loads(text) for text in path.read_text("utf-8").splitlines()]
        parts = {split: [row for row in lines if row["split"] == split] for split in ("train", "test")}
        most, train = (
            parts["train"][part] for part in (slice(config.module_answers), slice(config.module_answers, None))
        )
        for rows in (train, parts["test"]):
            random.Random(0).shuffle(rows)
        few, test = train[: config.answers], parts["test"][: config.test_prompts]
        for part, rows in {"few": few, "test": test, "most": most}.items():
            text = "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows)
            write_text(config.output / f"{name}-{part}.jsonl", text)


def tuned(config: RatesConfig) -> str:
    """Return the target after 50 more steps, on code."""
    path = config.output / TUNED
    if not (path / "tokenizer_config.json").exists():
        directory = families.PROSE / "target"
        tokenizer, model = AutoTokenizer.from_pretrained(directory), LlamaForCausalLM.from_pretrained(directory).float()
        turns = read_prompts(families.PROSE.parent / "prompts.jsonl")
        rows = fitting([turn for turn in turns if turn.split == "train"], tokenizer)
        families.stage(model, rows, config.output / "tuned.safetensors", TUNING)
        families.save(model, tokenizer, path)
    return str(path)


def modules_for_llamas() -> None:
    """Let Llamas have modules, with a layer of Qwen3.5's kind."""
    head: Any = MtpHead
    of_families = head.new_config

    def new_config(settings: MtpSettings, target: LlamaConfig) -> MtpConfig:
        sizes = {theirs: getattr(target, ours) for ours, theirs in SIZES.items()}
        return of_families(settings, plain_shape({"model_type": "qwen3_5_text", "num_hidden_layers": 1, **sizes}))

    head.new_config, head.start = new_config, lambda own, weights: None


def place(config: RatesConfig, target: str) -> Path:
    return config.output / (TUNED if target.endswith(TUNED) else "prose") / "data"


def responses(config: RatesConfig, target: str, name: str) -> Path:
    """Return the target's greedy answers to a file of prompts."""
    root = place(config, target)
    prompts, output = root / f"{name}-prompts", root / f"{name}-responses"
    source = str(config.output / f"{name}.jsonl")
    command("data prompts", source=source, split="none", target=target, overlong="drop", output=str(prompts))
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 48, "batch_size": 64, "num_threads": 1}
    command("data responses", data=str(prompts), target=target, output=str(output), **options)
    return output


def features(config: RatesConfig, target: str, name: str) -> Path:
    """Return the target's states along these answers."""
    data, output = responses(config, target, name), place(config, target) / name
    command("data features", data=str(data), drafter="mtp", target=target, num_threads=1, output=str(output))
    return output


def module(config: RatesConfig) -> Path:
    """Return the module that was trained before."""
    data, output = features(config, PROSE, "prose-most"), config.output / "module"
    options: dict[str, Any] = {"max_steps": config.module_steps, "val_every": 150, "loggers": ["csv"], "num_threads": 1}
    command("train mtp", config="mtp-embedded", data=str(data), target=PROSE, output=str(output), **options)
    return output / "best"


def test_texts(target: CausalLM, data: Path) -> list[TargetText]:
    """Read the answers to the test prompts."""
    texts, manifest = [], Manifest.read(data)
    with as_decoding(target.device):
        for row in Rows(manifest, ["input_ids", "loss_mask"], vocab_size=target.info.vocab_size).iterate():
            ids, begin = list(row["input_ids"]), list(row["loss_mask"]).index(True)
            texts.append(read(target, ids, [Answer(begin, len(ids), begin + 48)], GREEDY, ()))
    return texts


def counts(target: CausalLM, head: Path, texts: Sequence[TargetText]) -> np.ndarray:
    """Return tokens and target calls by prompt [N, 2]."""
    loaded: Any = load_head(head)  # the one of before the target was tuned, too
    with as_decoding(target.device):
        along = along_head(DEPTH, loaded.net(target), loaded.config.max_position, shorter=False)
        walks = [along.walk(text, [DEPTH])[0][0] for text in texts]
    return np.array([[walk.num_tokens, float(walk.calls[-1])] for walk in walks])


def line(rows: Sequence[dict[str, Any]]) -> str:
    """Format tau before, and of best/ and last/ in units of that with intervals over prompts, in the mean of seeds."""
    old = np.array(rows[0]["old"])
    drawn = np.random.default_rng(0).integers(len(old), size=(RESAMPLES, len(old)))

    def tau(of: np.ndarray, places: Any = slice(None)) -> Any:
        total = of[places].sum(-2)
        return total[..., 0] / total[..., 1]

    parts = [f"tau {tau(old):.3f}"]
    for name in ("best", "last"):
        runs = [np.array(row[name]) for row in rows]
        ratio = np.mean([tau(own) for own in runs]) / tau(old)
        spread = np.quantile(np.mean([tau(own, drawn) for own in runs], 0) / tau(old, drawn), [0.025, 0.975])
        parts.append(f"{name} {ratio:.3f} ({spread[0]:.3f}-{spread[1]:.3f})")
    return ", ".join([*parts, f"step {[round(row['step']) for row in rows]}"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main_of(RatesConfig, run))
