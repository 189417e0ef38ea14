"""vLLM's own code without its engine: its config resolution, its loader, its modules. Imported before vLLM is.

Only the operators of attention and of weights of 8 bits are replaced, which are compiled for GPUs.
"""

from __future__ import annotations

import os

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # else the wheel looks for a GPU when it is imported

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from exported import CausalAttention, Exported, emptied, uninitialized_is_nan
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from w8a16 import patch_vllm

patch_vllm()


@contextmanager
def one_process(exported: Exported, method: str, store: Path) -> Iterator[None]:
    with set_current_vllm_config(engine_config(exported, method)):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield


def engine_config(exported: Exported, method: str) -> VllmConfig:
    speculative = {"method": method, "model": str(exported.directory), "num_speculative_tokens": 3}
    return EngineArgs(
        model=str(exported.target),
        dtype="float32",
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},  # its own plain torch definitions, not compiled operators
        speculative_config=speculative,
    ).create_engine_config()


def load(config: VllmConfig, draft: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """The target's or the draft's module with the directory's weights, NaN where no tensor filled them, and what its
    parameters held before."""
    model_config = config.speculative_config.draft_model_config if draft else config.model_config
    with set_current_vllm_config(config):
        with uninitialized_is_nan():
            model = initialize_model(config, model_config=model_config)
        started = emptied(model)
        DefaultModelLoader(config.load_config).load_weights(model, model_config)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    for layer in model.model.layers:
        attention = layer.self_attn
        # Itself included (FlashAttentionImpl passes one less).
        left = None if attention.attn.sliding_window is None else attention.attn.sliding_window - 1
        attention.attn = CausalAttention(attention.num_heads, attention.num_kv_heads, attention.scaling, left)
    return model.eval(), started


def share(config: VllmConfig, target: nn.Module, draft: nn.Module) -> None:
    """The target's tables for the draft, where it has none."""
    proposer = SimpleNamespace(model=draft, vllm_config=config, use_local_argmax_reduction=False)
    SpecDecodeBaseProposer._maybe_share_embeddings(proposer, target)
    SpecDecodeBaseProposer._maybe_share_lm_head(proposer, target)
