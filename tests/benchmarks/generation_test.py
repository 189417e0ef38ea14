"""The benchmark of batched generation: its counts and its arithmetic, never its speed."""

from __future__ import annotations

import json

from draftsmith.benchmarks import generation
from draftsmith.benchmarks.generation import GenerationConfig
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams


def test_both_ways_give_the_answers_of_plain_decoding_and_the_ratio_is_theirs(models, tmp_path, monkeypatch, capsys):
    clock = iter(range(1000))
    monkeypatch.setattr(generation, "clock_of", lambda *_: lambda: float(next(clock)))  # every run takes one second
    path = generation.run(
        GenerationConfig(models["target"], models["prompts"], tmp_path, split="test", max_new_tokens=12, batch_size=2)
    )
    numbers = json.loads(path.read_text())
    target = load_lm(models["target"])
    answers = [
        generate_one(target, None, row.prompt_ids, SamplingParams(), 12, TorchSource(0)).tokens
        for row in read_prompts(models["prompts"], models["target"], "test")
    ]
    count = sum(map(len, answers))
    assert (numbers["prompts"], numbers["equal_answers"], numbers["tokens"]) == (5, 5, count)
    assert numbers["ratio"] == 1.0
    assert numbers["tokens_per_cpu_s"] == numbers["baseline_tokens_per_cpu_s"] == count
    assert "1.00x" in capsys.readouterr().out
