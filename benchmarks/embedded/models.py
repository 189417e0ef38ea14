"""Training of the embedded models: the target, grown from a small one, and the drafts, distilled on its own text.

Stages save to a work folder and are skipped when their file is there. Steps and seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from draftsmith.benchmarks.embedded.domains import Domain
from draftsmith.benchmarks.embedded.language_model import (
    PaddedBatch,
    Recipe,
    TokenRow,
    distillation_loss,
    evaluate,
    grow,
    init_weights,
    load_weights,
    next_token_loss,
    train_stage,
)
from draftsmith.modules.layers import LlamaModel

Log = Callable[[str], None]
LossOf = Callable[[LlamaModel, PaddedBatch], Tensor]


@dataclass(frozen=True)
class Builder:
    """Trains the shipped models in a work folder. dev: held-out rows, of which a stage says how well it knows them."""

    domain: Domain
    work: Path
    dev: Sequence[TokenRow]
    pad: int
    seed: int
    log: Log

    def target(self, rows: Sequence[TokenRow], shipped: Sequence[TokenRow], vocab_size: int) -> LlamaModel:
        """Run the stages one after the other. shipped: the rows of the shipped prompts."""
        model: LlamaModel | None = None
        for name, (num_layers, recipe) in self.domain.target_stages.items():
            if model is None:
                model = LlamaModel(self.domain.shape.config(vocab_size, num_layers))
                init_weights(model, self.seed)
            else:
                model = grow(model, num_layers, self.seed + num_layers)
            self._stage(name, model, recipe, rows, next_token_loss)
        assert model is not None
        if self.domain.by_heart is not None:
            self._stage("by-heart", model, self.domain.by_heart, shipped, next_token_loss)
        return model

    def draft(
        self, name: str, target: LlamaModel, rows: Sequence[TokenRow], own_text: Sequence[TokenRow]
    ) -> LlamaModel:
        """Train a draft on `rows` or from the seedling, then distil it on text that the target wrote."""
        plan = self.domain.drafts[name]
        draft = LlamaModel(self.domain.shape.config(target.config.vocab_size, plan.num_layers))
        if plan.start is None:
            load_weights(self._path("seedling"), draft)
        elif not self._path(name).exists():
            init_weights(draft, self.seed)
            self._stage(f"{name}-start", draft, plan.start, rows, next_token_loss)
        self._stage(name, draft, plan.distil, own_text, distillation_loss(target))
        return draft

    def _stage(self, name: str, model: LlamaModel, recipe: Recipe, rows: Sequence[TokenRow], loss_of: LossOf) -> None:
        """Run a stage; print the loss every 50 steps, the held-out one every 500 and at the end."""

        def report(step: int, loss: float) -> None:
            if step % 50 == 0:
                self.log(f"{name} step {step}/{recipe.steps} loss {loss:.4f}")
            if step % 500 == 499 or step == recipe.steps - 1:
                held_out, top1 = evaluate(model, self.dev, self.pad)
                self.log(f"{name} step {step + 1}: held-out loss {held_out:.4f}, top-1 {top1:.4f}")

        train_stage(self._path(name), model, rows, recipe, self.pad, loss_of, report)

    def _path(self, name: str) -> Path:
        return self.work / f"{name}.safetensors"
