"""Training of the embedded models: batching, growth and its losses."""

from __future__ import annotations

import itertools

import torch

from draftsmith.benchmarks.embedded.language_model import (
    Recipe,
    TokenRow,
    batches,
    collate,
    grow,
    init_weights,
    next_token_loss,
    train_steps,
)
from draftsmith.modules.layers import LlamaConfig, LlamaModel

CONFIG = LlamaConfig(40, 16, 24, 2, 2, 2, 8, 64, tie_embeddings=True)
ROWS = [TokenRow(tuple((i + j) % 39 + 1 for j in range(4 + i % 7)), 2) for i in range(50)]


def model(seed: int = 0) -> LlamaModel:
    made = LlamaModel(CONFIG)
    init_weights(made, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, param in made.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # zeros at the start: no test of anything
            torch.nn.init.normal_(param, 0, 0.2, generator=generator)
    return made


def test_growing_keeps_the_function():
    small = model()
    ids = torch.randint(1, 40, (2, 12))
    # Identity layers add exact zeros to the residual stream; another order of operations is all that may differ.
    torch.testing.assert_close(grow(small, 5, seed=3)(ids), small(ids), atol=1e-5, rtol=0)


def test_an_epoch_holds_every_row_once_and_order_follows_the_seed():
    recipe = Recipe(steps=1, tokens_per_step=30, seed=5)
    first = list(itertools.islice(batches(ROWS, recipe, 0), 40))
    again = list(itertools.islice(batches(ROWS, recipe, 0), 40))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    seen: list[tuple[int, ...]] = []
    for batch in first:
        seen += [tuple(token for token in row if token) for row in batch.ids.tolist()]
        assert batch.ids.numel() <= 30
        if len(seen) >= len(ROWS):
            break
    assert sorted(seen) == sorted(row.ids for row in ROWS)


def test_loss_is_the_weighted_mean_over_tokens():
    batch = collate(ROWS[:4], prompt_weight=0.25, pad=0)
    net = model()
    total = weight = 0.0
    for row in ROWS[:4]:
        logp = net(torch.tensor([row.ids])).double().log_softmax(-1)[0]
        for position in range(1, len(row.ids)):
            w = 1.0 if position >= row.answer_start else 0.25
            total += -w * logp[position - 1, row.ids[position]].item()
            weight += w
    torch.testing.assert_close(next_token_loss(net, batch).item(), total / weight, atol=1e-5, rtol=0)


def test_fit_learns_and_repeats():
    def train() -> list[float]:
        losses: list[float] = []
        recipe = Recipe(steps=40, tokens_per_step=120, lr=1e-2, warmup=5)
        train_steps(model(), batches(ROWS, recipe, 0), recipe, next_token_loss, lambda step, loss: losses.append(loss))
        return losses

    first = train()
    assert first == train()
    assert sum(first[-5:]) < 0.8 * sum(first[:5])
