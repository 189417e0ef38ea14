"""Exported MTP modules in vLLM: its own modules compute what ours do, and its whole engine on a CPU accepts drafts of a
copy of a Qwen3.5. Run by `make test-engines`."""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_code import engine_config, one_process  # isort: skip (before vLLM)
from exported import FIGURES, CausalAttention, Exported, emptied, uninitialized_is_nan
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

sys.path.append(str(Path(__file__).parents[1]))  # the other tests' helpers
from twins import COMMON, DELTA, EXPERTS, TWINS, VOCAB, build_twin

from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.files import whole_directory
from draftsmith.modules.pretrained.stitch import stitch
from draftsmith.modules.targets.shape import plain_shape

torch.set_num_threads(1)
ROWS, WINDOW, K = 24, 6, 3
TWINS["qwen3_5_moe"] = (
    "Qwen3_5MoeForCausalLM",
    {**COMMON, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
)
TWINS["mimo_v2_flash"] = ("MiMoV2FlashForCausalLM", {**COMMON, "v_head_dim": 16, "sliding_window": WINDOW})
# Fields of the released config.json, which transformers' class renames.
MIMO = {
    "layernorm_epsilon": 1e-5, "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334, "hidden_act": "silu",
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 16,
    "sliding_window_size": WINDOW - 1, "add_swa_attention_sink_bias": True, "hybrid_layer_pattern": [0, 1, 1, 1],
}  # fmt: skip


def write_copy(family: str, directory: Path, model: Any, head: MtpHead) -> Path:
    model.save_pretrained(directory / "target")
    config = directory / "target" / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, **(MIMO if family == "mimo_v2_flash" else {})}))
    with whole_directory(directory / "copy") as partial:
        stitch(
            Checkpoint(directory / "target"), partial, {name: own.detach() for name, own in head.state_dict().items()}
        )
    return directory / "copy"


def head_of(model: Any) -> MtpHead:
    return MtpHead(MtpHead.new_config(MtpSettings(), plain_shape(model.config.to_dict())))


class SinkAttention(CausalAttention):
    """The same with a logit for each head beside those of the tokens, and values as wide as they are."""

    def __init__(self, sinks: Tensor, *settings: Any):
        super().__init__(*settings)
        self.sinks = sinks

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = len(query)
        query, key, value = (
            x.reshape(rows, heads, -1).transpose(0, 1).repeat_interleave(self.heads // heads, 0)
            for x, heads in ((query, self.heads), (key, self.kv_heads), (value, self.kv_heads))
        )
        seen = torch.ones(rows, rows, dtype=torch.bool).tril().triu(-rows if self.left is None else -self.left)
        scores = (query @ key.transpose(1, 2) * self.scale).masked_fill(~seen, -torch.inf)
        beside = self.sinks[:, None, None].expand(-1, rows, 1)
        mixed = torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ value
        return mixed.transpose(0, 1).reshape(rows, -1)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.mktemp("first")
    model = build_twin("qwen3_next")
    copy = write_copy("qwen3_next", root, model, head_of(model))  # with experts, which have a group of processes
    with one_process(Exported(copy, copy, {}, []), "mtp", root / "store"):
        yield
    cleanup_dist_env_and_memory()


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "mimo_v2_flash"])
@torch.inference_mode()
def test_its_module_computes_ours(family: str, tmp_path: Path):
    model = build_twin(family)
    torch.manual_seed(1)
    head = head_of(model)
    for weight in head.parameters():
        weight.data += 0.2 * torch.randn_like(weight)
    copy = write_copy(family, tmp_path, model, head)
    config = engine_config(Exported(copy, copy, {}, []), "mtp")
    of_draft = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        with uninitialized_is_nan():
            draft: Any = initialize_model(config, model_config=of_draft)
        emptied(draft)
        DefaultModelLoader(config.load_config).load_weights(draft, of_draft)
        assert not [name for name, weight in draft.named_parameters() if weight.isnan().any()]
        process_weights_after_loading(draft, of_draft, torch.device("cpu"))
        layers = getattr(draft.model, "mtp", draft.model).layers
        (layer,) = layers.values() if isinstance(layers, nn.ModuleDict) else layers
        own = getattr(layer, "mtp_block", layer).self_attn
        sizes = own.num_heads, own.num_kv_heads, own.scaling
        sinks = getattr(own, "attention_sink_bias", None)
        own.attn = CausalAttention(*sizes, None) if sinks is None else SinkAttention(sinks, *sizes, WINDOW - 1)
        ids, states = torch.randint(2, VOCAB, (ROWS,)), torch.randn(ROWS, 64)
        # From 1: at position 0 it leaves out embeddings of GLM-4-MoE. Rotations are relative.
        with set_forward_context(None, config, num_tokens=ROWS):
            made = draft(ids, torch.arange(ROWS) + 1, states)
        logits = draft.compute_logits(made)
    ours = head.unroll(model.get_input_embeddings()(ids)[None], states[None], 1)[0][0]
    # What goes into the next step: GLM-4-MoE's has not passed the norm.
    fed = head.norm(made) if family == "glm4_moe" else made
    away = [
        float((one - other).abs().max() / other.abs().max())
        for one, other in ((fed, ours), (logits, ours @ model.lm_head.weight.T))
    ]
    FIGURES.append(f"vLLM's MTP module of {family}: states off by {away[0]:.1e}, logits by {away[1]:.1e}")
    assert max(away) < 1e-5


def cycle(swapped: bool) -> tuple[Any, MtpHead]:
    """A Qwen3.5 whose next token is the following number, and a module that knows it: their layers add nothing, and the
    module passes the embedding on. swapped: it takes the state for the embedding."""
    model = build_twin("qwen3_5")
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "norm.weight")):
            weight.data.zero_()  # gains are 1 + w
    rows = torch.nn.functional.normalize(torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(3)))
    model.get_input_embeddings().weight.data = rows * 8
    model.lm_head.weight.data = rows.roll(1, 0)
    head = head_of(model)
    for weight in head.parameters():
        weight.data.zero_()
    identity = torch.eye(64)
    head.eh_proj.weight.data = torch.cat([torch.zeros_like(identity), identity][:: 1 if swapped else -1], 1)
    return model, head


@pytest.mark.parametrize("swapped", [False, True])
def test_a_copy_of_qwen3_5_is_served(swapped: bool, tmp_path: Path):
    copy = write_copy("qwen3_5", tmp_path, *cycle(swapped))
    llm = LLM(
        model=str(copy), dtype="bfloat16", max_model_len=256, max_num_seqs=1, enforce_eager=True,
        skip_tokenizer_init=True, disable_log_stats=False, enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": K},
    )  # fmt: skip
    try:
        params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True, detokenize=False)
        answer = llm.generate([{"prompt_token_ids": list(range(20, 52))}], params, use_tqdm=False)[0].outputs[0]
        metrics = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    assert list(answer.token_ids) == list(range(52, 93))
    rounds, accepted = (metrics[name].value for name in ("num_drafts", "num_accepted_tokens"))
    FIGURES.append(f"Qwen3.5 with its MTP module{' swapped' if swapped else ''}: {accepted} of {K * rounds} accepted")
    assert accepted == (0 if swapped else K * rounds) and rounds >= 10
