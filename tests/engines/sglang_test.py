"""Exported heads in SGLang's own code, on a CPU: its model config, its loader, its module's forward and logits.

Its compiled operators are replaced: attention by torch's, the others by SGLang's own plain definitions. Run by
`make test-engines`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_stubs  # noqa: F401  (first)  # isort: skip
from defects import DEFECTS
from exported import (
    ROPE_SPELLINGS,
    CausalAttention,
    Exported,
    assert_close,
    assert_drafts_as_predicted,
    assert_loaded,
    assert_quoted,
    broken,
    cases,
    configured,
    edited,
    emptied,
    fused,
    read,
    settle,
    uninitialised_is_nan,
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


def load(
    args: ServerArgs, directory: Path, draft: bool, context: int | None = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The module with the directory's weights, NaN where no tensor filled them, and what its parameters held before.

    context: the target's, which its worker passes to that of the draft.
    """
    config = ModelConfig.from_server_args(args, model_path=str(directory), is_draft_model=draft, context_length=context)
    loader = DefaultModelLoader(LoadConfig())
    with set_default_torch_dtype(config.dtype):
        with uninitialised_is_nan():
            model = _initialize_model(config, loader.load_config, None)
        started = emptied(model)
        loader.load_weights_and_postprocess(model, loader._get_all_weights(config, model), torch.device("cpu"))
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.attn = CausalAttention(attention.num_heads, attention.num_kv_heads, attention.scaling)
    for module in model.modules():
        if isinstance(module, BaseFusedOp):
            module._forward_method = module.forward_native
    return model.eval(), started


def load_draft(args: ServerArgs, exported: Exported) -> tuple[nn.Module, dict[str, Tensor]]:
    context = json.loads((exported.target / "config.json").read_text())["max_position_embeddings"]
    return load(args, exported.directory, draft=True, context=context)


@pytest.fixture(scope="module")
def targets(server: ServerArgs) -> dict[str, nn.Module]:
    return {case: load(server, read(case, "sglang").target, draft=False)[0] for case in CASES}


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
