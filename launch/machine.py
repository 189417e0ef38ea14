"""What this machine's CPU can do for a pipeline, measured in a second: minutes, and what drafting can gain."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from typing import Any

# Linear layers [out, in] of a small decoder, SmolLM2-135M's: four layers and an lm_head in proportion, 21 M weights.
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
SHAPES = (*LAYER * 4, (8192, 576))
ROWS, REPEATS = 64, 30


def bfloat16_is_fast() -> bool:
    from draftsmith.data.engines import own

    return own.bfloat16_is_fast()


@functools.cache
def read_ms(rows: int) -> float:
    """Measure the CPU time of one thread for so many tokens in the decoder's layers, in milliseconds."""
    import torch

    from draftsmith.modules.engine.lean import LeanLinear

    dtype = torch.bfloat16 if bfloat16_is_fast() else torch.float32
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layers = [LeanLinear(torch.full(shape, 0.01, dtype=dtype), pack=True) for shape in SHAPES]
        inputs = [torch.ones(rows, shape[1], dtype=dtype) for shape in SHAPES]
        times = []
        for _ in range(REPEATS):
            began = time.thread_time()
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)
            times.append(time.thread_time() - began)
    finally:
        torch.set_num_threads(before)
    return min(times) * 1000


def forecast(measured: Mapping[str, Any], minutes: float, threads: int) -> float:
    """Print what a pipeline takes and can gain here; return this machine's minutes for one of the file's.

    measured: what the file's minutes, those of two cores, were measured with: `probe_ms`, this probe there. And what
    its head gave: `tau` with `drafted` tokens, each of which cost `draft_cost` of a call of the target.
    """
    from draftsmith.data.console import log_note

    if not minutes or "probe_ms" not in measured:
        return 1.0
    cores = min(threads, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads)
    pace = read_ms(ROWS) / float(measured["probe_ms"]) * 2 / max(1, cores)
    numbers = "bfloat16" if bfloat16_is_fast() else "float32, as this CPU has no AVX-512"
    log_note(f"Here, by products in {numbers}, on {cores} idle cores: about {max(1.0, minutes * pace):.0f} minutes.")
    if "tau" in measured:
        tau, drafted, cost = (float(measured[name]) for name in ("tau", "drafted", "draft_cost"))
        verify = max(1.0, read_ms(int(drafted) + 1) / read_ms(1))
        gain = tau / (verify + drafted * cost)
        log_note(
            f"With the defaults a head gave {tau:g} tokens per call of the target; reading {drafted + 1:.0f} tokens "
            f"takes {verify:.2f} times as long as one here: expect about {gain:.2f}x in our decoder."
            + (" A longer training (--set prompts=N) or a GPU gives more." if gain < 1.3 else "")
        )
    return pace
