"""Parts that EAGLE-1 and EAGLE-3 formats share: the fields of a Llama `config.json` and the biases of its layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from draftsmith.modules.formats.base import HeadFormat, Problem, TargetFacts, positive, same_values
from draftsmith.modules.formats.rope import KNOWN, Rope, conflict, missing_keys, safeailab_rope, transformers_rope
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.types import InputError

ROTARY_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# Defaults of transformers' LlamaConfig and of SafeAILab's EConfig alike.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
# Fields that change the forward, and the values under which our heads compute the same.
PLAIN_VALUES: dict[str, Any] = {
    "logit_scale": 1.0,
    "hidden_act": "silu",
    "quantization_config": None,
    "is_causal": True,
}
UNSUPPORTED = "Such heads are not supported."
AGAIN = "Train it again: heads trained from now on have none."
ELSEWHERE = "Export it with --format vllm or --format sglang."


class Biases(NamedTuple):
    """Linear layers that a system creates with a bias."""

    fc: bool
    qkv: bool
    o: bool
    mlp: bool


class LlamaFormat(HeadFormat):
    """Directory of a head whose layers are Llama's.

    classes: values of `architectures` by which the system builds this kind of head; empty if it does not read them.
    """

    classes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def biases(self, raw: Mapping[str, Any]) -> Biases:
        """Return which linear layers the system creates with a bias, by `config.json`."""

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        """Return the fields by which this system refuses the directory or computes something else."""
        problems = []
        if self.classes:
            name = next(iter(raw.get("architectures") or []), None)
            if name not in self.classes:
                text = f"{self.system} does not build this head for {name}: write {self.classes[0]}"
                problems.append(Problem("architectures", text))
            if raw.get("model_type") != "llama":
                text = f"{self.system} builds another model for {raw.get('model_type')!r}: write llama"
                problems.append(Problem("model_type", text))
        return problems

    def extra_fields(self, target: Mapping[str, Any], manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the type to run in: the target's, whatever type the weights are stored in.

        SGLang would otherwise run a head in another type than its target.
        """
        named = target.get("dtype") or target.get("torch_dtype")
        return {"torch_dtype": named, "dtype": named} if named else {}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with the layer's fields at the top; speculators keep them inside an object."""
    inner = config.get("transformer_layer_config")
    return {**(inner if isinstance(inner, Mapping) else {}), **config}


def llama_config(raw: Mapping[str, Any], rope: Rope, head_dim: bool = True) -> LlamaConfig:
    """Read the sizes of a `config.json`, without biases.

    rope: rotary settings as the system reads them. head_dim: the system honours the field of that name.

    Raises:
        InputError: a size is no positive integer, or eps no number.
    """

    def size(key: str) -> int:
        return positive(raw, key, DEFAULTS[key])

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    given, eps = raw.get("head_dim") if head_dim else None, raw.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool):
        raise InputError("config.json, rms_norm_eps", repr(eps), "a number", "Correct config.json.")
    return LlamaConfig(
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if raw.get("num_key_value_heads") is None else positive(raw, "num_key_value_heads", heads),
        head_dim=max(hidden // heads, 1) if given is None else positive(raw, "head_dim", 1),
        max_position=size("max_position_embeddings"),
        rms_eps=float(eps),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
    )


def llama_fields(llama: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of transformers' LlamaConfig, in both spellings of rope and dtype.

    SafeAILab's code wants exactly `type` and a float `factor` in `rope_scaling`.
    """
    name = str(dtype).removeprefix("torch.")
    scaling, factor = llama.rope_scaling, float(llama.rope_scaling.factor)
    new: dict[str, Any] = {"rope_type": scaling.kind}
    if scaling.kind != "default":
        new["factor"] = factor
    if scaling.kind == "llama3":
        new |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    old = {"default": None, "linear": {"type": "linear", "factor": factor}}.get(scaling.kind, new)
    return {
        "model_type": "llama",
        "vocab_size": llama.vocab_size,
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_hidden_layers": llama.num_layers,
        "num_attention_heads": llama.num_heads,
        "num_key_value_heads": llama.num_kv_heads,
        "head_dim": llama.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": llama.max_position,
        "rms_norm_eps": llama.rms_eps,
        "rope_theta": llama.rope_theta,
        "rope_scaling": old,
        "rope_parameters": {**new, "rope_theta": llama.rope_theta},
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": name,
        "dtype": name,
    }


def check_options(
    raw: Mapping[str, Any], llama: LlamaConfig, target: TargetFacts | None, vocabularies: Sequence[str]
) -> None:
    """Raise InputError for a field that our head cannot follow.

    vocabularies: fields that must be the target's whole vocabulary.
    """
    if contradiction := conflict(raw):
        remedy = "Keep in config.json what it was trained with."
        raise InputError("rope_parameters", contradiction, "one rotary setting", remedy)
    if lacking := missing_keys(raw):
        raise InputError("rope_scaling", f"no {', '.join(lacking)}", "all that its kind needs", "Complete config.json.")
    if llama.rope_scaling.kind not in KNOWN:
        raise InputError("rope_type", llama.rope_scaling.kind, " or ".join(KNOWN), UNSUPPORTED)
    for field, plain in PLAIN_VALUES.items():
        if raw.get(field) not in (None, plain):
            expected = "nothing" if plain is None else f"{plain} or nothing"
            raise InputError(f"config.json, {field}", raw[field], expected, UNSUPPORTED)
    if "sliding_attention" in (raw.get("layer_types") or []):
        raise InputError("config.json, layer_types", "sliding_attention", "full_attention", UNSUPPORTED)
    vocab = llama.vocab_size if target is None else target.raw.get("vocab_size", llama.vocab_size)
    for field in vocabularies:
        if raw.get(field) not in (None, vocab):
            expected = f"the target's whole vocabulary ({vocab})"
            remedy = "Heads of a truncated vocabulary are not supported."
            raise InputError(f"config.json, {field}", raw[field], expected, remedy)
    width = llama.hidden_size if target is None else target.hidden_size or llama.hidden_size
    if width != llama.hidden_size:
        raise InputError("config.json, hidden_size", llama.hidden_size, f"the target's {width}", "Pass its own target.")


def check_layer(llama: LlamaConfig, refused: Mapping[str, tuple[Any, str]]) -> None:
    """Raise InputError for a layer of ours that no system builds. refused: more switches, and what is expected."""
    common = {
        "mlp_bias": (llama.mlp_bias, "no bias in the MLP: SafeAILab/EAGLE and SGLang ignore it"),
        "sliding_window": (llama.sliding_window, "none: these systems' heads see everything"),
        "qk_norm": (llama.qk_norm, "no norm of q and k: a layer of Llama has none"),
        "o_bias": (llama.o_bias, "no bias of o_proj: SafeAILab/EAGLE and Qwen-type heads have none"),
    }
    for field, (value, expected) in {**refused, **common}.items():
        if value:
            raise InputError(field, value, expected, AGAIN)
    if llama.hidden_size % llama.num_heads:
        expected = f"a divisor of hidden_size {llama.hidden_size}: transformers refuses any other"
        raise InputError("num_heads", llama.num_heads, expected, "Train the head for a target of other sizes.")


def check_safeailab_layer(llama: LlamaConfig, system: str) -> None:
    """Raise InputError for sizes and rotary settings that SafeAILab's code does not go by."""
    scaling = llama.rope_scaling
    if llama.head_dim * llama.num_heads != llama.hidden_size:
        expected = f"hidden_size / num_heads = {llama.hidden_size // llama.num_heads}"
        raise InputError("head_dim", llama.head_dim, f"{expected}: {system} ignores the field", ELSEWHERE)
    if scaling.kind == "llama3":
        raise InputError("rope_scaling", "llama3", f"none or linear: {system} refuses every other", ELSEWHERE)
    if scaling.kind == "linear" and (llama.rope_theta != 10000 or scaling.factor <= 1):
        found = f"linear by {scaling.factor:g} on base {llama.rope_theta:g}"
        rule = f"{system} takes that base under linear scaling, whatever rope_theta says"
        raise InputError("rope_scaling", found, f"a factor over 1 on base 10000: {rule}", ELSEWHERE)


def safeailab_problems(raw: Mapping[str, Any], system: str) -> list[Problem]:
    """Return the fields of a layer that SafeAILab's code reads in another way than vLLM and SGLang."""
    problems = []
    heads = positive(raw, "num_attention_heads", DEFAULTS["num_attention_heads"])
    head_dim = positive(raw, "hidden_size", DEFAULTS["hidden_size"]) // heads
    if raw.get("head_dim") not in (None, head_dim):
        text = f"{system} ignores {raw['head_dim']} and takes hidden_size / {heads} heads = {head_dim}"
        problems.append(Problem("head_dim", text))
    scaling = raw.get("rope_scaling")
    if scaling and (
        scaling.keys() != {"type", "factor"}
        or scaling["type"] not in ("linear", "dynamic")
        or not isinstance(scaling["factor"], float)
    ):
        text = f"{system} wants `type` (linear or dynamic) and a float `factor`, not {dict(scaling)}"
        problems.append(Problem("rope_scaling", text))
    meant, read = transformers_rope(raw), safeailab_rope(raw)
    if (meant.theta, meant.kind) != (read.theta, read.kind):
        rule = "under rope_scaling its base is always 10000" if scaling else "it does not read rope_parameters"
        problems.append(Problem("rope_theta", f"{system} computes with {read}, not with {meant}: {rule}"))
    return problems


def check_embedding(name: str, tensor: Tensor, target: TargetFacts | None) -> None:
    """Raise InputError if a file's embedding is not the target's, the one that our heads read."""
    if target is None or target.embed_tokens is None:
        raise InputError(name, "an embedding in the head", "the target to compare it with", "Pass --target.")
    if not same_values(tensor, target.embed_tokens):
        found, expected = "an embedding that differs from the target's", "the target's: our head reads that one"
        remedy = "Pass the target that the head was trained for, or remove the tensor if it was not trained."
        raise InputError(name, found, expected, remedy)


def max_positions(target: TargetFacts | None) -> int:
    """Return the target's context length, 0 if it is unknown."""
    return 0 if target is None else int(target.raw.get("max_position_embeddings") or 0)


def longest_text(llama: LlamaConfig, target: TargetFacts | None, notes: list[str]) -> int:
    """Return the positions of an imported head: at least the target's."""
    longest = max(llama.max_position, max_positions(target))
    if longest > llama.max_position:
        notes.append(f"max_position_embeddings {llama.max_position} is raised to the target's {longest}, as vLLM does")
    return longest
