"""Exported DSpark and DFlash2 heads in vLLM's own code, on a CPU: its loader, and what they add to DFlash's layers.

Its engine drafts with them on a GPU only; the layers below are DFlash's, which it serves here (`gate_test.py`). Run by
`make test-engines`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from vllm_code import engine_config, one_process  # isort: skip (before vLLM)
from exported import assert_close, cases, emptied, read, uninitialized_is_nan, whole
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(read("dflash", "block", "vllm"), "dflash", tmp_path_factory.mktemp("store") / "store"):
        yield


def config_of(kind: str, case: str, format: str) -> VllmConfig:
    """A config of a DFlash head's, as vLLM refuses the others' without Triton, with the draft of this case."""
    config, exported = engine_config(read("dflash", "block", "vllm"), "dflash"), read(kind, case, format)
    raw = config.speculative_config.draft_model_config
    found = type(raw)(model=str(exported.directory), dtype="float32", runner="draft")
    config.speculative_config.draft_model_config = found
    return config


def loaded_whole(config: VllmConfig, made: type[nn.Module], state: dict[str, Tensor]) -> nn.Module:
    """The draft's module with the directory's weights, all of which are there."""
    draft_config = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        with uninitialized_is_nan():
            draft = made(vllm_config=config)
        emptied(draft)
        DefaultModelLoader(config.load_config).load_weights(draft, draft_config)
        loaded = {name: parameter.clone() for name, parameter in draft.named_parameters()}
        process_weights_after_loading(draft, draft_config, torch.device("cpu"))  # which packs them
    shared = ("embed_tokens", "lm_head", "mask_embedding", ".attn.")  # the last ones are scales of a cache
    assert not [name for name, t in loaded.items() if t.isnan().any() and not any(part in name for part in shared)]
    for name in ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"):
        assert torch.equal(loaded[f"model.{name}"], state[name])
    return draft


@pytest.mark.parametrize("case", cases("dflash2", "vllm"))
@torch.inference_mode()
def test_convolutions_and_selector_compute_as_ours(case: str):
    exported, config = read("dflash2", case, "vllm"), config_of("dflash2", case, "vllm")
    state, hf = exported.state, config.speculative_config.draft_model_config.hf_config
    assert hf.architectures == ["DFlash2DraftModel"]
    draft = loaded_whole(config, DFlash2Qwen3ForCausalLM, state)
    size, block, group = len(state["norm.weight"]), hf.block_size, hf.dflash_config["conv_group_size"]
    x, y = torch.randn(2, 3 * block, size)
    name, conv = "layers.1.mlp_conv", draft.model.layers[1].mlp_conv
    base = state[f"{name}.base_kernel"]
    deltas = (x @ state[f"{name}.kernel_projection.weight"].T).view(len(x), 2, base.shape[1], -1)
    before, behind = torch.zeros_like(x), torch.zeros_like(y)
    for row in range(len(x)):
        for tap in range(min(base.shape[1], row % block + 1)):
            for given, out, which in ((x, before, 0), (y, behind, 1)):
                kernel = base[which, tap] + deltas[row, which, tap].repeat_interleave(group)
                out[row] += kernel * given[row - tap]
    prepared, kept = conv.prepare(x)
    wanted = {"before": before, "behind": behind}
    assert_close(f"vLLM DFlash2 {case}", wanted, before=prepared, behind=conv.finish(y, kept))

    top_k, hidden, anchors = (
        hf.dflash_config["selector_top_k"],
        torch.randn(2, block - 1, size),
        exported.ours["ids"][:2],
    )
    unary, candidates = (hidden @ exported.ours["lm_head"].T).topk(top_k)
    a, b = (state[f"candidate_selector.{part}_codebook"] for part in ("predecessor", "successor"))
    projected = hidden @ state["candidate_selector.hidden_projection.weight"].T  # [2, n, r]
    before = torch.cat([anchors[:, None, None].expand(-1, 1, top_k), candidates[:, :-1]], 1)
    edges = torch.einsum("bspr,bsr,bscr->bspc", a[before], projected, b[candidates])
    scores = draft.model.candidate_selector(candidates, unary, hidden, anchors)
    assert_close(f"vLLM DFlash2 {case}", {"scores": unary[:, :, None] + edges}, scores=scores)


@pytest.mark.parametrize(("kind", "made"), [("dflash", DFlashQwen3ForCausalLM), ("dspark", Qwen3DSparkForCausalLM)])
@torch.inference_mode()
def test_logits_of_a_reduced_vocabulary_are_the_targets(kind: str, made: type[nn.Module]):
    exported, config = read(kind, "reduced", "vllm"), config_of(kind, "reduced", "vllm")
    draft, state, d2t = loaded_whole(config, made, exported.state), exported.state, exported.ours["d2t"]
    hidden = torch.randn(7, state["norm.weight"].shape[0])
    own, vocab = hidden @ state["lm_head.weight"].T, len(exported.ours["lm_head"])
    mine, theirs = whole(own, d2t, vocab), draft.compute_logits(hidden)
    assert torch.equal(mine.isfinite(), theirs.isfinite())
    assert_close(f"vLLM {kind} reduced", {"logits": mine[:, d2t]}, logits=theirs[:, d2t])
    if kind == "dspark":
        assert_close("vLLM DSpark reduced", {"drafted": own}, drafted=draft.compute_draft_logits(hidden))
        assert torch.equal(draft.map_draft_to_target(torch.arange(len(d2t))), d2t)


@pytest.mark.parametrize("case", cases("dspark", "vllm"))
@torch.inference_mode()
def test_markov_and_confidence_heads_compute_as_ours(case: str):
    exported, config = read("dspark", case, "vllm"), config_of("dspark", case, "vllm")
    state, hf = exported.state, config.speculative_config.draft_model_config.hf_config
    assert hf.architectures == ["Qwen3DSparkModel"]
    draft = loaded_whole(config, Qwen3DSparkForCausalLM, state)
    ids, hidden = exported.ours["ids"], torch.randn(len(exported.ours["ids"]), state["norm.weight"].shape[0])
    embed = draft.markov_embed(ids)
    wanted = {"bias": state["markov_head.markov_w1.weight"][ids] @ state["markov_head.markov_w2.weight"].T}
    theirs = {"bias": draft.markov_bias(embed)}
    assert ("confidence_head.proj.weight" in state) == (draft.model.confidence_head is not None)
    if draft.model.confidence_head is not None:
        joined: Tensor = torch.cat([hidden, state["markov_head.markov_w1.weight"][ids]], -1)
        weight, offset = (state[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
        wanted["confidence"] = F.linear(joined, weight, offset).sigmoid()[:, 0]
        theirs["confidence"] = draft.compute_confidence(hidden, embed)
    assert_close(f"vLLM DSpark {case}", wanted, **theirs)
