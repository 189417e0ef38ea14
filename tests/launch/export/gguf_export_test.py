"""Heads and draft models for llama.cpp, from the command's settings to the file and back."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from gguf_models import write_gguf_model
from transformers import AutoConfig
from worlds import tiny_llama_dir

from draftsmith.eval.check.check import run as check
from draftsmith.eval.settings import CheckConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.launch.export.settings import ExportConfig, ImportConfig
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head, layer_like
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.gguf import open_gguf
from draftsmith.modules.pretrained.heads import load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("target"), layers=8))


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    lm = load_lm(target)
    torch.manual_seed(2)
    net = Eagle3Head(Eagle3Config(layer_like(lm.config), (1, 4, 6), 64, norm_before_fc=True)).requires_grad_(False)
    net.use_draft_vocabulary(torch.arange(64) * 2, lm.model.lm_head.weight)
    return save_head(tmp_path_factory.mktemp("saved") / "head", net, {"target": lm.info.identity}, "card")


@pytest.mark.parametrize("weights", ["auto", "bfloat16", "q8_0"])
def test_a_head_comes_back_from_its_file(head, target, tmp_path, weights, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    write_gguf_model(tmp_path / "target.gguf", Checkpoint(target))
    given = {"target": target, "target_gguf": tmp_path / "target.gguf", "weights": weights}
    assert export(ExportConfig(format="llamacpp", head=head, output=there, **given)) == 0
    assert f"llama-server -m {tmp_path}/target.gguf -md {there}/head.gguf" in " ".join(capsys.readouterr().out.split())
    metadata, served = open_gguf(there / "head.gguf")[0], open_gguf(tmp_path / "target.gguf")[0]
    assert metadata["eagle3.target_layers"] == [1, 4, 6] and metadata["eagle3.norm_before_fc"]
    names = [name for name in served if name.startswith("tokenizer.")]
    assert names and all(metadata[name] == served[name] for name in names)
    assert check(CheckConfig(directory=there, target=target)) == 0
    import_head(ImportConfig(directory=str(there), output=back, target=target))
    ours, again = load_head(head).state_dict(), load_head(back).state_dict()
    tolerance = {"auto": 0.0, "bfloat16": 0.005, "q8_0": 0.02}[weights]
    assert ours.keys() == again.keys()
    assert all((ours[name].float() - again[name].float()).abs().max() <= tolerance for name in ours)


def test_whole_models_are_converted_by_llama_cpp(head, target, tmp_path):
    with pytest.raises(InputError, match=r"head: found .*expected a head's directory.*convert_hf_to_gguf.py"):
        export(ExportConfig(format="llamacpp", head=Path(target), target=target, output=tmp_path / "there"))
    assert export(ExportConfig(format="llamacpp", head=head, target=target, output=tmp_path / "there")) == 0
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def f(x):"}))
    asked = {"data": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 8, "engine_path": Path(sys.executable)}
    with pytest.raises(InputError, match=r"target: found .*expected its GGUF file.*convert_hf_to_gguf.py"):
        check(CheckConfig(directory=tmp_path / "there", target=target, engine="llamacpp", **asked))


def test_what_gguf_cannot_hold_is_refused(head, target, tmp_path):
    with pytest.raises(InputError, match="format: found --format vllm"):
        ExportConfig(format="vllm", head=head, output=tmp_path / "there", weights="q8_0")
    other = tiny_llama_dir(tmp_path / "other", vocab=400)
    write_gguf_model(tmp_path / "other.gguf", Checkpoint(other))
    config = ExportConfig(
        format="llamacpp", head=head, target=target, target_gguf=tmp_path / "other.gguf", output=tmp_path / "there"
    )
    with pytest.raises(InputError, match=r"target_gguf: found .*other.gguf with 400 tokens"):
        export(config)
    assert not (tmp_path / "there").exists()


def test_a_wrapped_target_has_the_vocabulary_of_its_text(target, tmp_path):
    """Multimodal targets state sizes in `text_config`, and may leave out the defaults of their family."""
    wrapped = Path(shutil.copytree(target, tmp_path / "wrapped"))
    text = json.loads((wrapped / "config.json").read_text()) | {"model_type": "gemma3_text"}
    for size in (text.pop("vocab_size"), 262_208):
        own = text | ({"vocab_size": size} if size < 1000 else {})
        (wrapped / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": own}))
        assert AutoConfig.from_pretrained(wrapped).get_text_config().vocab_size == size
        assert Checkpoint(wrapped).shape.vocab_size == Checkpoint(wrapped).info.vocab_size == size
