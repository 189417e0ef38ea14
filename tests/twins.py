"""Tiny random targets of families whose last state is read in different ways, that engines can serve.

Norm gains are away from 0 and 1, and logits are large enough for a softcap to bend them: else a wrong reading of the
state would look right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, LAYERS = 512, 4
# vLLM has no attention on CPUs for heads below 32, and no gated delta rule for heads other than 128.
COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024,
          "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}  # fmt: skip
MIXED = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "layer_types": [*["linear_attention"] * 3, "full_attention"]}  # fmt: skip
# Name -> transformers' class, and its config.
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForCausalLM", {**COMMON, **MIXED, "query_pre_attn_scalar": 32}),
    "gemma4": ("Gemma4ForCausalLM", {**COMMON, **MIXED, "final_logit_softcapping": 30.0, "global_head_dim": 64,
                                     "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
                                     "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB}),
    "gpt_oss": ("GptOssForCausalLM", {**COMMON, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
                                      "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                                          "original_max_position_embeddings": 128, "truncate": False,
                                                          "beta_fast": 32.0, "beta_slow": 1.0}}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**COMMON, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
                                        "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 32,
                                        "first_k_dense_replace": 1}),
    "granite": ("GraniteForCausalLM", {**COMMON, "logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    "qwen3_5": ("Qwen3_5ForCausalLM", {**COMMON, **DELTA}),
    "qwen3_next": ("Qwen3NextForCausalLM", {**COMMON, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}),
}  # fmt: skip


def build_twin(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of this family."""
    kind, settings = TWINS[name]
    found = getattr(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = found(found.config_class(**settings)).eval()
        for key, weight in model.named_parameters():
            if weight.ndim == 1 and "norm" in key:
                weight.data = 0.6 + 0.3 * torch.randn_like(weight)
            elif weight.ndim > 1:
                weight.data = (0.6 if "lm_head" in key else 0.15) * torch.randn_like(weight)
        # Divided by 8 in Granite, bounded by 30 in Gemma 4, and larger behind gains of 1 + w.
        scale = {"granite": 8.0, "gemma4": 3.0, "gemma3": 0.5, "qwen3_5": 0.3, "qwen3_next": 0.3}.get(name, 1.0)
        model.get_output_embeddings().weight.data *= scale
    return model.to(dtype)


def save_twin(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Build it and save it as vLLM reads it; return it."""
    model = build_twin(name, dtype)
    model.save_pretrained(directory)
    return model


def final_norm(model: Any) -> torch.nn.Module:
    """The model's final norm: the last module of its decoder with a gain of the model's width."""
    norms = [module for key, module in model.base_model.named_modules() if "norm" in key and "layers" not in key]
    return norms[-1]


@torch.no_grad()
def states_of(model: Any, tokens: list[int]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] as transformers numbers them, the last one before the final norm, and logits [T, V]."""
    raw = []
    hook = final_norm(model).register_forward_pre_hook(lambda module, args: raw.append(args[0][0]))
    output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    hook.remove()
    return tuple(states[0] for states in output.hidden_states), raw[-1], output.logits[0]
