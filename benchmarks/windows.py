"""Time of a drafted round far into a text, with a window and without: `python benchmarks/windows.py`.

The heads have random weights and the sizes of heads for SmolLM2-135M; the text's states are random too. A round reads
the states of its last tokens and drafts K. Medians over rounds at each length, interleaved, one thread and process CPU
time on a CPU, wall time behind a synchronization on CUDA.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.data.settings import comma_numbers
from draftsmith.launch.cli import main_of
from draftsmith.modules.decoding.drafter import Outcome
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.block.net import BlockConfig, layers_like
from draftsmith.modules.drafters.eagle3 import Eagle3Config, layer_like
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import SamplingParams

K, ACCEPTED = 5, 2
SHAPE = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=8, num_heads=9, num_kv_heads=3, head_dim=64,
    max_position=2**17,
)  # fmt: skip


@dataclass(frozen=True)
class WindowsConfig:
    """Measures rounds of heads at several lengths of text.

    Attributes:
        contexts: Tokens before the rounds, separated by commas; the first is the base of the ratios.
        window: Window of the heads that have one.
        rounds: Rounds at each length.
        device: cpu, cuda, cuda:1, ...
    """

    contexts: str = "1024,4096,32768"
    window: int = 2048
    rounds: int = 40
    device: str = "cpu"


class Place:
    """One head behind one text, round after round."""

    def __init__(self, kind: str, window: int | None, context: int, target: LlamaLM):
        layer = replace(layer_like(SHAPE), sliding_window=window)
        config: Any = Eagle3Config(layer, (2, 4, 5), 8192)
        if kind == "dspark":
            config = BlockConfig(layers_like(SHAPE, 2, window), (1, 2, 3, 4, 5), 7, 0, markov_rank=64)
        head = head_class(kind)(config).requires_grad_(False)
        self.times: list[float] = []
        self._states = torch.randn(context, len(head.aux_layers) * SHAPE.hidden_size, device=target.device)
        self._drafter = ChainDrafter(head.net(target), FixedLengthStop(K), context + 16 * K * 64)
        self._sampler = Sampler(SamplingParams(), TorchSource(0))
        self._drafter.start([1] * context, self._states, 1)
        self.round(timed=False)

    @torch.inference_mode()
    def round(self, timed: bool = True) -> None:
        """Draft, and take over ACCEPTED tokens and one more."""
        began = seconds(self._states.device)
        tree = self._drafter.propose(K, self._sampler)
        emitted = (*tree.tokens[:ACCEPTED], 1)
        logits = torch.empty(0)
        self._drafter.advance(Outcome(emitted, ACCEPTED, self._states[: len(emitted)], logits))
        if timed:
            self.times.append(seconds(self._states.device) - began)


def seconds(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def run(config: WindowsConfig) -> int:
    torch.manual_seed(0)
    device, contexts = torch.device(config.device), comma_numbers("contexts", config.contexts, int)
    if device.type == "cpu":
        torch.set_num_threads(1)
    # Only its embedding and lm_head are used.
    info = ModelInfo(SHAPE.hidden_size, SHAPE.vocab_size, SHAPE.num_layers, SHAPE.max_position, (), {})
    target = LlamaLM(LlamaModel(SHAPE).to(device).requires_grad_(False), info, packed=device.type == "cpu")
    print("| head | window | " + " | ".join(f"{own:,} tokens" for own in contexts) + " | last over first |")
    print("|---|---:|" + "---:|" * (len(contexts) + 1))
    for kind in ("eagle3", "dspark"):
        for window in (config.window, None):
            places = [Place(kind, window, context, target) for context in contexts]
            for _ in range(config.rounds):
                for place in places:
                    place.round()
            ms = [1e3 * statistics.median(place.times) for place in places]
            cells = " | ".join(f"{own:.1f} ms" for own in ms)
            print(f"| {kind} | {window or 'none'} | {cells} | {ms[-1] / ms[0]:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main_of(WindowsConfig, run))
