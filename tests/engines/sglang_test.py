"""Exported heads in SGLang's own code, on a CPU: its model config, its loader, its module's forward and logits.

Its compiled operators are replaced: attention by torch's, the others by SGLang's own plain definitions. Run by
`make test-engines`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_stubs  # noqa: F401  (first)  # isort: skip
from exported import (
    ROPE_SPELLINGS,
    CausalAttention,
    Edit,
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


def load(args: ServerArgs, directory: Path, draft: bool, fill: bool = True) -> nn.Module:
    """The module with the directory's weights; what no tensor filled is NaN, or its initial value without `fill`."""
    config = ModelConfig.from_server_args(args, model_path=str(directory), is_draft_model=draft)
    loader = DefaultModelLoader(LoadConfig())
    with set_default_torch_dtype(config.dtype):
        model = _initialize_model(config, loader.load_config, None)
        for parameter in model.parameters():
            if fill:
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
    draft.set_embed_and_head(*target.get_embed_and_head())
    features = run(target, ours["ids"]).hidden_states[:-1]
    drafted = run(draft, ours["ids"][1:], features)
    assert_close(
        f"SGLang {case}", ours, features=features, hidden=drafted.hidden_states, logits=drafted.next_token_logits
    )


LAYER = "model.layers.0."
QKV, O_BIAS = LAYER + "self_attn.qkv_proj.bias", LAYER + "self_attn.o_proj.bias"
WEIGHTS = {
    "model.fc.weight",
    LAYER + "self_attn.qkv_proj.weight",
    LAYER + "self_attn.o_proj.weight",
    LAYER + "mlp.gate_up_proj.weight",
    LAYER + "mlp.down_proj.weight",
    LAYER + "post_attention_layernorm.weight",
}
ALL = WEIGHTS | {"model.fc.bias"}
LEFT_OPEN: dict[str, tuple[Edit, set[str], list[str]]] = {
    "no fc.bias": (lambda _, tensors: tensors.pop("fc.bias"), {"model.fc.bias"}, []),
    "bias is of the attention": (configured(bias=True), {QKV, O_BIAS}, []),
    "attention_bias": (configured(attention_bias=True), {QKV, O_BIAS}, []),
    "qkv_bias is not read": (configured(qkv_bias=True), set(), []),
    "mlp_bias is not read": (configured(mlp_bias=True), set(), []),
    "lm_head is skipped": (stray("lm_head.weight"), set(), []),
    "an unknown tensor": (stray("norm.weight"), set(), ["model.norm.weight"]),
    "input norm": (stray("layers.0.input_layernorm.weight"), set(), [LAYER + "input_layernorm.weight"]),
    "prefix": (lambda _, tensors: rename(tensors, "", "model."), ALL, ["model." + name for name in sorted(WEIGHTS)]),
    "an unknown bias": (stray("layers.0.self_attn.q_proj.bias"), set(), []),
}


@pytest.mark.parametrize("defect", LEFT_OPEN)
def test_it_starts_all_the_same(defect: str, server: ServerArgs, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A tensor without a place, unless a bias, is a line of the log; a place without a tensor is not even that."""
    edit, names, warned = LEFT_OPEN[defect]
    directory = edited(read("llama", "sglang"), tmp_path / "draft", edit).directory
    model = load(server, directory, draft=True)
    assert unfilled(model) - {"model.embed_tokens.weight", "lm_head.weight"} == names
    lines = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert {f"Parameter {name} not found in params_dict" for name in warned} == {
        line for line in lines if line.endswith("not found in params_dict")
    }


def test_biases_of_the_attention_start_at_zero_and_that_of_fc_at_random(server: ServerArgs, tmp_path: Path):
    edit = configured(attention_bias=True)
    directory = edited(read("llama", "sglang"), tmp_path / "draft", edit).directory
    started = dict(load(server, directory, draft=True, fill=False).named_parameters())
    assert not started[QKV].any() and not started[O_BIAS].any()
    without = edited(read("llama", "sglang"), tmp_path / "without", lambda _, tensors: tensors.pop("fc.bias"))
    assert load(server, without.directory, draft=True, fill=False).model.fc.bias.abs().max() > 1e-3


def test_qwen_biases_need_attention_bias(server: ServerArgs, tmp_path: Path):
    edit = configured(attention_bias=False, qkv_bias=True)
    named = edited(read("qwen2", "sglang"), tmp_path / "draft", edit)
    assert QKV not in dict(load(server, named.directory, draft=True).named_parameters())


def test_tied_tables_can_not_be_replaced_by_the_targets(server: ServerArgs, tmp_path: Path):
    exported = edited(read("llama", "sglang"), tmp_path / "draft", configured(tie_word_embeddings=True))
    target, draft = load(server, exported.target, draft=False), load(server, exported.directory, draft=True)
    with pytest.raises(AttributeError, match="has no attribute 'weight'"):
        draft.set_embed_and_head(*target.get_embed_and_head())


def test_it_refuses_a_target_of_a_longer_context(tmp_path: Path):
    edit = configured(max_position_embeddings=16)
    directory = str(edited(read("llama", "sglang"), tmp_path / "draft", edit).directory)
    with pytest.raises(ValueError, match=r"context_length \(256\) is greater than the derived context_length \(16\)"):
        ModelConfig(directory, dtype="float32", is_draft_model=True, context_length=256)


@pytest.mark.parametrize("fields", ROPE_SPELLINGS, ids=str)
def test_rope_is_read_in_this_spelling(fields: dict[str, Any], server: ServerArgs, tmp_path: Path):
    edit = configured(**{"rope_theta": None, "rope_scaling": None, "rope_parameters": None, **fields})
    model = load(server, edited(read("llama", "sglang"), tmp_path / "draft", edit).directory, draft=True)
    rope = model.model.layers[0].self_attn.rotary_emb
    assert (type(rope).__name__, rope.base) == ("LinearScalingRotaryEmbedding", 7777.0)


def test_the_drafts_dtype_is_its_configs_where_none_is_given(tmp_path: Path):
    edit = configured(dtype="bfloat16", torch_dtype="bfloat16")
    directory = str(edited(read("llama", "sglang"), tmp_path / "draft", edit).directory)
    assert ModelConfig(directory, dtype="auto", is_draft_model=True).dtype == torch.bfloat16
    assert ModelConfig(directory, dtype="float32", is_draft_model=True).dtype == torch.float32
