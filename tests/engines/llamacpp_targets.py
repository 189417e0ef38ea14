"""Tiny random targets of families that llama.cpp gives a head the states of, as directories and as GGUF files.

Norm gains are away from 0 and 1, and weights large enough that first choices are clear: else a wrong reading of the
target would look right.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other tests' helpers
from worlds import tiny_tokenizer

LAYERS = 8
COMMON = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
          "tie_word_embeddings": False, "bos_token_id": None, "rms_norm_eps": 1e-6}  # fmt: skip
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# As gpt-oss's but for "truncate": llama.cpp rounds the ends of the ramp, which the published model does not.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        "truncate": True, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
# Family -> transformers' class, and its config.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", {
        **COMMON, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "layer_types": [*["linear_attention"] * 3, "full_attention"] * (LAYERS // 4),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                            "mrope_section": [2, 1, 1]},
    }),
    "gpt_oss": ("GptOssForCausalLM", {**COMMON, **MIXED, **EXPERTS, "rope_parameters": YARN}),
    # llama.cpp tells full layers from others by the size of their heads.
    "gemma4": ("Gemma4ForCausalLM", {
        **COMMON, **MIXED, "final_logit_softcapping": 30.0, "global_head_dim": 64, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    }),
    "lfm2": ("Lfm2ForCausalLM", {
        **COMMON, "layer_types": ["conv", "full_attention"] * (LAYERS // 2), "conv_L_cache": 3, "norm_eps": 1e-6,
        "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True, "conv_dim": 64, "conv_dim_out": 64,
        "block_dim": 64, "block_ff_dim": 96,
    }),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {
        **COMMON, **EXPERTS, "rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }),
}  # fmt: skip
# The converter knows no hash of this tokenizer, and no Gemma or GLM with another tokenizer than its own.
CONVERT = """
import runpy, sys
converter, *arguments = sys.argv[1:]
sys.path[:0] = [converter, converter + "/gguf-py"]
from conversion import base, gemma, glm
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
gemma.Gemma4Model.set_vocab = glm.Glm4MoeModel.set_vocab = lambda self: self._set_vocab_gpt2()
sys.argv = ["convert_hf_to_gguf.py", *arguments]
runpy.run_path(converter + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def write_target(family: str, directory: Path) -> Path:
    """A random model of this family, with the tokenizer of the tiny tests."""
    kind, settings = TARGETS[family]
    found, tokenizer = getattr(transformers, kind), tiny_tokenizer()
    own = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    torch.manual_seed(3)
    model = found(found.config_class(**{**own, **settings}))
    for name, weight in model.named_parameters():
        if weight.ndim == 1 and "norm" in name:
            weight.data = 0.7 + 0.3 * torch.randn_like(weight)
        elif weight.ndim > 1:
            weight.data = (0.6 if "lm_head" in name or "embed" in name else 0.15) * torch.randn_like(weight)
    # Whole characters only: llama.cpp streams no ids of others, and their rounds are counted in sum.
    texts = [tokenizer.decode([token]) for token in range(model.config.vocab_size)]
    whole = torch.tensor([text != "" and text.isascii() and text.isprintable() and "<|" not in text for text in texts])
    model.get_output_embeddings().weight.data[~whole] = 0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def convert(converter: Path, directory: Path, file: Path) -> Path:
    """Write a target as GGUF with llama.cpp's own converter, in float32."""
    # A config of Qwen3.5 without MTP layers asserts otherwise.
    config = (directory / "config.json").read_text()
    without = ["--no-mtp"] if "qwen3_5" in config and "mtp_num_hidden_layers" not in config else []
    words = [sys.executable, "-c", CONVERT, str(converter), str(directory), "--outfile", str(file), "--outtype", "f32"]
    made = subprocess.run([*words, *without], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    return file
