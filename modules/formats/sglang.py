"""EAGLE-1 heads in SGLang 0.5.23 (models/llama_eagle.py, models/llama.py, speculative/eagle_worker_v2.py).

What it does not know it ignores, what it does not find keeps its initial value, and its fusion layer always has a bias.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle.net import EagleConfig
from draftsmith.modules.formats.base import Package, Served, TargetFacts
from draftsmith.modules.formats.eagle1 import SGLANG_CLASS as CLASS
from draftsmith.modules.formats.eagle1 import Biases, EagleFormat
from draftsmith.modules.formats.reader import Reader, parts_of, positive
from draftsmith.modules.formats.rope import transformers_rope

# Modules whose shorter tensors it fills up with zeros, for MLPs of odd widths (layers/linear.py).
PADDED = ("gate_proj", "up_proj", "down_proj", "o_proj")
OVERRIDE = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"


class SGLang(EagleFormat):
    """What `--speculative-algorithm EAGLE` takes."""

    name = "sglang"
    system = "SGLang"
    zero_bias = True

    def fields(self, config: EagleConfig) -> dict[str, Any]:
        return {"architectures": [CLASS], "bias": False, "attention_bias": config.llama.qkv_bias}

    def write(
        self, config: EagleConfig, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        """Zero biases are added that it would otherwise fill at random (fc) or has beside those of q, k and v (o)."""
        llama, package = config.llama, super().write(config, state, dtype)
        zeros = {"fc.bias": torch.zeros(llama.hidden_size, dtype=dtype)}
        if llama.qkv_bias:
            for i in range(llama.num_layers):
                zeros[f"layers.{i}.self_attn.o_proj.bias"] = torch.zeros(llama.hidden_size, dtype=dtype)
        return Package(package.config, {**package.tensors, **zeros}, package.metadata)

    def serve(self, served: Served) -> str:
        return command(served, "EAGLE")

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        """`attention_bias` or `bias` give q, k, v and o one; the MLP never has any, fc always (models/llama.py)."""
        attention = bool(raw.get("attention_bias") or raw.get("bias"))
        return Biases(fc=True, qkv=attention, o=attention, mlp=False)

    def check_config(self, reader: Reader) -> None:
        raw = reader.raw
        reader.check_llama()
        if raw.get("model_type") != "llama":
            reader.note("model_type", f"takes {raw.get('model_type')!r}, with other defaults than those of `llama`")
        first = next(iter(raw.get("architectures") or []), None)
        if first == CLASS:
            reader.note("architectures", f"builds {first}")
        elif first is None:
            reader.error("architectures", f"raises: 'NoneType' object is not subscriptable: write {CLASS}")
        else:
            built = "an ordinary Llama" if first == "LlamaForCausalLM" else "no EAGLE-1 head"
            reader.error(
                "architectures", f"builds {built} for {first}, which this check does not follow: write {CLASS}"
            )
        if raw.get("bias") and not raw.get("attention_bias"):
            reader.error("bias", "reads it as the bias of q, k, v and o; that of fc is always there")
        if raw.get("tie_word_embeddings"):
            reader.error(
                "tie_word_embeddings", "raises: it deletes the shared table twice to put the target's in its place"
            )
        reader.unread("qkv_bias", "mlp_bias", "logit_scale")
        hot, vocab = raw.get("hot_vocab_size"), positive(raw, "vocab_size")
        if hot not in (None, vocab):
            reader.error(
                "hot_vocab_size",
                f"drafts from the target's whole lm_head, not from {hot} tokens, without --speculative-token-map",
            )

    def load(self, reader: Reader, name: str) -> None:
        """Prepend `model.`, except to what has `lm_head` in its name, which it skips."""
        if "lm_head" in name:
            reader.replaced(name, reader.differs(name, "lm_head"), "drops it and takes the target's")
        elif name == "embed_tokens.weight":
            load_embedding(reader, name)
        elif all(slot in reader.slots for slot in parts_of(name)):
            reader.fill_split(name, pads=PADDED)
        elif name.removeprefix("model.") in reader.slots:
            reader.dropped(name, "because it prepends `model.` a second time")
        elif name.endswith("proj.bias"):
            reader.dropped(name, "because `attention_bias` is not set; it never has biases in the MLP")
        else:
            reader.dropped(name, "because it has no such parameter")

    def finish(self, reader: Reader) -> None:
        check_length(reader)
        check_dtype(reader)


def command(served: Served, algorithm: str) -> str:
    """A chain of num_drafted tokens; the token that the target itself gave is counted among those it verifies."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(served.model)} --speculative-algorithm {algorithm}"
        f" --speculative-draft-model-path {shlex.quote(served.directory)}"
        f" --speculative-num-steps {served.num_drafted} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {served.num_drafted + 1}"
    )


def check_dtype(reader: Reader) -> None:
    """Types of computation: with `--dtype auto` target and draft each run in the type that their own config names, and
    in float16 where that is float32 (configs/model_config.py, _get_and_verify_dtype)."""
    if reader.target is None:
        return
    named = [str(raw.get("dtype") or raw.get("torch_dtype") or "float32") for raw in (reader.raw, reader.target.raw)]
    own, theirs = ("float16" if name == "float32" else name for name in named)
    if own == theirs:
        reader.note("dtype", f"runs head and target in {own}")
    else:
        reader.note("dtype", f"runs the head in {own} and the target in {theirs}, unless --dtype says otherwise")


def load_embedding(reader: Reader, name: str) -> None:
    """Loaded, then replaced (speculative/eagle_worker_v2.py, init_lm_head)."""
    shape = list(reader.package.tensors[name].shape)
    expected = [positive(reader.raw, "vocab_size"), reader.slots["fc.weight"].shape[0]]
    if shape != expected:
        reader.error(name, f"raises: a table of another shape (file {shape}, model {expected})")
    else:
        differ = reader.differs(name, "embed_tokens")
        reader.replaced(name, differ, f"{'silently ' * (differ is not False)}puts the target's in its place")


def check_length(reader: Reader) -> None:
    """It refuses a target of a longer context than the draft's (configs/model_config.py, _derive_context_length)."""
    if reader.target is None:
        return
    own, theirs = _context(reader.raw), _context(reader.target.raw)
    if theirs > own:
        reader.error(
            "max_position_embeddings",
            f"raises: Target model's context_length ({theirs}) is greater than the derived context_length ({own});"
            f" write a longer one, or set {OVERRIDE}",
        )


def _context(raw: Mapping[str, Any]) -> int:
    """Positions that SGLang derives: linear scaling multiplies them (utils/hf_transformers/common.py)."""
    rope = transformers_rope(raw)
    stretched = rope.scaling.factor if rope.kind == "linear" else 1.0
    return int(stretched * positive(raw, "max_position_embeddings"))
