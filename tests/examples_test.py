"""The examples of docs/examples, as a reader would run them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from worlds import quick_eagle3_head, tiny_llama_dir

import draftsmith
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("models") / "target", seed=0, layers=7))


@pytest.fixture(scope="module")
def responses(target, tmp_path_factory) -> Path:
    """The target's answers, made by the commands' own names in Python."""
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"prompt": f"What is {i} + {i + 1}?"}) for i in range(24)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    shared = {"target": target, "output": folder / "prompts"}
    draftsmith.run("data prompts", source=folder / "rows.jsonl", **shared)
    settings = {"data": folder / "prompts", "target": target, "output": folder / "responses"}
    return draftsmith.run("data responses", **settings, max_new_tokens=20, ignore_eos=True, num_threads=1)


def test_a_loss_of_ones_own_trains_and_resumes_with_itself_only(target, responses, tmp_path):
    focal = Path(shutil.copy(EXAMPLES / "focal.py", tmp_path))
    settings = {"data": responses, "target": target, "output": tmp_path / "run", "max_steps": 3, "batch_size": 8}
    quick = {"loggers": ("csv",), "tau_prompts": 0, "val_share": 0.2, "device": "cpu", "num_threads": 1}
    best = draftsmith.run("train eagle3", loss=f"{focal}:focal", config="eagle3-embedded", **settings, **quick)
    assert len(json.loads((best / "manifest.json").read_text())["inputs"]["loss"]) == 16
    with pytest.raises(draftsmith.InputError, match="without a function 'other'"):
        draftsmith.run(
            "train eagle3", loss=f"{focal}:other", config="eagle3-embedded", **settings | {"output": tmp_path}, **quick
        )
    focal.write_text(focal.read_text().replace("gamma=2.0", "gamma=1.0"))
    with pytest.raises(draftsmith.InputError, match="loss"):
        (tmp_path / "run" / "training.json").unlink()
        draftsmith.run("train eagle3", loss=f"{focal}:focal", config="eagle3-embedded", **settings, **quick)


def test_a_script_with_rows_of_its_own_trains_and_measures(target, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["own_trainer.py"])
    texts = [(f"What is {i} + {i}?", str(2 * i)) for i in range(16)]
    answers = example("own_trainer").main(target, texts, tmp_path / "head", steps=3)
    loaded = draftsmith.load_target(target)
    alone = [draftsmith.generate(loaded, question, max_new_tokens=32) for question, _ in texts[:4]]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
    assert all(answer.totals.num_draft_tokens for answer in answers)


def test_a_policy_in_a_file_of_ones_own(drafters_registry):
    draftsmith.add_drafters(str(EXAMPLES / "drafters"))
    target = draftsmith.load_target("embedded:target")
    drafter = draftsmith.load_drafter("embedded:draft", target, "streak:low=1:high=4")
    prompt = "Remove the docstring:\n\ndef f(x):\n    '''Doc.'''\n    return x"
    answer = draftsmith.generate(target, prompt, drafter, max_new_tokens=24)
    lengths = [len(made.tree.tokens) for made in answer if made.tree is not None]
    assert lengths[0] == 1 and 1 < max(lengths) <= 4
    assert answer.tokens == draftsmith.generate(target, prompt, max_new_tokens=24).tokens


def test_a_policy_on_the_command_line(drafters_registry, capsys, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_DRAFTERS", str(EXAMPLES / "drafters"))
    words = ["decode", "Rename a to b: a = 1", "--head", "embedded:draft", "--method", "streak:low=2"]
    assert main([*words, "--max-new-tokens", "8"]) == 0
    assert "streak:low=2: drafted and accepted" in capsys.readouterr().err


OWN_METHODS = "from draftsmith.modules.drafters.methods import METHODS as OWN\n"
BIGRAM = (EXAMPLES / "drafters" / "bigram.py").read_text()


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, "a folder of Python files"),
        (
            {"prompt_lookup.py": "raise AssertionError('never imported')"},
            "drafters: found prompt_lookup in .*, expected names that",
        ),
        ({"eagle3.py": "", "mine.py": ""}, "drafters: found eagle3 in"),
        ({"stops.py": f"{OWN_METHODS}METHODS = {{'pld': OWN['spec']}}"}, "METHODS: found pld in stops.py"),
        (
            {"mine.py": BIGRAM.replace('kind = "bigram"', 'kind = "eagle"')},
            "HEADS: found eagle in mine.py, expected kinds",
        ),
        ({"fails.py": "1 / 0"}, "division by zero"),
        ({"unlisted.py": BIGRAM.replace("HEADS", "heads")}, "expected a file that lists HEADS or METHODS"),
    ],
)
def test_a_folder_that_cannot_be_registered_is_refused_each_time(files, error, tmp_path, drafters_registry):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for _ in range(2):
        with pytest.raises((draftsmith.InputError, ZeroDivisionError), match=error):
            draftsmith.add_drafters(str(tmp_path))


# -- our decoder against reference_decoder.py: the same tokens and accepted drafts, round by round


reference = example("reference_decoder")
PROMPTS = [[5, 9, 13, 17], [40, 41, 42, 43, 44, 45, 46], [3]]
NEW_TOKENS = 60


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


@pytest.mark.parametrize("temperature", [0.0, 0.5])
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
