"""Tiny settings of targets that ship MTP modules."""

from __future__ import annotations

from typing import Any

from draftsmith.modules.drafters.mtp import MtpConfig, MtpHead
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.targets.shape import plain_shape

EXPERTS = 4
COMMON: dict[str, Any] = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
QWEN_EXPERTS = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32
}  # fmt: skip
SHARED_EXPERT = {
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
# By the type of the text model.
MTP_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**COMMON, **QWEN_EXPERTS},
    "qwen3_5_text": COMMON,
    "qwen3_5_moe_text": {**COMMON, **QWEN_EXPERTS},
    "glm4_moe": {**COMMON, **SHARED_EXPERT},
    "deepseek_v3": {**COMMON, **SHARED_EXPERT, **LATENT, "num_key_value_heads": 4, "head_dim": 8},
    "mimo_v2_flash": {**COMMON, "v_head_dim": 16, "sliding_window": 6},
}


def mtp_config(family: str, hidden_size: int, vocab_size: int, context: int) -> MtpConfig:
    """Return the config of a tiny module of a family; windows are six tokens wide."""
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "max_position_embeddings": context}
    raw = {"model_type": family, "num_hidden_layers": 4, **sizes, **MTP_FAMILIES[family]}
    return MtpHead.new_config(MtpSettings(), plain_shape(raw))
