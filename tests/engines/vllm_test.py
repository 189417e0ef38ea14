"""Exported heads in vLLM's own code, on a CPU: its config resolution, its loader, its module's forward.

Only the attention operator is replaced, which is compiled for GPUs. Run by `make test-engines`.
"""

from __future__ import annotations

import os

os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # else the wheel looks for a GPU when it is imported

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from exported import CausalAttention, Exported, assert_close, assert_loaded, cases, fused, read
from torch import Tensor, nn
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
