"""Schedules of `eval served` as vLLM itself reads them. Run by `make test-engines`."""

from __future__ import annotations

import json
import os

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}

import own_code  # noqa: F401
import pytest
from vllm.config import SpeculativeConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from draftsmith.eval.engines.schedule import ranges, vllm_config


@pytest.mark.parametrize("lengths", [[5, 5, 3, 1, 0, 0, 0], [2], [1, 4, 4, 2], [0, 0, 3]])
def test_every_batch_drafts_as_many_tokens_as_the_schedule_says(lengths: list[int]):
    written = json.loads(json.dumps(vllm_config(ranges(lengths))))
    config = SpeculativeConfig(method="ngram", prompt_lookup_max=3, **written)
    assert config.num_speculative_tokens == max(lengths) and config.uses_dynamic_speculative_decoding()
    schedule = config.num_speculative_tokens_per_batch_size
    assert schedule == ranges(lengths)
    found = build_dynamic_sd_schedule_lookup(schedule, len(lengths) + 3, config.num_speculative_tokens)
    assert found[1:] == [*lengths, *[lengths[-1]] * 3]
