"""Every causal architecture comes out as tests/architectures.yaml says: here one of each row is tried."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from architectures import VARIANTS, architectures, build, known, outcome
from tiny_configs import OMITTED, random_model, tiny_config

from draftsmith.modules.pretrained.models import load_lm


@pytest.fixture(autouse=True)
def empty_cache(tmp_path_factory, monkeypatch):
    """No result of an earlier self-test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


KNOWN = known()


def test_every_architecture_is_known_and_none_is_wrong():
    assert KNOWN.keys() == architectures().keys()
    assert not OMITTED.keys() & architectures().keys()
    assert not any("wrong" in cells for cells in KNOWN.values())


def one_of_each() -> list[str]:
    """The first architecture of each row, and all variants: they are why a family has several rows."""
    first = {cells: name for name, cells in reversed(KNOWN.items())}
    return sorted({*first.values(), *VARIANTS})


@pytest.mark.parametrize("name", one_of_each())
def test_an_architecture_comes_out_as_known(name):
    assert outcome(name).cells == KNOWN[name]


def test_a_refused_tree_is_an_error_when_it_is_read(tmp_path):
    """The self-test's result comes from the cache the second time, and is the same."""
    build("mpt", tmp_path)
    for lm in (load_lm(str(tmp_path)), load_lm(str(tmp_path))):
        session = lm.session(1, 20)
        session.extend([[3, 4, 5]])
        with pytest.raises(ValueError, match=r"other logits for a tree .* Use a method that drafts chains"):
            session.extend([[6, 7]], [[-1, -1]])


@torch.no_grad()
def test_rounding_in_half_precision_is_no_reason_to_refuse_trees(tmp_path, monkeypatch):
    """As Gemma 3 rounds. A wrong tree is refused in half precision too, and loading changes no weight."""
    layers = ["full_attention"] * 24
    model = random_model(tiny_config("gemma3_text", num_hidden_layers=24, layer_types=layers))
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(4 if "post_" in name else 8 if "q_" in name or "k_" in name else 0.5)
    model.save_pretrained(tmp_path / "noisy")
    lm = load_lm(str(tmp_path / "noisy"), dtype="bfloat16")
    assert not lm.no_trees and lm.dtype is torch.bfloat16
    expected = {name: weight.bfloat16() for name, weight in model.named_parameters()}
    assert all(torch.equal(weight, expected[name]) for name, weight in lm.model.named_parameters())
    ids = torch.arange(4, 26)[None]
    whole, rounded = (one(input_ids=ids).logits[0].float() for one in (model, lm.model))
    spread = (whole - whole.mean(-1, keepdim=True)).norm(dim=-1)
    assert ((rounded - whole).norm(dim=-1) / spread).median() > torch.finfo(torch.bfloat16).eps ** 0.5
    build("mpt", tmp_path / "wrong")
    assert "other logits for a tree" in load_lm(str(tmp_path / "wrong"), dtype="bfloat16").no_trees
    true = type(lm.decoder).forward

    def wrong_in_half(self: Any, *args: Any, attention_mask: Any = None, **named: Any) -> Any:
        output = true(self, *args, attention_mask=attention_mask, **named)
        if attention_mask is not None and output.last_hidden_state.dtype == torch.bfloat16:
            output.last_hidden_state = output.last_hidden_state.roll(1, -1)
        return output

    monkeypatch.setattr(type(lm.decoder), "forward", wrong_in_half)
    assert "other logits for a tree" in load_lm(str(tmp_path / "noisy"), dtype="bfloat16").no_trees


def test_mamba_reads_in_bfloat16_with_states_in_float32(tmp_path):
    build("mamba", tmp_path)
    lm = load_lm(str(tmp_path), dtype="bfloat16")
    assert lm.session(1, 8).extend([[3, 4, 5]]).logits.isfinite().all()


def test_a_qwen2_moe_whose_window_is_off_decodes_as_the_hub_has_it(tmp_path):
    """The hub's config states a window and switches it off; transformers 5 saves the same model with a window of 0."""
    model = build("qwen2_moe", tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    for window in (32768, 0):
        file.write_text(json.dumps({**settings, "sliding_window": window, "use_sliding_window": False}))
        lm = load_lm(str(tmp_path))
        assert not lm.no_trees
        session = lm.session(1, 20)
        session.extend([[3, 4, 5]])
        logits = session.extend([[6, 7]], [[-1, -1]], logits_to_keep=2).logits[0, 1]
        with torch.no_grad():
            expected = model(torch.tensor([[3, 4, 5, 7]])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_longrope_ends_where_its_frequencies_change(tmp_path):
    build("phi3, longrope", tmp_path)
    assert load_lm(str(tmp_path)).info.max_position == 48
