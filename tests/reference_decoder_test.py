"""Our decoder against docs/examples/reference_decoder.py: the same tokens and accepted drafts, round by round."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from examples_test import example
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from worlds import quick_eagle3_head, tiny_llama_dir

from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

reference = example("reference_decoder")
PROMPTS = [[5, 9, 13, 17], [40, 41, 42, 43, 44, 45, 46], [3]]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("reference") / "target", seed=0, layers=7)


@pytest.fixture(scope="module", params=[0, 60], ids=["whole vocabulary", "60 tokens"])
def heads(request, directory, tmp_path_factory):
    """The target with a trained head, ours and the reference's."""
    target = load_lm(str(directory))
    rows = [[*p, *generate_one(target, None, p, SamplingParams(), 40, TorchSource(0)).tokens] for p in PROMPTS]
    head = quick_eagle3_head(target, rows, steps=40, draft_vocab=request.param, aux_layers=(1, 3, 5))
    folder = tmp_path_factory.mktemp("head")
    (folder / "config.json").write_text(json.dumps({"head": dataclasses.asdict(head.config)}))
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    trees = {"reference": StaticTree.from_paths(reference.TREE)}
    models = Models(target, heads={"eagle3": head}, capacity=128, trees=trees)
    return models, model, reference.Eagle3(folder, model.get_input_embeddings().weight)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_rounds_are_those_of_the_reference(heads, shape, temperature):
    models, model, reference_head = heads
    tree = reference.CHAIN if shape == "chain" else reference.TREE
    name = "eagle3:k=3" if shape == "chain" else "eagle3-static:tree=reference"
    total = 0
    for seed, prompt in enumerate(PROMPTS):
        drafter, params = parse_method(name).build(models), SamplingParams(temperature)
        ours = generate_one(models.target, drafter, prompt, params, NEW_TOKENS, TorchSource(seed))
        uniform = TorchSource(seed).uniform
        tokens, accepted = reference.generate(model, reference_head, prompt, NEW_TOKENS, tree, temperature, uniform)
        assert ours.tokens == tokens
        assert [step.num_accepted for step in ours.trace.steps] == accepted
        total += sum(accepted)
    assert total > 0, "no draft was accepted, so nothing was compared"
