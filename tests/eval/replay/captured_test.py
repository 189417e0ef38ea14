"""Drafters that read layers of the target: what is recorded of them is what the decoder drafts."""

from __future__ import annotations

import pytest
import torch
from run_models import run_models
from tiny_models import tiny_llama_dir

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.costs import MeasuredTimes
from draftsmith.eval.replay.chains import ChainRecorder
from draftsmith.eval.replay.record import Recording, record_all
from draftsmith.eval.replay.trees import TreeRecorder
from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.drafters.eagle3.head import Eagle3Head
from draftsmith.modules.drafters.eagle3.net import Eagle3Config, layer_like
from draftsmith.modules.drafters.methods import Models, parse_method
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

PROMPTS = [BenchPrompt(str(n), [7 + n, 30, 9 * n + 1, 3]) for n in range(3)]
GREEDY, DEPTH, NEW_TOKENS = SamplingParams(), 4, 20
HOW = Recording(GREEDY, DEPTH, NEW_TOKENS, 0, ())


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    target = load_lm(str(tiny_llama_dir(tmp_path_factory.mktemp("captured"), seed=1, layers=3)), "float64")
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config(layer_like(target.config), (0, 1, 2), target.config.vocab_size, fc_norm=True))
    return run_models(target, None, eagle3=head.double().eval().requires_grad_(False), capacity=100)


def drafts_of(models: Models, method: str, prompt: BenchPrompt) -> dict[int, tuple[int, ...]]:
    """Tokens of the answer before each round of the decoder -> what it drafted."""
    found, at = {}, 0

    def seen(round_) -> None:
        nonlocal at
        if round_.tree is not None and round_.tree.tokens:
            found[at] = round_.tree.tokens
        at += len(round_.tokens)

    drafter = parse_method(method).build(models)
    generate_one(models.target, drafter, prompt.prompt_ids, GREEDY, NEW_TOKENS, TorchSource(0), (), DecodeOptions(seen))
    return found


@pytest.mark.parametrize("together", [False, True])
def test_chains_are_those_of_the_decoder(models, together):
    recorder = ChainRecorder(models, "eagle3", HOW, {}, side_by_side=together)
    for number, prompt in enumerate(PROMPTS):
        recorded, decoded = recorder(prompt, number), drafts_of(models, f"eagle3:k={DEPTH}", prompt)
        assert len(decoded) > NEW_TOKENS // (DEPTH + 1)
        for row, start in enumerate(recorded.start.tolist()):
            own = decoded.get(start, ())
            assert tuple(recorded.token[row, : len(own)].tolist()) == own


def test_trees_are_recorded_too(models):
    trees = record_all(TreeRecorder(models, parse_method("eagle3-tree:nodes=5:depth=2:topk=3"), HOW), PROMPTS)
    assert len(trees.levels) == sum(len(answer.tokens) - 1 for answer in trees.answers)
    assert set(trees.levels.tolist()) == {DEPTH + 1}


def test_times_of_its_trees_are_measured(models):
    trees = parse_method("eagle3-tree:nodes=3:depth=2:topk=3")
    times = MeasuredTimes()
    times.tree_times(models, "eagle3/3", lambda levels: trees.build(models))
    assert times.tree_seconds["eagle3/3"]
