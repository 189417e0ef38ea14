"""What `read` of the EAGLE-1 formats is made of: sizes, the parameters that a system creates, and a log of what fills
them. The rules themselves, where the systems differ, are in the file of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.interop.base import Finding, Package, Reading, TargetFacts
from draftsmith.modules.interop.eagle1.rope import Rope, conflict, inverse_frequencies, missing_keys, transformers_rope
from draftsmith.modules.types import InputError

ROTARY_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# What vLLM and SGLang hold as one parameter; they also take it as one tensor.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Of transformers' LlamaConfig and of SafeAILab's EConfig alike.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements, layers and heads as a system takes them from `config.json`."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Biases:
    """Which linear layers a system creates with a bias."""

    fc: bool
    qkv: bool
    o: bool
    mlp: bool


@dataclass(frozen=True)
class Slot:
    """A parameter that a system creates. start: what it holds until the file fills it; NaN: nothing defined."""

    shape: tuple[int, ...]
    start: float = math.nan


def positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer field of a `config.json`, `default` (or the systems' common one) where it is absent."""
    value = raw.get(key, DEFAULTS[key] if default is None else default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json, {key}", repr(value), "a positive integer", "Correct config.json.")
    return value


def config_number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """A number in a `config.json`, `default` where it is absent."""
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"config.json, {key}", repr(value), "a number", "Correct config.json.")
    return float(value)


def max_positions(target: TargetFacts | None) -> int:
    """How many the target has, 0 where that is not known."""
    return 0 if target is None else int(target.raw.get("max_position_embeddings") or 0)


def sizes(raw: Mapping[str, Any], head_dim: bool = True) -> Sizes:
    """head_dim: the system honours the field; else it is hidden_size / num_attention_heads whatever the field says.

    Raises:
        InputError: for a size that no system takes.
    """
    hidden, heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    given = raw.get("head_dim") if head_dim else None
    return Sizes(
        vocab=positive(raw, "vocab_size"),
        hidden=hidden,
        intermediate=positive(raw, "intermediate_size"),
        layers=positive(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads if raw.get("num_key_value_heads") is None else positive(raw, "num_key_value_heads", heads),
        head_dim=max(hidden // heads, 1) if given is None else positive(raw, "head_dim", 1),
    )


def slots(size: Sizes, biases: Biases, zero_bias: bool = False) -> dict[str, Slot]:
    """Parameters of an EAGLE-1 head by name: no norm before layer 0's attention, none at the end, no lm_head.

    zero_bias: the system puts zeros into q, k, v and o biases before it loads. Norms start as ones everywhere.
    """
    hidden, q, kv = size.hidden, size.heads * size.head_dim, size.kv_heads * size.head_dim
    linear = {
        "self_attn.q_proj": (q, hidden, biases.qkv),
        "self_attn.k_proj": (kv, hidden, biases.qkv),
        "self_attn.v_proj": (kv, hidden, biases.qkv),
        "self_attn.o_proj": (hidden, q, biases.o),
        "mlp.gate_proj": (size.intermediate, hidden, biases.mlp),
        "mlp.up_proj": (size.intermediate, hidden, biases.mlp),
        "mlp.down_proj": (hidden, size.intermediate, biases.mlp),
    }
    out = {"fc.weight": Slot((hidden, 2 * hidden))}
    if biases.fc:
        out["fc.bias"] = Slot((hidden,))
    for i in range(size.layers):
        for name, (rows, columns, bias) in linear.items():
            out[f"layers.{i}.{name}.weight"] = Slot((rows, columns))
            if bias:
                start = 0.0 if zero_bias and name.startswith("self_attn") else math.nan
                out[f"layers.{i}.{name}.bias"] = Slot((rows,), start)
        if i > 0:
            out[f"layers.{i}.input_layernorm.weight"] = Slot((hidden,), 1.0)
        out[f"layers.{i}.post_attention_layernorm.weight"] = Slot((hidden,), 1.0)
    return out


def parts_of(name: str) -> list[str]:
    """Our names for a tensor of vLLM's and SGLang's fused names, in its order of rows; itself for any other."""
    for whole, parts in FUSED.items():
        if f".{whole}." in name:
            return [name.replace(f".{whole}.", f".{part}.") for part in parts]
    return [name]


def split_dim(name: str) -> int | None:
    """Along which vLLM and SGLang split a parameter among GPUs, and cut a longer tensor of a file; None: neither."""
    module, kind = name.split(".")[-2:]
    if module in ("o_proj", "down_proj"):
        return 1 if kind == "weight" else None
    return 0 if any(module == whole or module in parts for whole, parts in FUSED.items()) else None


def same_values(one: Tensor, other: Tensor) -> bool:
    """Equal in the coarser of their two dtypes: a float32 copy of a bfloat16 tensor is the same tensor."""
    if one.shape != other.shape:
        return False
    coarser = max(one.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return torch.equal(one.to(coarser), other.to(coarser))


class Reader:
    """Collects one system's reading of one package: its slots, what filled them, and the findings."""

    def __init__(self, package: Package, target: TargetFacts | None, system: str):
        """system: its name, as findings begin with it."""
        self.package, self.target, self.system = package, target, system
        self.raw = package.config
        self.slots: dict[str, Slot] = {}
        self.weights: dict[str, Tensor] = {}
        self.settings: dict[str, Any] = {"embed": "target", "logit_scale": 1.0}
        self.findings: list[Finding] = []
        self.used: list[str] = []

    def error(self, where: str, text: str) -> None:
        self.findings.append(Finding("error", where, f"{self.system} {text}"))

    def note(self, where: str, text: str) -> None:
        self.findings.append(Finding("note", where, f"{self.system} {text}"))

    def take(self, size: Sizes, made: dict[str, Slot], rope: Rope) -> None:
        """The sizes, parameters and rotary settings that the system goes by."""
        raw = self.raw
        self.slots = made
        self.settings |= {
            "num_layers": size.layers,
            "num_heads": size.heads,
            "num_kv_heads": size.kv_heads,
            "head_dim": size.head_dim,
            "rms_eps": config_number(raw, "rms_norm_eps", 1e-6),
            "inv_freq": inverse_frequencies(rope, size.head_dim),
            "max_position": positive(raw, "max_position_embeddings"),
        }
        for key in ("num_hidden_layers", "rms_norm_eps"):
            if key not in raw:
                self.note(key, f"takes {DEFAULTS[key]}, its default: config.json does not say")
        if size.hidden % size.heads:
            self.error("hidden_size", f"raises: {size.hidden} is not a multiple of {size.heads} attention heads")
        if raw.get("quantization_config"):
            self.error("quantization_config", "would read quantised weights, which this check does not follow")
        self._compare_rope(rope)

    def _compare_rope(self, rope: Rope) -> None:
        both = conflict(self.raw)
        if both:
            self.error("rope_parameters", f"computes with {rope}, but config.json contradicts itself: {both}")
        if bool(torch.isnan(self.settings["inv_freq"]).any()):
            what = rope.kind if rope.partial == 1.0 else f"partial_rotary_factor {rope.partial:g}"
            self.error("rope_scaling", f"has rotary positions ({what}) that this check does not follow")
        text = f"rotates with {rope}"
        if self.target is not None:
            reads = transformers_rope(self.target.raw)
            same = torch.equal(inverse_frequencies(reads, self.settings["head_dim"]), self.settings["inv_freq"])
            text += ", as the target does" if same else f"; the target with {reads}"
        self.note("rope_theta", text)

    def unread(self, *keys: str) -> None:
        """Fields that the system passes over, where they would change something."""
        for key in keys:
            if self.raw.get(key) not in (None, False, 1, 1.0):
                self.note(key, f"does not read it ({self.raw[key]})")

    def check_llama(self) -> None:
        """What vLLM and SGLang ask of the config alike, through transformers' LlamaConfig and their own Llama."""
        raw = self.raw
        lacking = missing_keys(raw)
        if lacking:
            self.error("rope_scaling", f"raises: Missing required keys in `rope_parameters`: {', '.join(lacking)}")
        if raw.get("hidden_act", "silu") != "silu":
            self.error(
                "hidden_act", f"raises: Unsupported activation: {raw['hidden_act']}. Only silu is supported for now."
            )

    def fill(self, name: str, slot: str, refusal: str) -> None:
        """Tensor `name` of the file into a slot; `refusal` is what the system says of another shape."""
        self.used.append(name)
        self._fit(name, self.package.tensors[name], [slot], refusal)

    def fill_split(self, name: str, pads: tuple[str, ...] = ()) -> None:
        """Tensor `name` into slots, as vLLM and SGLang fill them: fused or not, cut where it is longer than its share
        of a split parameter.

        pads: modules whose shorter tensors are filled up with zeros; all others stop the system.
        """
        self.used.append(name)
        tensor, parts, dim = self.package.tensors[name], parts_of(name), split_dim(name)
        if len(parts) > 1:
            self.note(name, f"takes it for {', '.join(part.split('.')[-2] for part in parts)} in one")
        if dim is not None and dim < tensor.ndim:
            along, found = ("rows", "columns")[dim], tensor.shape[dim]
            expected = sum(self.slots[part].shape[dim] for part in parts)
            if found > expected:
                tensor = tensor.narrow(dim, 0, expected)
                self.error(name, f"takes the first {expected} of its {found} {along} and says nothing")
            elif found < expected and name.split(".")[-2] in pads:
                shape = list(tensor.shape)
                shape[dim] = expected - found
                tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
                self.error(name, f"adds {expected - found} {along} of zeros to its {found} and says nothing")
        self._fit(name, tensor, parts, "a weight of another shape")

    def _fit(self, name: str, tensor: Tensor, slots: list[str], refusal: str) -> None:
        """Rows of the tensor into slots, one after the other."""
        rows = [self.slots[slot].shape[0] for slot in slots]
        expected = (sum(rows), *self.slots[slots[0]].shape[1:])
        if tuple(tensor.shape) != expected:
            found = list(self.package.tensors[name].shape)
            self.error(name, f"raises: {refusal} (file {found}, model {list(expected)})")
            return
        for slot, part in zip(slots, tensor.to(torch.float32).split(rows), strict=True):
            self.weights[slot] = part

    def dropped(self, name: str, why: str) -> None:
        """A tensor that the system passes over without a word."""
        tensor = self.package.tensors[name]
        if any(buffer in name for buffer in ROTARY_BUFFERS):
            self.note(name, "passes over this rotary buffer and computes its own")
        elif name.endswith(".bias") and not bool(tensor.any()):
            self.note(name, f"drops it, {why}; it is zero, nothing is lost")
        else:
            self.error(name, f"drops it, {why}")

    def dropped_lm_head(self, name: str) -> None:
        """A stray lm_head that the system passes over: it takes the target's."""
        theirs = None if self.target is None else self.target.lm_head
        if theirs is None:
            self.error(name, "drops it and takes the target's, which is not at hand to compare")
        elif same_values(self.package.tensors[name], theirs):
            self.note(name, "drops it and takes the target's, which is the same")
        else:
            self.error(name, "drops it and takes the target's, which differs")

    def embeds_differ(self, name: str) -> bool | None:
        """Whether the file's embedding is another than the target's; None: the target's is not at hand."""
        theirs = None if self.target is None else self.target.embed_tokens
        return None if theirs is None else not same_values(self.package.tensors[name], theirs)

    def fill_embedding(self, name: str, rows: int | None, refusal: str, same: str) -> None:
        """The file's embedding, for a system that prefers it to the target's.

        rows: of the table that it makes; None: as many as the file has. refusal: what it says of another shape. same:
        what it does with a copy of the target's.
        """
        tensor = self.package.tensors[name]
        expected = [tensor.shape[0] if rows is None else rows, self.slots["fc.weight"].shape[0]]
        self.used.append(name)
        if list(tensor.shape) != expected:
            self.error(name, f"raises: {refusal} (file {list(tensor.shape)}, model {expected})")
        elif self.embeds_differ(name) is False:
            self.note(name, same)
        else:
            self.settings["embed"] = "file"
            self.weights["embed_tokens.weight"] = tensor.to(torch.float32)
            compared = "which differs from the target's" if self.embeds_differ(name) else "the target's is not at hand"
            self.note(name, f"embeds with the file's table; {compared}")

    def missing(self, random: str, zero_bias: bool) -> None:
        """Give every slot that no tensor filled what it holds then; `random` says what that is. zero_bias: a bias of
        o_proj is meant to be zeros then."""
        for name, slot in self.slots.items():
            if name in self.weights:
                continue
            self.weights[name] = torch.full((), slot.start).expand(slot.shape)
            holds = random if math.isnan(slot.start) else "ones" if slot.start == 1.0 else "zeros"
            if any(finding.where == name for finding in self.findings):
                continue
            if zero_bias and name.endswith("o_proj.bias"):
                self.note(name, "does not find it and takes zeros")
            else:
                self.error(name, f"does not find it and says nothing: it keeps {holds}")

    def surroundings(self, truncates: bool) -> None:
        """What the head is read beside. truncates: the draft's logits end at the config's vocab_size."""
        raw, target = self.raw, self.target
        layers = "L" if target is None else str(target.raw.get("num_hidden_layers", "L"))
        self.note("feature", f"feeds the target's last hidden state after its final norm, hs[{layers}]")
        self.note("position", "puts token x(t+1) and feature f(t) at position t, one further per step")
        self.note("lm_head", "takes the target's")
        if self.settings["embed"] == "target":
            self.note("embed_tokens", "takes the target's")
        vocab, hidden = positive(raw, "vocab_size"), positive(raw, "hidden_size")
        if raw.get("draft_vocab_size") not in (None, vocab):
            self.error(
                "draft_vocab_size", f"ignores {raw['draft_vocab_size']} and drafts from the target's whole lm_head"
            )
        if target is None:
            return
        theirs = target.raw.get("vocab_size", vocab)
        if vocab < theirs and truncates:
            self.error("vocab_size", f"drafts only the first {vocab} of the target's {theirs} tokens")
        elif vocab != theirs:
            self.note("vocab_size", f"does not go by {vocab} here: the tables are the target's, of {theirs} tokens")
        if target.raw.get("hidden_size", hidden) != hidden:
            self.error("hidden_size", f"cannot fuse features of width {target.raw['hidden_size']} at width {hidden}")

    def reading(self) -> Reading:
        return Reading(self.weights, self.settings, tuple(self.findings), tuple(self.used))
