"""DFlash, DFlash2 and DSpark heads in other systems' directories: names, the target's layers, the block's layout.

Specified by deepseek-ai/DeepSpec (modeling/dspark), z-lab/dflash, vLLM 0.33 (qwen3_dflash.py, qwen3_dflash2.py,
qwen3_dspark.py), SGLang 0.5.23 (models/dflash.py, models/dspark.py), speculators 0.9.0 (models/dflash, models/dflash2,
models/dspark) and ModelOpt 0.47 (export/plugins/hf_spec_export.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.modules.drafters.block.net import BlockConfig, DFlash2Config, default_layers
from draftsmith.modules.formats.base import NotReadHere, Package, Raw, TargetFacts, layer_types, same_values
from draftsmith.modules.formats.llama import (
    Fields,
    architecture,
    flat,
    inner_object,
    layer_ids,
    layer_windows,
    llama_fields,
    to_halves,
    window_fields,
)
from draftsmith.modules.formats.llama_format import PLAIN_VALUES, BiasFields, HeadFiles, LlamaFormat, Refusal
from draftsmith.modules.formats.vocabulary import take_vocabulary
from draftsmith.modules.llama_config import PARTIAL, LlamaConfig, positive
from draftsmith.modules.types import InputError

KINDS = ("dflash", "dflash2", "dspark")
# Tensors of a file; the embedding is the target's, and so is lm_head if the vocabulary is whole: servers share them.
# Of a reduced vocabulary it is there, with d2t and t2d as of EAGLE-3, and Vd is the number of its rows, else V.
#
#   fc.weight                                         [H, n H]     over the target's n states
#   hidden_norm.weight, norm.weight                   [H]
#   layers.{i}.*                                                   as in Qwen3, with q_norm and k_norm [head_dim]
#   markov_head.markov_w1.weight                      [V, r]       of the token before
#   markov_head.markov_w2.weight                      [Vd, r]
#   markov_head.gate_proj.{weight,bias}               [r, H + r]   of a gated one
#   markov_head.joint_proj.{weight,bias}              [3r, 2r + H] of an rnn
#   confidence_head.proj.{weight,bias}                [1, H + r]
#   layers.{i}.{attention,mlp}_conv.base_kernel       [2, k, H]    of DFlash2, as all below: before and behind
#   layers.{i}.{attention,mlp}_conv.kernel_projection.weight       [2 k H / group, H]
#   candidate_selector.{predecessor,successor}_codebook    [V, r]
#   candidate_selector.hidden_projection.weight       [r, H]
OUTPUTS = "target_layer_ids"  # number k is the output of layer k, our number k + 1
STATES = "aux_hidden_state_layer_ids"  # number k is the state after k layers, as in ours
# ModelOpt's names of the Markov and confidence heads.
FLAT = {
    **{name: f"markov_head.{name}" for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")},
    "confidence_proj": "confidence_head.proj",
}
# TorchSpec's names.
CONTEXT = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
TURNED = re.compile(r".*\.[qk]_(proj\.(weight|bias)|norm\.weight)")  # rows in the order of the rotary pairs
# Weights that read the states after the last norm; of the last one they are the last columns, else the first.
READ_STATE = (
    "confidence_head.proj.weight", "markov_head.gate_proj.weight", "markov_head.joint_proj.weight",
    "candidate_selector.hidden_projection.weight",
)  # fmt: skip
# Fields of a DFlash2 head by ours, and those that would change what its selector adds to, with their plain values.
SELECTOR = {"conv_kernel": "conv_kernel_size", "conv_group": "conv_group_size"}
SELECTOR |= {name: name for name in ("selector_rank", "selector_top_k")}
# What vLLM computes with and we do not, with plain values.
VLLM_ONLY: dict[str, object] = {
    "attention_value_scale": 1.0,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "dspark_draft_topk": None,
    "use_aux_hidden_state": True,
}
SCALES, SOFTCAP = {"input_embedding_scale": 1.0, "output_multiplier": 1.0}, "final_logit_softcapping"
NON_CAUSAL = "sliding_window_non_causal"  # of speculators
# Copies of the target's weights that speculators' files may have.
OF_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")
DEFAULT_BLOCK = 16


# Values of `architectures`, which vLLM and SGLang share; the first is written.
CLASSES = {
    "dflash": ("DFlashDraftModel",),
    "dflash2": ("DFlash2DraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),
}


class BlockFormat(LlamaFormat[BlockConfig]):
    """Directory of a block drafter of one kind.

    class_names: `classes` by kind.
    own_names: beginnings of tensors' names that no other system knows, and ours.
    anchored: kinds and classes whose blocks are anchor-first if `config.json` does not say.
    reads_part: the system rotates a part of each head where the target's settings name one, not `rope_dim` alone.
    asks_confidence: `config.json` says whether the system uses a confidence head.
    reads_swa: it reads ModelOpt's fields of a window.
    neox_fields: fields of `config.json` that may say that neighbors rotate in place of halves.
    markov_types: Markov heads that the system computes.
    """

    model_type = "qwen3"
    # Layers are causal or not within a block (`causal`).
    plain_values = {name: value for name, value in PLAIN_VALUES.items() if name != "is_causal"} | VLLM_ONLY
    bias_fields = BiasFields(qkv=("attention_bias",), o=("attention_bias",))
    class_names: Mapping[str, tuple[str, ...]] = CLASSES
    own_names: Mapping[str, str] = MappingProxyType({})
    anchored: tuple[str, ...] = ("dspark",)
    reads_part = True
    asks_confidence = True
    reads_swa = True
    neox_fields: tuple[str, ...] = ()
    markov_types: tuple[str, ...] = ("vanilla", "gated", "rnn")

    def __init__(self, kind: str):
        self.kind, self.classes = kind, self.class_names[kind]

    def wrote(self, package: Package) -> bool:
        return super().wrote(package) or any(bare_module(name) in self.own_names for name in package.tensors)

    def refused(self, config: BlockConfig, target: TargetFacts | None) -> Iterator[Refusal]:
        yield from super().refused(config, target)
        if self.kind != "dspark":
            if config.layout != "fill-in":
                expected = f"fill-in: {self.system} samples no block of this kind from its anchor"
                yield "layout", config.layout, expected, f"Train it as `train {self.kind}`, or `train dspark`."
            if config.markov_rank or config.confidence:
                found = config.markov_rank or config.confidence
                yield "markov_rank, confidence", found, f"neither in a {self.kind} head", "Train it as `train dspark`."
        elif not config.markov_rank:
            expected = f"a Markov head: {self.system} refuses DSpark without one"
            yield "markov_rank", 0, expected, "Train it with --markov-rank 64, or `train dflash`."
        elif config.markov_type not in self.markov_types:
            expected = f"{' or '.join(self.markov_types)}: {self.system} computes no other"
            yield "markov_type", config.markov_type, expected, "Train it as `train dspark`."

    def fields(self, config: BlockConfig, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        """Return what vLLM and SGLang both read."""
        own: Fields = {"mask_token_id": config.mask_token, OUTPUTS: [number - 1 for number in config.aux_layers]}
        own |= self.selector_fields(config)
        capped = None if target is None else target.text.get(SOFTCAP)
        if self.kind == "dflash2" and capped:
            own[SOFTCAP] = capped
        return {
            **qwen3_fields(config, dtype),
            "architectures": [CLASSES[self.kind][0]],
            "num_target_layers": None if target is None else target.num_layers,
            "block_size": config.block_size,
            # Systems differ in what an absent one means; none can say that layers differ.
            **({} if config.causal is None else {"is_causal": config.causal}),
            **(own if self.kind == "dspark" else {"dflash_config": own}),
            **self.switches(config),
            **({} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}),
        }

    def switches(self, config: BlockConfig) -> Fields:
        """Return the switches, all of them: systems differ in what an absent one means."""
        switches: Fields = {"sample_from_anchor": config.layout == "anchor-first"}
        if self.kind == "dspark":
            switches |= {
                "markov_rank": config.markov_rank,
                "markov_head_type": config.markov_type,
                "enable_confidence_head": config.confidence,
                "confidence_head_with_markov": config.confidence,
            }
        return switches

    def selector_fields(self, config: BlockConfig) -> Fields:
        """Return the sizes of a DFlash2 head's convolutions and selector."""
        return {theirs: getattr(config, ours) for ours, theirs in SELECTOR.items()} if self.kind == "dflash2" else {}

    def check_common(self, config: BlockConfig) -> None:
        llama = config.llama
        for field, found, expected in (
            ("qk_norm", llama.qk_norm, True),
            ("qkv_bias", llama.qkv_bias, False),
            ("o_bias", llama.o_bias, False),
            ("mlp_bias", llama.mlp_bias, False),
        ):
            if found != expected:
                raise InputError(field, found, f"{expected}: servers build Qwen3's layers", "Train it again.")

    def scaled(self, state: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
        """Scale the states after the last norm, and what else reads them by the inverse."""
        if "lm_head.weight" in state:
            return dict(state)
        scaled, size = dict(state), len(state["norm.weight"])
        scaled["norm.weight"] = state["norm.weight"] * factor
        for name in READ_STATE:
            if name in state:
                scaled[name] = weight = state[name].clone()
                (weight[:, -size:] if "joint" in name else weight[:, :size]).div_(factor)
        return scaled

    def our_name(self, name: str) -> str:
        """Return our name of a tensor, by any trainer's."""
        first, *rest = name.split(".")
        return ".".join([(FLAT | CONTEXT).get(first, first), *rest])

    def causal(self, config: Raw) -> object:
        """Return whether the system's layers are causal within a block; None: those with a window, and others not."""
        top = flat(config)
        return inner_object(top, "dflash_config").get("causal") if top.get("is_causal") is None else top["is_causal"]

    def top_level(self, config: Raw) -> Raw:
        raw: Raw = {**settings(config), "is_causal": self.causal(config)}
        if not self.reads_swa:
            raw = {**raw, "use_swa": None, "swa_window_size": None}
        ropes = {name: inner_object(raw, name) for name in ("rope_scaling", "rope_parameters")}
        if self.reads_part or any("rope_dim" in rope for rope in ropes.values()):
            return raw
        return {**raw, **{name: {**rope, PARTIAL: None} for name, rope in ropes.items() if rope}, PARTIAL: None}

    def read_config(self, files: HeadFiles, llama: LlamaConfig) -> BlockConfig:
        raw = files.raw
        if any(raw.get(name) is False for name in self.neox_fields):
            _halve(files, llama)
        unknown = (FLAT | CONTEXT).keys() - self.own_names.keys()
        if names := [name for name in files.package.tensors if bare_module(name) in unknown]:
            files.add_problems({names[0]: (True, f"knows it as {self.our_name(names[0].removeprefix('model.'))}")})
        drafted = self._vocabulary(files, llama.vocab_size)
        # A gated Markov head's gate_proj is none of an MLP.
        markov = {name: files.tensors.pop(name) for name in [*files.tensors] if name.startswith("markov_head.")}
        biases = files.take_biases()
        files.tensors |= markov
        rank = positive(raw, "markov_rank", 1) if raw.get("markov_rank") else 0
        if raw.get("block_size") is None:
            default = f"{DEFAULT_BLOCK}, the default of TorchSpec and llama.cpp"
            files.notes.append(f"block_size is not in config.json: {default}")
        block_size = DEFAULT_BLOCK if raw.get("block_size") is None else positive(raw, "block_size", DEFAULT_BLOCK)
        confidence, make = self._confidence(files, rank), self._config(files)
        # The latter is ModelOpt's.
        first = raw.get("sample_from_anchor", raw.get("shift_label"))
        # A DSpark head without a Markov head is read as DFlash, and laid as DSpark.
        anchored = self.kind in self.anchored or architecture(raw) in self.anchored
        own = windows(raw, llama.num_layers, block_size)
        dropped = own.window and not raw.get("use_sliding_window") and raw.get("swa_window_size") is None
        files.add_problems({"use_sliding_window": (dropped, "finds no window: transformers drops it. Write true")})
        return make(
            llama=dataclasses.replace(
                llama,
                max_position=files.longest_text(llama),
                qk_norm=True,
                qkv_bias=biases.qkv,
                o_bias=biases.o,
                sliding_window=own.window,
            ),
            aux_layers=self._aux_layers(files, llama.hidden_size),
            block_size=block_size,
            mask_token=_mask_token(raw, llama.vocab_size),
            layout="anchor-first" if (anchored if first is None else first) else "fill-in",
            markov_rank=rank,
            markov_type=raw.get("markov_head_type") or "vanilla",
            confidence=confidence,
            draft_vocab_size=drafted,
            full_layers=own.full_layers,
            causal=own.causal,
        )

    def _config(self, files: HeadFiles) -> Callable[..., BlockConfig]:
        """Return what makes the head's config. A DFlash2 head that scales other than its target is refused."""
        if self.kind != "dflash2":
            return BlockConfig
        raw = files.raw
        capped = (raw if files.target is None else files.target.text).get(SOFTCAP)
        for name, plain in (SCALES | {SOFTCAP: capped}).items():
            if (raw.get(name) or plain) != plain:
                raise NotReadHere(f"config.json, {name}", raw[name], f"{plain}, as our drafter has")
        sizes: dict[str, Any] = {ours: positive(raw, theirs, 0) for ours, theirs in SELECTOR.items()}
        return partial(DFlash2Config, **sizes)

    def _confidence(self, files: HeadFiles, rank: int) -> bool:
        """Return whether the head has a confidence head; give one that reads the state alone zeros for the rest."""
        raw, tensors = files.raw, files.tensors
        weight = tensors.get("confidence_head.proj.weight")
        present, width = weight is not None, positive(raw, "hidden_size", 1)
        said = raw.get("enable_confidence_head", raw.get("use_confidence_head", present))
        if not (said if self.asks_confidence else present):
            if weight is not None:
                name = "enable_confidence_head"
                files.add_problems({name: (True, "drops the confidence head and says nothing: write true")})
                files.notes.append(f"confidence_head: left out, {self.system} does not use it")
                for part in ("weight", "bias"):
                    tensors.pop(f"confidence_head.proj.{part}", None)
            elif said:
                files.add_problems({"confidence_head.proj.weight": (True, "does not find it, and says nothing")})
            return False
        reads_token = bool(rank and raw.get("confidence_head_with_markov", True))
        if weight is not None and self.classes and reads_token != (weight.numel() > width):
            wrong = f"raises: it wants another width than {weight.numel()}"
            files.add_problems({"confidence_head_with_markov": (True, wrong)})
        if rank and weight is not None and weight.shape == (1, width):
            tensors["confidence_head.proj.weight"] = torch.cat([weight, weight.new_zeros(1, rank)], -1)
            files.notes.append("confidence_head: zeros are added for the token before, which it does not read")
        return True

    def _vocabulary(self, files: HeadFiles, vocab: int) -> int | None:
        """Return the size of a reduced vocabulary; remove copies of the target's weights."""
        tensors, target = files.tensors, files.target
        for name in OF_TARGET:
            tensors.pop(name, None)
        if files.raw.get("draft_vocab_size") in (None, vocab) and not {"d2t", "t2d", "lm_head.weight"} & tensors.keys():
            return None
        if (drafted := take_vocabulary(files, vocab, ("markov_head.markov_w2.weight",))) != vocab:
            return drafted
        lm_head = tensors.pop("lm_head.weight")
        if target is None or target.lm_head is None:
            raise InputError("lm_head.weight", "a copy", "the target to compare it with", "Pass --target.")
        if not same_values(lm_head, target.lm_head):
            text, expected = "one that differs from the target's", "the target's, which our head and all but vLLM use"
            raise InputError("lm_head.weight", text, expected, "Pass the target that the head was trained for.")
        files.notes.append("lm_head.weight is left out: it is the target's")
        return None

    def _aux_layers(self, files: HeadFiles, size: int) -> tuple[int, ...]:
        """Return the target's layers that the head reads, as many as its fc has room for."""
        raw, wanted = files.raw, files.num_states(size)
        field = STATES if raw.get(STATES) is not None else OUTPUTS
        numbers, count = layer_ids(raw, field=field), None if files.target is None else files.target.num_layers
        if numbers is not None:
            layers = tuple(number + (field == OUTPUTS) for number in numbers)
        elif count is None:
            raise InputError(f"config.json, {OUTPUTS}", "none", "the target's layers", "Pass --target.")
        else:
            layers = default_layers(count, wanted)
            files.notes.append(f"{OUTPUTS} is absent: layers {', '.join(str(k - 1) for k in layers)}, as by default")
        return files.in_order(f"config.json, {field}", numbers or layers, layers, wanted, field == OUTPUTS)


def bare_module(name: str) -> str:
    """Return the first part of a tensor's name, without the prefix `model.`."""
    return name.removeprefix("model.").split(".")[0]


def settings(config: Raw) -> Raw:
    """Return a `config.json` with everything at the top; trainers and servers keep settings in objects inside."""
    raw = dict(flat(config))
    for place in ("dspark_config", "dflash_config"):
        raw |= {name: value for name, value in inner_object(raw, place).items() if value is not None}
    return raw


def qwen3_fields(config: BlockConfig, dtype: torch.dtype) -> Fields:
    """Return the fields of transformers' Qwen3Config."""
    llama = config.llama
    # SGLang's block drafters read the part that is rotated from here alone.
    part = {} if llama.rope_scaling.partial_rotary_factor == 1 else {"rope_dim": llama.rotary_dim}
    fields = {
        **llama_fields(llama, dtype, part),
        "model_type": "qwen3",
        "attention_bias": False,
        **window_fields(llama, config.full_layers),
        "max_window_layers": llama.num_layers if llama.sliding_window is None else 0,
    }
    del fields["pretraining_tp"]
    return fields


class Windows(NamedTuple):
    """Attention of the layers, as in `BlockConfig`: the window of all but `full_layers`, and if they are causal."""

    window: int | None
    full_layers: tuple[int, ...]
    causal: bool | None


def windows(raw: Raw, num_layers: int, block_size: int) -> Windows:
    """Return what the layers of a block drafter see. raw: of `BlockFormat.top_level`.

    A window counts from the slot, itself included, in all systems but speculators, which trains with one from the
    anchor. In a block that is not causal, vLLM and SGLang on FlashAttention, and Automodel, hide what is a window ahead
    too; vLLM on FlashInfer, llama.cpp and ModelOpt do not. No block is that long.

    Raises:
        InputError: as of `layer_windows`.
        NotReadHere: a window shorter than a block that is not causal.
    """
    size = "sliding_window" if raw.get("swa_window_size") is None else "swa_window_size"
    kinds, first = layer_types(raw), raw.get("max_window_layers", 28)
    if not kinds and raw.get("use_sliding_window") and raw.get("sliding_window") and isinstance(first, int):
        # transformers' Qwen3Config.
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    slides = "sliding_attention" in kinds
    if raw.get("use_swa") and not slides:
        # vLLM's _resolve_layer_attention; _dflash_layer_causal goes by what is said of layers.
        kinds = ["sliding_attention"] * num_layers
    own, full_layers = layer_windows({**raw, "layer_types": kinds}, num_layers, size)
    causal = None if full_layers else slides
    if raw.get("is_causal") is not None:
        causal = bool(raw["is_causal"])
    if own is not None and causal is False and own < block_size:
        raise NotReadHere(f"config.json, {size}", own, f"{block_size} or more: a block that is not causal")
    return Windows(own, full_layers, causal)


def _halve(files: HeadFiles, llama: LlamaConfig) -> None:
    """Reorder queries and keys, whose rotary pairs are neighbors in the file, to halves."""
    for name, rows in files.tensors.items():
        if TURNED.fullmatch(name):
            files.tensors[name] = to_halves(rows, len(rows) // llama.head_dim, llama.rotary_dim)
    files.notes.append("the rotary pairs of q and k are neighbors in the file, and halves here")


def _mask_token(raw: Raw, vocab: int) -> int:
    """Return the mask token.

    Raises:
        InputError: none, or one beyond the target's vocabulary, which needs an embedding of its own.
    """
    token = raw.get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab:
        expected = f"a token of the target's {vocab}"
        raise InputError("config.json, mask_token_id", repr(token), expected, "Correct config.json.")
    return token
