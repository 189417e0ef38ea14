"""EAGLE-1 heads in the directory that SafeAILab/EAGLE, vLLM and SGLang share: the fields of a Llama `config.json` and
the tensors of its layers. What each of the three makes of it is in the file of each."""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.modules.drafters.eagle.net import EagleConfig, EagleNet
from draftsmith.modules.formats.base import (
    Finding,
    ForeignHead,
    HeadFormat,
    Measure,
    Package,
    Parsed,
    Reading,
    TargetFacts,
    Trial,
)
from draftsmith.modules.formats.compare import DRAFT_STEPS, compare_eagle
from draftsmith.modules.formats.detect import CAN_READ, LATER
from draftsmith.modules.formats.reader import (
    ROTARY_BUFFERS,
    Reader,
    Slot,
    llama_config,
    max_positions,
    positive,
    same_values,
    slots_of,
)
from draftsmith.modules.formats.rope import KNOWN, Rope, conflict, frequencies, missing_keys, transformers_rope
from draftsmith.modules.layers import LlamaConfig, RopeScaling
from draftsmith.modules.types import InputError

SGLANG_CLASS = "LlamaForCausalLMEagle"  # no other system has it
AGAIN = "Train it again: heads trained from now on have none."
UNSUPPORTED = "Such heads are not supported."
# Field of `Biases` -> its tensors, and what to do where a file lacks them.
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


class Biases(NamedTuple):
    """Which linear layers have a bias."""

    fc: bool
    qkv: bool
    o: bool
    mlp: bool


class LlamaFormat(HeadFormat):
    """A directory of `config.json` and one weights file whose layers are Llama's, read by the rules of one system.

    uninitialised: what a parameter holds that no tensor fills. reads_head_dim: it honours the field.
    """

    probe_room = DRAFT_STEPS
    uninitialised: ClassVar[str] = "random numbers"
    reads_head_dim: ClassVar[bool] = True

    @abstractmethod
    def biases(self, raw: Mapping[str, Any]) -> Biases:
        """Which linear layers it creates with a bias, by `config.json`."""

    @abstractmethod
    def check_config(self, reader: Reader) -> None:
        """Findings about the config's fields."""

    @abstractmethod
    def load(self, reader: Reader, name: str) -> None:
        """What it does with a tensor of the file."""

    def finish(self, reader: Reader) -> None:
        """What is left to say once all is read."""

    def rope(self, raw: Mapping[str, Any]) -> Rope:
        """The rotary settings it goes by."""
        return transformers_rope(raw)

    def completed(self, target: Mapping[str, Any], manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        """The type to run in: the target's, whatever type the weights are stored in. SGLang would otherwise run a head
        in another type than its target."""
        named = target.get("dtype") or target.get("torch_dtype")
        return {"torch_dtype": named, "dtype": named} if named else {}

    def recorded(self, state: Mapping[str, Tensor], package: Package) -> Mapping[str, Tensor]:
        return state

    def settings_differ(self, config: Mapping[str, Any], reading: Reading) -> list[Finding]:
        """Sizes and rotary frequencies."""
        return sizes_differ(config, reading)


class EagleFormat(LlamaFormat):
    """A directory of an EAGLE-1 head.

    zero_bias: the system puts zeros into the biases of q, k, v and o before it loads. truncates: the draft's logits end
    at the config's vocab_size.
    """

    kind = "eagle"
    zero_bias: ClassVar[bool] = False
    truncates: ClassVar[bool] = True

    def fields(self, config: EagleConfig) -> dict[str, Any]:
        """Fields of `config.json` beside those of every Llama; vLLM and SafeAILab's code go by the same."""
        fields: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "bias": False}
        return fields | ({"qkv_bias": True} if config.llama.qkv_bias else {})

    def recognises(self, found: ForeignHead) -> bool:
        return found.fuses_two and not found.eagle3 and producer(found) == self.name

    def check(self, config: EagleConfig) -> None:
        """Refuses the switches that none of the three systems holds."""
        llama = config.llama
        reasons = {
            "fc_bias": (config.fc_bias, "no bias: vLLM drops it silently, and no two systems keep it alike"),
            "qk_norm": (llama.qk_norm, "no norm of q and k: none of these systems has one in an EAGLE-1 head"),
            "o_bias": (llama.o_bias, "no bias of o_proj: SafeAILab/EAGLE and Qwen-type heads have none"),
        }
        refuse(llama, reasons)

    def write(
        self, config: EagleConfig, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        """The tensors as they are, in `dtype`."""
        self.check(config)
        shapes = {name: slot.shape for name, slot in eagle_slots(config.llama, config.fc_bias).items()}
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes, "state is not the config's head"
        tensors = {name: state[name].detach().to(dtype).contiguous().clone() for name in shapes}
        return Package({**llama_fields(config.llama, dtype), **self.fields(config)}, tensors, {"format": "pt"})

    def read(self, package: Package, target: TargetFacts | None = None) -> Reading:
        raw = package.config
        biases = self.biases(raw)
        llama = with_biases(llama_config(raw, self.rope(raw), self.reads_head_dim), biases)
        reader = Reader(package, target, self.system, llama, eagle_slots(llama, biases.fc, self.zero_bias))
        self.check_config(reader)
        for name in package.tensors:
            self.load(reader, name)
        reader.missing(self.uninitialised, self.zero_bias)
        surroundings(reader, self.truncates)
        self.finish(reader)
        return reader.reading()

    def parse(self, package: Package, target: TargetFacts | None = None) -> Parsed:
        """A directory as our head, in the type of its file: sizes and rotary settings by the fields of transformers,
        tensors and biases by the rules of the system. Where that would compute with numbers of no one's choosing, it is
        refused."""
        raw, notes = package.config, list[str]()
        llama = llama_config(raw, transformers_rope(raw))
        check_fields(raw, llama, target)
        tensors = own_tensors(package, target, notes)
        kept = self._kept_biases(tensors, raw, notes)
        longest = longest_text(llama, target, notes)
        if "rms_norm_eps" not in raw:
            notes.append("rms_norm_eps is not in config.json: 1e-6, the default of the systems that read it")
        config = EagleConfig(with_biases(dataclasses.replace(llama, max_position=longest), kept), kept.fc)
        return Parsed(config, as_stored(tensors), tuple(notes))

    def _kept_biases(self, tensors: dict[str, Tensor], raw: Mapping[str, Any], notes: list[str]) -> Biases:
        """Which biases our head has; the others are taken out of `tensors`.

        Kept: those that the system uses, unless they are zero (a format's filling), except in q, k and v.
        """
        kept, creates = {}, self.biases(raw)._asdict()
        unbiased = raw.get("bias") is False  # by which whoever trained the head means fc
        for kind, (pattern, remedy) in BIASES.items():
            names = [name for name in tensors if re.fullmatch(pattern, name)]
            if kind == "fc" and creates[kind] and not names and unbiased:
                notes.append(f"fc has no bias, as config.json says; {self.system} itself would make up a random one")
            elif creates[kind] and not names and not (kind == "o" and self.zero_bias):
                found = f"no {kind} bias in the file, where config.json makes {self.system} create one"
                raise InputError("weights", found, "its values, which would be random", remedy)
            zero = not any(bool(tensors[name].any()) for name in names)
            kept[kind] = creates[kind] and bool(names) and (kind == "qkv" or not zero)
            if names and not kept[kind]:
                if not zero:
                    notes.append(f"{', '.join(names)}: left out, {self.system} does not use them")
                for name in names:
                    del tensors[name]
        return Biases(**kept)

    def compare(self, reading: Reading, head: nn.Module, package: Package, trial: Trial) -> list[Measure]:
        return compare_eagle(reading, head, package, trial)


def refuse(llama: LlamaConfig, reasons: Mapping[str, tuple[Any, str]]) -> None:
    """Raises InputError for a layer that no system has. reasons: more switches, what they are and what is expected."""
    common = {
        "mlp_bias": (llama.mlp_bias, "no bias in the MLP: SafeAILab/EAGLE and SGLang ignore it"),
        "sliding_window": (llama.sliding_window, "none: these systems' heads see everything"),
    }
    for field, (found, expected) in {**reasons, **common}.items():
        if found:
            raise InputError(field, found, expected, AGAIN)
    if llama.hidden_size % llama.num_heads:
        expected = f"a divisor of hidden_size {llama.hidden_size}: transformers refuses any other"
        raise InputError("num_heads", llama.num_heads, expected, "Train the head for a target of other sizes.")


def longest_text(llama: LlamaConfig, target: TargetFacts | None, notes: list[str]) -> int:
    """Positions of an imported head."""
    longest = max(llama.max_position, max_positions(target))
    if longest > llama.max_position:
        notes.append(f"max_position_embeddings {llama.max_position} is raised to the target's {longest}, as vLLM does")
    return longest


def as_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of an imported head in the type of their file; of float64 in float32. Types that are no weights' stay:
    building the head refuses them."""
    return {name: tensor.float() if tensor.dtype == torch.float64 else tensor for name, tensor in tensors.items()}


def with_biases(llama: LlamaConfig, biases: Biases) -> LlamaConfig:
    return dataclasses.replace(llama, qkv_bias=biases.qkv, o_bias=biases.o, mlp_bias=biases.mlp)


def eagle_slots(llama: LlamaConfig, fc_bias: bool, zero_bias: bool = False) -> dict[str, Slot]:
    """Parameters of a head of these sizes and biases: the three systems build the same net as ours."""
    plain = dataclasses.replace(llama, rope_scaling=RopeScaling(), max_position=1)
    with torch.device("meta"):
        return slots_of(EagleNet(EagleConfig(plain, fc_bias)), zero_bias)


def producer(found: ForeignHead) -> str:
    """Whose EAGLE-1 it is. SafeAILab's code and vLLM share a directory; what only one of them reads decides."""
    name = found.architecture
    if name == "EagleLlamaForCausalLM":
        return "vllm"
    if name not in ("", "LlamaForCausalLM", SGLANG_CLASS):
        raise InputError("directory", f"an EAGLE-1 head of the architecture {name}", CAN_READ, LATER)
    # SGLang's fusion layer always has a bias, and `bias` or `attention_bias` gives q, k and v theirs: it draws at
    # random what the file lacks, and drops what it has besides.
    asked = bool(found.config.get("bias") or found.config.get("attention_bias"))
    biased = found.has(r"layers\.\d+\.self_attn\.q_proj\.bias$")
    if name == SGLANG_CLASS and "fc.bias" in found.bare and asked == biased:
        return "sglang"
    if "fc.bias" in found.bare:  # vLLM drops it
        return "eagle"
    # SafeAILab's layer has head_dim = width / heads, no bias but, with qkv_bias, those of q, k and v, and its rope
    # settings are rope_theta and {type, factor} (eagle/model/cnets1.py).
    wide = found.rows("layers.0.self_attn.q_proj.weight") not in (None, found.rows("fc.weight"))
    odd = found.has(r"layers\.\d+\.(self_attn\.o_proj|mlp\.\w+)\.bias$") or (biased and "qkv_bias" not in found.config)
    newer = "rope_parameters" in found.config and "rope_theta" not in found.config
    rope = found.config.get("rope_scaling")
    simple = not rope or (isinstance(rope, Mapping) and rope.keys() == {"type", "factor"})
    if not (wide or odd or newer) and simple:
        return "eagle"  # under SGLang's class name too, which SafeAILab's code does not read
    return "sglang" if name == SGLANG_CLASS else "vllm"


def sizes_differ(config: Mapping[str, Any], reading: Reading) -> list[Finding]:
    """Sizes and rotary frequencies of an exported head against those that a system takes."""
    ours = LlamaConfig(**{**config["llama"], "rope_scaling": RopeScaling(**config["llama"]["rope_scaling"])})
    theirs = reading.settings["llama"]
    found = [
        Finding("error", name, f"{getattr(theirs, name)} in this system, exported with {getattr(ours, name)}")
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "rms_eps")
        if getattr(theirs, name) != getattr(ours, name)
    ]
    one, other = (frequencies(llama, Rope.of(llama)) for llama in (ours, theirs))
    if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-5):
        found.append(Finding("error", "rope", "other rotary frequencies than the head was exported with"))
    return found


def llama_fields(llama: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of transformers' LlamaConfig, with names of both its generations for rope and dtype. SafeAILab's code
    wants exactly `type` and a float `factor` in `rope_scaling`."""
    name = str(dtype).removeprefix("torch.")
    scaling, factor = llama.rope_scaling, float(llama.rope_scaling.factor)
    new: dict[str, Any] = {"rope_type": scaling.kind}
    if scaling.kind != "default":
        new["factor"] = factor
    if scaling.kind == "llama3":
        new |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    old = {"default": None, "linear": {"type": "linear", "factor": factor}}.get(scaling.kind, new)
    return {
        "model_type": "llama",
        "vocab_size": llama.vocab_size,
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_hidden_layers": llama.num_layers,
        "num_attention_heads": llama.num_heads,
        "num_key_value_heads": llama.num_kv_heads,
        "head_dim": llama.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": llama.max_position,
        "rms_norm_eps": llama.rms_eps,
        "rope_theta": llama.rope_theta,
        "rope_scaling": old,
        "rope_parameters": {**new, "rope_theta": llama.rope_theta},
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": name,
        "dtype": name,
    }


def surroundings(reader: Reader, truncates: bool) -> None:
    """What the head is read beside. truncates: the draft's logits end at the config's vocab_size."""
    raw, target = reader.raw, reader.target
    layers = "L" if target is None else str(target.raw.get("num_hidden_layers", "L"))
    reader.note("feature", f"feeds the target's last hidden state after its final norm, hs[{layers}]")
    reader.note("position", "puts token x(t+1) and feature f(t) at position t, one further per step")
    reader.note("lm_head", "takes the target's")
    if reader.settings["embed"] == "target":
        reader.note("embed_tokens", "takes the target's")
    vocab, hidden = positive(raw, "vocab_size"), positive(raw, "hidden_size")
    if raw.get("draft_vocab_size") not in (None, vocab):
        found = raw["draft_vocab_size"]
        reader.error("draft_vocab_size", f"ignores {found} and drafts from the target's whole lm_head")
    if target is None:
        return
    theirs = target.raw.get("vocab_size", vocab)
    if vocab < theirs and truncates:
        reader.error("vocab_size", f"drafts only the first {vocab} of the target's {theirs} tokens")
    elif vocab != theirs:
        reader.note("vocab_size", f"does not go by {vocab} here: the tables are the target's, of {theirs} tokens")
    if target.raw.get("hidden_size", hidden) != hidden:
        reader.error("hidden_size", f"cannot fuse features of width {target.raw['hidden_size']} at width {hidden}")


def check_fields(
    raw: Mapping[str, Any],
    llama: LlamaConfig,
    target: TargetFacts | None,
    whole: Sequence[str] = ("vocab_size", "draft_vocab_size", "hot_vocab_size"),
) -> None:
    """Raises InputError for every field that our head could not follow. whole: those that are to be the target's
    vocabulary."""
    if both := conflict(raw):
        raise InputError("rope_parameters", both, "one rotary setting", "Keep in config.json what it was trained with.")
    if lacking := missing_keys(raw):
        raise InputError("rope_scaling", f"no {', '.join(lacking)}", "all that its kind needs", "Complete config.json.")
    if llama.rope_scaling.kind not in KNOWN:
        raise InputError("rope_type", llama.rope_scaling.kind, " or ".join(KNOWN), UNSUPPORTED)
    for field, plain in {"logit_scale": 1.0, "hidden_act": "silu", "quantization_config": None}.items():
        if raw.get(field) not in (None, plain):
            expected = "nothing" if plain is None else f"{plain} or nothing"
            raise InputError(f"config.json, {field}", raw[field], expected, UNSUPPORTED)
    vocab = llama.vocab_size if target is None else target.raw.get("vocab_size", llama.vocab_size)
    for field in whole:
        if raw.get(field) not in (None, vocab):
            expected = f"the target's whole vocabulary ({vocab})"
            remedy = "Heads of a truncated vocabulary are not supported."
            raise InputError(f"config.json, {field}", raw[field], expected, remedy)
    width = llama.hidden_size if target is None else target.raw.get("hidden_size", llama.hidden_size)
    if width != llama.hidden_size:
        raise InputError("config.json, hidden_size", llama.hidden_size, f"the target's {width}", "Pass its own target.")


def own_tensors(package: Package, target: TargetFacts | None, notes: list[str]) -> dict[str, Tensor]:
    """Tensors without prefix, and without what is not of the head: rotary buffers, the target's tables, a norm that no
    system applies."""
    tensors: dict[str, Tensor] = {}
    for on_disk, tensor in package.tensors.items():
        name = on_disk.removeprefix("model.")
        if any(buffer in name for buffer in ROTARY_BUFFERS):
            continue
        if name in tensors:
            raise InputError("weights", f"{name} twice, with and without `model.`", "each once", "Remove one of them.")
        if name.startswith("lm_head"):
            notes.append(f"{on_disk} is left out: the target's lm_head is used")
        elif name == "layers.0.input_layernorm.weight":
            notes.append(f"{on_disk} is left out: EAGLE-1 has no norm before the attention of layer 0")
        elif name == "embed_tokens.weight":
            check_embedding(on_disk, tensor, target)
            notes.append(f"{on_disk} is left out: it is the target's embedding")
        else:
            tensors[name] = tensor
    return tensors


def check_embedding(name: str, tensor: Tensor, target: TargetFacts | None) -> None:
    if target is None or target.embed_tokens is None:
        raise InputError(name, "an embedding in the head", "the target to compare it with", "Pass --target.")
    if not same_values(tensor, target.embed_tokens):
        found, expected = "an embedding that differs from the target's", "the target's: our head reads that one"
        remedy = "Pass the target that the head was trained for, or remove the tensor if it was not trained."
        raise InputError(name, found, expected, remedy)
