"""The examples of docs/examples, as a reader would run them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from worlds import tiny_llama_dir

import draftsmith
from draftsmith.launch.cli import main

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"


@pytest.fixture(autouse=True)
def one_thread():
    """Beside other tests more only stand in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    settings = {"prompts": folder / "prompts", "target": target, "output": folder / "responses"}
    return draftsmith.run("data responses", **settings, max_new_tokens=20, ignore_eos=True, num_threads=1)


def test_a_loss_of_ones_own_trains_and_resumes_with_itself_only(target, responses, tmp_path):
    focal = Path(shutil.copy(EXAMPLES / "focal.py", tmp_path))
    settings = {"data": responses, "target": target, "output": tmp_path / "run", "max_steps": 3, "batch_size": 8}
    quick = {"loggers": ("csv",), "tau_prompts": 0, "val_share": 0.2, "accelerator": "cpu", "num_threads": 1}
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
    table = example("own_trainer").main(target, texts, tmp_path / "head", steps=3)
    assert list(table.index) == ["ar", "eagle:k=3"]
    assert table["matches_ar"].all() and table["prompts"].eq(4).all()


def test_a_policy_in_a_file_of_ones_own(drafters_registry):
    draftsmith.add_drafters(str(EXAMPLES / "drafters"))
    target = draftsmith.load_target("embedded:target")
    drafter = draftsmith.load_drafter("embedded:draft", target, "streak:low=1:high=4")
    prompt = "Remove the docstring:\n\ndef f(x):\n    '''Doc.'''\n    return x"
    answer = draftsmith.generate(target, prompt, drafter, max_new_tokens=24)
    lengths = [len(made.tree.tokens) for made in answer if made.tree is not None]
    assert lengths[0] == 1 and 1 < max(lengths) <= 4
    assert answer.tokens == draftsmith.generate(target, prompt, max_new_tokens=24).tokens


def test_a_policy_on_the_command_line(drafters_registry, capsys):
    draftsmith.add_drafters(str(EXAMPLES / "drafters"))
    words = ["decode", "Rename a to b: a = 1", "--draft", "embedded:draft", "--method", "streak:low=2"]
    assert main([*words, "--max-new-tokens", "8"]) == 0
    assert "streak:low=2: drafted and accepted" in capsys.readouterr().err


BIGRAM = (EXAMPLES / "drafters" / "bigram.py").read_text()


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, "a folder of Python files"),
        (
            {"pearl.py": "raise AssertionError('never imported')"},
            "drafters: found pearl in .*, expected names that",
        ),
        ({"medusa.py": "", "mine.py": ""}, "drafters: found medusa in"),
        ({"stops.py": "METHODS = {'pld': None}"}, "METHODS: found pld in stops.py"),
        ({"mine.py": BIGRAM}, "kind: found bigram in mine.py, expected mine"),
        ({"fails.py": "1 / 0"}, "division by zero"),
    ],
)
def test_a_folder_that_cannot_be_registered_is_refused_each_time(files, error, tmp_path, drafters_registry):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for _ in range(2):
        with pytest.raises((draftsmith.InputError, ZeroDivisionError), match=error):
            draftsmith.add_drafters(str(tmp_path))


def test_medusa2_saves_another_target_and_heads_that_decode_it(target, responses, tmp_path):
    new_target, heads = example("medusa2").main(responses, target, tmp_path / "run", steps=4, batch_size=4)
    original, changed = draftsmith.load_target(target), draftsmith.load_target(str(new_target))
    assert changed.info.identity != original.info.identity
    with pytest.raises(draftsmith.InputError, match="another model"):
        draftsmith.load_drafter(str(heads), original, "medusa")
    drafter = draftsmith.load_drafter(str(heads), changed, "medusa:k=2")
    answer = draftsmith.generate(changed, "What is 2 + 3?", drafter, max_new_tokens=12)
    assert answer.tokens == draftsmith.generate(changed, "What is 2 + 3?", max_new_tokens=12).tokens
