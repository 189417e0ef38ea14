"""Sizes of a target, and the decoder layer of its heads: one that servers run for any target.

A draft layer need not be the target's. Servers draft with a Llama or Qwen3 layer of the target's width for every family
(TorchSpec and SpecForge train such ones for Kimi and DeepSeek), so latent attention, experts and recurrent layers are
not copied. What is taken is what fits such a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.modules.llama_config import ROPE_KINDS, LlamaConfig, RopeScaling, llama_sizes
from draftsmith.modules.targets.hybrid import is_linear
from draftsmith.modules.types import InputError

# Families whose layers the lean engine computes.
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
ON_HF = "Load it with --loader hf."
# Mixtures of experts, and the family whose attention they have.
DENSE = {"qwen3_moe": "qwen3", "mixtral": "mistral"}
# Our names of sizes, and what families call them.
NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "emb_dim"),
    "num_hidden_layers": (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    ),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_key_value_heads": ("num_key_value_heads", "multi_query_group_num", "num_kv_heads"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
}
# Settings of attention that a plain layer does not have.
LATENT = ("kv_lora_rank", "q_lora_rank")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Layers with keys and values of the whole text, by the names in `layer_types` of families that transformers lacks.
FULL = ("full_attention", "attention", "global_attention")
HEAD_DIM = 128


@dataclass(frozen=True)
class TargetShape(LlamaConfig):
    """Sizes of a target, with a decoder layer for its heads in the place of its own.

    family: as of `family_of`.
    hybrid: some layers have a recurrent or convolution state. full_layers: of a hybrid, the numbers of the states after
    its full-attention layers, ascending.
    window: most tokens that each layer reads, of a target whose layers all have one, as a Mistral's. windowed: some
    layers have one, and not all.
    context: positions that config.json states, which servers take; 0 if it states none. `max_position` is what we read.
    reasons: how the heads' layer differs from the target's own, and why; empty if they are alike.
    text: settings of the target's text model; of a target with this very layer the name of its family alone.
    """

    family: str = ""
    hybrid: bool = False
    # Class variables of `LlamaConfig`, which mypy forbids to make fields of.
    full_layers: tuple[int, ...] = ()  # type: ignore[misc]
    reasons: tuple[str, ...] = ()  # type: ignore[misc]
    window: int | None = None
    windowed: bool = False
    context: int = 0
    text: dict = field(default_factory=dict)


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the settings of its text part, where it has one, in place of its own."""
    return {**raw, **{key: value for key, value in (raw.get("text_config") or {}).items() if value is not None}}


def family_of(raw: Mapping[str, Any]) -> str:
    """Return the model type of the text, without the ending of those that are a part of another (`qwen3_5_text`)."""
    return str(text_config(raw).get("model_type") or "").removesuffix("_text")


def stated_dtype(raw: Mapping[str, Any]) -> str | None:
    """Return the type of the weights that config.json names, of wrappers often for the text alone."""
    named = (part.get(name) for part in (raw, text_config(raw)) for name in ("dtype", "torch_dtype"))
    return next((str(name) for name in named if name), None)


def llama_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Read the config from a transformers `config.json`.

    Raises:
        InputError: a switch that this path does not implement; the transformers path does.
    """
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise InputError("model_type", kind, " or ".join(SUPPORTED), ON_HF)
    if raw.get("hidden_act", "silu") != "silu":
        raise InputError("hidden_act", raw["hidden_act"], "silu", ON_HF)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if name not in raw:
            raise InputError(name, "nothing", "an integer in config.json", "Fetch or build it again.")
    sizes = llama_sizes(raw)
    if sizes.rope_scaling.kind not in ROPE_KINDS:
        raise InputError("rope_type", sizes.rope_scaling.kind, " or ".join(ROPE_KINDS), ON_HF)
    windowed = raw.get("sliding_window") is not None and (kind == "mistral" or raw.get("use_sliding_window", False))
    if windowed and kind != "mistral":
        # Qwen windows only the layers from max_window_layers on; one window for all would be silently wrong.
        raise InputError("use_sliding_window", True, "false for a Qwen model", ON_HF)
    return dataclasses.replace(
        sizes,
        # Qwen2 has q/k/v biases without saying so; Mistral has none whatever it says.
        qkv_bias=kind == "qwen2" or (kind != "mistral" and bool(raw.get("attention_bias"))),
        o_bias=kind in ("llama", "qwen3") and bool(raw.get("attention_bias")),
        mlp_bias=kind == "llama" and bool(raw.get("mlp_bias")),
        qk_norm=kind == "qwen3",
        tie_embeddings=bool(raw.get("tie_word_embeddings")),
        sliding_window=raw["sliding_window"] if windowed else None,
    )


def own_shape(raw: Mapping[str, Any]) -> TargetShape | None:
    """Return the shape of a target whose heads have its own layer; None for layers that the lean engine lacks.

    It has those of its families, and of mixtures of experts with their attention, which get one MLP of config.json's
    intermediate_size.
    """
    family = str(raw.get("model_type"))
    if (kind := DENSE.get(family, family)) not in SUPPORTED:
        return None
    try:
        llama = llama_config({**raw, "model_type": kind})
    except InputError as error:
        if error.remedy != ON_HF:
            raise
        return None
    kinds = _named_kinds(raw) or [LayerKind(llama.sliding_window is None, False, llama.sliding_window)]
    about: dict[str, Any] = {"family": family, "context": stated_positions(raw), "text": {"model_type": family}}
    return TargetShape(**vars(llama), **about, **_windows(kinds))


def plain_shape(raw: Mapping[str, Any]) -> TargetShape:
    """Choose a layer for the heads of a target of any family, from its config.json.

    Raises:
        InputError: a size is missing or no positive integer.
    """
    text = text_config(raw)
    reasons = [f"a plain Llama layer, which servers draft with for any target (this one: {text.get('model_type')})"]
    sizes: dict[str, Any] = {ours: next((text[name] for name in names if text.get(name) is not None), None)
             for ours, names in NAMES.items()}  # fmt: skip
    sizes["num_hidden_layers"] = num_layers(text)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if sizes[name] is None:
            raise InputError(f"config.json, {name}", "nothing", "a size of the target", "Complete config.json.")
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    experts = any(text.get(name) for name in EXPERTS)
    # A mixture's intermediate_size is that of its dense layers or of one expert.
    if not isinstance(inner, int) or (experts and inner < 2 * hidden):
        sizes["intermediate_size"] = 3 * hidden
        why = "the target's is an expert's" if experts else "the target states none"
        reasons.append(f"an MLP of {3 * hidden}, three times the width: {why}")
    attention = _attention(text, sizes, reasons)
    named = {key: value for key, value in sizes.items() if value is not None}
    llama = llama_sizes({**text, **named, **attention, "max_position_embeddings": max_position(text)})
    rotation = llama.rope_scaling
    if rotation.kind not in ROPE_KINDS:
        reasons.append(f"rotation without scaling: the target's ({rotation.kind}) is not one that draft layers have")
        llama = dataclasses.replace(llama, rope_scaling=RopeScaling())
    if rotation.partial_rotary_factor != 1:
        # SGLang's and speculators' draft layers do, whatever config.json says.
        reasons.append(f"rotation of whole heads: the target rotates {rotation.partial_rotary_factor:g} of each")
        whole = dataclasses.replace(llama.rope_scaling, partial_rotary_factor=1.0)
        llama = dataclasses.replace(llama, rope_scaling=whole)
    kinds = layer_kinds(text)
    hybrid = is_hybrid(kinds)
    full_layers = tuple(number for number, kind in enumerate(kinds, 1) if kind.full)
    return TargetShape(
        **vars(llama),
        family=family_of(text),
        hybrid=hybrid,
        full_layers=full_layers if hybrid and len(kinds) == llama.num_layers else (),
        **_windows(kinds),
        context=stated_positions(text),
        reasons=tuple(reasons),
        text=text,
    )


def num_layers(text: Mapping[str, Any]) -> int | None:
    """Return how many layers give states of a text: Mllama's that read an image give none. None if it is not said."""
    count = next((text[name] for name in NAMES["num_hidden_layers"] if text.get(name) is not None), None)
    # Nemotron-H lists its layers and does not count them.
    count = count or len(_kinds(text)) or None
    seeing = text.get("cross_attention_layers")
    return count - sum(layer < count for layer in seeing) if isinstance(count, int) and seeing else count


def stated_positions(text: Mapping[str, Any]) -> int:
    """Return the context that config.json states, which servers take; 0 if it states none."""
    names = NAMES["max_position_embeddings"]
    return next((size for name in names if isinstance(size := text.get(name), int) and size > 0), 0)


def max_position(text: Mapping[str, Any]) -> int:
    """Return the number of positions whose keys do not depend on the length of the text.

    LongRoPE changes the frequencies of ALL positions once a text is longer than `original_max_position_embeddings`, so
    that cached keys would be wrong.
    """
    longest = stated_positions(text) or 2048
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        longest = min(longest, original or longest)
    return longest


def _attention(text: Mapping[str, Any], sizes: Mapping[str, Any], reasons: list[str]) -> dict[str, int]:
    """Return heads, kv heads and head_dim: the target's where a plain layer can have them."""
    hidden, heads, kv_heads = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    head_dim, latent = text.get("head_dim"), any(text.get(name) for name in LATENT)
    if isinstance(heads, int) and heads > 0 and not latent:
        own_dim = head_dim if isinstance(head_dim, int) else hidden // heads
        own_kv = kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads
        if heads % own_kv == 0 and own_dim > 0 and own_dim % 2 == 0:
            return {"num_attention_heads": heads, "num_key_value_heads": own_kv, "head_dim": own_dim}
    size = HEAD_DIM if hidden >= 8 * HEAD_DIM else max(8, hidden // 8)
    count = max(1, hidden // size)
    groups = next(groups for groups in (8, 4, 2, 1) if count % groups == 0)
    why = "latent attention" if latent else "heads of no even size"
    reasons.append(f"{count} heads of {size} over {groups} of keys: the target has {why}")
    return {"num_attention_heads": count, "num_key_value_heads": groups, "head_dim": size}


@dataclass(frozen=True)
class LayerKind:
    """State that a layer caches.

    full: keys and values of the whole text. linear: a state of fixed size. window: most tokens that it reads.
    """

    full: bool
    linear: bool
    window: int | None = None


def layer_kinds(text: Mapping[str, Any]) -> list[LayerKind]:
    """Return the kind of each layer, as transformers' cache has it; of other families, by the names in config.json."""
    from transformers import AutoConfig, DynamicCache

    try:
        layers = DynamicCache(config=AutoConfig.for_model(**text)).layers
    except Exception:  # each family refuses in its own way
        return _named_kinds(text) or [LayerKind(False, True) for name in text if name.startswith("mamba")][:1]
    return kinds_in(layers)


def kinds_in(layers: Sequence[Any]) -> list[LayerKind]:
    """Return what each layer of a transformers cache keeps."""
    return [
        LayerKind(not getattr(layer, "is_sliding", True), is_linear(layer), getattr(layer, "sliding_window", None))
        for layer in layers
    ]


def is_hybrid(kinds: Sequence[LayerKind]) -> bool:
    """Return whether some layers have a recurrent or convolution state."""
    return any(kind.linear for kind in kinds)


def shared_window(kinds: Sequence[LayerKind]) -> int | None:
    """Return the window of layers that all have the same one; None of others."""
    windows = {kind.window for kind in kinds}
    return windows.pop() if len(windows) == 1 else None


def _windows(kinds: Sequence[LayerKind]) -> dict[str, Any]:
    """Return `window` and `windowed` of a TargetShape."""
    window = shared_window(kinds)
    return {"window": window, "windowed": window is None and any(kind.window for kind in kinds)}


def _named_kinds(text: Mapping[str, Any]) -> list[LayerKind]:
    """Return what each layer caches by its name in config.json; [] if it has no names."""
    window = text.get("sliding_window")
    return [
        LayerKind(kind in FULL, "attention" not in kind or "linear" in kind, window if "sliding" in kind else None)
        for kind in _kinds(text)
    ]


def _kinds(text: Mapping[str, Any]) -> Sequence[str]:
    """Return the kind of each layer, where config.json has them."""
    return text.get("layer_types") or text.get("layers_block_type") or ()
