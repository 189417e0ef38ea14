"""What `--engine vllm` refuses without vLLM; with it: tests/engines/responses_vllm_cpu_test.py."""

from __future__ import annotations

import pytest

from draftsmith.data.engines.vllm import VllmEngine
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.modules.types import InputError, SamplingParams


def test_ranks_would_each_hold_all_gpus(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = AnswerSettings("embedded:target", SamplingParams(), 8, False, 0)
    with pytest.raises(InputError, match=r"vllm in 2 ranks.*tensor_parallel_size"):
        VllmEngine(settings, "float32", None, False)
