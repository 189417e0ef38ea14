"""Table of the systems that read heads with Llama's layers: what each reads, misreads, refuses, writes and runs.

One class for a system, one below it for each kind of head. Sources:

SafeAILab/EAGLE at cb7e084: eagle/model/cnets1.py, cnets.py, configs.py. It ignores unknown tensors (`strict=False`) and
    the fields that later systems added, and reads the target's layers 2, L/2 and L-3 always.
vLLM 0.33.0: models/llama_eagle.py, llama_eagle3.py, qwen3_dflash.py, qwen3_dflash2.py, qwen3_dspark.py, utils.py. An
    unknown tensor stops it, unless it is a bias or a rotary buffer.
SGLang 0.5.23: models/llama_eagle.py, llama_eagle3.py, dflash.py, dspark.py, speculative/. It ignores unknown tensors
    but in block drafters.
speculators 0.9.0: config.py, model.py, models/. The layer's settings are an object inside `config.json`.
llama.cpp: conversion/llama.py and qwen.py, src/models/eagle3.cpp and dflash.cpp. One GGUF file (`gguf.py`).
Trainers whose heads are only read: trainers.py.

A missing tensor stays random or uninitialized in all servers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from draftsmith.modules.drafters.block.net import BlockConfig, DFlash2Config
from draftsmith.modules.drafters.eagle import EagleConfig
from draftsmith.modules.drafters.eagle3 import Eagle3Config
from draftsmith.modules.formats import families
from draftsmith.modules.formats.base import VERSIONS, Package, Raw, Served, TargetFacts, layer_types
from draftsmith.modules.formats.block import (
    CLASSES,
    DEFAULT_BLOCK,
    KINDS,
    NON_CAUSAL,
    STATES,
    BlockFormat,
    qwen3_fields,
    windows,
)
from draftsmith.modules.formats.commands import ADAPTIVE, DRAWN, RAGGED, REQUESTS, TREE, V2
from draftsmith.modules.formats.eagle1 import Eagle1Format
from draftsmith.modules.formats.eagle3 import Eagle3Format, Flags, default_layers
from draftsmith.modules.formats.llama import IDS, Fields, architecture, flat, layer_ids, llama_fields, safeailab_rope
from draftsmith.modules.formats.llama_format import Biases, BiasFields, C, HeadFiles, LlamaFormat, Refusal, Wrong
from draftsmith.modules.formats.quantized import LAYERS
from draftsmith.modules.formats.trainers import TRAINERS, DeepSpecEagle3
from draftsmith.modules.llama_config import (
    CaptureConfig,
    config_object,
    positive,
    rope_number,
    rope_settings,
)
from draftsmith.modules.rotary import rope_attention_scale
from draftsmith.modules.types import InputError

ABSENT = "none (the field is missing)"
LIKE_LLAMA, FILLED = ("qwen2", "phi3", "mixtral"), ("rope_theta", "num_key_value_heads", "rms_norm_eps")
# With that of LiquidAI's heads.
SGLANG_CLASSES = {**CLASSES, "dspark": (*CLASSES["dspark"], "Lfm2DSparkDraftModel")}
SPECULATORS_CLASSES = {
    "dflash": ("DFlashSpeculator",),
    "dflash2": ("DFlash2DraftModel",),
    "dspark": ("DSparkSpeculator",),
}
TYPE = "speculators_model_type"
EAGLE3 = "LlamaForCausalLMEagle3"  # the class of vLLM and SGLang
NUM_STATES, COUNT = 3, "num_aux_hidden_states"  # of the target, that systems read by default
BOTH = ("attention_bias", "bias")  # fields of either bias in models/llama.py of vLLM and SGLang
OTHERS_VLLM, OTHERS_SGLANG = "Export it with --format vllm.", "Export it with --format vllm or --format sglang."


# -- what several systems do alike


def shown(value: object) -> str:
    return ABSENT if value is None else repr(value)


def built_by_class(files: HeadFiles, classes: Sequence[str], raw: Raw) -> Wrong:
    """Return wrong class names and model types. raw: the fields of `config.json` that the server reads."""
    name, model_type, wanted = architecture(raw), raw.get("model_type"), files.format.model_type
    # transformers fills missing fields by the type: those that Llama's layers read are then not Llama's.
    alike = wanted == "llama" and model_type in LIKE_LLAMA and all(name in raw for name in FILLED)
    other = f"builds another model for {shown(model_type)}: write {wanted}"
    return {
        "architectures": (name not in classes, f"does not build this head for {name or ABSENT}: write {classes[0]}"),
        "model_type": (model_type != wanted and not alike, other),
    }


def layers_to_name(config: Eagle3Config, target: TargetFacts | None) -> tuple[int, ...] | None:
    """Return the layers that `config.json` has to name: not those that every system reads of this target."""
    return None if target is not None and config.aux_layers == default_layers(target) else config.aux_layers


def count_field(layers: tuple[int, ...]) -> Fields:
    """Return the field by which vLLM builds fc, needed unless there are as many states as by default."""
    return {} if len(layers) == NUM_STATES else {COUNT: len(layers)}


def sglang_counts_outputs(ids: Sequence[int], target: TargetFacts | None) -> bool:
    """Return whether SGLang takes layer ids for those of outputs. Two classes of targets go by the numbers."""
    family = "" if target is None else target.served_family
    if family in families.SGLANG_DEEPSEEK:
        return min(ids) == 1
    return family != "gpt_oss" or max(ids) != getattr(target, "num_layers", 0)


class ServedEagle3(Eagle3Format):
    """An EAGLE-3 directory for vLLM and SGLang: vLLM reads the layers at the top first, SGLang in `eagle_config`."""

    whole_context = True

    def fields(self, config: Eagle3Config, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        fields = super().fields(config, dtype, target)
        if (layers := layers_to_name(config, target)) is None:
            return fields
        outputs = [number - 1 for number in layers]
        ids = outputs if sglang_counts_outputs(outputs, target) else list(layers)
        sglang: Fields = {} if layers[0] == 0 else {"eagle_config": {"use_aux_hidden_state": True, IDS: ids}}
        return fields | {IDS: list(layers), **count_field(layers), **sglang}

    def disk_tensors(self, config: Eagle3Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = super().disk_tensors(config, state)
        # In a layer behind the first SGLang reads this norm, vLLM the other one.
        later = [name for name in tensors if name.startswith("layers.")]
        return {name.replace("input_layernorm", "hidden_norm"): tensors[name] for name in later} | tensors


# -- SafeAILab/EAGLE


class SafeAILab(LlamaFormat[C]):
    name, system, target_index = "eagle", "SafeAILab/EAGLE", True
    classes = ("LlamaForCausalLM",)  # which it does not read
    families, lacking = families.SAFEAILAB, "captures no layers of a target of type {}"
    whole_heads = True

    def problems(self, files: HeadFiles) -> Wrong:
        # vLLM and SGLang read rotary settings in another way.
        meant, read = rope_settings(files.raw), safeailab_rope(files.raw)
        differ = (meant.theta, meant.kind) != (read.theta, read.kind)
        return {"rope_theta": (differ, f"computes with {read}, not with {meant}")}

    def refused(self, config: C, target: TargetFacts | None) -> Iterator[Refusal]:
        llama, scaling = config.llama, config.llama.rope_scaling
        yield from super().refused(config, target)
        if llama.head_dim * llama.num_heads != llama.hidden_size:
            usual = f"hidden_size / num_heads = {llama.hidden_size // llama.num_heads}"
            yield "head_dim", llama.head_dim, f"{usual}: {self.system} ignores the field", OTHERS_SGLANG
        if scaling.kind not in ("default", "linear"):
            yield "rope_scaling", scaling.kind, f"none or linear: {self.system} refuses every other", OTHERS_SGLANG
        if scaling.kind == "linear" and (llama.rope_theta != 10000 or scaling.factor <= 1):
            found = f"linear by {scaling.factor:g} on base {llama.rope_theta:g}"
            rule = f"{self.system} takes that base under linear scaling, whatever rope_theta says"
            yield "rope_scaling", found, f"a factor over 1 on base 10000: {rule}", OTHERS_SGLANG


class SafeAILabEagle1(SafeAILab[EagleConfig], Eagle1Format):
    notes = (TREE.format(5, "eagle-tree"),)

    def biases(self, raw: Raw) -> Biases:
        # `bias` is fc's and true by default (ea_model.py); `qkv_bias` is that of q, k and v (cnets1.py).
        return Biases(fc=bool(raw.get("bias", True)), qkv=bool(raw.get("qkv_bias", False)))


class SafeAILabEagle3(SafeAILab[Eagle3Config], Eagle3Format):
    layer_names = ("midlayer",)
    later_norm = ""
    windowless = True
    notes = (TREE.format(7, "eagle3-tree"),)

    def layers(self, raw: Raw, target: TargetFacts | None) -> None:
        return None

    def problems(self, files: HeadFiles) -> Wrong:
        raw, target = files.raw, files.target
        ids = layer_ids(raw) or layer_ids(raw, "eagle_config")
        return {
            **super().problems(files),
            TYPE: (TYPE in raw, "reads sizes at the top of config.json only"),
            "draft_vocab_size": (raw.get("draft_vocab_size") is None, "raises: the field is missing"),
            "layers": (ids is not None and (target is None or ids != default_layers(target)), "takes 2, L/2 and L-3"),
        }

    def refused(self, config: Eagle3Config, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        for name in Flags._fields:
            if getattr(config, name):
                yield name, True, f"false: {self.system} ignores it and says nothing", OTHERS_VLLM
        count = config.aux_layers[-1] + 3  # the target's layers, if these are the default ones
        always = f"which {self.system} always reads"
        if config.aux_layers != (2, count // 2, count - 3):
            yield "layers", list(config.aux_layers), f"2, L/2 and L-3, {always}", OTHERS_VLLM
        usual = None if target is None else default_layers(target)
        if usual not in (None, config.aux_layers):
            yield "layers", list(config.aux_layers), f"{list(usual or ())}, {always} of this target", OTHERS_VLLM


# -- vLLM


class ServedByVllm(LlamaFormat[C]):
    """A system whose directories vLLM serves."""

    # lm_head of EAGLE-3, if its config names it.
    eight_bits = rf"{LAYERS}|(fc|lm_head|.*kernel_projection)\.weight"
    whose = ""
    notes = (DRAWN,)

    def without_states(self, target: TargetFacts) -> str:
        if target.served_family in families.VLLM or not target.hybrid:
            return ""
        return f"{self.whose} {target.served_family} class gives none, and its transformers backend reads no hybrid"

    def refused(self, config: C, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        others = target is not None and target.served_family not in {"", *families.VLLM}
        if others and isinstance(config, CaptureConfig) and config.aux_layers[0] == 0:
            expected = "layers from 1: vLLM's transformers backend gives the last layer's state for 0"
            yield "layers", list(config.aux_layers), expected, "Train it with other --layers."

    def serving_notes(self, config: C, target: TargetFacts | None) -> list[str]:
        if target is None or not target.window or config.llama.sliding_window:
            return []
        return [f"vLLM gives the head the target's window of {target.window} tokens"]

    def serve_notes(self, served: Served) -> list[str]:
        only = [V2] if self.kind in ("dflash2", "dspark") else []
        return [*super().serve_notes(served), *only, *([ADAPTIVE] if served.confidence else [])]


class Vllm(ServedByVllm[C]):
    name, system = "vllm", "vLLM"
    whose = "has no states of its layers: its own"

    def tables(self, files: HeadFiles) -> Wrong:
        whole = files.has("d2t") and files.raw.get("draft_vocab_size") == files.raw.get("vocab_size")
        return {"d2t": (whole, "raises: it has no such parameter where the vocabulary is whole")}


class VllmEagle1(Vllm[EagleConfig], Eagle1Format):
    classes = ("LlamaForCausalLM", "EagleLlamaForCausalLM")
    strict = True
    bias_fields = BiasFields(qkv=BOTH, o=BOTH, mlp=("mlp_bias",))

    def biases(self, raw: Raw) -> Biases:
        # `qkv_bias`, if present, decides for q, k and v (models/llama.py, LlamaDecoderLayer).
        biases = super().biases(raw)
        return biases._replace(qkv=bool(raw.get("qkv_bias", biases.qkv)))

    def problems(self, files: HeadFiles) -> Wrong:
        # The head's layers count on from the target's, its `layer_types` do not (models/llama.py, LlamaAttention).
        raw, target = files.raw, files.target
        typed, layers = len(layer_types(raw)), positive(raw, "num_hidden_layers", 1)
        short = typed and target is not None and (target.num_layers or 0) + layers > typed
        text = "raises: effective_layer_idx is out of bounds. Remove the field"
        return {**built_by_class(files, self.classes, raw), "layer_types": (short, text)}


class VllmEagle3(Vllm[Eagle3Config], ServedEagle3):
    others = ("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM")
    classes = (EAGLE3, "Eagle3LlamaForCausalLM", "LlamaForCausalLM", *others)
    bias_fields = BiasFields(qkv=("attention_bias",), o=BOTH, mlp=("mlp_bias",))

    def flags(self, raw: Raw) -> Flags:
        # norm_before_residual is on by default in directories of speculators, which themselves have it off
        # (transformers_utils/configs/speculators/algos.py).
        return Flags.read(raw)._replace(norm_before_residual=bool(raw.get("norm_before_residual", TYPE in raw)))

    def layers(self, raw: Raw, target: TargetFacts | None) -> tuple[int, ...] | None:
        return layer_ids(raw) or layer_ids(raw, "eagle_config")

    def problems(self, files: HeadFiles) -> Wrong:
        raw, classes = files.raw, ("Eagle3Qwen3ForCausalLM",) if files.qk_norm else self.classes
        # A directory of speculators has its kind in another field.
        wrong = {} if TYPE in raw else built_by_class(files, classes, raw)
        return {**wrong, **self.tables(files)}


class VllmBlock(Vllm[BlockConfig], BlockFormat):
    markov_types = ("vanilla",)
    neox_fields = ("is_neox_style",)

    def causal(self, config: Raw) -> object:
        # transformers_utils/configs/speculators/algos.py: update_dflash says it of all layers, update_dspark of none.
        own = super().causal(config)
        if own is None and TYPE in config and self.kind != "dspark":
            return not config.get(NON_CAUSAL, True)
        return own

    def top_level(self, config: Raw) -> Raw:
        # In directories of speculators, which themselves have it true.
        absent = ("sample_from_anchor",) if TYPE in config else ("use_confidence_head", "confidence_head_with_markov")
        return {**dict.fromkeys(absent, False), **super().top_level(config)}

    def problems(self, files: HeadFiles) -> Wrong:
        raw, config = files.raw, files.package.config
        if TYPE not in raw:
            # What block drafters have inside an object, servers do not read.
            return {**built_by_class(files, self.classes, config), **self.tables(files)}
        size, block_size = positive(raw, "num_hidden_layers", 1), positive(raw, "block_size", DEFAULT_BLOCK)
        trained = windows({**raw, "is_causal": SpeculatorsBlock(self.kind).causal(config)}, size, block_size)
        own = windows(raw, size, block_size)
        text = f"lays {'causal' if own.causal else 'bidirectional'} blocks in other layers than it was trained with"
        return {**self.tables(files), NON_CAUSAL: (own != trained, text)}


# -- SGLang


class Sglang(LlamaFormat[C]):
    name, system = "sglang", "SGLang"
    eight_bits = rf"{LAYERS}|lm_head\.weight"
    whole_context = True
    lacking = "raises: its {} class does not capture the states of its layers"
    notes = (REQUESTS,)
    with_last: frozenset[str] = frozenset()

    def refused(self, config: C, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        if isinstance(config, CaptureConfig) and config.aux_layers[0] == 0:
            expected = f"layers from 1: {self.system} counts outputs of layers, and the embedding is none"
            yield "layers", list(config.aux_layers), expected, "Export it with --format vllm or --format speculators."

    def problems(self, files: HeadFiles) -> Wrong:
        raw, target = files.raw, files.target
        # Linear scaling multiplies the positions (configs/model_config.py, _derive_context_length).
        meant, rope = rope_settings(raw), config_object(raw, "rope_scaling") or config_object(raw, "rope_parameters")
        stretched = meant.scaling.factor if meant.kind == "linear" else 1.0
        own = int(stretched * positive(raw, "max_position_embeddings", 2048))
        theirs = 0 if target is None else target.max_position
        longer = f"raises: the target's context of {theirs} is longer than the draft's {own}. Write a longer one, or "
        # It does not read `attention_factor` of YaRN.
        usual = rope_attention_scale(dataclasses.replace(meant.scaling, attention_factor=None))
        scale = usual * rope_number("attn_factor", rope.get("attn_factor") or None, 1.0)
        otherwise = not math.isclose(scale, rope_attention_scale(meant.scaling), rel_tol=1e-6)
        return {
            "max_position_embeddings": (theirs > own, longer + "set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"),
            "attn_factor": (otherwise, f"scales attention by {scale:.4g}: it reads no attention_factor"),
            "tie_word_embeddings": (raw.get("tie_word_embeddings"), "raises, or drafts with the embedding as lm_head"),
        }

    def serve_notes(self, served: Served) -> list[str]:
        return [*super().serve_notes(served), *([RAGGED] if served.confidence else [])]


class SglangEagle1(Sglang[EagleConfig], Eagle1Format):
    classes = ("LlamaForCausalLMEagle",)
    bias_fields = BiasFields(qkv=BOTH, o=BOTH)
    zero_bias = True
    whole_heads = True

    def biases(self, raw: Raw) -> Biases:
        return super().biases(raw)._replace(fc=True)

    def problems(self, files: HeadFiles) -> Wrong:
        return {**built_by_class(files, self.classes, files.raw), **super().problems(files)}

    def fields(self, config: EagleConfig, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        own = {"architectures": [*self.classes], "bias": False, "attention_bias": config.llama.qkv_bias}
        return {**llama_fields(config.llama, dtype), **own}

    def extra_tensors(self, config: EagleConfig, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Tensor]:
        """Return zeros for the biases that SGLang creates beside ours."""
        names = ["fc.bias"]
        if config.llama.qkv_bias:
            names += [f"layers.{i}.self_attn.o_proj.bias" for i in range(config.llama.num_layers)]
        return {name: torch.zeros(config.hidden_size, dtype=dtype) for name in names}


class SglangEagle3(Sglang[Eagle3Config], ServedEagle3):
    classes = (EAGLE3,)
    bias_fields = BiasFields(fc=("bias",), o=BOTH)
    prefix = True
    whole_heads = True
    families = families.SGLANG_EAGLE3
    later_norm = "hidden_norm"
    own_embedding = False

    def flags(self, raw: Raw) -> Flags:
        return Flags.read(raw)._replace(fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")))

    def wrote(self, package: Package) -> bool:
        # Trainers alone name layers there and not at the top, ModelOpt and SpecForge: outputs, as SGLang counts.
        raw = self.top_level(package.config)
        return super().wrote(package) or (layer_ids(raw) is None and layer_ids(raw, "eagle_config") is not None)

    def layers(self, raw: Raw, target: TargetFacts | None) -> tuple[int, ...] | None:
        if (ids := layer_ids(raw, "eagle_config")) is None:
            return None
        return tuple(number + sglang_counts_outputs(ids, target) for number in ids)

    def problems(self, files: HeadFiles) -> Wrong:
        raw = files.raw
        above, read = layer_ids(raw), self.layers(raw, files.target)
        unsized = raw.get("draft_vocab_size") is None
        return {
            **built_by_class(files, self.classes, raw),
            **super().problems(files),
            TYPE: (TYPE in raw, "does not know such a config.json"),
            "draft_vocab_size": (unsized, "raises, or drops lm_head: write it"),
            IDS: (
                sorted(above or read or ()) != sorted(read or ()),
                "does not read it at the top, but in eagle_config",
            ),
            "q_norm": (files.qk_norm, "drops the norms of q and k, and says nothing"),
        }

    def refused(self, config: Eagle3Config, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        remedy = "Export it with --format vllm or --format speculators."
        if config.norm_before_residual:
            expected = f"false: {self.system} ignores it and adds the state as it is"
            yield "norm_before_residual", True, expected, remedy
        if config.aux_layers[0] == 1 and target is not None and target.served_family in families.SGLANG_DEEPSEEK:
            expected = f"layers from 2: {self.system} reads numbers from 1 as those of a layer later for this target"
            yield "layers", list(config.aux_layers), expected, remedy

    def serving_notes(self, config: Eagle3Config, target: TargetFacts | None) -> list[str]:
        if (window := config.llama.sliding_window) is None:
            return []
        flag = f"--speculative-draft-window-size {window - 1}"
        return [f"SGLang reads no window from the files: without {flag} the head attends to all tokens"]


class SglangBlock(Sglang[BlockConfig], BlockFormat):
    class_names = SGLANG_CLASSES
    families = families.SGLANG_BLOCKS
    reads_part = False
    asks_confidence = False  # but its own verification mode
    reads_swa = False
    neox_fields = ("is_neox_style", "rope_is_neox_style")

    def causal(self, config: Raw) -> object:
        return flat(config).get("is_causal")

    def without_states(self, target: TargetFacts) -> str:
        if target.served_family in families.SGLANG_SCALES:
            return "multiplies embeddings of Gemma by the root of their width, which the head reads as they are"
        return super().without_states(target)

    def refused(self, config: BlockConfig, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        if config.draft_vocab_size is not None:
            expected = f"the target's whole vocabulary: {self.system} maps no drafted tokens"
            yield "draft_vocab_size", config.draft_vocab_size, expected, OTHERS_VLLM

    def problems(self, files: HeadFiles) -> Wrong:
        raw = files.raw
        untyped = raw.get("markov_rank") and raw.get("markov_head_type") is None
        return {
            **({} if TYPE in raw else built_by_class(files, self.classes, files.package.config)),
            **super().problems(files),
            TYPE: (TYPE in raw, "does not know such a config.json"),
            "markov_head_type": (untyped, "raises: it has no default"),
        }


# -- speculators


class Speculators(ServedByVllm[C]):
    name, system = "speculators", "speculators"
    whose = "is served by vLLM, and vLLM's"
    marks = (TYPE,)
    whole_heads = True

    def problems(self, files: HeadFiles) -> Wrong:
        raw, layer = files.raw, isinstance(files.raw.get("transformer_layer_config"), Mapping)
        text = f"does not load {shown(raw.get(TYPE))} as a head of kind {self.kind}"
        reduced = raw.get("draft_vocab_size") != raw.get("vocab_size")
        return {
            TYPE: (raw.get(TYPE) != self.kind, text),
            "transformer_layer_config": (not layer, "does not find it"),
            "t2d": (reduced and not files.has("t2d"), "raises: t2d tensor hasn't been set"),
        }


class SpeculatorsEagle3(Speculators[Eagle3Config], Eagle3Format):
    layer_names = ("layers.0",)
    bias_fields = BiasFields(qkv=("attention_bias",), o=("attention_bias",), mlp=("mlp_bias",))

    def problems(self, files: HeadFiles) -> Wrong:
        raw, wrong = files.raw, super().problems(files)
        other = raw.get("model_type", "qwen3")
        layers = "qwen3" if files.qk_norm else "llama"
        nested = not wrong["transformer_layer_config"][0]
        for name in ("embed_tokens.weight", "lm_head.weight"):
            if not files.has(name):
                files.notes.append(f"{name} is not in the file: vLLM takes the target's, speculators may not")
        return {
            **wrong,
            "model_type": (nested and other != layers, f"builds the layer of {other!r}: write {layers}"),
        }

    def fields(self, config: Eagle3Config, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        layers = layers_to_name(config, target)
        return {
            TYPE: "eagle3",
            "speculators_version": VERSIONS["speculators"],
            "architectures": ["Eagle3DraftModel"],
            "speculators_config": speculators_config("eagle3", 5, target),
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
            "embed_requires_grad": config.own_embedding,
            "tie_word_embeddings": False,
        }

    def extra_tensors(self, config: Eagle3Config, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Tensor]:
        if config.own_embedding:
            return {}
        if target is None or target.embed_tokens is None:
            raise InputError("target", "none", "the target, whose embedding the file has", "Pass --target.")
        return {"embed_tokens.weight": target.embed_tokens.detach().to(dtype).contiguous().clone()}


class SpeculatorsBlock(Speculators[BlockConfig], BlockFormat):
    class_names = SPECULATORS_CLASSES
    loads = ("layout", "markov_rank", "full_layers", "causal")
    reads_swa = False

    def causal(self, config: Raw) -> object:
        # Of windowed layers; full ones never are.
        return False if config.get(NON_CAUSAL, self.kind == "dflash2") else None

    def top_level(self, config: Raw) -> Raw:
        # Files without it are older than the field.
        return {"sample_from_anchor": False, **super().top_level(config)}

    def serving_notes(self, config: BlockConfig, target: TargetFacts | None) -> list[str]:
        alone = [f"vLLM computes no {config.markov_type} Markov head"] if config.markov_type != "vanilla" else []
        return [*super().serving_notes(config, target), *alone]

    def problems(self, files: HeadFiles) -> Wrong:
        unsaid = self.kind == "dspark" and "sample_from_anchor" not in files.package.config
        return {**super().problems(files), "sample_from_anchor": (unsaid, "drafts from the anchor: write false")}

    def refused(self, config: BlockConfig, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        if config.causal and (config.llama.sliding_window is None or config.full_layers):
            yield "causal", True, f"false: {self.system} has no causal layers without a window", OTHERS_SGLANG
        # vLLM serves the directory, and reads NON_CAUSAL of all layers of DFlash and of none of DSpark (`VllmBlock`).
        if config.causal is None and self.kind != "dspark":
            expected = "none: vLLM makes these causal too in a directory of speculators"
            yield "full_layers", list(config.full_layers), expected, OTHERS_SGLANG
        if config.causal is False and config.llama.sliding_window is not None and self.kind == "dspark":
            expected = "true within a window: vLLM makes it so in a directory of speculators"
            yield "causal", False, expected, OTHERS_SGLANG
        if self.kind == "dflash2" and target is not None and target.left_out:
            expected = f"none: {self.system} gives it no field, and the selector adds to the logits"
            yield "target", f"a target with a {target.left_out}", expected, OTHERS_SGLANG

    def fields(self, config: BlockConfig, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        return {
            TYPE: self.kind,
            "speculators_version": VERSIONS["speculators"],
            "architectures": [*self.classes],
            "speculators_config": speculators_config(self.kind, config.drafts, target),
            "transformer_layer_config": qwen3_fields(config, dtype),
            "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
            "block_size": config.block_size,
            "target_hidden_size": None,
            STATES: list(config.aux_layers),
            "mask_token_id": config.mask_token,
            # Of windowed layers alone, but vLLM takes it for all.
            NON_CAUSAL: config.causal is False,
            "tie_word_embeddings": False,
            **self.switches(config),
            **self.selector_fields(config),
        }


def speculators_config(kind: str, num_drafted: int, target: TargetFacts | None) -> Fields:
    """Return the object that states the head's use and its target."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    path, raw = (None, {}) if target is None else (target.path or None, target.raw)
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": path, "architectures": raw.get("architectures") or []},
    }


# -- llama.cpp


class LlamaCpp(LlamaFormat[C]):
    name, system = "llamacpp", "llama.cpp"
    marks = ("gguf",)

    def without_states(self, target: TargetFacts) -> str:
        # A GGUF file has the text alone.
        known = target.family in families.LLAMACPP
        return "" if known else f"aborts: its {target.family} graphs do not give the states of their layers"

    def problems(self, files: HeadFiles) -> Wrong:
        return {"config.json": ("gguf" not in files.raw, "reads GGUF files alone")}


class LlamaCppEagle3(LlamaCpp[Eagle3Config], Eagle3Format):
    windowless = True
    with_last = families.LLAMACPP_LAST_EAGLE3
    later_norm = ""
    notes = (
        "For several requests at once serve another kind of head: llama.cpp then accepts a third of an EAGLE-3 "
        "head's drafts (docs/guides/llamacpp.md).",
    )

    def refused(self, config: Eagle3Config, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        remedy = "Train the head with --version 3 and default layers."
        if config.fc_norm:
            yield "fc_norm", True, "no norms of the target's states: llama.cpp has no EAGLE-3.1", remedy
        if config.norm_output:
            yield "norm_output", True, "states fed back as they are: llama.cpp has no EAGLE-3.1", remedy
        if len(config.aux_layers) != NUM_STATES:
            yield "layers", list(config.aux_layers), f"{NUM_STATES} layers, as llama.cpp reads", remedy

    def fields(self, config: Eagle3Config, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        # The file has no default layers: they are always named.
        own = {IDS: list(config.aux_layers), **count_field(config.aux_layers), "gguf": "eagle3"}
        return super().fields(config, dtype, target) | own


class LlamaCppBlock(LlamaCpp[BlockConfig], BlockFormat):
    markov_types = ("vanilla",)
    with_last = families.LLAMACPP_LAST_BLOCKS

    def refused(self, config: BlockConfig, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        if config.causal is None:
            expected = "one value for all layers, with and without a window: llama.cpp has one"
            yield "causal", "that of windowed layers alone", expected, OTHERS_VLLM
        if not isinstance(config, DFlash2Config):
            return
        # It hands the selector's candidates and their scores on in the place of one state (src/models/dflash.cpp).
        if (top := config.selector_top_k) * (top + 1) > config.hidden_size:
            size = f"<= {config.hidden_size}, the hidden size"
            expected = f"k with k (k + 1) {size}: llama.cpp stores as many scores there"
            yield "selector_top_k", top, expected, "Train it with a lower --selector-top-k, or export it for vLLM."

    def fields(self, config: BlockConfig, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        return super().fields(config, dtype, target) | {"gguf": "dflash"}


EAGLE1_CLASSES = VllmEagle1.classes + SglangEagle1.classes

# -- the table: of systems that read a directory alike, it is taken for that of the first

FORMATS: tuple[LlamaFormat[EagleConfig] | LlamaFormat[Eagle3Config] | LlamaFormat[BlockConfig], ...] = (
    # Imports take head_dim and llama3 scaling, which SafeAILab's code lacks: heads for vLLM come in the same directory.
    SafeAILabEagle1(),
    VllmEagle1(),
    SglangEagle1(),
    SglangEagle3(),
    SafeAILabEagle3(),
    VllmEagle3(),
    SpeculatorsEagle3(),
    LlamaCppEagle3(),
    DeepSpecEagle3(),
    *(VllmBlock(kind) for kind in KINDS),
    *(SglangBlock(kind) for kind in KINDS),
    *(SpeculatorsBlock(kind) for kind in KINDS),
    *(LlamaCppBlock(kind) for kind in KINDS),
    *(trainer(kind) for trainer in TRAINERS for kind in ("dflash", "dspark")),
)
