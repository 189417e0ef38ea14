"""`python benchmarks/loss_cost.py`: the losses' own time, against autograd of the formula as it is written.

Both make the same logits of the same states and the gradient of these; what is compared is what stands beside those
products: exponentials, sums, and what is counted for the log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.manifest import package_versions
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.results import hardware
from draftsmith.eval.cost.clock import clock_of, medians
from draftsmith.launch.cli import main_of
from draftsmith.modules.drafters.eagle3.loss import Objective, distances
from draftsmith.modules.losses import soft_cross_entropy
from draftsmith.modules.types import at_least

BASELINE = "autograd of the formula"


@dataclass(frozen=True)
class LossCostConfig:
    """Measures EAGLE's and EAGLE-3's losses with their gradients: CPU time, one thread, runs interleaved.

    Attributes:
        output: Directory to write loss.json to.
        tokens: Tokens that count.
        hidden: Width of the states.
        vocab: Tokens of the vocabulary.
        drafted: Of them those that EAGLE-3 drafts; 0 takes all.
        passes: Predictions of each token, of EAGLE-3.
        repeats: Runs of each.
    """

    output: Path
    tokens: int = 600
    hidden: int = 128
    vocab: int = 2048
    drafted: int = 0
    passes: int = 3
    repeats: int = 7

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "vocab", "passes", "repeats"):
            at_least(name, getattr(self, name), 1)


@sole_writer()
def run(config: LossCostConfig) -> Path:
    """Measure, print the ratios, write loss.json; returns its path."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers: dict[str, float] = {}
    for name, calls in (("EAGLE", eagle_losses(config)), ("EAGLE-3", eagle3_losses(config))):
        seconds = medians(calls, config.repeats, clock_of("cpu", 1), warm=True)
        numbers |= {f"{name}, {call}, ms": 1000 * taken for call, taken in seconds.items()}
        slowest = seconds.pop(BASELINE)
        numbers |= {f"{name}, {BASELINE} / {call}": slowest / taken for call, taken in seconds.items()}
    path = config.output / "loss.json"
    make_directory(config.output)
    settings = {name: str(value) for name, value in vars(config).items()}
    about = {"config": settings, "hardware": hardware("cpu"), "packages": package_versions()}
    write_json(path, {**about, **numbers})
    console = Console(highlight=False)
    for what, value in numbers.items():
        console.print(f"{what}: {value:.2f}")
    return path


def eagle_losses(config: LossCostConfig) -> dict[str, Callable[[], Tensor]]:
    """EAGLE-1's: the lm_head is frozen. Each gives the gradient of the states [N, H]."""
    weight = torch.randn(config.vocab, config.hidden) * 0.05
    wanted, states = torch.randn(2, config.tokens, config.hidden).unbind()
    kept = [torch.ones(config.tokens)]

    def ours(ranked: bool) -> Tensor:
        leaf = states.clone().requires_grad_()
        soft_cross_entropy(lambda h: F.linear(h, weight), wanted, kept, [leaf], ranked)[0].sum().backward()
        return gradient(leaf)

    def plain() -> Tensor:
        leaf = states.clone().requires_grad_()
        p = F.linear(wanted, weight).softmax(-1)
        (-(p * F.linear(leaf, weight).log_softmax(-1)).sum()).backward()
        return gradient(leaf)

    return {BASELINE: plain, "logged steps": lambda: ours(True), "other steps": lambda: ours(False)}


def eagle3_losses(config: LossCostConfig) -> dict[str, Callable[[], Tensor]]:
    """EAGLE-3's: its lm_head learns too. Each gives the gradient of the lm_head [D, H]."""
    d2t = torch.arange(config.drafted) if config.drafted else None
    lm_head = torch.randn(config.drafted or config.vocab, config.hidden) * 0.05
    target = torch.randn(config.tokens, config.vocab)
    states = torch.randn(config.passes, config.tokens, config.hidden)
    weights = torch.ones(config.passes, config.tokens)

    def ours(ranked: bool) -> Tensor:
        head, hidden = lm_head.clone().requires_grad_(), [own.clone().requires_grad_() for own in states]
        objective = Objective(drop_unknown=False)
        distances(objective, lambda part: target[part], head, d2t, hidden, weights, ranked).totals.sum().backward()
        return gradient(head)

    def plain() -> Tensor:
        head, hidden = lm_head.clone().requires_grad_(), [own.clone().requires_grad_() for own in states]
        p = (target if d2t is None else target[:, d2t]).softmax(-1)
        total = sum(-(p * F.linear(own, head).log_softmax(-1)).sum() for own in hidden)
        assert isinstance(total, Tensor)
        total.backward()
        return gradient(head)

    return {BASELINE: plain, "logged steps": lambda: ours(True), "other steps": lambda: ours(False)}


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


if __name__ == "__main__":
    sys.exit(main_of(LossCostConfig, run))
