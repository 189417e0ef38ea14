"""Architectures on the hf engine give the answers of whole forwards, or are refused: as docs/models.md says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, build, decode

from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.targets.self_test import Refusals

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path_factory, monkeypatch):
    """No result of an earlier self-test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def documented(name: str) -> str:
    section = PAGE.read_text("utf-8").partition("\n## Architectures\n")[2]
    rows = [line.strip("| ").partition(" | ") for line in section.splitlines()]
    return next(cells.removesuffix(" |") for names, _, cells in rows if name in names.split("; "))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_decodes_as_documented(name):
    outcome = decode(name)
    assert "wrong" not in outcome.ways.values()
    assert outcome.cells == documented(name)


def test_a_refused_tree_is_an_error_when_it_is_read(tmp_path):
    """The self-test's result comes from the cache the second time, and is the same."""
    build("MPT", tmp_path)
    for lm in (load_lm(str(tmp_path)), load_lm(str(tmp_path))):
        session = lm.session(1, 20)
        session.extend([[3, 4, 5]])
        with pytest.raises(ValueError, match=r"other logits for a tree .* Use a method that drafts chains"):
            session.extend([[6, 7]], [[-1, -1]])


def test_a_qwen2_moe_whose_window_is_off_decodes_as_the_hub_has_it(tmp_path):
    """The hub's config states a window and switches it off; transformers 5 saves the same model with a window of 0."""
    model = build("Qwen2-MoE", tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    for window in (32768, 0):
        file.write_text(json.dumps({**settings, "sliding_window": window, "use_sliding_window": False}))
        lm = load_lm(str(tmp_path))
        assert lm.refusals == Refusals()
        session = lm.session(1, 20)
        session.extend([[3, 4, 5]])
        logits = session.extend([[6, 7]], [[-1, -1]], logits_to_keep=2).logits[0, 1]
        with torch.no_grad():
            expected = model(torch.tensor([[3, 4, 5, 7]])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_longrope_ends_where_its_frequencies_change(tmp_path):
    build("Phi-3, longrope", tmp_path)
    assert load_lm(str(tmp_path)).info.max_position == 48
