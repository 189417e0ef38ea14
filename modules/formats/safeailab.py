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

from draftsmith.modules.drafters.eagle.net import EagleConfig
from draftsmith.modules.drafters.eagle3.net import Eagle3Config
from draftsmith.modules.formats.base import ImportedHead, Package, Problem, Served, TargetFacts
from draftsmith.modules.formats.eagle1 import Eagle1Format
from draftsmith.modules.formats.eagle3 import Eagle3Format, Flags, default_layers, has_flag, layer_ids
from draftsmith.modules.formats.llama import Biases, check_safeailab_layer, safeailab_problems
from draftsmith.modules.formats.rope import conflict, missing_keys, safeailab_rope, transformers_rope
from draftsmith.modules.types import InputError

SYSTEM = "SafeAILab/EAGLE"
# Types of targets whose states its code captures (modeling_llama_kv.py, modeling_qwen3_kv.py).
CAPTURED = ("llama", "qwen3")


class SafeAILabEagle(Eagle1Format):
    """EAGLE-1 head; vLLM reads what is written for it as well."""

    name = "eagle"
    system = SYSTEM
    target_index = True
    notes = (
        "Its tree of total_token 60, depth 5 and top_k 10 counts the root: here it is eagle2:nodes=59:depth=5:topk=10.",
    )

    def check(self, config: EagleConfig) -> None:
        check_safeailab_layer(config.llama, self.system)
        super().check(config)

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        """`bias` is fc's and true by default (ea_model.py); `qkv_bias` is that of q, k and v (cnets1.py)."""
        return Biases(fc=bool(raw.get("bias", True)), qkv=bool(raw.get("qkv_bias", False)), o=False, mlp=False)

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        return safeailab_problems(raw, self.system)

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        """Read a head. head_dim and llama3 scaling, which that code cannot have, are taken by the field.

        Heads for vLLM come in the same kind of directory; a base that the two read differently is refused.
        """
        raw = package.config
        theirs, meant = safeailab_rope(raw), transformers_rope(raw)
        differ = (meant.kind, meant.theta) != (theirs.kind, theirs.theta) and meant.kind in ("default", "linear")
        if differ and conflict(raw) is None and not missing_keys(raw):
            expected = f"{theirs}, which {self.system} computes with here, where vLLM goes by the field"
            remedy = "Import it with --format vllm if vLLM's rule is meant"
            remedy += f", else write {theirs.theta:g} into config.json."
            raise InputError("rope_theta", str(meant), expected, remedy)
        return super().read(package, target)

    def serve(self, served: Served) -> str:
        return webui(served)


class SafeAILabEagle3(Eagle3Format):
    """EAGLE-3 head without switches; every other system reads it as well."""

    name = "eagle"
    system = SYSTEM
    accepted = ("midlayer",)
    target_index = True
    notes = (
        "Its tree of total_token 60, depth 7 and top_k 10 counts the root: here it is"
        " eagle3-tree:nodes=59:depth=7:topk=10.",
    )

    def check(self, config: Eagle3Config) -> None:
        check_safeailab_layer(config.llama, self.system)
        for name in Flags._fields:
            if getattr(config, name):
                expected = f"false: {self.system} ignores it and says nothing"
                raise InputError(name, True, expected, "Export it with --format vllm.")
        count = config.capture[-1] + 3  # the target's layers, if these are the default ones
        if config.capture != (2, count // 2, count - 3):
            self._refuse_layers(config, "2, L/2 and L-3")
        super().check(config)

    def _refuse_layers(self, config: Eagle3Config, expected: str) -> None:
        found, expected = list(config.capture), f"{expected}, which {self.system} always reads"
        raise InputError("layers", found, expected, "Export it with --format vllm.")

    def write(
        self, config: Eagle3Config, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        usual = None if target is None else default_layers(target)
        if usual not in (None, config.capture):
            self._refuse_layers(config, f"{list(usual or ())} of this target")
        return super().write(config, state, dtype, target)

    def id_fields(self, ids: tuple[int, ...] | None) -> dict[str, Any]:
        return {}

    def flags(self, raw: Mapping[str, Any]) -> Flags:
        return Flags()

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        return None

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        return Biases(fc=False, qkv=False, o=False, mlp=False)

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        problems = safeailab_problems(raw, self.system)
        if "speculators_model_type" in raw:
            text = f"{self.system} reads sizes at the top of config.json only"
            problems.append(Problem("speculators_model_type", text))
        elif raw.get("draft_vocab_size") is None:
            problems.append(Problem("draft_vocab_size", f"{self.system} raises: the field is missing"))
        for name in Flags._fields:
            if has_flag(raw, name):
                problems.append(Problem(name, f"{self.system} does not read it"))
        ids = layer_ids(raw, "", "eagle_config")
        if ids is not None and (target is None or ids != default_layers(target)):
            problems.append(Problem("layers", f"{self.system} does not read {list(ids)}: it takes 2, L/2 and L-3"))
        if "target_hidden_size" in raw:
            text = f"{self.system} does not copy the target's embedding if the field is there"
            problems.append(Problem("target_hidden_size", text))
        if target is not None and target.raw.get("model_type", "llama") not in CAPTURED:
            text = f"{self.system} captures no layers of a target of type {target.raw['model_type']}"
            problems.append(Problem("model_type", text))
        return problems

    def serve(self, served: Served) -> str:
        """Return its web demo, which takes EAGLE-3 with --no-eagle3 (webui.py: use_eagle3=args.no_eagle3)."""
        return f"{webui(served)} --no-eagle3"


def webui(served: Served) -> str:
    """Return the command of the web demo; the number of drafted tokens has no flag there."""
    return (
        f"python -m eagle.application.webui --base-model-path {shlex.quote(served.model)}"
        f" --ea-model-path {shlex.quote(served.directory)}"
    )
