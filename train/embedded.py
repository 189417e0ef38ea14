"""Training of the embedded models: the target, grown from a small one, and the drafts, distilled on its own text.

Stages save to a work folder and are skipped when their file is there. Steps and seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from draftsmith.data.store.files import write_tensors
from draftsmith.modules.layers import LlamaConfig, LlamaModel
from draftsmith.train.language_model import (
    Recipe,
    TokenRow,
    batches,
    distillation_loss,
    evaluate,
    fit,
    grow,
    init_weights,
    next_token_loss,
)

MAX_POSITION = 1024
Log = Callable[[str], None]


@dataclass(frozen=True)
class Draft:
    """How a draft is made.

    start: training on the corpus, before distillation; None takes the first layers of the target's seedling.
    distil: training on what the target answers.
    """

    num_layers: int
    start: Recipe | None
    distil: Recipe


# Name -> (layers, recipe). Each grows from the one before: depth is cheap to add once the rest has learned to copy.
TARGET_STAGES = {
    "seedling": (2, Recipe(steps=3600, min_lr_fraction=0.2, seed=1)),
    "sapling": (6, Recipe(steps=900, decay_from=1.0 - 1e-9, lr=3e-3, seed=2)),
    "target": (12, Recipe(steps=900, decay_from=0.3, lr=3e-3, min_lr_fraction=0.03, seed=3)),
}
# The two-layer draft stops early on purpose: trained as long as the target's seedling, two layers come to agree with
# 99 % of its tokens, which no draft of a real model does, and leave nothing to measure.
DRAFTS = {
    "draft": Draft(
        2,
        start=Recipe(steps=1300, decay_from=0.75, min_lr_fraction=0.1, seed=1),
        distil=Recipe(steps=100, lr=5e-4, warmup=10, decay_from=0.1, min_lr_fraction=0.03, seed=4),
    ),
    "draft-small": Draft(
        1, start=None, distil=Recipe(steps=400, lr=3e-3, decay_from=0.1, min_lr_fraction=0.03, seed=5)
    ),
}


def architecture(vocab_size: int, num_layers: int) -> LlamaConfig:
    """Llama with tied embeddings; narrow and deep, so that a draft of few layers is cheap beside it."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        max_position=MAX_POSITION,
        tie_embeddings=True,
    )


def train_target(
    work: Path, rows: Sequence[TokenRow], dev: Sequence[TokenRow], vocab_size: int, pad: int, seed: int, log: Log
) -> LlamaModel:
    """seedling -> sapling -> target."""
    model: LlamaModel | None = None
    for name, (num_layers, recipe) in TARGET_STAGES.items():
        if model is None:
            model = LlamaModel(architecture(vocab_size, num_layers))
            init_weights(model, seed)
        else:
            model = grow(model, num_layers, seed + num_layers)
        path = work / f"{name}.safetensors"
        if not path.exists():
            report = _reporter(name, recipe, model, dev, pad, log)
            fit(model, batches(rows, recipe, pad), recipe, next_token_loss, report)
            save_weights(model, path)
        load_weights(model, path)
    assert model is not None
    return model


def train_draft(
    name: str,
    work: Path,
    target: LlamaModel,
    rows: Sequence[TokenRow],
    own_text: Sequence[TokenRow],
    dev: Sequence[TokenRow],
    pad: int,
    seed: int,
    log: Log,
) -> LlamaModel:
    """A draft that knows the language from `rows` or from the seedling, distilled on text that the target wrote."""
    plan = DRAFTS[name]
    draft = LlamaModel(architecture(target.config.vocab_size, plan.num_layers))
    path = work / f"{name}.safetensors"
    if not path.exists():
        start = work / ("seedling.safetensors" if plan.start is None else f"{name}-start.safetensors")
        if plan.start is not None and not start.exists():
            init_weights(draft, seed)
            report = _reporter(f"{name}, start,", plan.start, draft, dev, pad, log)
            fit(draft, batches(rows, plan.start, pad), plan.start, next_token_loss, report)
            save_weights(draft, start)
        load_weights(draft, start)
        report = _reporter(name, plan.distil, draft, dev, pad, log)
        fit(draft, batches(own_text, plan.distil, pad), plan.distil, distillation_loss(target), report)
        save_weights(draft, path)
    load_weights(draft, path)
    return draft


def _reporter(
    name: str, recipe: Recipe, model: LlamaModel, dev: Sequence[TokenRow], pad: int, log: Log
) -> Callable[[int, float], None]:
    """Logs the loss every 50 steps, and the held-out loss every 500 and at the end."""

    def report(step: int, loss: float) -> None:
        if step % 50 == 0:
            log(f"{name} step {step}/{recipe.steps} loss {loss:.4f}")
        if step % 500 == 499 or step == recipe.steps - 1:
            held_out, top1 = evaluate(model, dev, pad)
            log(f"{name} step {step + 1}: held-out loss {held_out:.4f}, top-1 {top1:.4f}")

    return report


def save_weights(model: LlamaModel, path: Path) -> None:
    """One safetensors file, complete or absent."""
    write_tensors(path, {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})


def load_weights(model: LlamaModel, path: Path) -> None:
    """Inverse of `save_weights`. Layers that `model` lacks are left out; the tied lm_head follows the embedding."""
    model.load_state_dict({k: v for k, v in load_file(path).items() if k in model.state_dict()}, strict=False)
