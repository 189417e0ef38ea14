"""Cost of training steps: tokens and model FLOPs from shapes, time and memory from the host.

Nothing here waits for a device. The time of a window is right on a GPU too: the losses are read back when a window
ends, and that waits for everything before.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from draftsmith.modules import flops
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.targets.base import CausalLM
from draftsmith.train.data_module import MicroBatch
from draftsmith.train.metrics import gather_rows
from draftsmith.train.strategies import process_memory


def features_flops(model: CausalLM, lengths: Sequence[int]) -> float:
    """Return the FLOPs of a frozen model's forward over documents of these lengths, without logits."""
    config = getattr(model, "config", None)
    if isinstance(config, LlamaConfig):
        return flops.layers_forward(config, lengths)
    # A transformers model (targets/hf.py).
    base = cast(Any, model).model.base_model
    embeddings = base.get_input_embeddings().weight.numel()
    # Each parameter once for each token, without attention.
    return 2.0 * (sum(p.numel() for p in base.parameters()) - embeddings) * sum(lengths)


def listed_peak(name: str, precision: str, tf32: bool) -> float | None:
    """Return the peak FLOP/s of a GPU by its name; None if it is unlisted, a slice (MIG) or a laptop form."""
    # Their peak is below that of the full card.
    if {"MIG", "Laptop"} & set(name.split()):
        return None
    for known, (in_bf16, in_tf32, in_float32) in flops.PEAK_TFLOPS.items():
        if re.search(rf"\b{re.escape(known)}\b", name):
            return 1e12 * (in_bf16 if precision == "bf16" else in_tf32 if tf32 else in_float32)
    return None


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far in 1e9 bytes: torch's on a GPU, else that of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return process_memory() / 1e9


@dataclass
class StepWindow:
    """Work of one rank since the last log. slots: tokens of its batches, padding included. waited_s: the part of
    worked_s without a batch to work on."""

    steps: int = 0
    tokens: int = 0
    slots: int = 0
    flops: float = 0.0
    waited_s: float = 0.0
    worked_s: float = 0.0


class Telemetry(pl.Callback):
    """Callback that counts a rank's work and time, without validation and saving: it stands before `BetweenSteps`.

    peak: FLOP/s of the device; None looks it up, and an unlisted one has no utilisation.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, peak: float | None = None):
        self._clock, self._peak = clock, peak
        self._window, self._mark = StepWindow(), 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._peak is None and pl_module.device.type == "cuda":
            tf32 = torch.get_float32_matmul_precision() != "highest"
            name = torch.cuda.get_device_name(pl_module.device)
            self._peak = listed_peak(name, pl_module.config.precision, tf32)
        self._mark = self._clock()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: MicroBatch, batch_idx: int) -> None:
        # The time since the last part was spent waiting for this one.
        self._window.waited_s += self._pass()
        self._window.tokens += sum(batch.real_lengths)
        # With padding: the size of the first tensor, the ids.
        self._window.slots += next(v.numel() for v in vars(batch.data).values() if isinstance(v, Tensor))
        self._window.flops += pl_module.flops(batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: MicroBatch, batch_idx: int
    ) -> None:
        self._pass()
        self._window.steps += batch.last

    def resume(self) -> None:
        """Start to count time again, after the work between steps."""
        self._mark = self._clock()

    def take(self, device: torch.device) -> dict[str, float]:
        """Return the numbers of all ranks since the last call. Every rank must call it, after reading the losses back.

        steps_per_s, tokens_per_s (without padding, all ranks together), data_wait (share of the time), real_tokens
        (share of slots without padding), memory_gb (largest of any rank so far), and mfu (model FLOPs utilisation:
        FLOPs over the peak of all ranks' devices).
        """
        self._pass()
        window, self._window = self._window, StepWindow()
        # One gather for all numbers.
        numbers = [*dataclasses.astuple(window), peak_memory_gb(device), self._peak or 0.0]
        rows = gather_rows(torch.tensor([numbers], dtype=torch.float64, device=device))  # [ranks, 8]
        steps, tokens, slots, total_flops, waited, worked, _, peak = rows.sum(0).tolist()
        if not worked or not slots:
            return {}
        # Ranks work at the same time: times are averaged, work is summed.
        ranks = len(rows)
        metrics = {
            "steps_per_s": steps / worked,
            "tokens_per_s": tokens * ranks / worked,
            "data_wait": waited / worked,
            "real_tokens": tokens / slots,
            "memory_gb": float(rows[:, 6].max()),
        }
        # FLOPs are 0 for a head that does not count them.
        if total_flops and (rows[:, 7] > 0).all():
            metrics["mfu"] = total_flops * ranks / (worked * peak)
        return metrics

    def _pass(self) -> float:
        """Count the time since the last event as work, and return it in seconds."""
        now = self._clock()
        passed, self._mark = now - self._mark, now
        self._window.worked_s += passed
        return passed
