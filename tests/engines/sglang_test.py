"""Exported EAGLE-1 heads in SGLang's own code, on a CPU: its model config, its loader, its module's forward and logits.
Run by `make test-engines`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_code import load, load_draft, run, start  # isort: skip (before SGLang)
from defects import DEFECTS
from exported import (
    ROPE_SPELLINGS,
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
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs
from torch import nn

CASES = cases("sglang")


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerArgs:
    return start(read("llama", "sglang"), "EAGLE", tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def targets(server: ServerArgs) -> dict[str, nn.Module]:
    return {case: load(server, read(case, "sglang").target, draft=False)[0] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_the_exported_tensor(case: str, server: ServerArgs):
    exported = read(case, "sglang")
    loaded = dict(load_draft(server, exported)[0].named_parameters())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # the target's take their places
        assert loaded.pop(name).isnan().all()
    expected = fused(exported.state)
    biases = {name for name in loaded if name.endswith(".bias")} - expected.keys()
    assert "model.fc.bias" in biases
    assert_loaded(loaded, expected | {name: torch.zeros_like(loaded[name]) for name in biases})


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_its_forward_on_its_own_targets_features_gives_our_logits(
    case: str, server: ServerArgs, targets: dict[str, nn.Module]
):
    exported = read(case, "sglang")
    ours, target = exported.ours, targets[case]
    draft, _ = load_draft(server, exported)
    draft.set_embed_and_head(*target.get_embed_and_head())
    features = run(target, ours["ids"]).hidden_states[:-1]
    drafted = run(draft, ours["ids"][1:], features)
    assert_close(
        f"SGLang {case}", ours, features=features, hidden=drafted.hidden_states, logits=drafted.next_token_logits
    )


# Fields that it ignores and the head does not need; biases of the attention that are announced and stay zero; rows of
# zeros.
LOST = {
    "draft_vocab_size",
    "hot_vocab_size",
    "bias",
    "attention_bias",
    "bias-without-qkv_bias",
    "larger-intermediate_size",
}


@pytest.mark.parametrize("defect", DEFECTS)
@torch.inference_mode()
def test_a_defect_does_what_our_reader_predicts(
    defect: str, server: ServerArgs, targets: dict[str, nn.Module], caplog: pytest.LogCaptureFixture
):
    exported, predicted = broken(defect, "sglang")
    target = targets[DEFECTS[defect].case]
    if predicted.raises:
        with pytest.raises((ValueError, AssertionError, RuntimeError, AttributeError, TypeError)) as caught:
            load_draft(server, exported)[0].set_embed_and_head(*target.get_embed_and_head())
        assert_quoted(predicted, str(caught.value))
        return
    draft, started = load_draft(server, exported)
    if not predicted.follows:  # another class of model
        assert type(draft).__name__ != "LlamaForCausalLMEagle"
        return
    loaded = dict(draft.named_parameters())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        del loaded[name]
    settle(loaded, started, fused(predicted.weights))
    assert warned(caplog) == unknown(predicted.dropped)
    draft.set_embed_and_head(*target.get_embed_and_head())
    logits = run(draft, exported.ours["ids"][1:], exported.ours["features"]).next_token_logits
    assert_drafts_as_predicted(predicted, logits, exported, lost=defect in LOST)


def warned(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Names that the log says it does not know."""
    lines = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    return {line.split()[1] for line in lines if line.endswith("not found in params_dict")}


def unknown(dropped: list[str]) -> set[str]:
    """Those of the dropped tensors that the log is to name: biases, rotary buffers and tables it passes over silently.

    By then q, k, v and gate, up have the names of what they are fused into.
    """
    names = set()
    for name in dropped:
        if not (name.endswith(".bias") or "rotary_emb" in name or "lm_head" in name or name == "embed_tokens.weight"):
            for part, whole in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
                name = name.replace(f".{part}_proj", f".{whole}_proj")
            names.add(f"model.{name}")
    return names


@pytest.mark.parametrize("fields", ROPE_SPELLINGS, ids=str)
def test_rope_is_read_in_this_spelling(fields: dict[str, Any], server: ServerArgs, tmp_path: Path):
    edit = configured(**{"rope_theta": None, "rope_scaling": None, "rope_parameters": None, **fields})
    model, _ = load_draft(server, edited(read("llama", "sglang"), tmp_path / "draft", edit))
    rope = model.model.layers[0].self_attn.rotary_emb
    assert (type(rope).__name__, rope.base) == ("LinearScalingRotaryEmbedding", 7777.0)


def test_the_drafts_dtype_is_its_configs_where_none_is_given(tmp_path: Path):
    edit = configured(dtype="bfloat16", torch_dtype="bfloat16")
    directory = str(edited(read("llama", "sglang"), tmp_path / "draft", edit).directory)
    assert ModelConfig(directory, dtype="auto", is_draft_model=True).dtype == torch.bfloat16
    assert ModelConfig(directory, dtype="float32", is_draft_model=True).dtype == torch.float32
