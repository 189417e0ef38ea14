"""Multi-token-prediction modules in the checkpoints of their targets: names and layout of the tensors, by family.

Sources: vLLM 0.33.0, models/*_mtp.py and config/speculative.py; SGLang 0.5.23, models/*_mtp.py and *_nextn.py;
transformers 5.23, modeling_layers.py and conversion_mapping.py; llama.cpp, conversion/.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.formats.base import HeadFormat, ImportedHead, Package, Served, TargetFacts
from draftsmith.modules.formats.commands import DRAWN
from draftsmith.modules.targets.shape import plain_shape
from draftsmith.modules.types import InputError

# Copies of the target's own tensors: every server but llama.cpp reads the target's in their place.
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # of all experts, as transformers has them


@dataclass(frozen=True)
class MtpFamily:
    """Names of a family's MTP tensors: ours are those of `MtpHead`.

    prefix: of all of them in checkpoints; `{n}` is the target's number of layers. count: field of config.json with the
    number of modules; empty if no server reads one. names: beginnings of our names, and what stands in their place
    behind the prefix; the first that fits counts.
    """

    prefix: str
    count: str
    names: tuple[tuple[str, str], ...]

    def own(self, names: Iterable[str], num_layers: int) -> list[str]:
        """Return the names of a checkpoint that belong to its MTP module, without copies of the target's tables."""
        prefix = self.prefix.format(n=num_layers)
        return [name for name in names if name.startswith(prefix) and not name.endswith(COPIES)]

    def from_file(self, tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
        """Return a checkpoint's MTP tensors by our names; experts become one tensor."""
        prefix, state, experts = self.prefix.format(n=num_layers), {}, dict[tuple[str, str], dict[int, Tensor]]()
        for file_name in self.own(tensors, num_layers):
            name = _renamed(file_name.removeprefix(prefix), [(theirs, ours) for ours, theirs in self.names])
            if match := EXPERT.fullmatch(name):
                experts.setdefault((match[1], match[3]), {})[int(match[2])] = tensors[file_name]
            else:
                state[name] = tensors[file_name]
        stacked = {key: torch.stack([one for _, one in sorted(each.items())]) for key, each in experts.items()}
        for stem in {stem for stem, _ in stacked}:
            halves = [stacked[stem, "gate_proj"], stacked[stem, "up_proj"]]
            state[f"{stem}.{GATE_UP}"] = torch.cat(halves, 1)  # [E, 2 I, H]
            state[f"{stem}.{DOWN}"] = stacked[stem, DOWN]  # [E, H, I]
        return state

    def to_file(self, state: Mapping[str, Tensor], num_layers: int, fused: bool) -> dict[str, Tensor]:
        """Return tensors of our names by those of a checkpoint. fused: experts in one tensor, not one by one."""
        tensors = {}
        for name, tensor in state.items():
            file_name = self.prefix.format(n=num_layers) + _renamed(name, self.names)
            stem, _, last = file_name.rpartition(".")
            if fused or not stem.endswith(".experts"):
                tensors[file_name] = tensor
                continue
            parts = ("gate_proj", "up_proj") if last == GATE_UP else (DOWN,)
            for number, expert in enumerate(tensor):
                for part, one in zip(parts, expert.chunk(len(parts)), strict=True):
                    tensors[f"{stem}.{number}.{part}.weight"] = one
        return tensors


def _renamed(name: str, names: Iterable[tuple[str, str]]) -> str:
    return next((new + name.removeprefix(old) for old, new in names if name.startswith(old)), name)


OUTER = ("enorm.", "hnorm.", "eh_proj.", "norm.")
QWEN = (
    *zip(OUTER, ("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm."), strict=True),
    ("layer.", "layers.0."),
)
NEXTN = (*zip(OUTER, (*OUTER[:3], "shared_head.norm."), strict=True), ("layer.", ""))
MIMO = (
    *zip(OUTER, (*OUTER[:3], "final_layernorm."), strict=True),
    ("layer.post_attention_layernorm.", "pre_mlp_layernorm."),
    ("layer.self_attn.sinks", "self_attn.attention_sink_bias"),
    ("layer.", ""),
)
FAMILIES = {
    # The layer behind the target's last one.
    "deepseek_v3": MtpFamily("model.layers.{n}.", "num_nextn_predict_layers", NEXTN),
    "glm4_moe": MtpFamily("model.layers.{n}.", "num_nextn_predict_layers", NEXTN),
    # The first of three modules: vLLM and SGLang draft with it alone.
    "mimo_v2_flash": MtpFamily("model.mtp.layers.0.", "", MIMO),
    "qwen3_5": MtpFamily("mtp.", "mtp_num_hidden_layers", QWEN),
    "qwen3_5_moe": MtpFamily("mtp.", "mtp_num_hidden_layers", QWEN),
    # Released configs lack the field.
    "qwen3_next": MtpFamily("mtp.", "num_nextn_predict_layers", QWEN),
}


def mtp_family(model_type: str) -> MtpFamily:
    """Return the names of a family (`TargetFacts.family`), or raise InputError."""
    if model_type not in FAMILIES:
        remedy = "Train another head: `train eagle3` reads states of any target."
        raise InputError("target", f"a target of type {model_type}", f"one of {', '.join(FAMILIES)}", remedy)
    return FAMILIES[model_type]


class MtpFormat(HeadFormat):
    """The MTP module in a copy of its target's checkpoint, with which servers load it; packages have its tensors alone.

    Its settings are those of the target.
    """

    name = kind = "mtp"
    system = "the target's checkpoint"
    sixteen_bits = "has one quantization_config for the target and its module"
    notes = (
        DRAWN,
        "SGLang: --speculative-algorithm NEXTN. llama.cpp: convert this directory, then --spec-type draft-mtp.",
        "The copy links to the target's files: keep them, or copy it with cp -rL.",
    )

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        if target is None:
            raise InputError("target", "none", "the target, whose settings are the module's", "Pass --target.")
        return ImportedHead(MtpHead.new_config(MtpSettings(), plain_shape(target.raw)), dict(package.tensors))

    def write(
        self, config: Any, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        return Package({}, state)

    def serve(self, served: Served) -> str:
        options = json.dumps({"method": "mtp", "num_speculative_tokens": served.num_drafted})
        return f"vllm serve {shlex.quote(served.directory)} --speculative-config {shlex.quote(options)}"
