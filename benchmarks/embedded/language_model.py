"""Training of the small language models that ship with the package: cross-entropy, growing, distillation.

A plain loop, not Lightning: one device, a few megabytes of weights, steps fixed in advance so that a build can be
repeated. The heads, which users train, go through train/command.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.pretrained.files import write_tensors
from draftsmith.train.optimizers import MuonAdamW


@dataclass(frozen=True)
class TokenRow:
    """A tokenised chat turn. `answer_start` is the index of the first answer token."""

    ids: tuple[int, ...]
    answer_start: int


@dataclass(frozen=True)
class Recipe:
    """One stage of training. tokens_per_step counts padding; prompt_weight is the loss weight of prompt tokens;
    bf16 multiplies matrices in bfloat16, which is faster only where the processor has instructions for it."""

    steps: int
    tokens_per_step: int = 4096
    lr: float = 4e-3
    warmup: int = 50
    min_lr_fraction: float = 0.05
    decay_from: float = 0.4
    weight_decay: float = 0.02
    prompt_weight: float = 0.15
    seed: int = 0
    bf16: bool = False


@dataclass(frozen=True)
class PaddedBatch:
    """Right-padded ids [B, T] and the loss weight of predicting each [B, T] (0 on padding and on position 0)."""

    ids: Tensor
    weights: Tensor


def batches(rows: Sequence[TokenRow], recipe: Recipe, pad: int) -> Iterator[PaddedBatch]:
    """Yield batches of rows of similar length, about `tokens_per_step` tokens each, in an order given by the seed."""
    rng = random.Random(recipe.seed)
    while True:
        order = list(range(len(rows)))
        rng.shuffle(order)
        # Sort by length within blocks: little padding, and still a random order of batches.
        for start in range(0, len(order), 2048):
            block = sorted(order[start : start + 2048], key=lambda i: len(rows[i].ids))
            groups: list[list[int]] = [[]]
            for index in block:
                if (len(groups[-1]) + 1) * len(rows[index].ids) > recipe.tokens_per_step:
                    groups.append([])
                groups[-1].append(index)
            rng.shuffle(groups)
            for group in groups:
                if group:
                    yield collate([rows[i] for i in group], recipe.prompt_weight, pad)


def collate(rows: Sequence[TokenRow], prompt_weight: float, pad: int) -> PaddedBatch:
    """Pad at the right and weigh the tokens."""
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), pad)
    weights = torch.zeros(len(rows), length)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        weights[i, 1 : row.answer_start] = prompt_weight
        weights[i, row.answer_start : len(row.ids)] = 1.0
    return PaddedBatch(ids, weights)


def init_weights(model: LlamaModel, seed: int) -> None:
    """Draw Normal(0, 0.02) matrices; last projections start at zero, so that a layer starts as the identity."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if param.ndim == 2:
            torch.nn.init.normal_(param, 0.0, 0.02 if "embed" in name else param.shape[1] ** -0.5, generator=generator)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(param)


def grow(model: LlamaModel, num_layers: int, seed: int) -> LlamaModel:
    """Return the same function with more layers; new ones, spread between the old, start as identities."""
    config = dataclasses.replace(model.config, num_layers=num_layers)
    grown = LlamaModel(config)
    init_weights(grown, seed)
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("layers.")}
    old = model.config.num_layers
    # Old layer i goes to the end of its share of the new depth; the first stays first, as it reads raw embeddings.
    places = [round(i * (num_layers - 1) / max(old - 1, 1)) for i in range(old)]
    grown.load_state_dict(state, strict=False)
    for i, place in enumerate(places):
        grown.layers[place].load_state_dict(model.layers[i].state_dict())
    return grown


def optimizer(model: Any, recipe: Recipe) -> MuonAdamW:
    """Build Muon for the layers' matrices and AdamW for embeddings and norms."""
    named = dict(model.named_parameters())
    matrices = [name for name, param in named.items() if param.ndim == 2 and "layers." in name]
    others = [param for name, param in named.items() if name not in matrices]
    return MuonAdamW([named[name] for name in matrices], others, recipe.lr, weight_decay=recipe.weight_decay)


def lr_fraction(step: int, recipe: Recipe) -> float:
    """Compute warm-up, constant rate, then linear decay from `decay_from` of the steps to `min_lr_fraction`."""
    warm = min(1.0, (step + 1) / recipe.warmup)
    progress = max(0.0, (step / recipe.steps - recipe.decay_from) / (1 - recipe.decay_from))
    return warm * (1 - (1 - recipe.min_lr_fraction) * progress)


def train_stage(
    path: Path,
    model: Any,
    rows: Sequence[TokenRow],
    recipe: Recipe,
    pad: int,
    loss_of: Callable[[Any, PaddedBatch], Tensor],
    on_step: Callable[[int, float], None],
) -> None:
    """Run a stage's steps and write the weights, or read what was written. `on_step(step, loss)` follows each step."""
    if not path.exists():
        train_steps(model, batches(rows, recipe, pad), recipe, loss_of, on_step)
        write_tensors(path, dict(model.named_parameters()))
    load_weights(path, model)


def load_weights(path: Path, model: Any) -> None:
    """Read a stage's weights, without layers that `model` lacks; a tied lm_head follows the embedding."""
    model.load_state_dict({k: v for k, v in load_file(path).items() if k in model.state_dict()}, strict=False)


def train_steps(
    model: Any,
    data: Iterator[PaddedBatch],
    recipe: Recipe,
    loss_of: Callable[[Any, PaddedBatch], Tensor],
    on_step: Callable[[int, float], None],
) -> None:
    """Run `recipe.steps` optimiser steps."""
    opt = optimizer(model, recipe)
    model.train()
    for step in range(recipe.steps):
        for group in opt.param_groups:
            group["lr"] = recipe.lr * lr_fraction(step, recipe)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
            loss = loss_of(model, next(data))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        on_step(step, loss.item())
    model.eval()


def next_token_loss(model: LlamaModel, batch: PaddedBatch) -> Tensor:
    """Compute weighted cross-entropy per weighted token; logits only where a weight is not zero."""
    features = model.features(batch.ids[:, :-1])
    weights = batch.weights[:, 1:]
    chosen = weights > 0
    losses = F.cross_entropy(model.lm_head(features[chosen]), batch.ids[:, 1:][chosen], reduction="none")
    return (losses * weights[chosen]).sum() / weights.sum()


def distillation_loss(teacher: LlamaModel) -> Callable[[LlamaModel, PaddedBatch], Tensor]:
    """Return soft cross-entropy against the teacher's distribution on answer tokens (Hinton et al. 2015), per token.

    With the answers sampled from the teacher this is the on-policy objective whose optimum maximises acceptance.
    """

    def loss_of(model: LlamaModel, batch: PaddedBatch) -> Tensor:
        chosen = batch.weights[:, 1:] >= 1.0
        with torch.no_grad():
            target_prob = teacher.lm_head(teacher.features(batch.ids[:, :-1])[chosen]).softmax(-1)
        draft_logits = model.lm_head(model.features(batch.ids[:, :-1])[chosen])
        return F.cross_entropy(draft_logits, target_prob)

    return loss_of


@torch.no_grad()
def evaluate(model: LlamaModel, rows: Sequence[TokenRow], pad: int, max_batches: int = 20) -> tuple[float, float]:
    """Compute held-out loss per answer token, and the share of answer tokens that are the argmax."""
    recipe = Recipe(steps=0, prompt_weight=0.0, seed=1)
    losses = hits = count = 0.0
    for _, batch in zip(range(max_batches), batches(rows, recipe, pad), strict=False):
        chosen = batch.weights[:, 1:] > 0
        logits = model.lm_head(model.features(batch.ids[:, :-1])[chosen])
        labels = batch.ids[:, 1:][chosen]
        losses += F.cross_entropy(logits, labels, reduction="sum").item()
        hits += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    return losses / count, hits / count
