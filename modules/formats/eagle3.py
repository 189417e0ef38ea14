"""EAGLE-3 heads in the directories of other systems: names of tensors, the target's layers, the draft vocabulary.

Specified by SafeAILab/EAGLE eagle/model/cnets.py. What each system makes of a directory is in the file of each.
"""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.modules.drafters.eagle3.net import Eagle3Config, Eagle3Net
from draftsmith.modules.drafters.eagle3.net import default_layers as layers_of_target
from draftsmith.modules.formats.base import (
    Finding,
    ForeignHead,
    Measure,
    Package,
    Parsed,
    Reading,
    TargetFacts,
    Trial,
    flat,
)
from draftsmith.modules.formats.compare import compare_eagle3, layers_beside
from draftsmith.modules.formats.draft_vocabulary import take_vocabulary
from draftsmith.modules.formats.eagle1 import (
    UNSUPPORTED,
    Biases,
    LlamaFormat,
    as_stored,
    check_embedding,
    check_fields,
    longest_text,
    refuse,
)
from draftsmith.modules.formats.eagle1 import llama_fields as fields_of
from draftsmith.modules.formats.reader import (
    ROTARY_BUFFERS,
    Reader,
    Slot,
    llama_config,
    positive,
    slots_of,
)
from draftsmith.modules.formats.rope import transformers_rope
from draftsmith.modules.layers import RopeScaling
from draftsmith.modules.types import InputError

CLASS = "LlamaForCausalLMEagle3"  # vLLM's and SGLang's alike
IDS, COUNT = "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"
DEFAULT = range(3)  # the places of the states that are read where nothing is said
TABLES = ("d2t", "t2d")
# Norms of the states, under the names that SGLang had for them first.
OLD_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


class Flags(NamedTuple):
    """The switches by which EAGLE-3 heads differ, as of `Eagle3Config`."""

    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False


class Dialect(NamedTuple):
    """How a directory is written, in words, and the format that imports it."""

    said: str
    format: str


class Eagle3Format(LlamaFormat):
    """A directory of an EAGLE-3 head.

    layer: what the system calls the head's layer in a file. accepted: all that it takes for that. counts_layers: it
    builds as many as `config.json` says.
    """

    kind = "eagle3"
    layer: ClassVar[str] = "midlayer"
    accepted: ClassVar[tuple[str, ...]] = ("midlayer", "layers.0")
    counts_layers: ClassVar[bool] = True

    @abstractmethod
    def flags(self, raw: Mapping[str, Any]) -> Flags:
        """The switches that it goes by."""

    @abstractmethod
    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The layers that it reads by `config.json`, in our numbering; None: its default."""

    def fields(self, config: Eagle3Config, dtype: torch.dtype, ids: tuple[int, ...] | None) -> dict[str, Any]:
        """`config.json`. ids: the layers in our numbering, where they are not the target's default."""
        said = {name: True for name in Flags._fields if getattr(config, name)}
        own = {"architectures": [CLASS], "draft_vocab_size": config.draft_vocab_size}
        return {**fields_of(config.llama, dtype), **own, **said, **self.id_fields(ids)}

    def num_states(self, raw: Mapping[str, Any]) -> int:
        """How many of the target's states its fc is built for: vLLM's and SGLang's rule."""
        said = raw.get(COUNT)
        return len(said_ids(raw, "eagle_config") or DEFAULT) if said is None else positive(raw, COUNT, 1)

    def id_fields(self, ids: tuple[int, ...] | None) -> dict[str, Any]:
        """What says which layers it reads, in its own numbering."""
        return {} if ids is None else {IDS: list(ids)} | self.count_field(ids)

    def count_field(self, ids: tuple[int, ...]) -> dict[str, int]:
        """What says how many they are, where that is not the number that is taken without it."""
        return {} if len(ids) == len(DEFAULT) else {COUNT: len(ids)}

    def recognises(self, found: ForeignHead) -> bool:
        return found.eagle3 and dialect(found).format == self.name

    def dialect(self, found: ForeignHead) -> str:
        return dialect(found).said

    def check(self, config: Eagle3Config) -> None:
        """Refuses the switches that no system holds."""
        llama = config.llama
        reasons = {
            "qkv_bias": (llama.qkv_bias, "no bias of q, k and v: SafeAILab/EAGLE and SGLang have none in EAGLE-3"),
            "qk_norm": (llama.qk_norm, "no norm of q and k: a layer of Llama has none"),
            "o_bias": (llama.o_bias, "no bias of o_proj: SafeAILab/EAGLE has none"),
        }
        refuse(llama, reasons)

    def write(
        self, config: Eagle3Config, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        """The tensors in `dtype`; of a reduced vocabulary the offsets d2t and the marks t2d. Layers are named where
        they are not those that every system reads by itself of this target, or no target is given."""
        self.check(config)
        usual = target is not None and config.capture == default_layers(target)
        tensors = {
            self.disk_name(name): tensor.detach().to(dtype).contiguous().clone()
            for name, tensor in state.items()
            if name != "d2t"
        }
        if config.reduced:
            ids = state["d2t"].cpu()
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        return Package(self.fields(config, dtype, None if usual else config.capture), tensors, {"format": "pt"})

    def disk_name(self, name: str) -> str:
        """The name that a file has for one of our parameters."""
        return re.sub(r"^layer\.", f"{self.layer}.", name)

    def own_name(self, name: str) -> str:
        """Our name for what the system takes a tensor of a file for; its own where it is none of ours."""
        for layer in self.accepted:
            if name.startswith(f"{layer}."):
                return f"layer.{name.removeprefix(f'{layer}.')}"
        return f"/{name}" if name.startswith("layer.") else name

    def read(self, package: Package, target: TargetFacts | None = None) -> Reading:
        raw = flat(package.config)
        llama, flags, biases = llama_config(raw, self.rope(raw), self.reads_head_dim), self.flags(raw), self.biases(raw)
        depth = llama.num_layers if self.counts_layers else 1
        llama = dataclasses.replace(llama, num_layers=depth, qkv_bias=biases.qkv, o_bias=biases.o, mlp_bias=biases.mlp)
        drafted = llama.vocab_size if raw.get("draft_vocab_size") is None else positive(raw, "draft_vocab_size", 1)
        count = self.num_states(raw)
        plain = dataclasses.replace(llama, num_layers=1, rope_scaling=RopeScaling(), max_position=1)
        slots = eagle3_slots(Eagle3Config(plain, tuple(range(count)), drafted, **flags._asdict()))
        reader = Reader(Package(raw, package.tensors), target, self.system, llama, slots)
        ids = self.ids(raw)
        capture = ids if ids is not None else None if target is None else default_layers(target)
        reader.settings |= {
            **flags._asdict(),
            "capture": capture,
            "num_states": count,
            "draft_vocab_size": drafted,
        }
        self.check_config(reader)
        for name in package.tensors:
            self.load(reader, name)
        if drafted != llama.vocab_size and "d2t" not in reader.weights:
            reader.weights["d2t"] = torch.arange(drafted)
            if "d2t" not in package.tensors:
                reader.error("d2t", "does not find it and says nothing: it takes drafted ids for the target's own")
        reader.missing(self.uninitialised, False, self.disk_name)
        surroundings(reader)
        self.finish(reader)
        return reader.reading()

    def parse(self, package: Package, target: TargetFacts | None = None) -> Parsed:
        """A directory as our head, in the type of its file: its layers, switches and rotary settings by this system's
        fields, its tensors by any system's names."""
        raw, notes = flat(package.config), list[str]()
        llama = llama_config(raw, transformers_rope(raw))
        check_fields(raw, llama, target, ("vocab_size",))
        tensors = own_tensors(package, target, notes)
        flags = flags_of(self.flags(raw), raw, tensors)
        capture = capture_of(self.ids(raw), target, states_of(tensors, llama.hidden_size))
        drafted = take_vocabulary(tensors, raw, llama, target, notes)
        kept: dict[str, Any] = own_switches(tensors, self.biases(raw), self.system)
        longest = longest_text(llama, target, notes)
        llama = dataclasses.replace(llama, num_layers=1, max_position=longest, **kept)
        return Parsed(Eagle3Config(llama, capture, drafted, **flags._asdict()), as_stored(tensors), tuple(notes))

    def layers(self, reading: Reading, head: Any, num_layers: int) -> tuple[int, ...]:
        return layers_beside((*(reading.settings["capture"] or ()), *head.config.capture), num_layers)

    def compare(self, reading: Reading, head: nn.Module, package: Package, trial: Trial) -> list[Measure]:
        return compare_eagle3(reading, head, package, trial)

    def settings_differ(self, config: Mapping[str, Any], reading: Reading) -> list[Finding]:
        """Sizes, rotary frequencies, layers and switches."""
        theirs = {name: reading.settings[name] for name in (*Flags._fields, "capture", "draft_vocab_size")}
        ours = {name: config[name] for name in theirs} | {"capture": tuple(config["capture"])}
        return super().settings_differ(config, reading) + [
            Finding("error", name, f"{theirs[name]} in this system, exported with {ours[name]}")
            for name in theirs
            if theirs[name] != ours[name]
        ]


def default_layers(target: TargetFacts) -> tuple[int, ...] | None:
    """What all systems read of a target where nothing is said; None where its number of layers is not known."""
    return None if target.num_layers is None else layers_of_target(target.num_layers)


def eagle3_slots(config: Eagle3Config) -> dict[str, Slot]:
    """Parameters of a head of these sizes and switches."""
    with torch.device("meta"):
        return slots_of(Eagle3Net(config))


def said_ids(raw: Mapping[str, Any], *places: str) -> tuple[int, ...] | None:
    """Layer ids as `config.json` has them, from the first of these places that has any: `` is the top."""
    for place in places:
        block = (raw.get(place) or {}) if place else raw
        ids = block.get(IDS) if isinstance(block, Mapping) else None
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
            raise InputError(f"config.json, {IDS}", repr(ids), "a list of integers", "Correct config.json.")
        return tuple(ids)
    return None


def said_flag(raw: Mapping[str, Any], name: str) -> bool:
    """A switch at the top or in `eagle_config`."""
    inner = raw.get("eagle_config")
    return bool(raw.get(name) or (isinstance(inner, Mapping) and inner.get(name)))


def dialect(found: ForeignHead) -> Dialect:
    """Whose directory it is: what it says before what it leaves open."""
    raw, name = found.sizes, found.architecture
    if "speculators_model_type" in raw:
        return Dialect("speculators", "speculators")
    if name == "LlamaEagle3DraftModel":
        return Dialect("NeMo Automodel", "vllm")
    if raw.get(IDS) is not None or name.startswith("Eagle3") or raw.get("norm_before_residual"):
        return Dialect("vLLM", "vllm")
    if name == CLASS:
        return Dialect("SGLang (SpecForge, ModelOpt)", "sglang")
    if raw.get("eagle_config") is not None or found.has(r"fc_norm\.|aux_norm_"):
        return Dialect("SGLang (SpecForge, ModelOpt)", "sglang")
    if found.has(r"midlayer\.") or name in ("", "LlamaForCausalLM"):
        return Dialect("SafeAILab/EAGLE", "eagle")
    return Dialect("vLLM", "vllm")


def surroundings(reader: Reader) -> None:
    """What the head is read beside."""
    raw, target, capture = reader.raw, reader.target, reader.settings["capture"]
    named = "hs[2], hs[L/2], hs[L-3]" if capture is None else ", ".join(f"hs[{number}]" for number in capture)
    reader.note("layers", f"feeds the target's states {named} side by side, without its final norm")
    reader.note("position", "puts token x(t+1) and states of t at position t, one further per step")
    if reader.settings["embed"] == "target":
        reader.note("embed_tokens", "takes the target's")
    count = reader.settings["num_states"]
    if capture is not None and (len(capture) != count or list(capture) != sorted(set(capture))):
        reader.error("layers", f"reads the target's layers {list(capture)}, not {count} distinct ones, as its fc does")
    if (layers := reader.settings["llama"].num_layers) != 1:
        reader.error("num_hidden_layers", f"builds {layers} layers, which this check and our head do not")
    if target is None:
        return
    count, vocab, hidden = target.num_layers, positive(raw, "vocab_size"), positive(raw, "hidden_size")
    if capture is not None and count is not None and not all(0 <= number < count for number in capture):
        reader.error("layers", f"reads the target's layers {list(capture)}, of {count}")
    if target.raw.get("vocab_size", vocab) != vocab:
        reader.error("vocab_size", f"goes by {vocab}, the target has {target.raw['vocab_size']} tokens")
    if (target.hidden_size or hidden) != hidden:
        reader.error("hidden_size", f"cannot read states of width {target.hidden_size} at width {hidden}")


def own_tensors(package: Package, target: TargetFacts | None, notes: list[str]) -> dict[str, Tensor]:
    """Tensors by our names, whatever system's they have; without rotary buffers and the target's embedding."""
    tensors: dict[str, Tensor] = {}
    for on_disk, tensor in package.tensors.items():
        name = on_disk.removeprefix("model.")
        name = re.sub(r"^(midlayer|layers\.0)\.", "layer.", OLD_NORMS.get(name, name))
        if any(buffer in name for buffer in ROTARY_BUFFERS):
            continue
        if name in tensors:
            raise InputError("weights", f"{name} twice, by two names", "each once", "Remove one of them.")
        if name == "embed_tokens.weight":
            check_embedding(on_disk, tensor, target)
            notes.append(f"{on_disk} is left out: it is the target's embedding")
        else:
            tensors[name] = tensor
    return tensors


def flags_of(flags: Flags, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Flags:
    """The system's switches, if our head can be such a one."""
    for name in ("norm_before_fc", "target_hidden_size"):
        if said_flag(raw, name) and raw.get(name) != raw.get("hidden_size"):
            raise InputError(f"config.json, {name}", raw.get(name, True), "nothing", UNSUPPORTED)
    inner = raw.get("eagle_config")
    if isinstance(inner, Mapping) and inner.get("use_aux_hidden_state") is False:
        raise InputError("config.json, use_aux_hidden_state", False, "true: it is no EAGLE-3 head", UNSUPPORTED)
    normed = "fc_norm.0.weight" in tensors
    if flags.fc_norm != normed:
        found = f"{'norms' if normed else 'no norm'} of the target's states in the file"
        raise InputError("fc_norm", found, f"what config.json says ({flags.fc_norm})", "Correct config.json.")
    return flags


def states_of(tensors: Mapping[str, Tensor], size: int) -> int:
    """How many states of this size fc reads."""
    fc = tensors.get("fc.weight")
    if fc is None or fc.ndim != 2 or fc.shape[1] % size:
        found = "none" if fc is None else f"a tensor {list(fc.shape)}"
        raise InputError("fc.weight", found, f"a matrix that reads states of width {size}", UNSUPPORTED)
    return fc.shape[1] // size


def capture_of(ids: tuple[int, ...] | None, target: TargetFacts | None, num_states: int) -> tuple[int, ...]:
    """The layers that a foreign head reads, as many as its fc."""
    layers = ids if ids is not None else None if target is None else default_layers(target)
    if layers is None:
        found = "a head that reads its target's layers 2, L/2 and L-3"
        raise InputError("target", "none", f"the target: this is {found}", "Pass --target.")
    count = None if target is None else target.num_layers
    fits = len(layers) == num_states and list(layers) == sorted(set(layers)) and layers[0] >= 0
    if not fits or (count is not None and layers[-1] >= count):
        expected = f"{num_states} distinct ones, as fc reads, ascending"
        expected += "" if count is None else f", below {count}"
        raise InputError("layers", list(layers), expected, "Pass the target that the head was trained for.")
    return layers


def own_switches(tensors: dict[str, Tensor], biases: Biases, system: str) -> dict[str, bool]:
    """Switches of the layer, by its tensors. biases: those that the system builds; of zeros they are left out."""
    parts = {"qkv_bias": "self_attn.q_proj.bias", "o_bias": "self_attn.o_proj.bias", "mlp_bias": "mlp.up_proj.bias"}
    for (switch, part), built in zip(parts.items(), (biases.qkv, biases.o, biases.mlp), strict=True):
        bias = tensors.get(f"layer.{part}")
        if built != (bias is not None) and (bias is None or bool(bias.any())):
            found = f"{'no' if built else 'a'} {part} in the file"
            expected = f"{'one' if built else 'none'}, as {system} builds it by config.json"
            raise InputError("weights", found, expected, f"Correct attention_bias or mlp_bias ({switch}).")
    for name in [name for name, tensor in tensors.items() if name.endswith(".bias") and not tensor.any()]:
        del tensors[name]
    switches = parts | {"qk_norm": "self_attn.q_norm.weight"}
    return {switch: f"layer.{part}" in tensors for switch, part in switches.items()}
