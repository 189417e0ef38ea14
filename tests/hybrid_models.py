"""Tiny random models whose layers keep recurrent or convolution states, some beside attention."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.hf import HFLM

CONTEXT, VOCAB = 96, 97
IDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1, "hidden_size": 32}
LLAMA = {**IDS, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": CONTEXT, "tie_word_embeddings": False}  # fmt: skip
HEADS = {**LLAMA, "head_dim": 8}
TWICE = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
ZAMBA = {**LLAMA, "mamba_d_state": 8, "attention_head_dim": 16,
         "layers_block_type": ["linear_attention", "hybrid"] * 2}  # fmt: skip
SSM = {**IDS, "num_hidden_layers": 3}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4,
          "num_local_experts": 4, "moe_intermediate_size": 16}  # fmt: skip
# transformers clamps the time steps of these where it reads several tokens, and not where it reads one.
UNCLAMPED = {"time_step_min": 1e-9}
# Name -> transformers' class without `ForCausalLM`, and its config.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": ("Qwen3_5", {**HEADS, **DELTA, **TWICE}),
    "Qwen3.5-MoE": ("Qwen3_5Moe", {**HEADS, **DELTA, **SHARED, **TWICE}),
    "Qwen3-Next": ("Qwen3Next", {**HEADS, **DELTA, **SHARED}),
    "LFM2": ("Lfm2", {**LLAMA, **CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    "LFM2-MoE": ("Lfm2Moe", {**LLAMA, **CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1}),
    "Granite hybrid": ("GraniteMoeHybrid", {**LLAMA, **MAMBA, **TWICE, "num_local_experts": 4, "logits_scaling": 1.0,
                                            "num_experts_per_tok": 2, "shared_intermediate_size": 16}),
    "OLMo hybrid": ("OlmoHybrid", {**LLAMA, **DELTA, **TWICE, "linear_num_key_heads": 4}),
    "Nemotron-H": ("NemotronH", {**HEADS, **EXPERTS, **UNCLAMPED, "mamba_num_heads": 8, "mamba_head_dim": 8,
                                 "ssm_state_size": 8,
                                 "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
                                 "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                                 "moe_shared_expert_intermediate_size": 16}),
    "Falcon-H1": ("FalconH1", {**HEADS, **MAMBA, "mamba_d_ssm": 64}),
    "Bamba": ("Bamba", {**LLAMA, **MAMBA, "attn_layer_indices": [1, 3]}),
    "Zamba 2": ("Zamba2", {**ZAMBA, **UNCLAMPED, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1,
                           "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 4}),
    "Zamba": ("Zamba", {**ZAMBA, "n_mamba_heads": 2, "use_mamba_kernels": False}),
    "Jamba": ("Jamba", {**LLAMA, "num_experts": 2, "use_mamba_kernels": False, "attn_layer_period": 2,
                        "attn_layer_offset": 1}),
    "Kimi Linear": ("KimiLinear", {**LLAMA, **TWICE, **LATENT, "num_experts_per_token": 2, "linear_head_dim": 8,
                                   "linear_num_heads": 4, "model_max_length": CONTEXT}),
    "Ring": ("BailingHybrid", {**HEADS, **TWICE, **LATENT, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}),
    "LFM3": ("Lfm3", {**LLAMA, **CONVOLUTIONS}),
    "Zaya, window": ("Zaya", {**HEADS, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8}),
    "Mamba": ("Mamba", {**SSM, "state_size": 4}),
    "Falcon Mamba": ("FalconMamba", {**SSM, "state_size": 4}),
    "Mamba 2": ("Mamba2", {**SSM, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
}  # fmt: skip


def hybrid_model(name: str, vocab: int = VOCAB, dtype: torch.dtype = torch.float32) -> Any:
    """A random model whose answers depend on all of its context."""
    kind, settings = HYBRIDS[name]
    found = getattr(transformers, f"{kind}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = found(found.config_class(**settings, vocab_size=vocab)).eval()
        for weight in model.parameters():
            weight.data = 0.3 * torch.randn_like(weight) if weight.ndim > 1 else weight + 0.1 * torch.randn_like(weight)
    return model.to(dtype)


def language_model(model: Any) -> HFLM:
    """The model as `load_lm` gives it, without its self-test."""
    config = model.config.get_text_config()
    return HFLM(model, ModelInfo(config.hidden_size, config.vocab_size, config.num_hidden_layers, CONTEXT, (), {}))
