"""A draft's directory for plain transformers, written and then used by transformers itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama_dir
from transformers import LlamaForCausalLM

from draftsmith.data.export import assistant
from draftsmith.data.export.assistant import check_assistant, write_assistant
from draftsmith.data.models.hub import resolve_model
from draftsmith.modules.formats.hf_assisted import Tuning, serve
from draftsmith.modules.types import InputError

TARGET, DRAFT = "embedded:target", "embedded:draft"


@pytest.fixture
def written(tmp_path) -> Path:
    write_assistant(DRAFT, Tuning(3, 0.0), tmp_path / "draft")
    return tmp_path / "draft"


def change(directory: Path, name: str, **fields) -> None:
    """Set fields of a JSON file; None removes one."""
    content = {**json.loads((directory / name).read_text()), **fields}
    content = {key: value for key, value in content.items() if value is not None}
    (directory / name).write_text(json.dumps(content))


def errors(directory: Path, target: str = TARGET) -> dict[str, str]:
    return {problem.where: problem.text for problem in check_assistant(directory, target).problems}


def test_the_draft_is_copied_with_its_settings(written):
    source = Path(resolve_model(DRAFT))
    assert {file.name for file in written.iterdir()} == {file.name for file in source.iterdir()}
    for file in source.iterdir():
        same = (written / file.name).read_bytes() == file.read_bytes()
        assert same == (file.name != "generation_config.json"), file.name
    before = json.loads((source / "generation_config.json").read_text())
    after = json.loads((written / "generation_config.json").read_text())
    assert after == before | {
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def test_a_good_directory_passes(written):
    report = check_assistant(written, TARGET)
    assert report.failures == [] and "num_assistant_tokens: 3" in report.notes


def test_the_lines_of_the_card_run(written, capsys):
    lines = serve(resolve_model(TARGET), str(written))
    exec(lines.replace("max_new_tokens=64", "max_new_tokens=4"), {})
    assert "def add(a, b):" in capsys.readouterr().out


def lost_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def pickled(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


BROKEN = {
    "no settings": (lambda d: (d / "generation_config.json").unlink(), "num_assistant_tokens", "absent"),
    "lost threshold": (
        lambda d: change(d, "generation_config.json", assistant_confidence_threshold=None),
        "assistant_confidence_threshold",
        "transformers takes its own default",
    ),
    "lost tensor": (lost_tensor, "", "model.norm.weight"),
    "pickle": (pickled, "", "without safetensors"),
    "unknown family": (lambda d: change(d, "config.json", model_type="no-such-model"), "", "no-such-model"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_directory_is_an_error(kind, written):
    spoil, where, text = BROKEN[kind]
    spoil(written)
    found = errors(written)
    assert text in found[where or str(written)]


def test_an_answer_that_is_not_the_targets_own_fails(written, monkeypatch):
    """A draft that changes answers is a defect of transformers; the one put in here changes the third token."""
    generate = LlamaForCausalLM.generate

    def defective(model, *args, **inputs):
        tokens = generate(model, *args, **inputs)
        if "assistant_model" in inputs:
            tokens[0, args[0].shape[1] + 2] += 1
        return tokens

    monkeypatch.setattr(LlamaForCausalLM, "generate", defective)
    monkeypatch.setattr(assistant, "MAX_NEW_TOKENS", 4)
    assert check_assistant(written, TARGET).failures == [
        "greedy answers to two prompts: another from token 2 on (the target's own)"
    ]


def test_another_vocabulary_or_tokenizer_is_an_error(written, tmp_path):
    other = tiny_llama_dir(tmp_path / "other")
    assert "the target has" in errors(written, str(other))["vocab_size"]
    shutil.copy(other / "tokenizer.json", written)
    assert "token ids mean something else" in errors(written)["tokenizer"]


def a_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model(DRAFT), tmp_path / "source"))


def escaping_index(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (pickled, "without safetensors"),
        (escaping_index, "names ../elsewhere.safetensors"),
        (lambda d: change(d, "config.json", auto_map={"AutoModel": "m.M"}), "its own code"),
    ],
)
def test_a_draft_that_cannot_be_shipped_is_refused(spoil, message, tmp_path):
    source = a_copy(tmp_path)
    spoil(source)
    with pytest.raises(InputError, match=f"draft: found .*{message}"):
        write_assistant(str(source), Tuning(3), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_in_pickles_and_other_files_stay_behind(tmp_path):
    source = a_copy(tmp_path)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "optimizer.pt", "run.py", "LICENSE"):
        (source / name).write_text("{}")
    write_assistant(str(source), Tuning(3), tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "LICENSE" in names and not {name for name in names if name.endswith((".bin", ".pt", ".py", "index.json"))}


def test_end_tokens_of_the_config_are_kept_where_there_was_no_file(tmp_path):
    source = a_copy(tmp_path)
    (source / "generation_config.json").unlink()
    write_assistant(str(source), Tuning(3), tmp_path / "out")
    expected = json.loads((source / "config.json").read_text())["eos_token_id"]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == expected
