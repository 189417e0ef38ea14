"""EAGLE-3 heads in the directories of other systems: tensor names, the target's layers, the draft vocabulary.

Specified by SafeAILab/EAGLE eagle/model/cnets.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from draftsmith.modules.drafters.eagle3 import Eagle3Config
from draftsmith.modules.drafters.eagle3 import default_layers as layers_of_target
from draftsmith.modules.formats.base import NotReadHere, Raw, TargetFacts
from draftsmith.modules.formats.llama import Fields, flat, inner_object, layer_ids, layer_window, llama_fields
from draftsmith.modules.formats.llama_format import HeadFiles, LlamaFormat, Refusal, check_layer
from draftsmith.modules.formats.vocabulary import take_vocabulary
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.types import InputError

# Tensors of a file; some systems say `layers.0` for `midlayer`. Layers behind it are plain ones, `layers.1` and so on.
# d2t and t2d are there only if the draft vocabulary is reduced.
#
#   fc.weight                                  [H, n H]   over the target's n states
#   midlayer.self_attn.{q,k,v}_proj.weight     [.., 2 H]  over [norm(embedding); norm(state)]
#   midlayer.{self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj}.weight
#   midlayer.{input_layernorm, hidden_norm, post_attention_layernorm}.weight, norm.weight
#   lm_head.weight                             [draft_vocab_size, H]
#   d2t                                        [draft_vocab_size] int64, added to a drafted id
#   t2d                                        [V] bool, whether a token of the target is drafted
#   embed_tokens.weight                        [V, H]     that of the target, or trained
#   fc_norm.{i}.weight                         of the target's i-th state, in EAGLE-3.1
# Norms of the states, under the names that SGLang first had for them.
OLD_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


class Flags(NamedTuple):
    """Switches of EAGLE-3 heads, as of `Eagle3Config`."""

    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @classmethod
    def read(cls, raw: Raw) -> Flags:
        """Read the switches by their own names, as most systems do."""
        before = bool(raw.get("norm_before_fc") or inner_object(raw, "eagle_config").get("norm_before_fc"))
        return cls(*(bool(raw.get(name)) for name in cls._fields))._replace(norm_before_fc=before)


class Eagle3Format(LlamaFormat[Eagle3Config]):
    """Directory of an EAGLE-3 head.

    layer_names: names of the head's first layer that the system knows; the first is written.
    later_norm: norm of the input of the layers behind it; empty if the system has no such layers.
    """

    kind = "eagle3"
    layer_names: tuple[str, ...] = ("midlayer", "layers.0")
    later_norm = "input_layernorm"

    def flags(self, raw: Raw) -> Flags:
        """Return the switches by which the system computes."""
        return Flags.read(raw)

    def layers(self, raw: Raw, target: TargetFacts | None) -> tuple[int, ...] | None:
        """Return the layers that a `config.json` names, by our numbers; None if the system takes its default ones."""
        return layer_ids(raw)

    def fields(self, config: Eagle3Config, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        """Return what all systems but speculators read, without the layers."""
        flags = {name: True for name in Flags._fields if getattr(config, name)}
        shape = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.draft_vocab_size}
        return {**llama_fields(config.llama, dtype), **shape, **flags}

    def refused(self, config: Eagle3Config, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        if config.llama.num_layers > 1 and not self.later_norm:
            remedy = "Export it with --format vllm, sglang or speculators."
            yield "num_layers", config.llama.num_layers, f"1, all that {self.system} computes", remedy
        if config.own_embedding and not self.own_embedding:
            expected = f"false: {self.system} takes the target's embedding in its place and says nothing"
            yield "own_embedding", True, expected, "Export it with --format vllm or --format speculators."

    def check_common(self, config: Eagle3Config) -> None:
        expected = "no bias of q, k and v: SafeAILab/EAGLE and SGLang have none in EAGLE-3"
        check_layer(config.llama, {"qkv_bias": (config.llama.qkv_bias, expected)})

    def disk_name(self, name: str) -> str:
        return re.sub(r"^layer\.", f"{self.layer_names[0]}.", name)

    def our_name(self, name: str) -> str:
        return re.sub(r"^(midlayer|layers\.0)\.", "layer.", OLD_NORMS.get(name, name))

    def top_level(self, config: Raw) -> Raw:
        return flat(config)

    def read_config(self, files: HeadFiles, llama: LlamaConfig) -> Eagle3Config:
        """Read settings by this system's fields, and tensors by any system's names."""
        raw, tensors = files.raw, files.tensors
        if (width := raw.get("target_hidden_size")) not in (None, raw.get("hidden_size")):
            raise NotReadHere("config.json, target_hidden_size", width, "the head's own width")
        if inner_object(raw, "eagle_config").get("use_aux_hidden_state") is False:
            raise NotReadHere("config.json, use_aux_hidden_state", False, "true, as an EAGLE-3 head has")
        names = files.package.tensors
        layers = {name.removeprefix("model.").rpartition(".self_attn.q_proj")[0] for name in names}
        for wrong in {"midlayer", "layers.0"} & layers - {*self.layer_names}:
            files.add_problems({wrong: (True, f"knows the layer as {self.layer_names[0]} only")})
        count = self._take_later_layers(files, llama.num_layers)
        # The norms of the target's states show in the file, the other switches only in config.json.
        flags = self.flags(raw)
        for name, norm in {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}.items():
            if (said := getattr(flags, name)) != (normed := norm in tensors):
                text = f"{'norms' if normed else 'no norm'} of the target's states in the file ({norm})"
                remedy = f'Write "{name}": {str(normed).lower()} in config.json.'
                raise InputError(f"config.json, {name}", text, f"what config.json says ({said})", remedy)
        aux_layers = self._aux_layers(files, llama.hidden_size)
        drafted = take_vocabulary(files, llama.vocab_size)
        biases = files.take_biases()
        llama = dataclasses.replace(
            llama,
            num_layers=count,
            sliding_window=layer_window(raw, count),
            qk_norm="layer.self_attn.q_norm.weight" in tensors,
            max_position=files.longest_text(llama),
            qkv_bias=biases.qkv,
            o_bias=biases.o,
            mlp_bias=biases.mlp,
        )
        own = "embed_tokens.weight" in tensors
        return Eagle3Config(llama, aux_layers, drafted, **flags._asdict(), own_embedding=own)

    def _take_later_layers(self, files: HeadFiles, stated: int) -> int:
        """Return the number of layers in the file. stated: as `config.json` has it.

        The norm that the system has in front of later layers takes the name of ours.
        """
        tensors = files.tensors
        numbers = [int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d{1,4})\.", name))]
        count = 1 + max(numbers, default=0)
        text = f"builds {stated} layers, and the file has {count}"
        files.add_problems({"num_hidden_layers": (self.later_norm and stated != count, text)})
        for number in range(1, count):
            norm = f"layers.{number}.hidden_norm.weight"
            used = tensors.pop(norm, None)
            if self.later_norm == "hidden_norm":
                files.add_problems({norm: (used is None, "does not find it, and norms that layer's input with ones")})
                if used is not None:
                    tensors[norm.replace("hidden_norm", "input_layernorm")] = used
        return count

    def _aux_layers(self, files: HeadFiles, size: int) -> tuple[int, ...]:
        """Return the target's layers that the head reads, as many as its fc has room for."""
        # fc says how many states it reads, and nothing else in the file says which.
        count, layers = files.num_states(size), self.layers(files.raw, files.target)
        if layers is None and files.target is not None:
            layers = default_layers(files.target)
        if layers is None:
            expected = "the target: this is a head that reads its target's layers 2, L/2 and L-3"
            raise InputError("target", "none", expected, "Pass --target.")
        return files.in_order("layers", layers, layers, count, outputs=False)


def default_layers(target: TargetFacts) -> tuple[int, ...] | None:
    """Return the layers that all systems read of a target by default; None if its number of layers is unknown."""
    return None if target.num_layers is None else layers_of_target(target.num_layers)
