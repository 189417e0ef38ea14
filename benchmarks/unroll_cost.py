"""`python benchmarks/unroll_cost.py`: what drafts from every row cost in training (`modules/diagonal.py`).

Passes of an EAGLE-3 head, forward and backward without the loss, against one pass, and against the same attention under
a mask over all passes side by side.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from draftsmith.benchmarks.step_peak import peak_above
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.manifest import package_versions
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.cost.clock import clock_of, medians
from draftsmith.launch.cli import main_of
from draftsmith.modules.drafters.eagle3 import net
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.types import at_least

PASSES = (3, 7)


@dataclass(frozen=True)
class UnrollConfig:
    """Measures training-time test: CPU time, one thread, runs interleaved; peaks in processes of their own.

    Attributes:
        output: Directory to write unroll.json to.
        length: Tokens of each sequence.
        batch_size: Sequences.
        hidden: Width of the head, in attention heads of 32.
        repeats: Runs of each.
    """

    output: Path
    length: int = 1024
    batch_size: int = 2
    hidden: int = 128
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "repeats"):
            at_least(name, getattr(self, name), 1)
        at_least("hidden", self.hidden, 32)


@sole_writer()
def run(config: UnrollConfig) -> Path:
    """Measure, print the ratios, write unroll.json; returns its path."""
    torch.set_num_threads(1)
    variants = [(1, False), *((passes, masked) for passes in PASSES for masked in (False, True))]
    steps = {json.dumps(variant): step(config, *variant) for variant in variants}
    taken = medians(steps, config.repeats, clock_of("cpu", 1))
    seconds = {variant: taken[json.dumps(variant)] for variant in variants}
    peaks = {variant: in_new_process(config, *variant) for variant in variants}
    numbers: dict[str, float] = {"one pass, seconds": seconds[1, False], "one pass, peak MB": peaks[1, False] / 1e6}
    for passes in PASSES:
        measured: dict[str, Mapping[tuple[int, bool], float]] = {"time": seconds, "peak memory": peaks}
        for name, found in measured.items():
            numbers[f"{passes} passes / one, {name}"] = found[passes, False] / found[1, False]
            numbers[f"{passes} passes, diagonal / masked, {name}"] = found[passes, False] / found[passes, True]
    path = config.output / "unroll.json"
    make_directory(config.output)
    settings = {name: str(value) for name, value in vars(config).items()}
    write_json(path, {"config": settings, "packages": package_versions(), **numbers})
    console = Console(highlight=False)
    for what, value in numbers.items():
        console.print(f"{what}: {value:.3f}")
    return path


def step(config: UnrollConfig, passes: int, masked: bool) -> Callable[[], None]:
    """Forward and backward of so many passes of one layer, with random weights and inputs."""
    torch.manual_seed(0)
    size, heads = config.hidden, config.hidden // 32
    llama = LlamaConfig(
        vocab_size=64, hidden_size=size, intermediate_size=size * 11 // 4, num_layers=1, num_heads=heads,
        num_kv_heads=heads, head_dim=32, max_position=config.length + passes,
    )  # fmt: skip
    head = net.Eagle3Net(net.Eagle3Config(llama, (1, 2, 3), 64))
    embeds = torch.randn(config.batch_size, config.length + passes - 1, size)
    states = torch.randn(config.batch_size, config.length, 3 * size)
    attention = masked_attention if masked else net.diagonal_attention

    def taken() -> None:
        head.zero_grad(set_to_none=True)
        with patch.object(net, "diagonal_attention", attention):
            hidden = head.unroll(embeds, states, passes)
        torch.stack([states.square().mean() for states in hidden]).sum().backward()

    return taken


def masked_attention(query: Tensor, first: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """All passes side by side, under a mask [T, K*T]: what `diagonal_attention` does without it."""
    rows = query.shape[2]
    keys, values = (torch.cat(parts, 2) for parts in zip(first, *own, strict=True))
    mask = torch.cat([torch.ones(rows, rows).tril(), *[torch.eye(rows)] * len(own)], 1).bool()
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def in_new_process(config: UnrollConfig, passes: int, masked: bool) -> int:
    """Bytes at the peak of a step, above what is there before."""
    sizes = {**dataclasses.asdict(config), "output": str(config.output)}
    words = [sys.executable, __file__, "--peak", json.dumps([sizes, passes, masked])]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        torch.set_num_threads(1)
        sizes, *variant = json.loads(sys.argv[2])
        print(peak_above(step(UnrollConfig(**sizes), *variant)))
    else:
        sys.exit(main_of(UnrollConfig, run))
