"""Schedules of `eval served` in SGLang's own controller of adaptive steps. Run by `make test-engines`."""

from __future__ import annotations

import json
from pathlib import Path

import own_code  # noqa: F401
import pytest
import sglang_stubs  # noqa: F401  (before SGLang)
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams, resolve_candidate_steps_from_config

from draftsmith.eval.engines.schedule import ranges, sglang_config


@pytest.mark.parametrize("lengths", [[5, 5, 3, 1, 0, 0, 0], [2], [1, 4, 4, 2], [0, 0, 3]])
def test_every_batch_takes_as_many_steps_as_the_schedule_says(lengths: list[int], tmp_path: Path):
    path = tmp_path / "sglang.json"
    path.write_text(json.dumps(sglang_config(ranges(lengths))))
    assert resolve_candidate_steps_from_config(str(path)) == sorted({*lengths})
    params = AdaptiveSpeculativeParams(max(lengths), str(path))
    for accepted in (0, 5):  # whatever is accepted, and for how long
        for size, steps in enumerate(lengths, start=1):
            for _ in range(40):
                assert params.on_verify_complete([min(accepted, steps)] * size, size) is None
                assert params.get_steps_for_batch(size) == steps
    assert params.get_steps_for_batch(len(lengths) + 9) == lengths[-1]
