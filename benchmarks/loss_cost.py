"""The losses over the vocabulary, alone: against the plain form, and in steps that are logged against others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.benchmarks.pairs import paired_ratio
from draftsmith.eval.cost.clock import interleaved
from draftsmith.modules.drafters.eagle3.loss import Objective, distances
from draftsmith.modules.losses import soft_cross_entropy

TOKENS, PASSES = 1000, 3
REPEATS = 9


def loss_ratios(hidden: int, vocab: int) -> Iterator[tuple[str, float]]:
    """What, and how many times as long it takes as the step that is not logged, gradient included: medians of pairs."""
    rng = torch.Generator().manual_seed(0)
    weight, wanted = torch.randn(vocab, hidden, generator=rng) * 0.1, torch.randn(TOKENS, hidden, generator=rng)
    states = [torch.randn(TOKENS, hidden, generator=rng).requires_grad_() for _ in range(PASSES)]
    ones = torch.ones(PASSES, TOKENS)
    trained = weight.clone().requires_grad_()  # EAGLE-3's lm_head learns too

    def eagle(ranked: bool) -> Tensor:
        return soft_cross_entropy(lambda x: x @ weight.T, wanted, [ones[0]], states[:1], ranked)[0].sum()

    def eagle3(measured: bool) -> Tensor:
        target = lambda part: wanted[part] @ weight.T  # noqa: E731
        return distances(Objective(), target, trained, None, states, ones, measured).totals.sum()

    def plain(lm_head: Tensor, passes: int) -> Tensor:
        prob = (wanted @ weight.T).softmax(-1)
        return torch.stack([F.cross_entropy(own @ lm_head.T, prob, reduction="sum") for own in states[:passes]]).sum()

    def with_gradient(loss: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(), leaves)

    kinds = (
        ("EAGLE", eagle, partial(plain, weight, 1), states[:1]),
        (f"EAGLE-3, {PASSES} passes", eagle3, partial(plain, trained, PASSES), [trained, *states]),
    )
    for name, own, written, leaves in kinds:
        forms: dict[str, Callable[[], Tensor]] = {
            "the plain form, unlogged": written,
            "a logged step": partial(own, True),
            "ours": partial(own, False),
        }
        calls = {form: with_gradient(loss, leaves) for form, loss in forms.items()}
        seconds = interleaved(calls, REPEATS, time.thread_time)
        for form in ("the plain form, unlogged", "a logged step"):
            yield f"{name} loss: {form} / ours", paired_ratio(seconds[form], seconds["ours"])
