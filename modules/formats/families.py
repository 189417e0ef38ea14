"""Families of targets that systems give a head states of, by transformers' `model_type` without `_text`.

Of multimodal models vLLM and SGLang go by the type of the whole, llama.cpp by that of the text. Read on 2026-11-28.
llama.cpp of llama-cpp-python 0.3.36: src/models/*.cpp, `t_layer_inp`, of the architectures that conversion/ writes.
SGLang 0.5.23: classes with set_eagle3_layers_to_capture, and with set_dflash_layers_to_capture. vLLM 0.33.0: classes
with SupportsEagle3; it reads any other model of attention layers with `--model-impl transformers`. SafeAILab/EAGLE at
cb7e084: modeling_llama_kv.py and modeling_qwen3_kv.py.
"""

from __future__ import annotations

SAFEAILAB = {"llama", "qwen3"}
LLAMACPP = {
    "deepseek_v4", "gemma4", "gemma4_unified", "gpt_oss", "hunyuan_v1_dense", "lfm2", "lfm2_moe", "llama",
    "mimo_v2_flash", "minimax_m2", "mistral", "mixtral", "nemotron_h", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_moe", "qwen3_next",
}  # fmt: skip
# Of which llama.cpp gives the state after the last layer, before the final norm: to EAGLE-3 by t_h_nextn, which is
# normed for most, to blocks by t_layer_inp[n_layer].
LLAMACPP_LAST_EAGLE3 = {"gpt_oss", "mimo_v2_flash"}
LLAMACPP_LAST_BLOCKS = {"deepseek_v4", "mimo_v2_flash", "nemotron_h"}
SGLANG_BLOCKS = {
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma4", "gemma4_unified", "glm4_moe_lite", "glm_moe_dsa",
    "gpt_oss", "inkling_mm_model", "internlm3", "kimi_k2", "kimi_k25", "laguna", "lfm2", "lfm2_moe", "lfm2_vl", "llama",
    "llama4", "mellum", "mimo_v2_flash", "minimax_m3_vl", "ministral3", "mistral", "muse_glimmer", "muse_spark",
    "nemotron_h", "nemotron_h_omni", "phi3", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl",
    "qwen3_vl_moe",
}  # fmt: skip
SGLANG_EAGLE3 = SGLANG_BLOCKS - {
    "inkling_mm_model", "laguna", "lfm2", "lfm2_moe", "lfm2_vl", "mimo_v2_flash", "muse_glimmer", "muse_spark",
    "nemotron_h", "nemotron_h_omni",
} | {
    "apertus", "exaone_moe", "gemma3", "glm4_moe", "longcat_flash", "minimax_m2", "qwen2", "qwen2_5_vl", "qwen2_moe",
}  # fmt: skip
# Types of targets that SGLang's models/deepseek_v2.py and glm4_moe_lite.py build.
SGLANG_DEEPSEEK = {
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite", "glm_moe_dsa",
}  # fmt: skip
SGLANG_SCALES = {"gemma4", "gemma4_unified"}  # in the module of its embedding, which block drafters borrow
VLLM = {
    "afmoe", "apertus", "cohere2_moe", "cohere_compass", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
    "ernie4_5", "exaone4_5", "gemma4", "gemma4_unified", "glm_moe_dsa", "gpt_oss", "granite", "granite_swa",
    "granitemoe", "granitemoe_swa", "granitemoeshared", "internlm3", "kimi_k2", "kimi_k25", "kimi_linear", "laguna",
    "lighton_ocr", "llama", "llama4", "llava", "mimo_v2_flash", "minicpm3", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
    "minimax_m2", "minimax_m3_vl", "ministral3", "mistral", "mistral3", "nemotron_h", "phi3", "qwen2", "qwen2_5_vl",
    "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_thinker", "qwen3_vl",
    "qwen3_vl_moe",
}  # fmt: skip
