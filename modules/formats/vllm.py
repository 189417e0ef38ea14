"""EAGLE-1 heads in vLLM 0.33.0 (models/llama_eagle.py, models/llama.py, models/utils.py, v1/spec_decode/).

An unknown tensor stops it, unless it is a bias or a rotary buffer; a missing one does not.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from draftsmith.modules.formats.base import Served
from draftsmith.modules.formats.eagle1 import SGLANG_CLASS, Biases, EagleFormat
from draftsmith.modules.formats.reader import ROTARY_BUFFERS, Reader, config_number, max_positions, parts_of
from draftsmith.modules.formats.rope import transformers_rope

CLASS = "EagleLlamaForCausalLM"
# Whose config always has `layer_types` (transformers 5).
LAYER_TYPED = ("qwen2", "qwen3")
# Kinds of rope whose table only grows with max_position_embeddings (config/speculative.py, _CACHE_ONLY_ROPE_TYPES).
RESIZED = ("default", "linear", "llama3", "ntk", "proportional")


class VLLM(EagleFormat):
    """What `--speculative-config '{"method": "eagle", ...}'` takes: the directory of SafeAILab/EAGLE, also for a head
    whose head_dim or rope only vLLM holds."""

    name = "vllm"
    system = "vLLM"
    uninitialised = "uninitialised memory"

    def serve(self, served: Served) -> str:
        return command(served, "eagle")

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        """`attention_bias` or `bias` give q, k, v and o one; `qkv_bias`, where present, decides for q, k and v; fc has
        none (models/llama.py, LlamaDecoderLayer)."""
        attention = bool(raw.get("attention_bias") or raw.get("bias"))
        qkv = bool(raw["qkv_bias"]) if "qkv_bias" in raw else attention
        return Biases(fc=False, qkv=qkv, o=attention, mlp=bool(raw.get("mlp_bias")))

    def check_config(self, reader: Reader) -> None:
        raw = reader.raw
        reader.check_llama()
        if raw.get("model_type") != "llama":
            reader.error("model_type", f"builds another model for {raw.get('model_type')!r}; EAGLE heads are `llama`")
        named = raw.get("architectures") or []
        if not named:
            reader.error("architectures", "raises: no model architectures are specified")
        for name in named[:1]:
            built = name if name.startswith("Eagle") else f"Eagle{name}"
            if built == CLASS:
                reader.note("architectures", f"builds {built} for {name}")
            else:
                reader.error("architectures", f"looks for {built} for {name}, not for {CLASS}: write LlamaForCausalLM")
            if name == SGLANG_CLASS:
                reader.error("architectures", f"raises: Model architectures {[name]} are not supported for now")
        if raw.get("bias") and not raw.get("attention_bias"):
            covered = "o" if "qkv_bias" in raw else "q, k, v and o"
            reader.error("bias", f"reads it as the bias of {covered}, and never as that of fc")
        if "bias" not in raw:
            reader.note("bias", "gives neither fc nor, unless `attention_bias` says so, the attention a bias")
        if raw.get("is_causal", True) is False:
            reader.error("is_causal", "attends to later tokens")
        _check_layer_types(reader)
        check_window(reader)
        check_scale(reader)
        if raw.get("hot_vocab_size"):
            reader.note("hot_vocab_size", "does not read it and drafts from the target's whole lm_head")

    def load(self, reader: Reader, name: str) -> None:
        """Prepend `model.` unless the name has `lm_head` in it, then walk down the modules (AutoWeightsLoader)."""
        if any(buffer in name for buffer in ROTARY_BUFFERS):
            reader.dropped(name, "a rotary buffer")
        elif "lm_head" in name:
            inner = name.removeprefix("model.")
            built = "LlamaModel" if inner != name else CLASS
            where = inner.split(".")[0]
            reader.error(name, f"raises: There is no module or parameter named {where!r} in {built}")
        elif all(slot in reader.slots for slot in parts_of(name)):
            reader.fill_split(name)
        elif name == "embed_tokens.weight":
            # Kept where it differs from the target's (v1/spec_decode/llm_base_proposer.py, _maybe_share_embeddings).
            same = "finds it identical to the target's and shares that one"
            reader.fill_embedding(name, reader.raw.get("vocab_size"), "a table of another shape", same)
        else:
            unknown = first_unknown(name, reader.slots)
            if unknown.endswith(".bias"):
                reader.dropped(name, "as it drops every bias that it has no place for")
            else:
                reader.error(name, f"raises: There is no module or parameter named {unknown!r} in LlamaModel")

    def finish(self, reader: Reader) -> None:
        check_length(reader)


def command(served: Served, method: str) -> str:
    """What serves a head that its speculative config calls by this method."""
    settings = {"method": method, "model": served.directory, "num_speculative_tokens": served.num_drafted}
    return f"vllm serve {shlex.quote(served.model)} --speculative-config {shlex.quote(json.dumps(settings))}"


def check_window(reader: Reader) -> None:
    """A window of the head's own layers."""
    if "sliding_attention" in (reader.raw.get("layer_types") or []):
        reader.error("layer_types", "attends within a sliding window, which this check and our head do not")


def check_scale(reader: Reader) -> None:
    """A factor of the draft's logits."""
    scale = config_number(reader.raw, "logit_scale", 1.0)
    reader.settings["logit_scale"] = scale
    if scale != 1.0:
        reader.error("logit_scale", f"multiplies the draft's logits by {scale}, which our head does not")


def check_length(reader: Reader) -> None:
    """The rotary table grows to the target's positions, the draft's own length does not
    (v1/worker/gpu_model_runner.py)."""
    own, theirs = reader.settings["max_position"], max_positions(reader.target)
    if theirs > own and transformers_rope(reader.raw).kind in RESIZED:
        reader.error("max_position_embeddings", f"does not draft beyond {own} tokens; the target has {theirs}")
        reader.settings["max_position"] = theirs


def _check_layer_types(reader: Reader) -> None:
    """The head's layers count on from the target's, its `layer_types` do not (models/llama.py, LlamaAttention)."""
    raw, layers = reader.raw, reader.settings["llama"].num_layers
    typed = len(raw.get("layer_types") or []) or (layers if raw.get("model_type") in LAYER_TYPED else 0)
    if not typed or reader.target is None:
        return
    first = int(reader.target.raw.get("num_hidden_layers") or 0)
    if first + layers > typed:
        index = max(first, typed)
        reader.error("layer_types", f"raises: effective_layer_idx: {index} is out of bounds for layer_types")


def first_unknown(name: str, slots: Iterable[str]) -> str:
    """The part of a name down to where no module goes on; layer 0's `input_layernorm` is a module, an empty one."""
    modules = {"layers.0.input_layernorm"}
    for slot in slots:
        parts = slot.split(".")
        modules |= {".".join(parts[:i]) for i in range(1, len(parts))}
    parts = name.split(".")
    for i in range(1, len(parts)):
        if ".".join(parts[:i]) not in modules:
            return ".".join(parts[:i])
    return name
