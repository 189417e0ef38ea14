"""SGLang's own code without its server: its model config, its loader, its modules' forward and logits.

Its compiled operators are replaced: attention by torch's, the others by SGLang's own plain definitions.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # DFlash2's convolutions would take minutes to be compiled

import torch

import sglang_stubs  # noqa: F401  (first)  # isort: skip
from exported import CausalAttention, Exported, emptied, uninitialized_is_nan
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_loader.loader import DefaultModelLoader, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import get_quant_config
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch import Tensor, nn
from w8a16 import patch_sglang

patch_sglang()


def start(exported: Exported, algorithm: str, store: Path) -> ServerArgs:
    """Settings of a server of one process, as its workers have them."""
    args = ServerArgs(
        model_path=str(exported.target),
        device="cpu",
        dtype="float32",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(exported.directory),
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        disable_cuda_graph=True,
    )
    publish(args, role="test", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    initialize_model_parallel(backend="gloo")
    return args


def load(
    args: ServerArgs, directory: Path, draft: bool, context: int | None = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The module with the directory's weights, NaN where no tensor filled them, and what its parameters held before.

    context: the target's, which its worker passes to that of the draft.
    """
    config = ModelConfig.from_server_args(args, model_path=str(directory), is_draft_model=draft, context_length=context)
    loader = DefaultModelLoader(LoadConfig())
    with set_default_torch_dtype(config.dtype):
        with uninitialized_is_nan():
            # Without its check of types: it runs weights of 8 bits in 16.
            quantized = get_quant_config(config, loader.load_config, {}) if config.quantization else None
            model = _initialize_model(config, loader.load_config, quantized)
        started = emptied(model)
        loader.load_weights_and_postprocess(model, loader._get_all_weights(config, model), torch.device("cpu"))
    for layer in getattr(model, "model", model).layers:
        attention = layer.self_attn
        left = attention.attn.sliding_window_size
        left = None if left is None or left < 0 else left
        attention.attn = CausalAttention(attention.num_heads, attention.num_kv_heads, attention.scaling, left)
    for module in model.modules():
        if isinstance(module, BaseFusedOp):
            module._forward_method = module.forward_native
    return model.eval(), started


def load_draft(args: ServerArgs, exported: Exported) -> tuple[nn.Module, dict[str, Tensor]]:
    context = json.loads((exported.target / "config.json").read_text())["max_position_embeddings"]
    return load(args, exported.directory, draft=True, context=context)


def run(model: nn.Module, ids: Tensor, features: Tensor | None = None) -> Any:
    """The model's output on one sequence from position 0, with logits and hidden states of every row."""
    zero = torch.zeros(1, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,  # of which every row is scored
        batch_size=len(ids),
        input_ids=ids,
        req_pool_indices=zero,
        seq_lens=zero + len(ids),
        out_cache_loc=torch.arange(len(ids)),
        seq_lens_sum=len(ids),
    )
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    batch.spec_info = SimpleNamespace(hidden_states=features)
    return model(ids, torch.arange(len(ids)), batch)
