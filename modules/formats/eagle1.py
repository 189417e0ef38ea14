"""EAGLE-1 heads in the directory that SafeAILab/EAGLE, vLLM and SGLang share.

Tensors are named as ours: fc, layers.{i}.self_attn.{q,k,v,o}_proj, layers.{i}.mlp.{gate,up,down}_proj and the norms,
without a prefix, embedding and lm_head. The systems differ in the biases that they create; see the file of each.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle.net import EagleConfig, EagleNet
from draftsmith.modules.formats.base import (
    CAN_READ,
    NOT_YET,
    ForeignHead,
    ImportedHead,
    Package,
    Problem,
    TargetFacts,
    Trial,
    as_stored,
    check_tensors,
    same_values,
)
from draftsmith.modules.formats.llama import (
    ROTARY_BUFFERS,
    Biases,
    LlamaFormat,
    check_embedding,
    check_layer,
    check_options,
    llama_config,
    llama_fields,
    longest_text,
)
from draftsmith.modules.formats.rope import transformers_rope
from draftsmith.modules.types import InputError

SGLANG_CLASS = "LlamaForCausalLMEagle"  # no other system has it
FIRST_NORM = "layers.0.input_layernorm.weight"
# Field of `Biases` -> its tensors, and the remedy if a file lacks them.
BIASES = {
    "fc": (r"fc\.bias", 'Add "bias": false to config.json if the head was trained without.'),
    "qkv": (
        r".*\.[qkv]_proj\.bias",
        'Set "attention_bias" and "qkv_bias" to false in config.json if the head was trained without.',
    ),
    "o": (r".*\.o_proj\.bias", 'Write "qkv_bias": true in place of "attention_bias" if only q, k and v have one.'),
    "mlp": (
        r".*\.(gate|up|down)_proj\.bias",
        'Set "mlp_bias" to false in config.json if the head was trained without.',
    ),
}


class Eagle1Format(LlamaFormat):
    """Directory of an EAGLE-1 head.

    strict: the system raises for tensors that it does not know. zero_bias: it fills attention biases with zeros.
    """

    kind = "eagle"
    strict: ClassVar[bool] = False
    zero_bias: ClassVar[bool] = False

    def recognises(self, foreign: ForeignHead) -> bool:
        return foreign.fuses_two and not foreign.eagle3 and producer(foreign) == self.name

    def check(self, config: EagleConfig) -> None:
        fc_bias = (config.fc_bias, "no bias: vLLM drops it silently, and no two systems keep it alike")
        check_layer(config.llama, {"fc_bias": fc_bias})

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
        llama = llama_config(raw, transformers_rope(raw))
        check_options(raw, llama, target, ("vocab_size", "draft_vocab_size", "hot_vocab_size"))
        problems = self.problems(raw, target)
        tensors = self._own_tensors(package, target, notes, problems)
        biases = self._take_biases(tensors, raw, notes, problems)
        if "rms_norm_eps" not in raw:
            notes.append("rms_norm_eps is not in config.json: 1e-6, the default of the systems that read it")
        switches = {"qkv_bias": biases.qkv, "o_bias": biases.o, "mlp_bias": biases.mlp}
        llama = dataclasses.replace(llama, max_position=longest_text(llama, target, notes), **switches)
        config = EagleConfig(llama, biases.fc)
        with torch.device("meta"):
            check_tensors(EagleNet(config), tensors)
        return ImportedHead(config, as_stored(tensors), tuple(notes), tuple(problems))

    def _own_tensors(
        self, package: Package, target: TargetFacts | None, notes: list[str], problems: list[Problem]
    ) -> dict[str, Tensor]:
        """Return the tensors without prefix, and without those that are not the head's."""
        tensors: dict[str, Tensor] = {}
        if any(name.startswith("model.") for name in package.tensors):
            text = f"begins names that {self.system} knows without it"
            problems.append(Problem("model.", text))
        for on_disk, tensor in package.tensors.items():
            name = on_disk.removeprefix("model.")
            if any(buffer in name for buffer in ROTARY_BUFFERS):
                continue
            if self.strict and (name.startswith("lm_head") or name == FIRST_NORM):
                problems.append(Problem(on_disk, f"{self.system} raises: it has no such parameter"))
            if name in tensors:
                raise InputError("weights", f"{name} twice, with and without `model.`", "each once", "Remove one.")
            if name.startswith("lm_head"):
                notes.append(f"{on_disk} is left out: the target's lm_head is used")
                theirs = None if target is None else target.lm_head
                if not self.strict and theirs is not None and not same_values(tensor, theirs):
                    problems.append(Problem(on_disk, f"{self.system} takes the target's, which differs"))
            elif name == FIRST_NORM:
                notes.append(f"{on_disk} is left out: EAGLE-1 has no norm before the attention of layer 0")
            elif name == "embed_tokens.weight":
                check_embedding(on_disk, tensor, target)
                notes.append(f"{on_disk} is left out: it is the target's embedding")
            else:
                tensors[name] = tensor
        return tensors

    def _take_biases(
        self, tensors: dict[str, Tensor], raw: Mapping[str, Any], notes: list[str], problems: list[Problem]
    ) -> Biases:
        """Remove the biases that the system does not use, or that are zero, and return those that our head has."""
        kept, created = {}, self.biases(raw)._asdict()
        for part, (pattern, remedy) in BIASES.items():
            names = [name for name in tensors if re.fullmatch(pattern, name)]
            zero = not any(bool(tensors[name].any()) for name in names)
            if created[part] and not names and not (part == "o" and self.zero_bias):
                # To whoever trains heads, `bias` is that of fc. SGLang's fc has one whatever config.json says.
                if part != "fc" or raw.get("bias") is not False:
                    found = f"no {part} bias in the file, where config.json makes {self.system} create one"
                    raise InputError("weights", found, "its values, which would be random", remedy)
                problems.append(Problem("fc.bias", f"{self.system} does not find it and makes up a random one"))
            kept[part] = created[part] and bool(names) and (part == "qkv" or not zero)
            if names and not kept[part]:
                if not zero:
                    notes.append(f"{', '.join(names)}: left out, {self.system} does not use them")
                    problems.append(Problem(names[0], f"{self.system} drops it and says nothing"))
                for name in names:
                    del tensors[name]
        return Biases(**kept)

    def forward(self, head: Any, trial: Trial) -> list[list[Tensor]]:
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
