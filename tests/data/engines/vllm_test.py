"""What `--engine vllm` refuses without vLLM; with it: tests/engines/responses_vllm_cpu_test.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.data.engines.vllm import VllmEngine, read_arguments
from draftsmith.data.text.turns import AnswerSettings, PendingTurn
from draftsmith.modules.types import InputError, SamplingParams


def test_arguments_are_a_json_object(tmp_path):
    path = tmp_path / "args.json"
    given = {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    path.write_text(json.dumps(given))
    assert read_arguments(path) == given


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"model": "other"}', "vllm_args: found model"),
        ('{"dtype": "float16"}', "vllm_args: found dtype"),
        ("[1]", "an object"),
        ("{", "damaged"),
        (None, "vllm_args: found .*args.json"),
    ],
)
def test_what_is_decided_here_is_refused_there(tmp_path, text, what):
    path = tmp_path / "args.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=what):
        read_arguments(path)


def test_ranks_would_each_hold_all_gpus(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = AnswerSettings("embedded:target", SamplingParams(), 8, False, 0)
    with pytest.raises(InputError, match=r"vllm in 2 ranks.*tensor_parallel_size"):
        VllmEngine(settings, "float32", None, False)


@pytest.mark.parametrize("tokens", [[], [90], [5] * 9])
def test_an_answer_that_is_none_is_refused(tokens):
    engine: Any = object.__new__(VllmEngine)
    engine.settings, engine.context = AnswerSettings("t", SamplingParams(), 8, False, 0), 64
    engine._vocab_size, engine._eos_ids, engine._params = 90, (1,), SimpleNamespace
    answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])
    engine._llm = SimpleNamespace(generate=lambda *_, **__: [answer])
    with pytest.raises(InputError, match=r"^engine: found .* to prompt 3, expected a response of vLLM"):
        list(engine.answers([PendingTurn(3, 1, "a", [4])]))
