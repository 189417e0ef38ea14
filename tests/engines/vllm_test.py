"""Exported EAGLE-1 heads in vLLM's own code, on a CPU: its config resolution, its loader, its module's forward. Run by
`make test-engines`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_code

from vllm_code import load, one_process, share  # isort: skip (before vLLM)
from defects import DEFECTS
from exported import (
    ROPE_SPELLINGS,
    Exported,
    assert_close,
    assert_drafts_as_predicted,
    assert_loaded,
    assert_quoted,
    broken,
    cases,
    configured,
    edited,
    fused,
    read,
    settle,
)
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

CASES = cases("vllm")


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(read("llama", "vllm"), "eagle", tmp_path_factory.mktemp("store") / "store"):
        yield


def engine_config(exported: Exported) -> VllmConfig:
    return vllm_code.engine_config(exported, "eagle")


def load_draft(exported: Exported) -> nn.Module:
    return load(engine_config(exported), draft=True)[0]


@functools.cache
def load_target(case: str) -> nn.Module:
    return load(engine_config(read(case, "vllm")), draft=False)[0]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_the_exported_tensor(case: str):
    exported = read(case, "vllm")
    loaded = dict(load_draft(exported).named_parameters())
    assert loaded.pop("model.embed_tokens.weight").isnan().all()  # the target's takes its place
    assert_loaded(loaded, fused(exported.state))


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_its_forward_on_its_own_targets_features_gives_our_logits(case: str):
    exported = read(case, "vllm")
    ours = exported.ours
    config = engine_config(exported)
    target, draft = load_target(case), load(config, draft=True)[0]
    share(config, target, draft)
    with set_current_vllm_config(config):
        positions = torch.arange(len(ours["ids"]))
        features = target(ours["ids"], positions)[:-1]
        to_head, to_next_step = draft(ours["ids"][1:], positions[:-1], features)
        logits = draft.compute_logits(to_head)
    assert torch.equal(to_head, to_next_step)
    assert_close(f"vLLM {case}", ours, features=features, hidden=to_head, logits=logits)


# Fields that it ignores and the head does not need, and what happens beyond the sequences here.
LOST = {"draft_vocab_size", "max_position_embeddings"}


@pytest.mark.parametrize("defect", DEFECTS)
@torch.inference_mode()
def test_a_defect_does_what_our_reader_predicts(defect: str):
    exported, predicted = broken(defect, "vllm")
    if predicted.raises:
        with pytest.raises((ValueError, AssertionError, RuntimeError)) as caught:
            load_draft(exported)
        assert_quoted(predicted, str(caught.value))
        return
    config = engine_config(exported)
    draft, started = load(config, draft=True)
    weights, loaded = fused(predicted.weights), dict(draft.named_parameters())
    own, table = weights.pop("model.embed_tokens.weight", None), loaded.pop("model.embed_tokens.weight")
    settle(loaded, started, weights)
    share(config, load_target(DEFECTS[defect].case), draft)
    assert (draft.model.embed_tokens.weight is table) == (own is not None)
    ours = exported.ours
    with set_current_vllm_config(config):
        hidden, _ = draft(ours["ids"][1:], torch.arange(len(ours["ids"]) - 1), ours["features"])
        logits = draft.compute_logits(hidden)
    assert_drafts_as_predicted(predicted, logits, exported, lost=defect in LOST)


def test_its_draft_has_the_targets_dtype_and_positions(tmp_path: Path):
    edit = configured(dtype="bfloat16", torch_dtype="bfloat16", max_position_embeddings=16)
    config = engine_config(edited(read("llama", "vllm"), tmp_path / "draft", edit)).speculative_config
    assert config.draft_model_config.dtype == torch.float32
    assert config.draft_model_config.max_model_len == 16  # it drafts up to there, and has rotary positions beyond
    assert config.draft_model_config.hf_config.max_position_embeddings == config.target_model_config.max_model_len


@pytest.mark.parametrize("fields", ROPE_SPELLINGS, ids=str)
def test_rope_is_read_in_this_spelling(fields: dict[str, Any], tmp_path: Path):
    edit = configured(**{"rope_theta": None, "rope_scaling": None, "rope_parameters": None, **fields})
    model = load_draft(edited(read("llama", "vllm"), tmp_path / "draft", edit))
    rope = model.model.layers[0].self_attn.rotary_emb
    assert (type(rope).__name__, rope.base) == ("LinearScalingRotaryEmbedding", 7777.0)
