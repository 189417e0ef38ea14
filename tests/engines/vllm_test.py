"""Exported heads in vLLM's own code, on a CPU: its config resolution, its loader, its module's forward.

Only the attention operator is replaced, which is compiled for GPUs. Run by `make test-engines`.
"""

from __future__ import annotations

import os

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # else the wheel looks for a GPU when it is imported

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported import (
    ROPE_SPELLINGS,
    CausalAttention,
    Edit,
    Exported,
    assert_close,
    assert_loaded,
    cases,
    configured,
    edited,
    fused,
    read,
    rename,
    stray,
    unfilled,
)
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

CASES = cases("vllm")


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    exported = read("llama", "vllm")
    with set_current_vllm_config(engine_config(exported)):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('store') / 'store'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield


def engine_config(exported: Exported) -> VllmConfig:
    speculative = {"method": "eagle", "model": str(exported.directory), "num_speculative_tokens": 3}
    return EngineArgs(
        model=str(exported.target),
        dtype="float32",
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},  # its own plain torch definitions, not compiled operators
        speculative_config=speculative,
    ).create_engine_config()


def load(config: VllmConfig, draft: bool) -> nn.Module:
    """The target's or the draft's module with the directory's weights; what no tensor filled is NaN."""
    model_config = config.speculative_config.draft_model_config if draft else config.model_config
    with set_current_vllm_config(config):
        model = initialize_model(config, model_config=model_config)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        DefaultModelLoader(config.load_config).load_weights(model, model_config)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.attn = CausalAttention(attention.num_heads, attention.num_kv_heads, attention.scaling)
    return model.eval()


def load_draft(exported: Exported) -> nn.Module:
    return load(engine_config(exported), draft=True)


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
    target, draft = load(config, draft=False), load(config, draft=True)
    proposer = SimpleNamespace(model=draft, vllm_config=config, use_local_argmax_reduction=False)
    SpecDecodeBaseProposer._maybe_share_embeddings(proposer, target)
    SpecDecodeBaseProposer._maybe_share_lm_head(proposer, target)
    with set_current_vllm_config(config):
        positions = torch.arange(len(ours["ids"]))
        features = target(ours["ids"], positions)[:-1]
        to_head, to_next_step = draft(ours["ids"][1:], positions[:-1], features)
        logits = draft.compute_logits(to_head)
    assert torch.equal(to_head, to_next_step)
    assert_close(f"vLLM {case}", ours, features=features, hidden=to_head, logits=logits)


REFUSED: dict[str, tuple[Edit, str]] = {
    "lm_head": (stray("lm_head.weight"), "no module or parameter named 'lm_head' in EagleLlamaForCausalLM"),
    "input norm": (stray("layers.0.input_layernorm.weight"), "named 'layers.0.input_layernorm.weight' in LlamaModel"),
    "final norm": (stray("norm.weight"), "no module or parameter named 'norm' in LlamaModel"),
    "prefix": (lambda _, tensors: rename(tensors, "", "model."), "no module or parameter named 'model' in LlamaModel"),
    "other name": (
        lambda _, tensors: rename(tensors, "layers.0", "midlayer"),
        "no module or parameter named 'midlayer'",
    ),
    "SGLang's class": (configured(architectures=["LlamaForCausalLMEagle"]), "are not supported for now"),
}


@pytest.mark.parametrize("defect", REFUSED)
def test_it_refuses(defect: str, tmp_path: Path):
    edit, message = REFUSED[defect]
    with pytest.raises(ValueError, match=message):
        load_draft(edited(read("llama", "vllm"), tmp_path / "draft", edit))


LAYER = "model.layers.0."
QKV, O_BIAS = LAYER + "self_attn.qkv_proj.bias", LAYER + "self_attn.o_proj.bias"
LEFT_OPEN: dict[str, tuple[Edit, set[str]]] = {
    "bias is of the attention": (configured(bias=True), {QKV, O_BIAS}),
    "attention_bias": (configured(attention_bias=True), {QKV, O_BIAS}),
    "qkv_bias": (configured(qkv_bias=True), {QKV}),
    "bias beside qkv_bias": (configured(bias=True, qkv_bias=False), {O_BIAS}),
    "mlp_bias": (configured(mlp_bias=True), {LAYER + "mlp.gate_up_proj.bias", LAYER + "mlp.down_proj.bias"}),
    "a missing tensor": (lambda _, tensors: rename(tensors, "fc.weight", "fc.bias"), {"model.fc.weight"}),
    "fc.bias is dropped": (stray("fc.bias"), set()),
    "a bias without its switch is dropped": (stray("layers.0.self_attn.q_proj.bias"), set()),
}


@pytest.mark.parametrize("defect", LEFT_OPEN)
def test_it_says_nothing_and_leaves_open(defect: str, tmp_path: Path):
    edit, names = LEFT_OPEN[defect]
    model = load_draft(edited(read("llama", "vllm"), tmp_path / "draft", edit))
    assert unfilled(model) - {"model.embed_tokens.weight"} == names


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
