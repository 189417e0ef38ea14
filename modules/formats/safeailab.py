"""EAGLE-1 and EAGLE-3 heads of SafeAILab/EAGLE (commit cb7e084: eagle/model/cnets1.py, cnets.py, configs.py).

A directory of `config.json` and one weights file, loaded with `strict=False`: unknown tensors are ignored, missing ones
stay random. It reads none of the fields that later systems added, and always the target's layers 2, L/2 and L-3.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle3.net import Eagle3Config
from draftsmith.modules.formats.base import Package, Problem, Served, TargetFacts
from draftsmith.modules.formats.eagle1 import Eagle1Format
from draftsmith.modules.formats.eagle3 import Eagle3Format, Flags, default_layers, layer_ids
from draftsmith.modules.formats.llama import Biases, LlamaFormat
from draftsmith.modules.formats.rope import safeailab_rope
from draftsmith.modules.layers import rope_settings
from draftsmith.modules.types import InputError

SYSTEM = "SafeAILab/EAGLE"
# Types of targets whose states its code captures (modeling_llama_kv.py, modeling_qwen3_kv.py).
CAPTURED = ("llama", "qwen3")


class SafeAILab(LlamaFormat):
    """Head that SafeAILab's web demo serves; the number of drafted tokens has no flag there."""

    name, system = "eagle", SYSTEM
    target_index = True

    def check_system(self, config: Any) -> None:
        llama, remedy = config.llama, "Export it with --format vllm or --format sglang."
        scaling = llama.rope_scaling
        if llama.head_dim * llama.num_heads != llama.hidden_size:
            expected = f"hidden_size / num_heads = {llama.hidden_size // llama.num_heads}: {SYSTEM} ignores the field"
            raise InputError("head_dim", llama.head_dim, expected, remedy)
        if scaling.kind == "llama3":
            raise InputError("rope_scaling", "llama3", f"none or linear: {SYSTEM} refuses every other", remedy)
        if scaling.kind == "linear" and (llama.rope_theta != 10000 or scaling.factor <= 1):
            found = f"linear by {scaling.factor:g} on base {llama.rope_theta:g}"
            rule = f"{SYSTEM} takes that base under linear scaling, whatever rope_theta says"
            raise InputError("rope_scaling", found, f"a factor over 1 on base 10000: {rule}", remedy)

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        # vLLM and SGLang read rotary settings in another way.
        meant, read = rope_settings(raw), safeailab_rope(raw)
        differ = (meant.theta, meant.kind) != (read.theta, read.kind)
        return self.listed({"rope_theta": (differ, f"computes with {read}, not with {meant}")})

    def serve(self, served: Served) -> str:
        # It takes EAGLE-3 with --no-eagle3 (webui.py: use_eagle3=args.no_eagle3).
        return (
            f"python -m eagle.application.webui --base-model-path {shlex.quote(served.model)}"
            f" --ea-model-path {shlex.quote(served.directory)}{' --no-eagle3' if self.kind == 'eagle3' else ''}"
        )


class SafeAILabEagle(SafeAILab, Eagle1Format):
    """EAGLE-1 head; vLLM reads what is written for it as well.

    head_dim and llama3 scaling, which this code does not have, are imported: heads for vLLM come in the same directory.
    """

    notes = (
        "Its tree of total_token 60, depth 5 and top_k 10 counts the root: here it is eagle2:nodes=59:depth=5:topk=10.",
    )

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        # `bias` is fc's and true by default (ea_model.py); `qkv_bias` is that of q, k and v (cnets1.py).
        return Biases(fc=bool(raw.get("bias", True)), qkv=bool(raw.get("qkv_bias", False)), o=False, mlp=False)


class SafeAILabEagle3(SafeAILab, Eagle3Format):
    """EAGLE-3 head without switches; every other system reads it as well."""

    accepted = ("midlayer",)
    notes = (
        "Its tree of total_token 60, depth 7 and top_k 10 counts the root: here it is"
        " eagle3-tree:nodes=59:depth=7:topk=10.",
    )

    def check_system(self, config: Eagle3Config) -> None:
        super().check_system(config)
        for name in Flags._fields:
            if getattr(config, name):
                expected = f"false: {self.system} ignores it and says nothing"
                raise InputError(name, True, expected, "Export it with --format vllm.")
        count = config.capture[-1] + 3  # the target's layers, if these are the default ones
        if config.capture != (2, count // 2, count - 3):
            expected = f"2, L/2 and L-3, which {self.system} always reads"
            raise InputError("layers", list(config.capture), expected, "Export it with --format vllm.")

    def write(
        self, config: Eagle3Config, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        usual = None if target is None else default_layers(target)
        if usual not in (None, config.capture):
            expected = f"{list(usual or ())}, which {self.system} always reads of this target"
            raise InputError("layers", list(config.capture), expected, "Export it with --format vllm.")
        return super().write(config, state, dtype, target)

    def id_fields(self, ids: tuple[int, ...] | None) -> dict[str, Any]:
        return {}

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        return None

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        ids = layer_ids(raw, "", "eagle_config")
        model_type = "llama" if target is None else target.raw.get("model_type", "llama")
        wrong = {
            "speculators_model_type": ("speculators_model_type" in raw, "reads sizes at the top of config.json only"),
            "draft_vocab_size": (raw.get("draft_vocab_size") is None, "raises: the field is missing"),
            "layers": (ids is not None and (target is None or ids != default_layers(target)), "takes 2, L/2 and L-3"),
            "model_type": (model_type not in CAPTURED, f"captures no layers of a target of type {model_type}"),
        }
        return super().problems(raw, target) + self.listed(wrong)
