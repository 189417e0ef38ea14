"""Tiny random models of many architectures, and how each decodes beside transformers: the table of docs/models.md.

`python tests/architectures.py` prints the table; `tests/modules/targets/architectures_test.py` holds the page to it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith.modules.decoding.loop import generate, generate_one
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams

VOCAB, CONTEXT, WINDOW = 97, 96, 24
PROMPT, ANSWER = 30, 24  # beyond the window
IDS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 96, "pad_token_id": 1}
LLAMA = {**IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False}  # fmt: skip
HEADS = {**LLAMA, "head_dim": 8}
MOE = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT = {**IDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}
BERT = {**IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT + 2, "is_decoder": True}  # fmt: skip
SSM = {**IDS, "hidden_size": 32, "num_hidden_layers": 2}
WINDOWED = {"sliding_window": WINDOW}
MIXED = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **settings}}


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "original_max_position_embeddings": 48,
}  # fmt: skip
# Name -> transformers' class without `ForCausalLM` (or whole), and its config.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", LLAMA),
    "Llama, linear rope": ("Llama", {**LLAMA, **rope("linear")}),
    "Llama, llama3 rope": ("Llama", {**LLAMA, **rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0,
                                                     original_max_position_embeddings=32)}),
    "Llama, dynamic rope": ("Llama", {**LLAMA, **rope("dynamic", original_max_position_embeddings=32)}),
    "Llama, yarn": ("Llama", {**LLAMA, **rope("yarn", original_max_position_embeddings=32)}),
    "Mistral": ("Mistral", {**LLAMA, "sliding_window": None}),
    "Mistral, window": ("Mistral", {**LLAMA, **WINDOWED}),
    "Qwen2": ("Qwen2", LLAMA),
    "Qwen2, window": ("Qwen2", {**LLAMA, **WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3": ("Qwen3", HEADS),
    "Qwen3, window": ("Qwen3", {**HEADS, **WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    "Qwen2-MoE": ("Qwen2Moe", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                               "shared_expert_intermediate_size": 16}),
    "Qwen3-MoE": ("Qwen3Moe", MOE),
    "Mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-OSS": ("GptOss", {**HEADS, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma": ("Gemma", HEADS),
    "Gemma 2, softcapping": ("Gemma2", {**HEADS, **WINDOWED}),
    "Gemma 2, none": ("Gemma2", {**HEADS, **WINDOWED, "final_logit_softcapping": None}),
    "Gemma 3": ("Gemma3", {**HEADS, **MIXED}),
    "Phi": ("Phi", LLAMA),
    "Phi-3": ("Phi3", {**LLAMA, **WINDOWED}),
    "Phi-3, longrope": ("Phi3", {**LLAMA, **LONGROPE}),
    "Granite": ("Granite", {**LLAMA, "logits_scaling": 1.0}),
    "Granite, scaled logits": ("Granite", {**LLAMA, "logits_scaling": 8.0}),
    "Cohere": ("Cohere", {**LLAMA, "logit_scale": 1.0}),
    "Cohere, scaled logits": ("Cohere", {**LLAMA, "logit_scale": 0.0625}),
    "OLMo 2": ("Olmo2", LLAMA),
    "OLMo 3": ("Olmo3", {**LLAMA, **MIXED}),
    "SmolLM3": ("SmolLM3", LLAMA),
    "StableLM": ("StableLm", LLAMA),
    "StarCoder2": ("Starcoder2", {**LLAMA, **WINDOWED}),
    "EXAONE 4": ("Exaone4", {**HEADS, **WINDOWED, "sliding_window_pattern": 2}),
    "GLM-4": ("Glm4", HEADS),
    "nanochat": ("NanoChat", LLAMA),
    "Doge": ("Doge", LLAMA),
    "GPT-2": ("GPT2LMHeadModel", GPT),
    "GPT-Neo": ("GPTNeo", {**IDS, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "window_size": WINDOW,
                           "max_position_embeddings": CONTEXT,
                           "attention_types": [[["global", "local", "global"], 1]]}),
    "GPT-NeoX": ("GPTNeoX", LLAMA),
    "GPT-J": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "GPT-BigCode": ("GPTBigCode", GPT),
    "CodeGen": ("CodeGen", {**GPT, "n_ctx": CONTEXT, "rotary_dim": 4}),
    "OPT": ("OPT", {**IDS, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                    "max_position_embeddings": CONTEXT, "word_embed_proj_dim": 32}),
    "BLOOM": ("Bloom", {**IDS, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "MPT": ("Mpt", {**IDS, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": CONTEXT}),
    "Falcon": ("Falcon", {**IDS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}),
    "Falcon, ALiBi": ("Falcon", {**IDS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                                 "alibi": True, "multi_query": False, "parallel_attn": False}),
    "BioGPT": ("BioGpt", LLAMA),
    "XGLM": ("XGLM", {**IDS, "d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4,
                      "max_position_embeddings": CONTEXT}),
    "CTRL": ("CTRLLMHeadModel", {**GPT, "dff": 48}),
    "BART decoder": ("Bart", {**IDS, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
                              "decoder_ffn_dim": 48, "max_position_embeddings": CONTEXT, "is_decoder": True,
                              "is_encoder_decoder": False}),
    "BERT decoder": ("BertLMHeadModel", BERT),
    "RoBERTa decoder": ("Roberta", BERT),
    "GPT": ("OpenAIGPTLMHeadModel", GPT),
    "XLNet": ("XLNetLMHeadModel", {**IDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    "XLM": ("XLMWithLMHeadModel", {**IDS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True,
                                   "max_position_embeddings": CONTEXT}),
    "Mamba": ("Mamba", {**SSM, "state_size": 4}),
    "Mamba 2": ("Mamba2", {**SSM, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
    "Falcon Mamba": ("FalconMamba", {**SSM, "state_size": 4}),
    "RWKV": ("Rwkv", {**SSM, "attention_hidden_size": 32}),
    "Jamba": ("Jamba", {**LLAMA, "num_hidden_layers": 4, "num_experts": 2, "use_mamba_kernels": False,
                        "attn_layer_period": 2, "attn_layer_offset": 1}),
    "LFM2": ("Lfm2", {**LLAMA, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
                      "block_auto_adjust_ff_dim": False}),
    "Qwen3-Next": ("Qwen3Next", {**MOE, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16,
                                 "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                                 "linear_value_head_dim": 8}),
    "Llama 4": ("Llama4", {**HEADS, "num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 2,
                           "attention_chunk_size": 16, "no_rope_layers": [1, 1, 1, 0]}),
    "MiniMax": ("MiniMax", {**HEADS, "num_hidden_layers": 4, "num_local_experts": 2, "block_size": 8}),
}  # fmt: skip
WAYS = {"alone": "ar", "chains": "spec:k=3", "trees": "lookahead:w=4:n=3:g=4", "rows": ""}


@dataclass(frozen=True)
class Outcome:
    """Result of an architecture. ways: `equal`, `refused` or `wrong` by way of `WAYS`; reason: of the refusals."""

    engine: str
    ways: dict[str, str]
    reason: str = ""

    @property
    def cells(self) -> str:
        """The row of docs/models.md without its first cell, the architectures that came out so."""
        return f"{self.engine} | {' | '.join(self.ways.values())} | {self.reason or 'none'}"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """The table in docs/models.md: a row for all architectures that came out alike."""
    names: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        names.setdefault(outcome.cells, []).append(name)
    head = f"| architectures | engine | {' | '.join(WAYS)} | refused because it |\n|---|---|---|---|---|---|---|\n"
    return head + "".join(f"| {'; '.join(alike)} | {cells} |\n" for cells, alike in names.items())


def build(name: str, directory: Path) -> Any:
    """A random model whose answers depend on all of its context, saved in `directory`."""
    kind, settings = ARCHITECTURES[name]
    found = getattr(transformers, kind if "Model" in kind else f"{kind}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = found(found.config_class(**settings)).eval()
        for weight in model.parameters():
            # Positions, norms and biases too: none may go unused unnoticed.
            weight.data = 0.3 * torch.randn_like(weight) if weight.ndim > 1 else weight + 0.1 * torch.randn_like(weight)
    model.save_pretrained(directory)
    return model


def decode(name: str) -> Outcome:
    """Compare greedy answers in each way with those of whole forwards without a cache."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(name, Path(folder))
        try:
            lm = load_lm(folder)
        except InputError as error:
            return Outcome("-", dict.fromkeys(WAYS, "refused"), reason(error))
    engine = "lean" if type(lm).__name__ == "LlamaLM" else "hf"
    prompts = [tokens(PROMPT, 1), tokens(7, 2)]
    room = min(ANSWER, lm.info.max_position - PROMPT)
    expected = [whole_forwards(model, prompt, room) for prompt in prompts]
    greedy, ways, refusals = SamplingParams(), {}, []

    def answer(method: str) -> list[list[int]]:
        if not method:
            both = generate(lm, None, prompts, greedy, room, [TorchSource(0), TorchSource(1)], ())
            return [row.tokens for row in both]
        models = Models(target=lm, draft=lm, capacity=lm.info.max_position + 8)
        drafter = parse_method(method).build(models, 1)
        return [generate_one(lm, drafter, prompts[0], greedy, room, TorchSource(0), ()).tokens]

    for way, method in WAYS.items():
        try:
            found = answer(method)
        except InputError as error:
            ways[way] = "refused"
            refusals.append(reason(error))
        else:
            ways[way] = "equal" if found == expected[: len(found)] else "wrong"
    return Outcome(engine, ways, "; ".join(dict.fromkeys(refusals)))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(2, VOCAB - 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def whole_forwards(model: Callable[..., Any], prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def reason(error: InputError) -> str:
    """The error's cause without the class's name and without numbers, which differ between machines."""
    if error.field != "model":
        return f"has `{error.field}`"
    said = str(error).removeprefix("model: found ").partition(", expected")[0]
    return re.sub(r" \(.*", "", said).partition(", which ")[2]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    sys.stdout.write(table({name: decode(name) for name in ARCHITECTURES}))
