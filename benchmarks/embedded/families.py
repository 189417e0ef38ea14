"""`python benchmarks/embedded/families.py --output runs/families`: small trained targets of other families.

Qwen3.5 (layers with recurrent states), gpt-oss (experts, sliding windows, YaRN) and Gemma 4 (softcap, sliding windows,
two rotary bases), of 2 to 3 M weights each, which learn from the shipped prompts of the prose pair in a few CPU
minutes. Their heads are trained on text that a model means, and a server answers with them in seconds. They do not
ship. A stage of the training whose file is there is not repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from draftsmith.benchmarks.embedded.build import fitting, read_prompts
from draftsmith.benchmarks.embedded.language_model import PaddedBatch, Recipe, TokenRow, train_stage
from draftsmith.data.engines.own import set_threads
from draftsmith.launch.cli import main_of
from draftsmith.modules.pretrained.files import make_directory
from draftsmith.modules.types import InputError

PROSE = Path(__file__).parents[2] / "data" / "embedded" / "prose"
# The learning rate of each stage; short ones, so that a killed training loses little.
RATES = (4e-3, 4e-3, 4e-3, 2e-3, 5e-4)
TUNING_RATE = 2e-3
STAGE = Recipe(steps=50, tokens_per_step=1024, warmup=5, decay_from=1.0 - 1e-9, prompt_weight=0.3)
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
}


def qwen3_5(**shape: Any) -> PreTrainedModel:
    """Build a hybrid whose recurrent heads are as wide as vLLM's kernels on a CPU want them, 128."""
    layers = ["linear_attention", "full_attention"] * 4
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "head_dim": 32}
    config = Qwen3_5TextConfig(
        intermediate_size=352, layer_types=layers, full_attention_interval=2, tie_word_embeddings=True, **heads, **shape
    )
    return Qwen3_5ForCausalLM(config)


def gpt_oss(**shape: Any) -> PreTrainedModel:
    """Build a mixture of four experts with YaRN over the positions and windows of 64 tokens in every other layer."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    yarn |= {"original_max_position_embeddings": 256, "rope_theta": 150_000.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
    config = GptOssConfig(head_dim=32, sliding_window=64, rope_parameters=yarn, **experts, **shape)
    return GptOssForCausalLM(config)


def gemma4(**shape: Any) -> PreTrainedModel:
    """Build a dense model with logits capped at 30, wider heads in every fourth layer and windows in the others."""
    layers = [*["sliding_attention"] * 3, "full_attention"] * 2
    config = Gemma4TextConfig(
        head_dim=32,
        global_head_dim=64,
        intermediate_size=352,
        layer_types=layers,
        sliding_window=64,
        final_logit_softcapping=30.0,
        hidden_size_per_layer_input=0,
        **shape,
    )
    return Gemma4ForCausalLM(config)


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {"qwen3_5": qwen3_5, "gpt_oss": gpt_oss, "gemma4": gemma4}


@dataclass(frozen=True)
class FamiliesConfig:
    """Trains small targets of the families qwen3_5, gpt_oss and gemma4.

    Attributes:
        output: Directory that receives a directory for each target, with its tokenizer.
        families: Which ones, separated by commas.
        tuned: Also write NAME-tuned: the target after 50 more steps, on the prompts of the code pair.
        seed: Of the weights and the order of batches.
        num_threads: CPU threads.
    """

    output: Path
    families: str = ",".join(FAMILIES)
    tuned: bool = False
    seed: int = 0
    num_threads: int = 2


def run(config: FamiliesConfig) -> Path:
    """Train whatever is missing."""
    set_threads(config.num_threads)
    names = config.families.split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        raise InputError("families", ", ".join(unknown), f"some of {', '.join(FAMILIES)}", "Change it.")
    make_directory(config.output)
    tokenizer = AutoTokenizer.from_pretrained(str(PROSE / "target"))
    prose, code = (
        fitting([turn for turn in read_prompts(file) if turn.split == "train"], tokenizer)
        for file in (PROSE / "prompts.jsonl", PROSE.parent / "prompts.jsonl")
    )
    for name in names:
        torch.manual_seed(config.seed)
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        model = FAMILIES[name](vocab_size=len(tokenizer), **ends, **SHAPE)
        print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M weights", flush=True)
        for number, rate in enumerate(RATES):
            recipe = replace(STAGE, lr=rate, seed=config.seed + number)
            stage(model, prose, config.output / f"{name}-{number}.safetensors", recipe)
        model.generation_config = GenerationConfig(**ends, do_sample=False)
        save(model, tokenizer, config.output / name)
        if config.tuned:
            recipe = replace(STAGE, lr=TUNING_RATE, seed=config.seed + len(RATES))
            stage(model, code, config.output / f"{name}-tuned.safetensors", recipe)
            save(model, tokenizer, config.output / f"{name}-tuned")
    return config.output


def save(model: PreTrainedModel, tokenizer: Any, directory: Path) -> None:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(str(directory))


def stage(model: PreTrainedModel, rows: list[TokenRow], path: Path, recipe: Recipe) -> None:
    """Train, or read what was trained; print the last loss."""

    def report(step: int, loss: float) -> None:
        if step == recipe.steps - 1:
            print(f"{path.stem}: loss {loss:.3f}", flush=True)

    train_stage(path, model, rows, recipe, model.config.pad_token_id, next_token_loss, report)


def next_token_loss(model: Any, batch: PaddedBatch) -> Tensor:
    """Compute weighted cross-entropy per weighted token. Padding stands behind the rows, so that no mask is needed."""
    weights = batch.weights[:, 1:]
    logits = model(batch.ids[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


if __name__ == "__main__":
    sys.exit(main_of(FamiliesConfig, run))
