"""Exported heads in SGLang's own code, on a CPU: its model config, its loader, its module's forward and logits.

Its compiled operators are replaced: attention by torch's, the others by SGLang's own plain definitions. Run by
`make test-engines`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

# Imported by SGLang and never called here. PyPI's torchvision is built for another torch: its operators do not load, and
# its Python part, which is all that is needed, registers shapes for two of them. Without a GPU the rotary kernel is
# sought in vLLM.
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.modules["vllm"] = ModuleType("vllm")
sys.modules["vllm._custom_ops"] = SimpleNamespace(rotary_embedding=None)

from exported import CausalAttention, Exported, assert_close, assert_loaded, cases, fused, read
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_loader.loader import DefaultModelLoader, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch import Tensor, nn

CASES = cases("sglang")


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerArgs:
    exported = read("llama", "sglang")
    args = ServerArgs(
        model_path=str(exported.target),
        device="cpu",
        dtype="float32",
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(exported.directory),
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        disable_cuda_graph=True,
    )
    publish(args, role="test", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('store') / 'store'}", 0, "gloo")
    initialize_model_parallel(backend="gloo")
    return args


def load(args: ServerArgs, directory: Path, draft: bool) -> nn.Module:
    """The module with the directory's weights; what no tensor filled is NaN."""
    config = ModelConfig.from_server_args(args, model_path=str(directory), is_draft_model=draft)
    loader = DefaultModelLoader(LoadConfig())
    with set_default_torch_dtype(config.dtype):
        model = _initialize_model(config, loader.load_config, None)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        loader.load_weights_and_postprocess(model, loader._get_all_weights(config, model), torch.device("cpu"))
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.attn = CausalAttention(attention.num_heads, attention.num_kv_heads, attention.scaling)
    for module in model.modules():
        if isinstance(module, BaseFusedOp):
            module._forward_method = module.forward_native
    return model.eval()


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


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_the_exported_tensor(case: str, server: ServerArgs):
    exported = read(case, "sglang")
    loaded = dict(load(server, exported.directory, draft=True).named_parameters())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # the target's take their places
        assert loaded.pop(name).isnan().all()
    expected = fused(exported.state)
    biases = {name for name in loaded if name.endswith(".bias")} - expected.keys()
    assert "model.fc.bias" in biases
    assert_loaded(loaded, expected | {name: torch.zeros_like(loaded[name]) for name in biases})


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_its_forward_on_its_own_targets_features_gives_our_logits(case: str, server: ServerArgs):
    exported = read(case, "sglang")
    ours = exported.ours
    target = load(server, exported.target, draft=False)
    draft = load(server, exported.directory, draft=True)
    draft.set_embed_and_head(target.get_embed_and_head()[0], target.get_embed_and_head()[1])
    features = run(target, ours["ids"]).hidden_states[:-1]
    drafted = run(draft, ours["ids"][1:], features)
    assert_close(
        f"SGLang {case}", ours, features=features, hidden=drafted.hidden_states, logits=drafted.next_token_logits
    )
