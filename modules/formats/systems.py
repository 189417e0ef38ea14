"""Table of the systems that read heads with Llama's layers: one row for each system and kind of head.

Functions stand where systems compute differently. Sources:

SafeAILab/EAGLE at cb7e084: eagle/model/cnets1.py, cnets.py, configs.py. It ignores unknown tensors (`strict=False`) and
    the fields that later systems added, and reads the target's layers 2, L/2 and L-3 always.
vLLM 0.33.0: models/llama_eagle.py, llama_eagle3.py, qwen3_dflash.py, qwen3_dflash2.py, qwen3_dspark.py, utils.py. An
    unknown tensor stops it, unless it is a bias or a rotary buffer.
SGLang 0.5.23: models/llama_eagle.py, llama_eagle3.py, dflash.py, dspark.py, speculative/. It ignores unknown tensors
    but in block drafters.
speculators 0.9.0: config.py, model.py, models/. The layer's settings are an object inside `config.json`.
llama.cpp: conversion/llama.py and qwen.py, src/models/eagle3.cpp and dflash.cpp. One GGUF file (`gguf.py`).
DeepSpec (modeling/dspark), SpecForge, ModelOpt 0.47 (export/plugins/hf_spec_export.py): trainers.

A missing tensor stays random or uninitialized in all servers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.block.net import BlockConfig, DFlash2Config
from draftsmith.modules.drafters.eagle import EagleConfig
from draftsmith.modules.drafters.eagle3 import Eagle3Config
from draftsmith.modules.formats.base import Served, TargetFacts
from draftsmith.modules.formats.block import NON_CAUSAL, OUTPUTS, SELECTOR, SOFTCAP, STATES
from draftsmith.modules.formats.eagle3 import default_layers, layer_ids
from draftsmith.modules.formats.families import VLLM as VLLM_FAMILIES
from draftsmith.modules.formats.llama import (
    BLOCK_KINDS,
    IDS,
    Biases,
    Flags,
    HeadFiles,
    Raw,
    Refusal,
    System,
    Wrong,
    architecture,
    llama_fields,
    max_positions,
    safeailab_rope,
    window_fields,
)
from draftsmith.modules.layers import PARTIAL, config_object, rope_attention_scale, rope_settings
from draftsmith.modules.types import InputError

ABSENT = "none (the field is missing)"
SGLANG_EAGLE, EAGLE3 = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"  # the second is vLLM's class too
QWEN3_EAGLE3 = "Eagle3Qwen3ForCausalLM"  # vLLM's class with norms of q and k
# Types of targets that SGLang's models/deepseek_v2.py and glm4_moe_lite.py build.
DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite", "glm_moe_dsa")
LIKE_LLAMA, FILLED = ("qwen2", "phi3", "mixtral"), ("rope_theta", "num_key_value_heads", "rms_norm_eps")
TYPE, VERSION = "speculators_model_type", "0.9.0"
NUM_STATES, COUNT = 3, "num_aux_hidden_states"  # of the target, that systems read by default
OTHERS_VLLM, OTHERS_SGLANG = "Export it with --format vllm.", "Export it with --format vllm or --format sglang."


# -- biases, switches and defaults that a system reads from config.json


def biases_by(**parts: tuple[str, ...]) -> Callable[[Raw], Biases]:
    """Return a reader of biases. parts: field of `Biases` -> fields of `config.json`, any of which creates them."""
    return lambda raw: Biases(**{part: any(raw.get(name) for name in names) for part, names in parts.items()})


BOTH = ("attention_bias", "bias")  # models/llama.py of vLLM and SGLang


def safeailab_biases(raw: Raw) -> Biases:
    # `bias` is fc's and true by default (ea_model.py); `qkv_bias` is that of q, k and v (cnets1.py).
    return Biases(fc=bool(raw.get("bias", True)), qkv=bool(raw.get("qkv_bias", False)))


def vllm_biases(raw: Raw) -> Biases:
    # `qkv_bias`, if present, decides for q, k and v (models/llama.py, LlamaDecoderLayer).
    biases = biases_by(qkv=BOTH, o=BOTH, mlp=("mlp_bias",))(raw)
    return biases._replace(qkv=bool(raw["qkv_bias"])) if "qkv_bias" in raw else biases


def sglang_biases(raw: Raw) -> Biases:
    # fc always has one, the MLP never.
    return biases_by(qkv=BOTH, o=BOTH)(raw)._replace(fc=True)


def vllm_flags(raw: Raw) -> Flags:
    # norm_before_residual is on by default in directories of speculators, which themselves have it off
    # (transformers_utils/configs/speculators/algos.py).
    return Flags.read(raw)._replace(norm_before_residual=bool(raw.get("norm_before_residual", TYPE in raw)))


def sglang_flags(raw: Raw) -> Flags:
    return Flags.read(raw)._replace(fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")))


def vllm_fills(raw: Raw) -> Raw:
    """Return what vLLM takes for fields that a block drafter's `config.json` lacks."""
    # In directories of speculators, which themselves have it true.
    if TYPE in raw:
        return {"sample_from_anchor": False}
    return {"use_confidence_head": False, "confidence_head_with_markov": False}


# -- settings that a system ignores or computes in another way


def safeailab_refused(system: System, config: Any, target: TargetFacts | None) -> Iterator[Refusal]:
    llama, scaling = config.llama, config.llama.rope_scaling
    if llama.head_dim * llama.num_heads != llama.hidden_size:
        usual = f"hidden_size / num_heads = {llama.hidden_size // llama.num_heads}"
        yield "head_dim", llama.head_dim, f"{usual}: {system.system} ignores the field", OTHERS_SGLANG
    if scaling.kind not in ("default", "linear"):
        yield "rope_scaling", scaling.kind, f"none or linear: {system.system} refuses every other", OTHERS_SGLANG
    yield from whole_rotation(system, config, target)
    if scaling.kind == "linear" and (llama.rope_theta != 10000 or scaling.factor <= 1):
        found = f"linear by {scaling.factor:g} on base {llama.rope_theta:g}"
        rule = f"{system.system} takes that base under linear scaling, whatever rope_theta says"
        yield "rope_scaling", found, f"a factor over 1 on base 10000: {rule}", OTHERS_SGLANG
    if system.kind == "eagle":
        return
    yield from no_window(system, config, target)
    for name in Flags._fields:
        if getattr(config, name):
            yield name, True, f"false: {system.system} ignores it and says nothing", OTHERS_VLLM
    count = config.aux_layers[-1] + 3  # the target's layers, if these are the default ones
    always = f"which {system.system} always reads"
    if config.aux_layers != (2, count // 2, count - 3):
        yield "layers", list(config.aux_layers), f"2, L/2 and L-3, {always}", OTHERS_VLLM
    usual_layers = None if target is None else default_layers(target)
    if usual_layers not in (None, config.aux_layers):
        yield "layers", list(config.aux_layers), f"{list(usual_layers or ())}, {always} of this target", OTHERS_VLLM


def no_window(system: System, config: Eagle3Config, target: TargetFacts | None) -> Iterator[Refusal]:
    if config.llama.sliding_window is not None:
        expected = f"none: {system.system} ignores it, and the head attends to the whole text"
        yield "sliding_window", config.llama.sliding_window, expected, OTHERS_SGLANG


def whole_rotation(system: System, config: Any, target: TargetFacts | None) -> Iterator[Refusal]:
    """Yield a refusal of a layer that rotates a part of each head's dimensions.

    SafeAILab's layer, transformers' (in speculators) and SGLang's Llama layer rotate all. SGLang reads a field at the
    top of config.json, which transformers moves into `rope_parameters` before.
    """
    part = config.llama.rope_scaling.partial_rotary_factor
    if part != 1:
        remedy = OTHERS_VLLM if system.kind in BLOCK_KINDS else OTHERS_VLLM[:-1] + ", or train it with --rope plain."
        yield PARTIAL, part, f"1: {system.system} rotates whole heads", remedy


def speculators_block_refused(system: System, config: BlockConfig, target: TargetFacts | None) -> Iterator[Refusal]:
    yield from block_refused(system, config, target)
    yield from whole_rotation(system, config, target)
    if system.kind == "dflash2" and target is not None and target.left_out:
        expected = f"none: {system.system} gives it no field, and the selector adds to the logits"
        yield "target", f"a target with a {target.left_out}", expected, OTHERS_SGLANG


def sglang_eagle3_refused(system: System, config: Eagle3Config, target: TargetFacts | None) -> Iterator[Refusal]:
    yield from whole_rotation(system, config, target)
    remedy = "Export it with --format vllm or --format speculators."
    if config.norm_before_residual:
        expected = f"false: {system.system} ignores it and adds the state as it is"
        yield "norm_before_residual", True, expected, remedy
    if config.aux_layers[0] == 0:
        expected = f"layers from 1: {system.system} counts outputs of layers, and the embedding is none"
        yield "layers", list(config.aux_layers), expected, remedy
    if config.aux_layers[0] == 1 and target is not None and target.family in DEEPSEEK:
        expected = f"layers from 2: {system.system} reads numbers from 1 as those of a layer later for this target"
        yield "layers", list(config.aux_layers), expected, remedy


def llamacpp_eagle3_refused(system: System, config: Eagle3Config, target: TargetFacts | None) -> Iterator[Refusal]:
    yield from no_window(system, config, target)
    remedy = "Train the head with --version 3 and default layers."
    if config.fc_norm:
        yield "fc_norm", True, "no norms of the target's states: llama.cpp has no EAGLE-3.1", remedy
    if config.norm_output:
        yield "norm_output", True, "states fed back as they are: llama.cpp has no EAGLE-3.1", remedy
    if len(config.aux_layers) != NUM_STATES:
        yield "layers", list(config.aux_layers), f"{NUM_STATES} layers, as llama.cpp reads", remedy


def llamacpp_dflash2_refused(system: System, config: DFlash2Config, target: TargetFacts | None) -> Iterator[Refusal]:
    yield from block_refused(system, config, target)
    # It hands the selector's candidates and their scores on in the place of one state (src/models/dflash.cpp).
    if (top := config.selector_top_k) * (top + 1) > config.hidden_size:
        expected = f"k with k (k + 1) <= {config.hidden_size}, the hidden size: llama.cpp stores as many scores there"
        yield "selector_top_k", top, expected, "Train it with a lower --selector-top-k, or export it for vLLM."


def block_refused(system: System, config: BlockConfig, target: TargetFacts | None) -> Iterator[Refusal]:
    if system.kind != "dspark":
        if config.layout != "fill-in":
            expected = f"fill-in: {system.system} samples no block of this kind from its anchor"
            yield "layout", config.layout, expected, "Train it with --layout fill-in, or `train dspark`."
        if config.markov_rank or config.confidence:
            found = config.markov_rank or config.confidence
            yield "markov_rank, confidence", found, f"neither in a {system.kind} head", "Train it as `train dspark`."
    elif not config.markov_rank:
        expected = f"a Markov head: {system.system} refuses DSpark without one"
        yield "markov_rank", 0, expected, "Train it with --markov-rank 64, or `train dflash`."
    elif config.markov_type not in system.markov_types:
        expected = f"{' or '.join(system.markov_types)}: {system.system} computes no other"
        yield "markov_type", config.markov_type, expected, "Train it with --markov-type vanilla."


def deepspec_refused(system: System, config: BlockConfig, target: TargetFacts | None) -> Iterator[Refusal]:
    if config.layout != "anchor-first":
        yield "layout", config.layout, "anchor-first", "Train the head with other options."


# -- directories that a system refuses, or computes another head from


def shown(value: Any) -> str:
    return ABSENT if value is None else repr(value)


def built_by_class(files: HeadFiles) -> Wrong:
    # What block drafters have inside an object, servers do not read.
    row, raw = files.row, files.package.config if files.row.kind in BLOCK_KINDS else files.raw
    name, model_type = architecture(raw), raw.get("model_type")
    wanted = "llama" if "eagle" in row.kind else "qwen3"
    classes = (QWEN3_EAGLE3,) if (row.name, row.kind) == ("vllm", "eagle3") and files.qk_norm else row.classes
    # transformers fills missing fields by the type: those that Llama's layers read are then not Llama's.
    alike = wanted == "llama" and model_type in LIKE_LLAMA and all(name in raw for name in FILLED)
    other = f"builds another model for {shown(model_type)}: write {wanted}"
    return {
        "architectures": (name not in classes, f"does not build this head for {name or ABSENT}: write {classes[0]}"),
        "model_type": (model_type != wanted and not alike, other),
    }


def safeailab_problems(files: HeadFiles) -> Wrong:
    raw, target = files.raw, files.target
    # vLLM and SGLang read rotary settings in another way.
    meant, read = rope_settings(raw), safeailab_rope(raw)
    differ = (meant.theta, meant.kind) != (read.theta, read.kind)
    wrong = {"rope_theta": (differ, f"computes with {read}, not with {meant}")}
    if files.row.kind == "eagle":
        return wrong
    ids = layer_ids(raw, "", "eagle_config")
    return {
        **wrong,
        TYPE: (TYPE in raw, "reads sizes at the top of config.json only"),
        "draft_vocab_size": (raw.get("draft_vocab_size") is None, "raises: the field is missing"),
        "layers": (ids is not None and (target is None or ids != default_layers(target)), "takes 2, L/2 and L-3"),
    }


def vllm_problems(files: HeadFiles) -> Wrong:
    raw, target, kind = files.raw, files.target, files.row.kind
    # A directory of speculators has its kind in another field.
    wrong = {} if TYPE in raw and kind != "eagle" else built_by_class(files)
    if kind == "eagle3":
        whole = files.has("d2t") and raw.get("draft_vocab_size") == raw.get("vocab_size")
        wrong = {**wrong, "d2t": (whole, "raises: it has no such parameter where the vocabulary is whole")}
    if kind == "eagle":
        # The head's layers count on from the target's, its `layer_types` do not (models/llama.py, LlamaAttention).
        typed, layers = len(raw.get("layer_types") or []), int(raw.get("num_hidden_layers") or 1)
        short = typed and target is not None and (target.num_layers or 0) + layers > typed
        return {**wrong, "layer_types": (short, "raises: effective_layer_idx is out of bounds. Remove the field")}
    slides = "sliding_attention" in (raw.get("layer_types") or [])
    # transformers_utils/configs/speculators/algos.py, update_dflash.
    other = kind != "eagle3" and raw.get(TYPE) in ("dflash", "dflash2") and bool(raw.get(NON_CAUSAL, True)) == slides
    text = f"lays {'bidirectional' if slides else 'causal'} blocks: write {str(not slides).lower()}"
    return {**wrong, NON_CAUSAL: (other, text)}


def sglang_output_ids(ids: Sequence[int], target: TargetFacts | None) -> int:
    """Return 1 if SGLang takes numbers of layers for those of outputs. Two classes of targets go by the numbers."""
    family = "" if target is None else target.family
    states = ids[0] != 1 if family in DEEPSEEK else family == "gpt_oss" and ids[-1] == getattr(target, "num_layers", 0)
    return 0 if states else 1


def sglang_scale(raw: Raw) -> float:
    """Return YaRN's attention scale as SGLang computes it: it does not read `attention_factor`."""
    rope, scaling = rope_object(raw), rope_settings(raw).scaling
    return rope_attention_scale(dataclasses.replace(scaling, attention_factor=None)) * (rope.get("attn_factor") or 1)


def rope_object(raw: Raw) -> Raw:
    return config_object(raw, "rope_scaling") or config_object(raw, "rope_parameters")


def sglang_problems(files: HeadFiles) -> Wrong:
    raw, kind = files.raw, files.row.kind
    # Linear scaling multiplies the positions (configs/model_config.py, _derive_context_length).
    rope = rope_settings(raw)
    stretched = rope.scaling.factor if rope.kind == "linear" else 1.0
    own, theirs = int(stretched * int(raw.get("max_position_embeddings") or 2048)), max_positions(files.target)
    longer = f"raises: the target's context of {theirs} is longer than the draft's {own}. Write a longer one, or "
    is_eagle3, untyped = kind == "eagle3", raw.get("markov_rank") and raw.get("markov_head_type") is None
    above, inside = (layer_ids(raw, place) if is_eagle3 else None for place in ("", "eagle_config"))
    read = None if inside is None else tuple(sorted({number + 1 for number in inside}))
    scale = sglang_scale(raw)
    scaled_otherwise = not math.isclose(scale, rope_attention_scale(rope.scaling), rel_tol=1e-6)
    return {
        **({} if TYPE in raw and kind in BLOCK_KINDS else built_by_class(files)),
        "max_position_embeddings": (theirs > own, longer + "set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"),
        "attn_factor": (scaled_otherwise, f"scales attention by {scale:.4g}: it reads no attention_factor"),
        "tie_word_embeddings": (raw.get("tie_word_embeddings"), "raises, or drafts with the embedding as lm_head"),
        TYPE: (kind != "eagle" and TYPE in raw, "does not know such a config.json"),
        "draft_vocab_size": (is_eagle3 and raw.get("draft_vocab_size") is None, "raises, or drops lm_head: write it"),
        IDS: (above not in (None, read), "does not read it at the top, but in eagle_config"),
        "q_norm": (is_eagle3 and files.qk_norm, "drops the norms of q and k, and says nothing"),
        "markov_head_type": (kind in BLOCK_KINDS and untyped, "raises: it has no default"),
    }


def speculators_problems(files: HeadFiles) -> Wrong:
    raw, kind = files.raw, files.row.kind
    layer = isinstance(raw.get("transformer_layer_config"), Mapping)
    wrong = {
        TYPE: (raw.get(TYPE) != kind, f"does not load {shown(raw.get(TYPE))} as a head of kind {kind}"),
        "transformer_layer_config": (not layer, "does not find it"),
    }
    if kind in BLOCK_KINDS:
        return wrong
    other, reduced = raw.get("model_type", "qwen3"), raw.get("draft_vocab_size") != raw.get("vocab_size")
    layers = "qwen3" if files.qk_norm else "llama"
    return {
        **wrong,
        "model_type": (layer and other != layers, f"builds the layer of {other!r}: write {layers}"),
        "embed_tokens.weight": (not files.has("embed_tokens.weight"), "may leave it undefined"),
        "t2d": (reduced and not files.has("t2d"), "raises: t2d tensor hasn't been set"),
    }


# -- config.json as it is written


def eagle_fields(system: System, config: EagleConfig, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Any]:
    """Return what vLLM and SafeAILab both read."""
    qkv_bias = {"qkv_bias": True} if config.llama.qkv_bias else {}
    return {**llama_fields(config.llama, dtype), "architectures": ["LlamaForCausalLM"], "bias": False, **qkv_bias}


def sglang_eagle_fields(
    system: System, config: EagleConfig, dtype: torch.dtype, target: TargetFacts | None
) -> dict[str, Any]:
    own = {"architectures": [SGLANG_EAGLE], "bias": False, "attention_bias": config.llama.qkv_bias}
    return {**llama_fields(config.llama, dtype), **own}


def layers_to_name(config: Eagle3Config, target: TargetFacts | None) -> tuple[int, ...] | None:
    """Return the layers that `config.json` has to name: not those that every system reads of this target."""
    return None if target is not None and config.aux_layers == default_layers(target) else config.aux_layers


def count_field(layers: tuple[int, ...]) -> dict[str, int]:
    """Return the field by which vLLM builds fc, needed unless there are as many states as by default."""
    return {} if len(layers) == NUM_STATES else {COUNT: len(layers)}


def eagle3_fields(
    system: System, config: Eagle3Config, dtype: torch.dtype, target: TargetFacts | None
) -> dict[str, Any]:
    flags = {name: True for name in Flags._fields if getattr(config, name)}
    shape = {"architectures": [EAGLE3], "draft_vocab_size": config.draft_vocab_size}
    fields = {**llama_fields(config.llama, dtype), **shape, **flags}
    layers = layers_to_name(config, target)
    if system.name == "llamacpp":
        # The file has no default layers: they are always named.
        return fields | {IDS: list(config.aux_layers), **count_field(config.aux_layers), "gguf": "eagle3"}
    if layers is None or not system.id_places:
        return fields
    if system.name == "sglang":
        written = ([number - 1 for number in layers], list(layers))
        ids = next((ids for ids in written if ids[0] + system.output_ids(ids, target) == layers[0]), written[0])
        return fields | {"eagle_config": {"use_aux_hidden_state": True, IDS: ids}}
    return fields | {IDS: list(layers), **count_field(layers)}


def qwen3_fields(config: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of transformers' Qwen3Config."""
    own = {
        "model_type": "qwen3",
        "attention_bias": False,
        **window_fields(config.llama),
        "max_window_layers": config.llama.num_layers if config.llama.sliding_window is None else 0,
    }
    fields = {**llama_fields(config.llama, dtype), **own}
    del fields["pretraining_tp"]
    if config.llama.rope_scaling.partial_rotary_factor != 1:
        # SGLang's block drafters read the part from here alone.
        for name in ("rope_parameters", "rope_scaling"):
            fields[name] = fields[name] and {**fields[name], "rope_dim": config.llama.rotary_dim}
    return fields


def block_switches(system: System, config: BlockConfig) -> dict[str, Any]:
    """Return the switches, all of them: systems differ in what an absent one means."""
    switches: dict[str, Any] = {"sample_from_anchor": config.layout == "anchor-first"}
    if system.kind == "dspark":
        switches |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_type,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence,
        }
    return switches


def selector_fields(system: System, config: BlockConfig) -> dict[str, int]:
    """Return the sizes of a DFlash2 head's convolutions and selector."""
    return {theirs: getattr(config, ours) for ours, theirs in SELECTOR.items()} if system.kind == "dflash2" else {}


def block_fields(system: System, config: BlockConfig, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Any]:
    """Return what vLLM and SGLang both read."""
    own = {"mask_token_id": config.mask_token, OUTPUTS: [number - 1 for number in config.aux_layers]}
    own |= selector_fields(system, config)
    capped = None if target is None else target.text.get(SOFTCAP)
    if system.kind == "dflash2" and capped:
        own[SOFTCAP] = capped
    return {
        **qwen3_fields(config, dtype),
        "architectures": [BLOCK_CLASSES[system.kind][0]],
        "num_target_layers": None if target is None else target.num_layers,
        "block_size": config.block_size,
        **(own if system.kind == "dspark" else {"dflash_config": own}),
        **block_switches(system, config),
        **({"gguf": "dflash"} if system.name == "llamacpp" else {}),
    }


def speculators_eagle3_fields(
    system: System, config: Eagle3Config, dtype: torch.dtype, target: TargetFacts | None
) -> dict[str, Any]:
    layers = layers_to_name(config, target)
    return {
        TYPE: "eagle3",
        "speculators_version": VERSION,
        "architectures": ["Eagle3DraftModel"],
        "speculators_config": speculators_config("eagle3", 5),
        "transformer_layer_config": {
            **llama_fields(config.llama, dtype),
            "attention_bias": False,
            "mlp_bias": False,
            **({} if layers is None else count_field(layers)),
        },
        "draft_vocab_size": config.draft_vocab_size,
        # Always explicit: vLLM and speculators have different defaults.
        **{name: getattr(config, name) for name in Flags._fields},
        "target_hidden_size": None,
        IDS: None if layers is None else list(layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }


def speculators_block_fields(
    system: System, config: BlockConfig, dtype: torch.dtype, target: TargetFacts | None
) -> dict[str, Any]:
    return {
        TYPE: system.kind,
        "speculators_version": VERSION,
        "architectures": [system.classes[0]],
        "speculators_config": speculators_config(system.kind, config.drafts),
        "transformer_layer_config": qwen3_fields(config, dtype),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": None,
        STATES: list(config.aux_layers),
        "mask_token_id": config.mask_token,
        # Of windowed layers alone, but vLLM takes it for all.
        NON_CAUSAL: config.llama.sliding_window is None,
        "tie_word_embeddings": False,
        **block_switches(system, config),
        **selector_fields(system, config),
    }


def speculators_config(kind: str, num_drafted: int) -> dict[str, Any]:
    """Return the object that states the head's use; the verifier is named with the target's path."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": None, "architectures": []},
    }


# -- tensors beside the head's own


def sglang_zeros(config: EagleConfig, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Tensor]:
    """Return zeros for the biases that SGLang creates beside ours."""
    names = ["fc.bias"]
    if config.llama.qkv_bias:
        names += [f"layers.{i}.self_attn.o_proj.bias" for i in range(config.llama.num_layers)]
    return {name: torch.zeros(config.hidden_size, dtype=dtype) for name in names}


def target_embedding(config: Eagle3Config, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Tensor]:
    if target is None or target.embed_tokens is None:
        raise InputError("target", "none", "the target, whose embedding the file has", "Pass --target.")
    return {"embed_tokens.weight": target.embed_tokens.detach().to(dtype).contiguous().clone()}


# -- commands


def served_kind(kind: str) -> str:
    """Return the kind of a head in the options of servers, which tell DFlash2 from DFlash by the files."""
    return kind.replace("dflash2", "dflash")


def safeailab_command(kind: str, served: Served) -> str:
    # It takes EAGLE-3 with --no-eagle3 (webui.py: use_eagle3=args.no_eagle3). Drafted tokens have no flag.
    return (
        f"python -m eagle.application.webui --base-model-path {shlex.quote(served.model)}"
        f" --ea-model-path {shlex.quote(served.directory)}{' --no-eagle3' if kind == 'eagle3' else ''}"
    )


def vllm_command(method: str, served: Served) -> str:
    """Return the command that serves a drafter by a method of vLLM's speculative config: a kind, or draft_model."""
    options = {"method": served_kind(method), "model": served.directory, "num_speculative_tokens": served.num_drafted}
    if served.confidence:
        options["enable_adaptive_verification"] = True  # else nothing reads the confidences (config/speculative.py)
    # Classes without the interface of EAGLE-3 give no states of their layers; transformers' models all do.
    others = method not in ("eagle", "draft_model") and served.family not in {"", *VLLM_FAMILIES}
    backend = " --model-impl transformers" if others else ""
    return f"vllm serve {shlex.quote(served.model)}{backend} --speculative-config {shlex.quote(json.dumps(options))}"


def sglang_command(kind: str, served: Served) -> str:
    # A chain; the target's own token counts among those that it verifies.
    drafts = f" --speculative-num-draft-tokens {served.num_drafted + 1}"
    if "eagle" in kind:
        drafts = f" --speculative-num-steps {served.num_drafted} --speculative-eagle-topk 1{drafts}"
    if kind == "eagle3" and served.window:
        # Of tokens before the one that attends (radix attention's window_left).
        drafts += f" --speculative-draft-window-size {served.window - 1}"
    if kind == "dspark":
        # Drafted tokens, whatever the file's block_size; any other count is refused (arg_groups/speculative_hook.py).
        drafts = f" --speculative-dspark-block-size {served.num_drafted}"
    algorithm = served_kind(kind).upper()
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(served.model)} --speculative-algorithm {algorithm}"
        f" --speculative-draft-model-path {shlex.quote(served.directory)}{drafts}"
    )


def llamacpp_command(kind: str, served: Served) -> str:
    """Return the command that serves a drafter, a kind or `simple`; model and directory are GGUF files."""
    drafts = f"--spec-type draft-{served_kind(kind)} --spec-draft-n-max {served.num_drafted}"
    return f"llama-server -m {shlex.quote(served.model)} -md {shlex.quote(served.directory)} {drafts}"


# -- the table

LFM2 = "Lfm2DSparkDraftModel"  # SGLang's class of LiquidAI's heads
BLOCK_CLASSES = {
    "dflash": ("DFlashDraftModel",),
    "dflash2": ("DFlash2DraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),
}
SPECULATORS_CLASSES = {"dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}
TREE = "Its tree of total_token 60, depth {0} and top_k 10 counts the root: here it is {1}:nodes=59:depth={0}:topk=10."
SAFEAILAB = partial(
    System,
    "eagle",
    "SafeAILab/EAGLE",
    serve=safeailab_command,
    refused=safeailab_refused,
    problems=safeailab_problems,
    layer_names=("midlayer",),
    id_places=(),
    target_index=True,
)
VLLM = partial(System, "vllm", "vLLM", serve=vllm_command, problems=vllm_problems)
SGLANG = partial(System, "sglang", "SGLang", serve=sglang_command, problems=sglang_problems)
# vLLM serves such directories.
SPECULATORS = partial(System, "speculators", "speculators", serve=vllm_command, problems=speculators_problems)
LLAMACPP = partial(System, "llamacpp", "llama.cpp", serve=llamacpp_command)

EAGLE1_ROWS = (
    # Imports take head_dim and llama3 scaling, which its code lacks: heads for vLLM come in the same directory.
    SAFEAILAB(
        kind="eagle",
        fields=eagle_fields,
        biases=safeailab_biases,
        notes=(TREE.format(5, "eagle-tree"),),
    ),
    VLLM(
        kind="eagle",
        fields=eagle_fields,
        classes=("LlamaForCausalLM", "EagleLlamaForCausalLM"),
        strict=True,
        biases=vllm_biases,
    ),
    SGLANG(
        kind="eagle",
        fields=sglang_eagle_fields,
        classes=(SGLANG_EAGLE,),
        zero_bias=True,
        biases=sglang_biases,
        refused=whole_rotation,
        extra_tensors=sglang_zeros,
    ),
)
EAGLE3_ROWS = (
    LLAMACPP(
        kind="eagle3",
        fields=eagle3_fields,
        refused=llamacpp_eagle3_refused,
        notes=(
            "For several requests at once serve another kind of head: llama.cpp then accepts a third of an EAGLE-3 "
            "head's drafts (docs/guides/llamacpp.md).",
        ),
    ),
    SAFEAILAB(
        kind="eagle3",
        fields=eagle3_fields,
        notes=(TREE.format(7, "eagle3-tree"),),
    ),
    VLLM(
        kind="eagle3",
        fields=eagle3_fields,
        classes=(EAGLE3, "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
        biases=biases_by(qkv=("attention_bias",), o=BOTH, mlp=("mlp_bias",)),
        id_places=("", "eagle_config"),
        sorts_ids=True,
        flags=vllm_flags,
    ),
    SGLANG(
        kind="eagle3",
        fields=eagle3_fields,
        classes=(EAGLE3,),
        prefix=True,
        biases=biases_by(fc=("bias",), o=BOTH),
        refused=sglang_eagle3_refused,
        id_places=("eagle_config",),
        output_ids=sglang_output_ids,
        sorts_ids=True,
        flags=sglang_flags,
    ),
    SPECULATORS(
        kind="eagle3",
        fields=speculators_eagle3_fields,
        biases=biases_by(qkv=("attention_bias",), o=("attention_bias",), mlp=("mlp_bias",)),
        refused=whole_rotation,
        extra_tensors=target_embedding,
        layer_names=("layers.0",),
    ),
    # Only read.
    System(
        "deepspec",
        "DeepSpec",
        kind="eagle3",
        id_field=OUTPUTS,
        output_ids=lambda ids, target: 1,
        layer_names=("layers.0",),
    ),
)


def block_rows(kind: str) -> tuple[System, ...]:
    """Return the rows of DFlash, DFlash2 or DSpark heads."""
    biases, classes = biases_by(qkv=("attention_bias",), o=("attention_bias",)), BLOCK_CLASSES[kind]
    first, vanilla = kind == "dspark", ("vanilla",)
    common: dict[str, Any] = {"kind": kind, "biases": biases, "refused": block_refused, "anchor_first": first}
    servers = (
        VLLM(
            fields=block_fields,
            classes=classes,
            markov_types=vanilla,
            fills=vllm_fills,
            neox_fields=("is_neox_style",),
            **common,
        ),
        SGLANG(
            fields=block_fields,
            classes=(*classes, *([LFM2] if first else [])),
            asks_confidence=False,  # but its own verification mode
            neox_fields=("is_neox_style", "rope_is_neox_style"),
            whole_heads=lambda raw: "rope_dim" not in rope_object(raw),
            **common,
        ),
        SPECULATORS(
            fields=speculators_block_fields,
            classes=(SPECULATORS_CLASSES[kind],),
            **common | {"refused": speculators_block_refused, "loads": ("layout", "markov_rank")},
        ),
    )
    if kind == "dflash2":
        return LLAMACPP(fields=block_fields, **common | {"refused": llamacpp_dflash2_refused}), *servers
    return (
        LLAMACPP(fields=block_fields, markov_types=vanilla, **common),
        *servers,
        # Trainers, whose heads are read and not written. DeepSpec's DFlash heads are anchor-first too, and have the
        # name of DSpark; no server reads the names of ModelOpt and TorchSpec. Layers of transformers, which two of them
        # build, rotate whole heads.
        System(
            "deepspec",
            "DeepSpec",
            whole_heads=lambda raw: True,
            **common | {"refused": deepspec_refused, "anchor_first": True},
        ),
        System("specforge", "SpecForge", whole_heads=lambda raw: True, **common),
        System("modelopt", "ModelOpt", **common),
        System("torchspec", "TorchSpec", **common),
    )
