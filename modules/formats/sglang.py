"""EAGLE-1 and EAGLE-3 heads in SGLang 0.5.23 (models/llama_eagle.py, models/llama_eagle3.py, speculative/).

Unknown tensors and fields are ignored, and missing tensors keep their initial values.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle.net import EagleConfig
from draftsmith.modules.drafters.eagle3.net import Eagle3Config
from draftsmith.modules.formats.base import Package, Problem, Served, TargetFacts
from draftsmith.modules.formats.eagle1 import SGLANG_CLASS, Eagle1Format
from draftsmith.modules.formats.eagle3 import CLASS, IDS, Eagle3Format, Flags, layer_ids
from draftsmith.modules.formats.llama import Biases, LlamaFormat, max_positions
from draftsmith.modules.layers import rope_settings
from draftsmith.modules.types import InputError


class SGLang(LlamaFormat):
    """A speculative algorithm of SGLang, EAGLE or EAGLE3."""

    name, system = "sglang", "SGLang"

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        # Linear scaling multiplies the positions (configs/model_config.py, _derive_context_length).
        rope = rope_settings(raw)
        stretched = rope.scaling.factor if rope.kind == "linear" else 1.0
        own, theirs = int(stretched * int(raw.get("max_position_embeddings") or 2048)), max_positions(target)
        longer = f"raises: the target's context of {theirs} is longer than the draft's {own}. Write a longer one, or "
        wrong = {
            "max_position_embeddings": (theirs > own, longer + "set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"),
            "tie_word_embeddings": (raw.get("tie_word_embeddings"), "raises, or drafts with the embedding as lm_head"),
        }
        return super().problems(raw, target) + self.listed(wrong)

    def serve(self, served: Served) -> str:
        # A chain; the target's own token counts among those that it verifies.
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(served.model)}"
            f" --speculative-algorithm {self.kind.upper()}"
            f" --speculative-draft-model-path {shlex.quote(served.directory)}"
            f" --speculative-num-steps {served.num_drafted} --speculative-eagle-topk 1"
            f" --speculative-num-draft-tokens {served.num_drafted + 1}"
        )


class SGLangEagle(SGLang, Eagle1Format):
    """EAGLE-1 head. Its fusion layer always has a bias."""

    zero_bias = True
    classes = (SGLANG_CLASS,)
    # models/llama.py. The MLP never has one.
    bias_fields = {"qkv": ("attention_bias", "bias"), "o": ("attention_bias", "bias")}

    def fields(self, config: EagleConfig) -> dict[str, Any]:
        return {"architectures": [SGLANG_CLASS], "bias": False, "attention_bias": config.llama.qkv_bias}

    def write(
        self, config: EagleConfig, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        """Convert a head, and add zeros for the biases that SGLang creates beside ours."""
        llama, package = config.llama, super().write(config, state, dtype)
        zeros = {"fc.bias": torch.zeros(llama.hidden_size, dtype=dtype)}
        if llama.qkv_bias:
            for i in range(llama.num_layers):
                zeros[f"layers.{i}.self_attn.o_proj.bias"] = torch.zeros(llama.hidden_size, dtype=dtype)
        return Package(package.config, {**package.tensors, **zeros}, package.metadata)

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        return super().biases(raw)._replace(fc=True)


class SGLangEagle3(SGLang, Eagle3Format):
    """EAGLE-3 head. Its number k is the OUTPUT of layer k, our number k + 1."""

    prefix = True
    classes = (CLASS,)
    # q, k and v never have one (models/llama_eagle3.py), o has as any Llama's (models/llama.py).
    bias_fields = {"fc": ("bias",), "o": ("attention_bias", "bias")}

    def check_system(self, config: Eagle3Config) -> None:
        remedy = "Export it with --format vllm or --format speculators."
        if config.norm_before_residual:
            expected = f"false: {self.system} ignores it and adds the state as it is"
            raise InputError("norm_before_residual", True, expected, remedy)
        if config.capture[0] == 0:
            expected = f"layers from 1: {self.system} counts outputs of layers, and the embedding is none"
            raise InputError("layers", list(config.capture), expected, remedy)

    def id_fields(self, ids: tuple[int, ...] | None) -> dict[str, Any]:
        block = {"use_aux_hidden_state": True, IDS: [number - 1 for number in ids or ()]}
        return {} if ids is None else {"eagle_config": block}

    def flags(self, raw: Mapping[str, Any]) -> Flags:
        return super().flags(raw)._replace(fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")))

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        # States come in the order of the layers, whatever the list's (models/llama.py, layers_to_capture).
        ids = layer_ids(raw, "eagle_config")
        return None if ids is None else tuple(sorted({number + 1 for number in ids}))

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        above = layer_ids(raw, "")
        wrong = {
            "speculators_model_type": ("speculators_model_type" in raw, "does not know such a config.json"),
            "draft_vocab_size": (raw.get("draft_vocab_size") is None, "raises, or drops lm_head: write it"),
            IDS: (above is not None and above != self.ids(raw), "does not read it at the top, but in eagle_config"),
        }
        return super().problems(raw, target) + self.listed(wrong)
