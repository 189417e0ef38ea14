"""Model cards: every section is filled from the manifest, and says unknown where it has nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.pretrained.card import measured_of, model_card, write_measured
from draftsmith.modules.pretrained.heads import head_fields, save_head

LLAMA = LlamaConfig(50, 8, 16, 1, 2, 1, 4, 64, rope_theta=5e5)
TRAINED: dict[str, Any] = {
    "target": {"config": "aaaa", "lm_head": "bbbb"},
    "samples": {"training": {"samples": 1200, "tokens": 34567}},
    "options": {"lr": 3e-5, "init": "random", "betas": [0.9, 0.95]},
    "step": 1500,
    "metrics": {"loss": 1.25, "tau": 2.5, "accepted_3": 0.5},
    "teacher": {
        "source": "vLLM's states",
        "tokens": 127,
        "norm": "rms+1",
        "eps": 1e-6,
        "scale": 1.0,
        "softcap": None,
        "largest": 0.03,
        "median": 0.014,
        "own": 0.006,
    },
    "packages": {"draftsmith": "0.1", "torch": "2.8", "transformers": None},
    "git_commit": "1234",
}
MEASURED = {
    "settings": {"target": "t", "top_k": 0, "top_p": 1.0, "max_new_tokens": 64, "dtype": "float32"},
    "methods": [{"method": "eagle:k=5", "temperature": 0.0, "tau": 2.5, "prompts": 4, "tokens": 100, "speedup": 1.5,
                 "by": {"task": [{"name": "edit", "tau": 3.25, "prompts": 4, "tokens": 100, "speedup": 1.5}]}}],
    "prompts": {"source": "FILE", "count": 4, "sha256": "9999"},
    "clock": "cpu", "hardware": {"cpu": "a CPU"}, "date": "today", "git_commit": "1234",
}  # fmt: skip


def eagle_manifest(**config: Any) -> dict[str, Any]:
    head = head_fields(EagleHead(EagleConfig(LLAMA)))
    return {
        **TRAINED,
        "head": head,
        "config": {"target": "owner/model", "output": "/home/me", "loggers": ("csv",), **config},
    }


def parts(card: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The front matter, and the text of every section by its heading."""
    _, matter, body = card.split("---\n", 2)
    sections = dict(part.split("\n\n", 1) for part in body.split("\n## ")[1:])
    return yaml.safe_load(matter), sections


def test_a_trained_heads_card_says_what_a_reader_needs():
    card = model_card("eagle", eagle_manifest())
    matter, sections = parts(card)
    for words, section in {
        "`owner/model`": "Target",
        "- teacher proved on 127 tokens of vLLM's states: norm rms+1; 0.03 nat at most": "Target",
        "1,200 samples, 34,567 tokens": "Data",
        "1,500 steps of `draftsmith train eagle`:\n\n```yaml\nlr: 3.0e-05\ninit: random\nbetas:": "Training",
        "| loss | 1.25 |": "Measured on held-out samples",
        "| accepted_3 | 0.5 | share of the drafted tokens 3 that are": "Measured on held-out samples",
        "draftsmith eval bench --target owner/model --head DIR --methods eagle --data FILE ": "tau by task",
        "draftsmith export --head DIR --format sglang --output DIR-sglang": "How to use it",
        "draftsmith 0.1, torch 2.8, commit 1234.": "Versions",
    }.items():
        assert words in sections[section], section
    assert "nknown" not in card and "Calibration" not in sections
    assert not [word for word in ("aaaa", "/home/me", "wandb") if word in card]
    assert matter["base_model"] == "owner/model" and matter["library_name"] == "draftsmith"


@pytest.mark.parametrize("path", ["embedded:target", "/models/llama", "./runs/model"])
def test_only_a_hub_id_is_a_base_model(path):
    matter, _ = parts(model_card("eagle", eagle_manifest(target=path)))
    assert "base_model" not in matter


def test_a_license_is_stated_or_said_not_to_be():
    matter, sections = parts(model_card("eagle", eagle_manifest()))
    assert (matter["license"], matter["license_name"]) == ("other", "not-stated")
    assert sections["License"].startswith("Not stated.") and "licenses apply to `owner/model`" in sections["License"]
    matter, sections = parts(model_card("eagle", {**eagle_manifest(), "license": "apache-2.0"}))
    assert matter["license"] == "apache-2.0" and sections["License"].startswith("`apache-2.0`")


@pytest.mark.parametrize("kind", ["eagle", "acceptance"])
def test_an_imported_heads_card_says_what_it_does_not_know(kind):
    imported = {"producer": "SafeAILab EAGLE-1", "path": "heads/theirs", "notes": ["no fc bias: the default"]}
    card = model_card(kind, {"imported": imported})
    _, sections = parts(card)
    for section in ("Data", "Training", "Measured on held-out samples"):
        assert "Unknown: the head was imported" in sections[section], section
    assert "imported from SafeAILab EAGLE-1, `heads/theirs`" in card and "- no fc bias: the default" in card
    assert "No identity is recorded" in sections["Target"]
    assert "--target TARGET" in sections["tau by task"] and "None" not in card


def test_the_calibration_of_an_acceptance_head_is_on_its_card():
    head = AcceptanceHead(AcceptanceHeadConfig(8, tied=True, w_rej=6.0, calibration=(0.8, -0.1)))
    manifest = {**TRAINED, "head": head_fields(head), "config": {"head": "a draft"}}
    manifest |= {"sampling": {"temperature": 0.5}, "metrics": {"ece": 0.2, "ece_platt": 0.05}}
    _, sections = parts(model_card("acceptance", manifest))
    text = sections["Calibration"]
    assert '"temperature": 0.5' in text
    assert "held-out tokens: 0.05" in text
    assert "--target TARGET --head 'a draft' --acceptance DIR" in sections["How to use it"]
    assert "decode PROMPT --target t --head 'a draft'" in model_card("acceptance", manifest, measured=MEASURED)


def test_a_card_is_written_anew_with_what_was_measured(tmp_path):
    torch.manual_seed(0)
    manifest = {**TRAINED, "config": {"target": "owner/model"}}
    head = save_head(tmp_path / "head", EagleHead(EagleConfig(LLAMA)), manifest, "an old card")
    fastest = MEASURED["methods"][0]
    rows = [fastest, {**fastest, "temperature": 0.7, "speedup": 1.4}]
    write_measured(head, {**MEASURED, "methods": rows})
    assert measured_of(head)["methods"] == rows
    text = parts((head / "README.md").read_text())[1]["tau by task"]
    assert "| edit | eagle:k=5, temperature 0 | 4 | 100 | 3.250 | 1.50x |" in text and "eval bench" not in text
    assert "under greedy decoding and under sampling at temperature 0.7, top-k all, top-p 1, bonus token" in text
    assert "| all | eagle:k=5, temperature 0.7 | 4 | 100 | 2.500 | 1.40x |" in text
    assert "| edit | eagle:k=5, temperature 0.7 |" not in text, "not the fastest"
    assert "4 prompts of `FILE`, in float32 on a CPU" in text
