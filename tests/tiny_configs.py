"""Tiny configs of every architecture of transformers that writes text, made from the fields of its config class.

A field's name says what it is (`RULES`); few architectures need more (`SPECIAL`). What cannot be made is in `OMITTED`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

VOCAB, CONTEXT, WINDOW, LAYERS = 97, 96, 24, 4
# Names of fields, matched as a whole, the first that fits, and their values. Head sizes differ from the hidden size's
# share of a head, key heads from query heads, and so on, so that no two sizes are taken for each other.
RULES = {
    r"hidden_size_per_layer_input": 8,
    r"(.*_)?vocab_size(_per_layer_input)?": VOCAB,
    r"hidden_size|d_model|n_embd|emb(ed)?_dim|embedding_(size|dim)|word_embed_proj_dim|(in|out)put_embedding_size": 32,
    r"attention_hidden_size|cross_attention_hidden_size|lru_width|out_hidden_size": 32,
    r"adapter_(in|out)_dim|adapter_input_size|projector_(in|out)put_dim|vision_output_dim|projection_dim": 32,
    r"downsample_hidden_size|hc_lowrank": 32,
    r"(moe|expert|shared).*(intermediate|ffn_hidden)_size": 16,
    r".*intermediate_size(_mlp)?|.*ffn_dim|ffn_hidden_size|n_inner|dff|dim_ff|d_inner|feed_forward_size": 48,
    r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|num_blocks|depth": LAYERS,
    r"(num_)?((en|de)coder_)?attention_heads|n_heads?|num_heads|.*_num_value_heads": 4,
    r"num_key_value_heads|num_kv_heads|num_query_groups|.*_num_key_heads": 2,
    r"qk_nope_head_dim": 4,
    r"qk_head_dim": 12,
    r"(.*_)?head_dim|d_head|attention_head_size|dim_head|head_size|mamba_d_head|mamba_headdim": 8,
    r".*_rank": 16,
    r"(num_(local_|routed_)?|n_routed_|moe_num_)experts": 4,
    r"num_experts_per_tok(en)?|moe_(topk|k)|top_k_experts|n_group|num_expert_group|expert_layer_period": 2,
    r"first_k_dense_replace|num_dense_layers|n_shared_experts|topk_group|zero_expert_num": 1,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_(source|target)_positions": CONTEXT,
    r"context_length": CONTEXT,
    r"(attention_)?(sliding_)?window(_size)?|local_attention": WINDOW,
    r"attention_chunk_size": 16,
    r"(mamba_|ssm_)?(d_)?state(_size)?|mamba_n(um)?_heads|(mamba_)?chunk_size|block_size|index_topk": 8,
    r"rotary_dim": 4,
    r"image_size": 56,
    r"bos_token_id": 0,
    r"eos_token_id": VOCAB - 1,
    r"pad_token_id": 1,
    r".*_token_(id|index)": 2,
}
# Fields that get a value although their default is None.
WITHOUT_DEFAULT = (
    r"num_key_value_heads|num_kv_heads|n_inner|(bos|eos|pad)_token_id|num_experts_per_tok|n_(routed|shared)_experts"
    r"|head_dim"
)
SWITCHES = {"is_decoder": True, "is_encoder_decoder": False, "causal": True, "lm_head_bias": True}
# Scales that real models change and whose defaults hide them.
SCALES = r"(embedding|residual|attention|lm_head|key)_multiplier|logits_scaling|logit_scale|.*_(in|out)_multiplier"
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
SPECIAL: dict[str, dict[str, Any]] = {
    "glm4v_text": MROPE,
    "glm_ocr_text": MROPE,
    "qwen2_vl_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    "qwen2_5_omni_text": MROPE,
    "paddleocr_vl_text": MROPE,
    "hunyuan_vl_text": MROPE,
    "cosmos3_edge_text": MROPE,
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 2]}, "moe_intermediate_size": [16, 16],
    },
    "glm4v_moe_text": {
        "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    },
    "mistral4": {"qk_nope_head_dim": 8},
    "chameleon": {"vocabulary_map": {"<image>": 2}},
    "step3p5": {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)]},
    "granite4_vision": {
        "downsample_rate": "1/2", "deepstack_layer_map": [[0, 1]],
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 64, "num_hidden_layers": 1,
                          "num_attention_heads": 1, "image_size": 56},
    },
    "granite_speech_encoder": {"hidden_dim": 32},
    "granite_speech_plus_encoder": {"hidden_dim": 32},
    "inkling2_vision": {"text_hidden_size": 32},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1},
    "muse_glimmer": {"projector_hidden_size": 32},
    "muse_spark": {"projector_hidden_size": 32},
    "muse_spark_audio": {"hidden_sizes": [32] * 4},
    "molmo2_adapter": {"vit_layers": [-1]},
    "molmo2_vision": {"image_size": [56, 56]},
    "radio": {"video_temporal_patch_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 12, "per_layer_config": {}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 5, "<image>": 6}},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"final_logit_softcapping": 30.0, "global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "mllama_text_model": {"num_hidden_layers": 5},  # one of them reads an image, and gives no state of a text
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": [12, 8], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local"] * 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


@functools.cache
def compiled() -> list[tuple[re.Pattern[str], Any]]:
    return [(re.compile(names), value) for names, value in RULES.items()]


def tiny_config(model_type: str, **settings: Any) -> Any:
    """A config of few layers whose every size is small; settings: fields that are not as the rules make them."""
    return made(CONFIG_MAPPING[model_type], settings)


def made(kind: type[PreTrainedConfig], settings: dict[str, Any]) -> Any:
    default = kind()
    fields = {name: value for name, value in default.to_dict().items() if known(kind, name)}
    small = {name: value for name, old in fields.items() if (value := small_value(name, old)) is not None}
    if "qk_rope_head_dim" in fields and "num_key_value_heads" in small:
        # Latent attention has keys for every head.
        small["num_key_value_heads"] = 4
    for name in kind.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            small[name] = made(type(part), {}).to_dict()
    return kind(**{**small, **SPECIAL.get(kind.model_type, {}), **settings})


def known(kind: type[PreTrainedConfig], name: str) -> bool:
    """Whether a config class takes a field: not one that it derives from others."""
    if name in kind.sub_configs or isinstance(getattr(kind, name, None), property):
        return False
    aliases = {*kind.attribute_map, *kind.attribute_map.values()}
    return (
        name in aliases
        or any(name in vars(base).get("__annotations__", {}) for base in kind.__mro__)
        or (name in inspect.signature(kind.__init__).parameters)
    )


def small_value(name: str, old: Any) -> Any:
    """The value of a field, None to leave it as it is."""
    if name in KINDS:
        kinds = list(dict.fromkeys(old or ()))
        return [kinds[number % len(kinds)] for number in range(LAYERS)] if kinds else None
    if name == "rope_parameters":
        return short_rope(old)
    if isinstance(old, bool):
        return SWITCHES.get(name)
    if isinstance(old, float) and re.fullmatch(SCALES, name):
        return 0.5
    if old is None and not re.fullmatch(WITHOUT_DEFAULT, name):
        return None
    return next((value for names, value in compiled() if names.fullmatch(name)), None)


def short_rope(old: Any) -> Any:
    """Rotary settings whose original context is shorter than the test's text, of each kind of layer."""
    if not isinstance(old, dict):
        return None
    short = {name: short_rope(value) if isinstance(value, dict) else value for name, value in old.items()}
    if "original_max_position_embeddings" in short:
        short["original_max_position_embeddings"] = 32
    return short


def causal_types() -> list[str]:
    """Values of `model_type`, one of each config class."""
    return one_of_each(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def multimodal_types() -> list[str]:
    """The same of models that see or hear, and have no class of causal models."""
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return one_of_each([name for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if name not in causal])


def one_of_each(names: Collection[str]) -> list[str]:
    kinds = {CONFIG_MAPPING[name]: name for name in reversed([*names])}
    return [name for name in names if kinds[CONFIG_MAPPING[name]] == name]


@torch.no_grad()
def random_model(config: Any, seed: int = 5) -> Any:
    """A model whose answers depend on all of its context, and all of whose weights count.

    Gains of norms are near 0.5, which neither w nor 1 + w hides. Biases are not zero. Logits reach 20, so that a
    softcap of 30 changes them.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # Checkpoints of a family that sees are of the whole model.
        sees = type(config) in AutoModelForMultimodalLM._model_mapping
        auto = AutoModelForMultimodalLM if sees else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32).eval()
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            if weight.ndim > 1:
                weight.copy_(0.3 * noise)
            elif re.search(r"(norm|ln)\w*\.weight$|layernorm", name):
                weight.copy_(0.5 + 0.1 * noise)
            else:
                weight.add_(0.1 * noise)
    for module in model.modules():
        # transformers sets this row to 0 when it loads Youtu, whatever the file has.
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0
    output = model.get_output_embeddings()
    if output is not None:
        ids = torch.arange(2, 34)[None]
        with contextlib.suppress(TypeError, ValueError, KeyError):  # some need an image
            for _ in range(3):
                output.weight.mul_(20 / model(input_ids=ids, use_cache=False).logits.abs().max())
    return model


def sample(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB - 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def largest(values: Sequence[torch.Tensor]) -> float:
    return max(float(value.abs().max()) for value in values)


# Why no model of these is tried.
OMITTED: dict[str, str] = {
    "blt": "reads bytes in patches, not tokens",
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "needs timm"),
    "gemma4_assistant": "drafts for gemma4 from its cache",
    "gemma4_unified_assistant": "drafts for gemma4_unified from its cache",
    "diffusion_gemma": "writes blocks by diffusion",
    **dict.fromkeys(("evolla", "pi0", "shieldgemma2"), "reads proteins, moves robots, classifies images"),
    **dict.fromkeys(
        ("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"),
        "has an encoder for its input",
    ),
    "glm5_next": "has no valid config as small",
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), "needs an image"),
    **dict.fromkeys(
        ("fun_asr_nano", "kyutai_speech_to_text", "nemo_speechlm", "vibevoice_asr", "voxtral_realtime"),
        "writes speech down",
    ),
    **dict.fromkeys(("moshi", "qwen2_5_omni", "qwen3_omni_moe"), "speaks"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "makes sounds"),
}
