"""What several passes of training-time test cost: time and peak memory of a step against one pass, and against a mask
over all passes side by side. `python benchmarks/unroll_cost.py --output DIR`"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.benchmarks.step_peak import peak_above
from draftsmith.data.store.files import write_json
from draftsmith.eval.cost.clock import Clock, interleaved
from draftsmith.modules.drafters.eagle3 import net as eagle3
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.types import at_least


@dataclass(frozen=True)
class UnrollConfig:
    """Measure training-time test.

    Attributes:
        output: Directory to write results.json to.
        length: Tokens of each of the sequences.
        batch_size: Sequences.
        hidden: Width of the head.
        repeats: Times that each is taken, in turns.
    """

    output: Path
    length: int = 1024
    batch_size: int = 2
    hidden: int = 256
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "hidden", "repeats"):
            at_least(name, getattr(self, name), 1)


def masked(query: Tensor, first: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """The same attention over all passes side by side, under a mask [T, K*T]."""
    rows = query.shape[2]
    keys, values = (torch.cat(parts, 2) for parts in zip(first, *own, strict=True))
    causal, diagonal = torch.ones(rows, rows, dtype=torch.bool).tril(), torch.eye(rows, dtype=torch.bool)
    mask = torch.cat([causal, *[diagonal] * len(own)], 1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def step(config: UnrollConfig, passes: int, diagonal: bool):
    """Forward and backward of so many passes of a head with one layer, without the loss."""
    torch.manual_seed(0)
    size = config.hidden
    llama = LlamaConfig(
        vocab_size=64, hidden_size=size, intermediate_size=3 * size, num_layers=1, num_heads=size // 32,
        num_kv_heads=size // 32, head_dim=32, max_position=config.length + passes,
    )  # fmt: skip
    net = eagle3.Eagle3Net(eagle3.Eagle3Config(llama, (1, 2, 3), 64))
    embeds = torch.randn(config.batch_size, config.length + passes - 1, size)
    states = torch.randn(config.batch_size, config.length, 3 * size)

    def run() -> None:
        eagle3.diagonal_attention = OURS if diagonal else masked
        net.zero_grad(set_to_none=True)
        sum(hidden.square().mean() for hidden in net.unroll(embeds, states, passes)).backward()

    return run


OURS = eagle3.diagonal_attention


def peak(config: UnrollConfig, passes: int, diagonal: bool) -> int:
    """Bytes of a step in a process of its own."""
    settings = json.dumps([config.length, config.batch_size, config.hidden, passes, diagonal])
    done = subprocess.run([sys.executable, __file__, settings], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def run(config: UnrollConfig) -> dict[str, float]:
    torch.set_num_threads(1)
    kinds = {"1": (1, True), "3": (3, True), "7": (7, True), "masked 3": (3, False), "masked 7": (7, False)}
    steps = {name: step(config, *kind) for name, kind in kinds.items()}
    times = interleaved(steps, config.repeats, Clock.cpu()) if False else taken(steps, config.repeats)
    peaks = {name: peak(config, *kind) for name, kind in kinds.items()}
    found = {
        "seconds of one pass": times["1"],
        **{f"{k} passes / one, time": times[k] / times["1"] for k in ("3", "7")},
        **{f"{k} passes, diagonal / masked, time": times[k] / times[f"masked {k}"] for k in ("3", "7")},
        **{f"{k} passes / one, peak memory": peaks[k] / peaks["1"] for k in ("3", "7")},
        **{f"{k} passes, diagonal / masked, peak memory": peaks[k] / peaks[f"masked {k}"] for k in ("3", "7")},
    }
    for what, value in found.items():
        print(f"{what:45s} {value:.3f}")
    return found
def taken(steps, repeats):
    import time
    out = {n: [] for n in steps}
    for s in steps.values(): s()
    for _ in range(repeats):
        for n, s in steps.items():
            t = time.process_time(); s(); out[n].append(time.process_time() - t)
    return {n: statistics.median(v) for n, v in out.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        *sizes, passes, diagonal = json.loads(sys.argv[1])
        config = UnrollConfig(Path(), *sizes)
        print(peak_above(step(config, passes, diagonal)))
    else: run(UnrollConfig(Path('/tmp/x'), hidden=128))
