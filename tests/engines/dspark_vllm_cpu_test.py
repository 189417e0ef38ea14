"""Exported DSpark heads in vLLM's own code, on a CPU: its loader, and its Markov and confidence heads.

Its engine drafts with them on a GPU only; the layers below are DFlash's, which it serves here (`gate_test.py`). Run by
`make test-engines`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from vllm_code import engine_config, one_process  # isort: skip (before vLLM)
from exported import assert_close, cases, emptied, read, uninitialized_is_nan
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

CASES = cases("dspark", "vllm")


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(read("dflash", "block", "vllm"), "dflash", tmp_path_factory.mktemp("store") / "store"):
        yield


def config_of(case: str, format: str) -> VllmConfig:
    """A config of a DFlash head's, as vLLM refuses one of DSpark's without Triton, with the draft of this case."""
    config, exported = engine_config(read("dflash", "block", "vllm"), "dflash"), read("dspark", case, format)
    raw = config.speculative_config.draft_model_config
    found = type(raw)(model=str(exported.directory), dtype="float32", runner="draft")
    config.speculative_config.draft_model_config = found
    return config


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_an_export_is_loaded_whole_and_its_further_heads_compute_as_ours(case: str):
    exported, config = read("dspark", case, "vllm"), config_of(case, "vllm")
    draft_config = config.speculative_config.draft_model_config
    assert draft_config.hf_config.architectures == ["Qwen3DSparkModel"]
    with set_current_vllm_config(config):
        with uninitialized_is_nan():
            draft = Qwen3DSparkForCausalLM(vllm_config=config)
        emptied(draft)
        DefaultModelLoader(config.load_config).load_weights(draft, draft_config)
        loaded = {name: parameter.clone() for name, parameter in draft.named_parameters()}
        process_weights_after_loading(draft, draft_config, torch.device("cpu"))  # which packs them
    state = exported.state
    shared = ("embed_tokens", "lm_head", "mask_embedding")
    assert not [name for name, t in loaded.items() if t.isnan().any() and not any(part in name for part in shared)]
    for name in ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"):
        assert torch.equal(loaded[f"model.{name}"], state[name])

    ids, hidden = exported.ours["ids"], torch.randn(len(exported.ours["ids"]), state["norm.weight"].shape[0])
    embed = draft.markov_embed(ids)
    bias = draft.markov_bias(embed)
    odds = draft.compute_confidence(hidden, embed)
    w1, w2 = (state[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    joined: Tensor = torch.cat([hidden, w1[ids]], -1)
    sure = F.linear(joined, state["confidence_head.proj.weight"], state["confidence_head.proj.bias"]).sigmoid()[:, 0]
    assert_close(f"vLLM DSpark {case}", {"bias": w1[ids] @ w2.T, "confidence": sure}, bias=bias, confidence=odds)
