"""A schedule as vLLM (0.32, 0.33) and SGLang (0.5.23) read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.eval.schedule.choice import Range


def for_vllm(found: Sequence[Range]) -> dict[str, Any]:
    """A part of --speculative-config: inclusive ranges of the requests of a step. Beyond the last one its K holds."""
    longest = max(k for _, _, k in found)
    return {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": [list(own) for own in found]}


def for_sglang(found: Sequence[Range]) -> dict[str, Any]:
    """--speculative-adaptive-config: by the smallest batch that it is for, the numbers of steps that may be taken:
    where there is one, acceptance rates change nothing."""
    return {str(start): {"candidate_steps": [k]} for start, _, k in found}
