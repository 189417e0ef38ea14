"""DFlash and DSpark heads in the directories of other systems: tensor names, the target's layers, the block's layout.

Specified by deepseek-ai/DeepSpec (modeling/dspark), z-lab/dflash, vLLM 0.32 (qwen3_dflash.py, qwen3_dspark.py), SGLang
0.5.23 (models/dflash.py, models/dspark.py), speculators 0.9.0 (models/dflash, models/dspark) and ModelOpt 0.47
(export/plugins/hf_spec_export.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftsmith.modules.drafters.block.head import BlockHead
from draftsmith.modules.drafters.block.net import BlockConfig, DocumentBlocks, Layout, default_layers
from draftsmith.modules.formats.base import (
    ForeignHead,
    HeadTrial,
    ImportedHead,
    Package,
    Problem,
    Served,
    TargetFacts,
    as_stored,
    check_tensors,
    positive,
    same_values,
)
from draftsmith.modules.formats.llama import (
    UNSUPPORTED,
    LlamaFormat,
    check_options,
    flat,
    llama_config,
    llama_fields,
    longest_text,
)
from draftsmith.modules.formats.sglang import SGLang
from draftsmith.modules.formats.speculators import TYPE, VERSION, speculators_config
from draftsmith.modules.formats.vllm import VLLM
from draftsmith.modules.layers import rope_settings
from draftsmith.modules.types import InputError

# Tensors of a file; the embedding and lm_head are the target's, and servers share them.
#
#   fc.weight                                         [H, n H]     over the target's n states
#   hidden_norm.weight, norm.weight                   [H]
#   layers.{i}.*                                                   as in Qwen3, with q_norm and k_norm [head_dim]
#   markov_head.markov_w1.weight                      [V, r]       of the token before
#   markov_head.markov_w2.weight                      [V, r]
#   markov_head.gate_proj.{weight,bias}               [r, H + r]   of a gated one
#   markov_head.joint_proj.{weight,bias}              [3r, 2r + H] of an rnn
#   confidence_head.proj.{weight,bias}                [1, H + r]
KINDS = ("dflash", "dspark")
CLASSES = {"dflash": ("DFlashDraftModel",), "dspark": ("Qwen3DSparkModel", "DSparkDraftModel")}  # that servers build
OUTPUTS = "target_layer_ids"  # number k is the output of layer k, our number k + 1
STATES = "aux_hidden_state_layer_ids"  # number k is the state after k layers, as in ours
# ModelOpt's names of the Markov and confidence heads.
FLAT = {
    **{name: f"markov_head.{name}" for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")},
    "confidence_proj": "confidence_head.proj",
}
NON_CAUSAL = "sliding_window_non_causal"  # of speculators
# Copies of the target's weights that speculators' files may have.
OF_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")
RETRAIN = "Train the head with other options."
BLOCKS_AT_ONCE = 32  # of a forward on text
DEFAULT_BLOCK = 16


class BlockFormat(LlamaFormat):
    """Directory of a block drafter.

    classes_of: kind -> architectures by which the system builds it; empty if it does not read them.
    anchor_first: kinds whose blocks are anchor-first if `config.json` does not say.
    markov_types: Markov heads that the system computes.
    """

    classes_of: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    anchor_first: ClassVar[tuple[str, ...]] = ("dspark",)
    markov_types: ClassVar[tuple[str, ...]] = ("vanilla", "gated", "rnn")
    bias_fields = {"qkv": ("attention_bias",), "o": ("attention_bias",)}

    @classmethod
    def of(cls, kind: str) -> BlockFormat:
        """Return the format for a kind of head."""
        made: type[BlockFormat] = type(f"{cls.__name__}.{kind}", (cls,), {"kind": kind})
        return made()

    def recognises(self, foreign: ForeignHead) -> bool:
        return foreign.block == self.kind and producer(foreign) == self.name

    # -- writing

    def check(self, config: BlockConfig) -> None:
        llama = config.llama
        for field, found, expected in (
            ("qk_norm", llama.qk_norm, True),
            ("qkv_bias", llama.qkv_bias, False),
            ("o_bias", llama.o_bias, False),
            ("mlp_bias", llama.mlp_bias, False),
        ):
            if found != expected:
                raise InputError(field, found, f"{expected}: servers build Qwen3's layers", "Train it again.")
        self.check_system(config)

    def check_system(self, config: BlockConfig) -> None:
        for field, found, expected, remedy in self.refused(config):
            raise InputError(field, found, f"{expected}", remedy)

    def refused(self, config: BlockConfig) -> Iterator[tuple[str, Any, str, str]]:
        """Yield settings of a head that the system refuses or ignores: field, value, what is expected, remedy."""
        if self.kind == "dflash":
            if config.layout != "fill-in":
                expected = f"fill-in: {self.system} samples no DFlash block from its anchor"
                yield "layout", config.layout, expected, "Train it with --layout fill-in, or `train dspark`."
            if config.markov_rank or config.confidence:
                found = config.markov_rank or config.confidence
                yield "markov_rank, confidence", found, "neither in a DFlash head", "Train it as `train dspark`."
        elif not config.markov_rank:
            expected = f"a Markov head: {self.system} refuses DSpark without one"
            yield "markov_rank", 0, expected, "Train it with --markov-rank 64, or `train dflash`."
        elif config.markov_type not in self.markov_types:
            expected = f"{' or '.join(self.markov_types)}: {self.system} computes no other"
            yield "markov_type", config.markov_type, expected, "Train it with --markov-type vanilla."

    def write(
        self, config: BlockConfig, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        self.check(config)
        tensors = {name: tensor.detach().to(dtype).contiguous().clone() for name, tensor in state.items()}
        return Package(self.fields(config, dtype, target), tensors, {"format": "pt"})

    def fields(self, config: BlockConfig, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Any]:
        """Return `config.json`, which vLLM and SGLang both read."""
        own = {"mask_token_id": config.mask_token, OUTPUTS: [number - 1 for number in config.capture]}
        return {
            **layer_fields(config, dtype),
            "architectures": [CLASSES[self.kind][0]],
            "num_target_layers": None if target is None else target.num_layers,
            "block_size": config.block_size,
            **({"dflash_config": own} if self.kind == "dflash" else own),
            **self.flags(config),
        }

    def flags(self, config: BlockConfig) -> dict[str, Any]:
        """Return the switches, all of them: systems differ in what an absent one means."""
        flags: dict[str, Any] = {"sample_from_anchor": config.layout == "anchor-first"}
        if self.kind == "dspark":
            flags |= {
                "markov_rank": config.markov_rank,
                "markov_head_type": config.markov_type,
                "enable_confidence_head": config.confidence,
                "confidence_head_with_markov": config.confidence,
            }
        return flags

    # -- reading

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        raw, notes = settings(package.config), list[str]()
        llama = llama_config(raw, rope_settings(raw))
        plain = {name: value for name, value in raw.items() if name not in ("layer_types", "is_causal")}
        check_options(plain, llama, target, ("vocab_size", "draft_vocab_size"), notes)
        if raw.get("is_neox_style", raw.get("rope_is_neox_style", True)) is not True:
            raise InputError("config.json, is_neox_style", False, "true: rotary halves", UNSUPPORTED)
        problems = self.problems(package.config, target)
        names = [name for name in package.tensors if name.removeprefix("model.").split(".")[0] in FLAT]
        if names and self.name != "modelopt":
            problems += self.listed({names[0]: (True, f"knows it as {our_name(names[0])}")})
        tensors = self.own_tensors(package, target, our_name, notes, problems)
        self._take_tables(tensors, llama.vocab_size, target, notes)
        # A gated Markov head's gate_proj is none of an MLP.
        own = {name: tensors.pop(name) for name in [*tensors] if name.startswith("markov_head.")}
        biases = self.take_biases(tensors, raw, notes, problems)
        tensors |= own
        rank = positive(raw, "markov_rank", 1) if raw.get("markov_rank") else 0
        if raw.get("block_size") is None:
            raw = {**raw, "block_size": DEFAULT_BLOCK}
            notes.append(f"block_size is not in config.json: {DEFAULT_BLOCK}, the default of TorchSpec and llama.cpp")
        confidence = self._confidence(raw, tensors, rank, notes, problems)
        config = BlockConfig(
            llama=dataclasses.replace(
                llama,
                max_position=longest_text(llama, target, notes),
                qk_norm=True,
                qkv_bias=biases.qkv,
                o_bias=biases.o,
                sliding_window=window(raw, llama.num_layers),
            ),
            capture=self._capture(raw, target, tensors, llama.hidden_size, notes),
            block_size=positive(raw, "block_size", DEFAULT_BLOCK),
            mask_token=_mask_token(raw, llama.vocab_size),
            layout=self.layout(raw),
            markov_rank=rank,
            markov_type=raw.get("markov_head_type") or "vanilla",
            confidence=confidence,
        )
        with torch.device("meta"):
            check_tensors(BlockHead(config), tensors)
        return ImportedHead(config, as_stored(tensors), tuple(notes), (*problems, *self.unheld(config)))

    def layout(self, raw: Mapping[str, Any]) -> Layout:
        """Read what a slot predicts."""
        first = raw.get("sample_from_anchor", raw.get("shift_label"))  # the latter is ModelOpt's
        if first is None:
            first = self.kind in self.anchor_first
        return "anchor-first" if first else "fill-in"

    def confident(self, raw: Mapping[str, Any], present: bool) -> bool:
        """Return whether the system builds a confidence head. present: its tensors are in the file."""
        return bool(raw.get("enable_confidence_head", raw.get("use_confidence_head", present)))

    def with_token(self, raw: Mapping[str, Any]) -> bool:
        """Return whether the system's confidence head reads the token before."""
        return bool(raw.get("confidence_head_with_markov", True))

    def _confidence(
        self,
        raw: Mapping[str, Any],
        tensors: dict[str, Tensor],
        rank: int,
        notes: list[str],
        problems: list[Problem],
    ) -> bool:
        """Return whether the head has a confidence head; give one that reads the state alone zeros for the rest."""
        weight = tensors.get("confidence_head.proj.weight")
        if not self.confident(raw, weight is not None):
            if weight is not None:
                name = "enable_confidence_head"
                problems += self.listed({name: (True, "drops the confidence head and says nothing: write true")})
                notes.append(f"confidence_head: left out, {self.system} does not use it")
                for part in ("weight", "bias"):
                    tensors.pop(f"confidence_head.proj.{part}", None)
            return False
        if (
            weight is not None
            and self.classes_of
            and bool(rank and self.with_token(raw)) != (weight.numel() > _width(raw))
        ):
            wrong = f"raises: it wants another width than {weight.numel()}"
            problems += self.listed({"confidence_head_with_markov": (True, wrong)})
        if rank and weight is not None and weight.shape == (1, _width(raw)):
            tensors["confidence_head.proj.weight"] = torch.cat([weight, weight.new_zeros(1, rank)], -1)
            notes.append("confidence_head: zeros are added for the token before, which it does not read")
        return True

    def _take_tables(
        self, tensors: dict[str, Tensor], vocab: int, target: TargetFacts | None, notes: list[str]
    ) -> None:
        """Remove copies of the target's weights."""
        for name in OF_TARGET:
            tensors.pop(name, None)
        offsets, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
        if (offsets is not None and bool(offsets.any())) or (marks is not None and not bool(marks.all())):
            found = f"{vocab if offsets is None else len(offsets)} of {vocab} tokens"
            raise InputError("d2t", found, "the whole vocabulary: a block's head has the target's lm_head", UNSUPPORTED)
        if (lm_head := tensors.pop("lm_head.weight", None)) is None:
            return
        if target is None or target.lm_head is None:
            raise InputError("lm_head.weight", "a copy", "the target to compare it with", "Pass --target.")
        if not same_values(lm_head, target.lm_head):
            found, expected = "one that differs from the target's", "the target's, which our head and all servers use"
            raise InputError("lm_head.weight", found, expected, "Pass the target that the head was trained for.")
        notes.append("lm_head.weight is left out: it is the target's")

    def _capture(
        self,
        raw: Mapping[str, Any],
        target: TargetFacts | None,
        tensors: Mapping[str, Tensor],
        size: int,
        notes: list[str],
    ) -> tuple[int, ...]:
        """Return the target's layers that the head reads, as many as its fc has room for."""
        fc = tensors.get("fc.weight")
        if fc is None or fc.ndim != 2 or fc.shape[1] % size:
            found = "none" if fc is None else f"a tensor {list(fc.shape)}"
            raise InputError("fc.weight", found, f"a matrix that reads states of width {size}", UNSUPPORTED)
        field = STATES if raw.get(STATES) is not None else OUTPUTS
        numbers, count = raw.get(field), None if target is None else target.num_layers
        if numbers is None:
            if count is None:
                raise InputError(f"config.json, {OUTPUTS}", "none", "the target's layers", "Pass --target.")
            layers = default_layers(count, fc.shape[1] // size)
            notes.append(f"{OUTPUTS} is absent: layers {', '.join(str(k - 1) for k in layers)}, as by default")
        elif isinstance(numbers, list) and numbers and all(type(number) is int for number in numbers):
            layers = tuple(number + (field == OUTPUTS) for number in numbers)
        else:
            raise InputError(f"config.json, {field}", repr(numbers), "a list of integers", "Correct config.json.")
        fits = len(layers) == fc.shape[1] // size and list(layers) == sorted(set(layers)) and layers[0] >= 0
        # The state after the last layer is normed where it is read.
        if not fits or (count is not None and layers[-1] >= count):
            expected = f"{fc.shape[1] // size} distinct ones, as fc reads, ascending"
            expected += "" if count is None else f", outputs of layers below {count - 1}"
            remedy = "Pass the target that the head was trained for."
            raise InputError(f"config.json, {field}", numbers, expected, remedy)
        return layers

    # -- computing

    def forward(self, head: Any, trial: HeadTrial) -> list[list[Tensor]]:
        """Return logits of a block's first and second token and the confidence head's log-odds, teacher-forced."""
        embedding, lm_head = trial.tables()
        config, outputs = head.config, []
        count = min(2, config.drafts)
        for probe in trial.probes:
            states = torch.cat([probe.states[number] for number in config.capture], -1)  # [T, n H]
            parts = []
            for anchors in torch.arange(1, len(probe.ids)).split(BLOCKS_AT_ONCE):
                slots = torch.full((len(anchors), config.block_size), config.mask_token)
                slots[:, 0] = probe.ids[anchors]
                blocks = DocumentBlocks.of(0, anchors, config.block_size, config.llama.sliding_window)
                hidden = head(embedding[slots], states, [blocks])[:, config.first_slot :][:, :count]  # [M, n, H]
                previous = probe.ids[(anchors[:, None] + torch.arange(count)).clamp_max(len(probe.ids) - 1)]
                logits = hidden @ lm_head.T
                if head.markov_head is not None:
                    logits = logits + head.markov_head.markov_w2(head.markov_head(hidden, previous))
                part = list(logits.unbind(1))
                part += [head.confidence(hidden, previous)] if config.confidence else []
                parts.append(part)
            outputs.append([torch.cat(pieces) for pieces in zip(*parts, strict=True)])
        return outputs

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        names = self.classes_of.get(self.kind)
        if not names:
            return []
        name, kind = ForeignHead(raw, {}).architecture or None, raw.get("model_type")
        wrong = {
            "architectures": (name not in names, f"does not build this head for {name}: write {names[0]}"),
            "model_type": (kind != "qwen3", f"builds another model for {kind!r}: write qwen3"),
        }
        return [] if TYPE in raw else self.listed(wrong)


class VLLMBlock(BlockFormat, VLLM):
    """Drafters of vLLM. K drafted tokens take a block of K slots, of a fill-in head K + 1."""

    classes_of = CLASSES
    markov_types = ("vanilla",)

    def layout(self, raw: Mapping[str, Any]) -> Layout:
        # Absent, it is false in directories of speculators, which themselves have it true.
        return super().layout({"sample_from_anchor": False, **raw} if TYPE in raw else raw)

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        own = settings(raw)
        slides = "sliding_attention" in (own.get("layer_types") or [])
        # transformers_utils/configs/speculators/algos.py, update_dflash.
        other = TYPE in raw and self.kind == "dflash" and bool(raw.get(NON_CAUSAL, True)) == slides
        text = f"lays {'bidirectional' if slides else 'causal'} blocks: write {str(not slides).lower()}"
        return super().problems(raw, target) + self.listed({NON_CAUSAL: (other, text)})

    def confident(self, raw: Mapping[str, Any], present: bool) -> bool:
        return super().confident(raw, present and TYPE in raw)

    def with_token(self, raw: Mapping[str, Any]) -> bool:
        return super().with_token({"confidence_head_with_markov": TYPE in raw, **raw})


class SGLangBlock(BlockFormat, SGLang):
    """Drafters of SGLang; a tensor that it does not know is an error."""

    classes_of = CLASSES

    def confident(self, raw: Mapping[str, Any], present: bool) -> bool:
        # It asks its own verification mode, and not config.json.
        return present

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        own = settings(raw)
        lost = own.get("markov_rank") and own.get("markov_head_type") is None
        wrong = {
            "markov_head_type": (lost, "raises: it has no default"),
            TYPE: (TYPE in raw, "does not know such a config.json"),
        }
        return [*BlockFormat.problems(self, raw, target), *SGLang.problems(self, raw, target), *self.listed(wrong)]

    def serve(self, served: Served) -> str:
        command, _, _ = super().serve(served).partition(" --speculative-num-steps")
        return f"{command} --speculative-num-draft-tokens {served.num_drafted + 1}"


class SpeculatorsBlock(BlockFormat):
    """Drafters of speculators, which vLLM reads as they are."""

    name = system = "speculators"
    classes_of = {"dflash": ("DFlashSpeculator",), "dspark": ("DSparkSpeculator",)}
    serve = VLLM.serve

    def fields(self, config: BlockConfig, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Any]:
        use = speculators_config(None, None)
        methods = [{**method, "speculative_tokens": config.drafts} for method in use["proposal_methods"]]
        return {
            TYPE: self.kind,
            "speculators_version": VERSION,
            "architectures": [self.classes_of[self.kind][0]],
            "speculators_config": {**use, "algorithm": self.kind, "proposal_methods": methods},
            "transformer_layer_config": layer_fields(config, dtype),
            "draft_vocab_size": config.vocab_size,
            "block_size": config.block_size,
            "target_hidden_size": None,
            STATES: list(config.capture),
            "mask_token_id": config.mask_token,
            # Of windowed layers alone, but vLLM takes it for all.
            NON_CAUSAL: config.llama.sliding_window is None,
            "tie_word_embeddings": False,
            **self.flags(config),
        }

    def extra_fields(self, target: Mapping[str, Any], path: str) -> dict[str, Any]:
        verifier = speculators_config(path, target.get("architectures"))["verifier"]
        return {**super().extra_fields(target, path), "speculators_config": {"verifier": verifier}}

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        layer = isinstance(raw.get("transformer_layer_config"), Mapping)
        wrong = {
            TYPE: (raw.get(TYPE) != self.kind, f"does not load {raw.get(TYPE)!r} as a {self.kind} head"),
            "transformer_layer_config": (not layer, "does not find it"),
        }
        return self.listed(wrong)


class DeepSpecBlock(BlockFormat):
    """Heads of DeepSpec's trainer: its DFlash heads are anchor-first too, and have the name of DSpark."""

    name, system, writes = "deepspec", "DeepSpec", False
    anchor_first = KINDS

    def refused(self, config: BlockConfig) -> Iterator[tuple[str, Any, str, str]]:
        if config.layout != "anchor-first":
            yield "layout", config.layout, "anchor-first", RETRAIN


class SpecForgeBlock(BlockFormat):
    """DSpark heads of SpecForge's trainer."""

    name, system, writes = "specforge", "SpecForge", False


class ModelOptBlock(BlockFormat):
    """DSpark heads of ModelOpt, which no server reads under its names."""

    name, system, writes = "modelopt", "ModelOpt", False


FORMATS = (VLLMBlock, SGLangBlock, SpeculatorsBlock, DeepSpecBlock, SpecForgeBlock, ModelOptBlock)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with everything at the top; trainers and servers keep settings in objects inside."""
    raw = flat(config)
    for place in ("dspark_config", "dflash_config"):
        inner = raw.get(place)
        raw |= {name: value for name, value in inner.items() if value is not None} if isinstance(inner, Mapping) else {}
    return raw


def layer_fields(config: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of transformers' Qwen3Config."""
    window = config.llama.sliding_window
    kind = "full_attention" if window is None else "sliding_attention"
    own = {
        "model_type": "qwen3",
        "attention_bias": False,
        "layer_types": [kind] * config.llama.num_layers,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window is not None else config.llama.num_layers,
    }
    fields = {**llama_fields(config.llama, dtype), **own}
    del fields["pretraining_tp"]
    return fields


def producer(foreign: ForeignHead) -> str:
    """Return the format of a block drafter's directory."""
    raw, name = settings(foreign.config), foreign.architecture
    if foreign.config.get("gguf"):
        return "llamacpp"
    if TYPE in raw:
        return "speculators"
    if "shift_label" in raw or any(part.split(".")[0] in FLAT for part in foreign.bare):
        return "modelopt"
    if name == "DSparkDraftModel":
        return "specforge"
    return "deepspec" if name == "Qwen3DSparkModel" and "num_anchors" in raw else "vllm"


def our_name(name: str) -> str:
    """Return our name of a tensor, by any trainer's, without the prefix `model.`."""
    first, *rest = name.removeprefix("model.").split(".")
    return ".".join([FLAT.get(first, first), *rest])


def window(raw: Mapping[str, Any], num_layers: int) -> int | None:
    """Return the sliding window of all layers; within one a block is causal, without one it is not.

    Raises:
        InputError: layers differ, or a block's causality is another than that.
    """
    types = raw.get("layer_types") or ["full_attention"]
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise InputError("config.json, layer_types", repr(types)[:80], "a list of names", "Correct config.json.")
    kinds = set(types[:num_layers])
    if len(kinds) > 1 or raw.get("use_swa"):
        raise InputError("config.json, layer_types", ", ".join(sorted(kinds)), "layers of one kind", UNSUPPORTED)
    slides = kinds == {"sliding_attention"}
    causal = raw.get("is_causal", raw.get("causal"))
    if raw.get(NON_CAUSAL) and slides:
        causal = False
    if causal is not None and bool(causal) != slides:
        expected = f"{str(slides).lower()}, as in layers {'with' if slides else 'without'} a window"
        raise InputError("config.json, is_causal", causal, expected, UNSUPPORTED)
    return positive(raw, "sliding_window", 0) if slides else None


def other_readings(config: BlockConfig, num_layers: int) -> Iterator[tuple[str, BlockConfig]]:
    """Yield readings of a head by another layout, or by layers one earlier or later, with their names."""
    other: Layout = "fill-in" if config.layout == "anchor-first" else "anchor-first"
    if config.block_size > 1:
        name = f"layout {other} in place of {config.layout}"
        yield name, dataclasses.replace(config, layout=other)
    for step in (1, -1):
        layers = tuple(number + step for number in config.capture)
        if layers[0] >= 0 and layers[-1] < num_layers:
            name = f"layers {', '.join(map(str, layers))} in place of {', '.join(map(str, config.capture))}"
            yield name, dataclasses.replace(config, capture=layers)


def _width(raw: Mapping[str, Any]) -> int:
    return positive(raw, "hidden_size", 1)


def _mask_token(raw: Mapping[str, Any], vocab: int) -> int:
    """Return the mask token.

    Raises:
        InputError: none, or one beyond the target's vocabulary, which needs an embedding of its own.
    """
    token = raw.get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab:
        expected = f"a token of the target's {vocab}"
        raise InputError("config.json, mask_token_id", repr(token), expected, UNSUPPORTED)
    return token
