"""What `read` of a Llama-like head is made of: the sizes in `config.json`, the parameters that a system creates, and a
log of what fills them. The rules themselves, where systems differ, are in the file of each format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from draftsmith.modules.formats.base import Finding, Package, Reading, TargetFacts
from draftsmith.modules.formats.rope import KNOWN, Rope, conflict, frequencies, missing_keys, transformers_rope
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.types import InputError

WHICH = {None: "which is not at hand to compare", False: "which is the same", True: "which differs"}
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
class Slot:
    """A parameter that a system creates. start: what it holds until the file fills it; NaN: nothing defined."""

    shape: tuple[int, ...]
    start: float = math.nan


def slots_of(module: nn.Module, zero_bias: bool = False) -> dict[str, Slot]:
    """The parameters of a net that a system builds alike. Norms start as ones everywhere.

    zero_bias: it puts zeros into the biases of q, k, v and o before it loads.
    """

    def start(name: str) -> float:
        if "norm." in name:
            return 1.0
        return 0.0 if zero_bias and ".self_attn." in name and name.endswith(".bias") else math.nan

    return {name: Slot(tuple(tensor.shape), start(name)) for name, tensor in module.named_parameters()}


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


def llama_config(raw: Mapping[str, Any], rope: Rope, head_dim: bool = True) -> LlamaConfig:
    """Sizes as a system takes them from `config.json`, without biases.

    rope: as it reads the rotary settings. head_dim: it honours the field; else it is hidden_size / num_attention_heads
        whatever the field says.

    Raises:
        InputError: for a size that no system takes.
    """
    hidden, heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    given = raw.get("head_dim") if head_dim else None
    return LlamaConfig(
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(raw, "intermediate_size"),
        num_layers=positive(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if raw.get("num_key_value_heads") is None else positive(raw, "num_key_value_heads", heads),
        head_dim=max(hidden // heads, 1) if given is None else positive(raw, "head_dim", 1),
        max_position=positive(raw, "max_position_embeddings"),
        rms_eps=config_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
    )


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
    """Collects one system's reading of one package: its slots, what filled them, and the findings.

    settings: `llama`, sizes and rotary settings of its layers, of a kind of rope that ours may not compute;
        `max_position`, positions that the system serves with this head; `embed`, "target" or "file", and then
        `weights` has `embed_tokens.weight`; `logit_scale`, a factor of the draft's logits.
    """

    def __init__(
        self, package: Package, target: TargetFacts | None, system: str, llama: LlamaConfig, slots: dict[str, Slot]
    ):
        """system: its name, as findings begin with it. llama, slots: sizes and parameters that it goes by."""
        self.package, self.target, self.system, self.slots = package, target, system, slots
        self.raw = package.config
        rope = Rope.of(llama)
        self.weights: dict[str, Tensor] = {}
        self.settings: dict[str, Any] = {
            "llama": llama,
            "max_position": llama.max_position,
            "embed": "target",
            "logit_scale": 1.0,
        }
        self.findings: list[Finding] = []
        self.used: list[str] = []
        for key in ("num_hidden_layers", "rms_norm_eps"):
            if key not in self.raw:
                self.note(key, f"takes {DEFAULTS[key]}, its default: config.json does not say")
        if llama.hidden_size % llama.num_heads:
            heads = f"{llama.num_heads} attention heads"
            self.error("hidden_size", f"raises: {llama.hidden_size} is not a multiple of {heads}")
        if self.raw.get("quantization_config"):
            self.error("quantization_config", "would read quantised weights, which this check does not follow")
        self._compare_rope(llama, rope)

    def error(self, where: str, text: str) -> None:
        self.findings.append(Finding("error", where, f"{self.system} {text}"))

    def note(self, where: str, text: str) -> None:
        self.findings.append(Finding("note", where, f"{self.system} {text}"))

    def _compare_rope(self, llama: LlamaConfig, rope: Rope) -> None:
        if both := conflict(self.raw):
            self.error("rope_parameters", f"computes with {rope}, but config.json contradicts itself: {both}")
        if rope.kind not in KNOWN:
            self.error("rope_scaling", f"has rotary positions ({rope.kind}) that this check does not follow")
        text = f"rotates with {rope}"
        if self.target is not None:
            theirs = transformers_rope(self.target.raw)
            same = torch.equal(frequencies(llama, theirs), frequencies(llama, rope))
            text += ", as the target does" if same else f"; the target with {theirs}"
        self.note("rope_theta", text)

    def unread(self, *keys: str) -> None:
        """Fields that the system passes over, where they would change something."""
        for key in keys:
            if self.raw.get(key) not in (None, False, 1, 1.0):
                self.note(key, f"does not read it ({self.raw[key]})")

    def check_llama(self) -> None:
        """What vLLM and SGLang ask of the config alike, through transformers' LlamaConfig and their own Llama."""
        if lacking := missing_keys(self.raw):
            self.error("rope_scaling", f"raises: Missing required keys in `rope_parameters`: {', '.join(lacking)}")
        activation = self.raw.get("hidden_act", "silu")
        if activation != "silu":
            self.error("hidden_act", f"raises: Unsupported activation: {activation}. Only silu is supported for now.")

    def fill(self, name: str, tensor: Tensor, slots: list[str], refusal: str) -> None:
        """Rows of tensor `name` of the file, which may have been cut, into slots, one after the other.

        refusal: what the system says of another shape.
        """
        self.used.append(name)
        rows = [self.slots[slot].shape[0] for slot in slots]
        expected = (sum(rows), *self.slots[slots[0]].shape[1:])
        if tuple(tensor.shape) != expected:
            found = list(self.package.tensors[name].shape)
            self.error(name, f"raises: {refusal} (file {found}, model {list(expected)})")
            return
        self.weights |= dict(zip(slots, tensor.to(torch.float32).split(rows), strict=True))

    def fill_split(self, name: str, pads: tuple[str, ...] = (), own: str = "") -> None:
        """Tensor `name` into slots, as vLLM and SGLang fill them: fused or not, cut where it is longer than its share
        of a split parameter.

        pads: modules whose shorter tensors are filled up with zeros; all others stop the system. own: our name for it,
        where that is another.
        """
        tensor, parts, dim = self.package.tensors[name], parts_of(own or name), split_dim(own or name)
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
        self.fill(name, tensor, parts, "a weight of another shape")

    def dropped(self, name: str, why: str) -> None:
        """A tensor that the system passes over without a word."""
        if any(buffer in name for buffer in ROTARY_BUFFERS):
            self.note(name, "passes over this rotary buffer and computes its own")
        elif name.endswith(".bias") and not bool(self.package.tensors[name].any()):
            self.note(name, f"drops it, {why}; it is zero, nothing is lost")
        else:
            self.error(name, f"drops it, {why}")

    def differs(self, name: str, table: Literal["embed_tokens", "lm_head"]) -> bool | None:
        """Whether a tensor of the file is another than the target's table; None: that one is not at hand."""
        theirs = None if self.target is None else getattr(self.target, table)
        return None if theirs is None else not same_values(self.package.tensors[name], theirs)

    def replaced(self, name: str, differ: bool | None, text: str) -> None:
        """A table that the system takes from the target instead, silently."""
        tell = self.note if differ is False else self.error
        tell(name, f"{text}, {WHICH[differ]}")

    def fill_embedding(self, name: str, rows: int | None, refusal: str, same: str) -> None:
        """The file's embedding, for a system that prefers it to the target's.

        rows: of the table that it makes; None: as many as the file has. refusal: what it says of another shape. same:
        what it does with a copy of the target's.
        """
        tensor, differ = self.package.tensors[name], self.differs(name, "embed_tokens")
        expected = [tensor.shape[0] if rows is None else rows, self.slots["fc.weight"].shape[0]]
        self.used.append(name)
        if list(tensor.shape) != expected:
            self.error(name, f"raises: {refusal} (file {list(tensor.shape)}, model {expected})")
        elif differ is False:
            self.note(name, same)
        else:
            self.settings["embed"] = "file"
            self.weights["embed_tokens.weight"] = tensor.to(torch.float32)
            compared = "which differs from the target's" if differ else "the target's is not at hand"
            self.note(name, f"embeds with the file's table; {compared}")

    def missing(self, random: str, zero_bias: bool, shown: Callable[[str], str] = str) -> None:
        """Give every slot that no tensor filled what it holds then; `random` says what that is. zero_bias: a bias of
        o_proj is meant to be zeros then. shown: a slot's name in the system's files."""
        for slot_name, slot in self.slots.items():
            if slot_name in self.weights:
                continue
            name = shown(slot_name)
            self.weights[slot_name] = torch.full((), slot.start).expand(slot.shape)
            if any(finding.where == name for finding in self.findings):
                continue
            if zero_bias and name.endswith("o_proj.bias"):
                self.note(name, "does not find it and takes zeros")
            else:
                holds = random if math.isnan(slot.start) else "ones" if slot.start == 1.0 else "zeros"
                self.error(name, f"does not find it and says nothing: it keeps {holds}")

    def reading(self) -> Reading:
        return Reading(self.weights, self.settings, tuple(self.findings), tuple(self.used))
