"""EAGLE-1 heads in the directory that SafeAILab/EAGLE, vLLM and SGLang share.

Tensors are named as ours: fc, layers.{i}.self_attn.{q,k,v,o}_proj, layers.{i}.mlp.{gate,up,down}_proj and the norms,
without a prefix, embedding and lm_head. The systems differ in the biases that they create; see the file of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle.net import EagleConfig, EagleNet
from draftsmith.modules.formats.base import (
    CAN_READ,
    NOT_YET,
    ForeignHead,
    HeadTrial,
    ImportedHead,
    Package,
    Problem,
    TargetFacts,
    as_stored,
    check_tensors,
    same_values,
)
from draftsmith.modules.formats.llama import (
    LlamaFormat,
    check_layer,
    check_options,
    llama_config,
    llama_fields,
    longest_text,
)
from draftsmith.modules.layers import rope_settings
from draftsmith.modules.types import InputError

SGLANG_CLASS = "LlamaForCausalLMEagle"  # no other system has it
FIRST_NORM = "layers.0.input_layernorm.weight"


class Eagle1Format(LlamaFormat):
    """Directory of an EAGLE-1 head.

    strict: the system raises for tensors that it does not know.
    """

    kind = "eagle"
    strict: ClassVar[bool] = False

    def recognises(self, foreign: ForeignHead) -> bool:
        return foreign.fuses_two and not foreign.eagle3 and producer(foreign) == self.name

    def check(self, config: EagleConfig) -> None:
        fc_bias = (config.fc_bias, "no bias: vLLM drops it silently, and no two systems keep it alike")
        check_layer(config.llama, {"fc_bias": fc_bias})
        self.check_system(config)

    def fields(self, config: EagleConfig) -> dict[str, Any]:
        """Return the fields of `config.json` beside those of every Llama; the same for vLLM and SafeAILab."""
        qkv_bias = {"qkv_bias": True} if config.llama.qkv_bias else {}
        return {"architectures": ["LlamaForCausalLM"], "bias": False, **qkv_bias}

    def write(
        self, config: EagleConfig, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        self.check(config)
        tensors = {name: tensor.detach().to(dtype).contiguous().clone() for name, tensor in state.items()}
        return Package({**llama_fields(config.llama, dtype), **self.fields(config)}, tensors, {"format": "pt"})

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        raw, notes = package.config, list[str]()
        llama = llama_config(raw, rope_settings(raw))
        check_options(raw, llama, target, ("vocab_size", "draft_vocab_size", "hot_vocab_size"), notes)
        problems = self.problems(raw, target)
        tensors = self.own_tensors(package, target, str, notes, problems)
        # A published file may have tensors that no EAGLE-1 head computes with.
        for name in [name for name in tensors if name.startswith("lm_head") or name == FIRST_NORM]:
            tensor, theirs = tensors.pop(name), None if target is None else target.lm_head
            if name == FIRST_NORM:
                notes.append(f"{name} is left out: EAGLE-1 has no norm before the attention of layer 0")
            else:
                notes.append(f"{name} is left out: the target's lm_head is used")
            if self.strict:
                problems.append(Problem(name, f"{self.system} raises: it has no such parameter"))
            elif name != FIRST_NORM and theirs is not None and not same_values(tensor, theirs):
                problems.append(Problem(name, f"{self.system} takes the target's, which differs"))
        biases = self.take_biases(tensors, raw, notes, problems)
        switches: dict[str, Any] = {"qkv_bias": biases.qkv, "o_bias": biases.o, "mlp_bias": biases.mlp}
        llama = dataclasses.replace(llama, max_position=longest_text(llama, target, notes), **switches)
        config = EagleConfig(llama, biases.fc)
        with torch.device("meta"):
            check_tensors(EagleNet(config), tensors)
        return ImportedHead(config, as_stored(tensors), tuple(notes), (*problems, *self.unheld(config)))

    def forward(self, head: Any, trial: HeadTrial) -> list[list[Tensor]]:
        embedding, lm_head = trial.tables()
        outputs = []
        for probe in trial.probes:
            embeds, features = embedding[probe.ids[1:]][None], probe.features[None, :-1]  # [1, T-1, H]
            outputs.append([hidden[0] @ lm_head.T for hidden in head.unroll(embeds, features, 2)])
        return outputs


def producer(foreign: ForeignHead) -> str:
    """Return the format of an EAGLE-1 directory. SafeAILab and vLLM share one: what only one of them reads decides."""
    name = foreign.architecture
    if name == "EagleLlamaForCausalLM":
        return "vllm"
    if name not in ("", "LlamaForCausalLM", SGLANG_CLASS):
        raise InputError("directory", f"an EAGLE-1 head of the architecture {name}", CAN_READ, NOT_YET)
    # SGLang's fusion layer always has a bias, and `bias` or `attention_bias` gives q, k and v theirs: it draws at
    # random what the file lacks, and drops what it has besides.
    asked = bool(foreign.config.get("bias") or foreign.config.get("attention_bias"))
    biased = foreign.has(r"layers\.\d+\.self_attn\.q_proj\.bias$")
    if name == SGLANG_CLASS and "fc.bias" in foreign.bare and asked == biased:
        return "sglang"
    if "fc.bias" in foreign.bare:  # vLLM drops it
        return "eagle"
    # SafeAILab's layer has head_dim = width / heads, no bias but, with qkv_bias, those of q, k and v, and its rope
    # settings are rope_theta and {type, factor} (eagle/model/cnets1.py).
    wide = foreign.size("layers.0.self_attn.q_proj.weight", 0) not in (None, foreign.size("fc.weight", 0))
    odd_bias = foreign.has(r"layers\.\d+\.(self_attn\.o_proj|mlp\.\w+)\.bias$")
    odd_bias = odd_bias or (biased and "qkv_bias" not in foreign.config)
    newer = "rope_parameters" in foreign.config and "rope_theta" not in foreign.config
    rope = foreign.config.get("rope_scaling")
    simple = not rope or (isinstance(rope, Mapping) and rope.keys() == {"type", "factor"})
    if not (wide or odd_bias or newer) and simple:
        return "eagle"  # under SGLang's class name too, which SafeAILab's code does not read
    return "sglang" if name == SGLANG_CLASS else "vllm"
