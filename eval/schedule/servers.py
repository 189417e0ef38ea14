"""A schedule as servers read it: vLLM (0.32, 0.33), SGLang (0.5.23) and TensorRT-LLM."""

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


def for_tensorrt_llm(found: Sequence[Range]) -> dict[str, Any]:
    """A part of `speculative_config`. The first length is the largest, max_draft_len.

    In earlier versions a key is the smallest batch that its length is for, in later ones (NVIDIA/TensorRT-LLM#10860)
    the largest: a range has both its ends, which either reads alike. Beyond the last key the former go on with its
    length, the latter do not draft.
    """
    longest = found[0][2]
    assert longest == max(k for _, _, k in found)
    lengths = {size: k for start, end, k in found for size in (start, end)}
    return {"speculative_config": {"max_draft_len": longest, "draft_len_schedule": lengths}}
