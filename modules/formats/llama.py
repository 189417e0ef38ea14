"""Parts that EAGLE-1 and EAGLE-3 formats share: the fields of a Llama `config.json`, tensors and biases."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from draftsmith.modules.formats.base import HeadFormat, Package, Problem, TargetFacts, positive, same_values
from draftsmith.modules.layers import ROPE_KINDS, LlamaConfig, RotarySettings
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
# Fields that change a distribution and not its first choice.
OF_LOGITS = ("output_multiplier", "final_logit_softcapping", "logits_scaling", "lm_head_multiplier")
UNSUPPORTED = "Such heads are not supported."
AGAIN = "Train it again: heads trained from now on have none."
# Field of `Biases` -> its tensors.
BIASES = {
    "fc": r"fc\.bias",
    "qkv": r".*\.[qkv]_proj\.bias",
    "o": r".*\.o_proj\.bias",
    "mlp": r".*\.(gate|up|down)_proj\.bias",
}
NO_BIAS = (
    'Correct config.json: "bias" (of fc), "attention_bias" and "mlp_bias" are false without; write "qkv_bias": true '
    'in place of "attention_bias" if only q, k and v have one.'
)


class Biases(NamedTuple):
    """Linear layers that a system creates with a bias."""

    fc: bool
    qkv: bool
    o: bool
    mlp: bool


class LlamaFormat(HeadFormat):
    """Directory of a head whose layers are Llama's."""

    # Values of `architectures` by which the system builds this kind of head; empty if it does not read them.
    classes: ClassVar[tuple[str, ...]] = ()
    # Fields of `config.json`, any of which makes the system create these linear layers with a bias (parts of `Biases`).
    bias_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # It also reads names that begin with `model.`.
    prefix: ClassVar[bool] = False
    # It fills attention biases with zeros before it loads.
    zero_bias: ClassVar[bool] = False

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        """Return which linear layers the system creates with a bias, by `config.json`."""
        fields = self.bias_fields
        return Biases(*(any(raw.get(name) for name in fields.get(part, ())) for part in Biases._fields))

    def problems(self, raw: Mapping[str, Any], target: TargetFacts | None) -> list[Problem]:
        """Return the fields by which this system refuses the directory or computes something else."""
        if not self.classes:
            return []
        name = next(iter(raw.get("architectures") or []), None)
        text, other = f"does not build this head for {name}: write {self.classes[0]}", raw.get("model_type")
        wrong = {
            "architectures": (name not in self.classes, text),
            "model_type": (other != "llama", f"builds another model for {other!r}: write llama"),
        }
        return self.listed(wrong)

    def listed(self, fields: Mapping[str, tuple[Any, str]]) -> list[Problem]:
        """Return the problems of fields, each with its condition and what the system does."""
        return [Problem(field, f"{self.system} {text}") for field, (wrong, text) in fields.items() if wrong]

    def check_system(self, config: Any) -> None:
        """Raise InputError for a setting that this system ignores, or computes with in another way."""

    def unheld(self, config: Any) -> list[Problem]:
        """Return the setting of a head in a directory that this system does not compute with."""
        try:
            self.check_system(config)
        except InputError as error:
            return [Problem(error.field, f"is {error.found}, where {self.system} has {error.expected}")]
        return []

    def extra_fields(self, target: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the type to run in: the target's, whatever type the weights are stored in.

        SGLang would otherwise run a head in another type than its target.
        """
        named = target.get("dtype") or target.get("torch_dtype")
        return {"torch_dtype": named, "dtype": named} if named else {}

    def own_tensors(
        self,
        package: Package,
        target: TargetFacts | None,
        our_name: Callable[[str], str],
        notes: list[str],
        problems: list[Problem],
    ) -> dict[str, Tensor]:
        """Return a file's tensors by our names, without rotary buffers and the target's embedding."""
        tensors: dict[str, Tensor] = {}
        # SGLang reads them in EAGLE-3 but for lm_head.
        known = [name for name in package.tensors if self.prefix and name != "model.lm_head.weight"]
        prefixed = any(name.startswith("model.") for name in package.tensors.keys() - set(known))
        problems += self.listed({"model.": (prefixed, "knows the names without it")})
        for on_disk, tensor in package.tensors.items():
            name = our_name(on_disk.removeprefix("model."))
            if any(buffer in name for buffer in ROTARY_BUFFERS):
                continue
            if name in tensors:
                raise InputError("weights", f"{name} twice, by two names", "each once", "Remove one of them.")
            if name != "embed_tokens.weight":
                tensors[name] = tensor
                continue
            if target is None or target.embed_tokens is None:
                expected = "the target to compare it with"
                raise InputError(on_disk, "an embedding in the head", expected, "Pass --target.")
            if not same_values(tensor, target.embed_tokens):
                found, expected = "an embedding that differs from the target's", "the target's: our head reads that one"
                remedy = "Pass the target that the head was trained for, or remove the tensor if it was not trained."
                raise InputError(on_disk, found, expected, remedy)
            notes.append(f"{on_disk} is left out: it is the target's embedding")
        return tensors

    def take_biases(
        self, tensors: dict[str, Tensor], raw: Mapping[str, Any], notes: list[str], problems: list[Problem]
    ) -> Biases:
        """Remove the biases that the system does not use, or that are zero, and return those that our head has."""
        kept, created = {}, self.biases(raw)._asdict()
        for part, pattern in BIASES.items():
            names = [name for name in tensors if re.fullmatch(pattern, name)]
            zero = not any(bool(tensors[name].any()) for name in names)
            if created[part] and not names and not (part == "o" and self.zero_bias):
                # To whoever trains heads, `bias` is that of fc. SGLang's fc has one whatever config.json says.
                if part != "fc" or raw.get("bias") is not False:
                    found = f"no {part} bias in the file, where config.json makes {self.system} create one"
                    raise InputError("weights", found, "its values, which would be random", NO_BIAS)
                problems.append(Problem("fc.bias", f"{self.system} does not find it and makes up a random one"))
            # EAGLE-1 heads of Qwen2 targets keep q, k and v biases of zeros: their layers have them.
            kept[part] = created[part] and bool(names) and not (zero and (part != "qkv" or self.kind == "eagle3"))
            if names and not kept[part]:
                if not zero:
                    notes.append(f"{', '.join(names)}: left out, {self.system} does not use them")
                    problems.append(Problem(names[0], f"{self.system} drops it and says nothing"))
                for name in names:
                    del tensors[name]
        return Biases(**kept)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with the layer's fields at the top; speculators keep them inside an object."""
    inner = config.get("transformer_layer_config")
    return {**(inner if isinstance(inner, Mapping) else {}), **config}


def llama_config(raw: Mapping[str, Any], rope: RotarySettings, head_dim: bool = True) -> LlamaConfig:
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
    raw: Mapping[str, Any],
    llama: LlamaConfig,
    target: TargetFacts | None,
    vocabularies: Sequence[str],
    notes: list[str],
) -> None:
    """Raise InputError for a field that our head cannot follow; add notes of what is left out or assumed.

    vocabularies: fields that must be the target's whole vocabulary.
    """
    if "rms_norm_eps" not in raw:
        notes.append("rms_norm_eps is not in config.json: 1e-6, the default of the systems that read it")
    for field in OF_LOGITS:
        value = raw.get(field)
        if value not in (None, 1.0) and (target is None or value != target.raw.get(field)):
            notes.append(f"{field} {value} is left out: the head's logits are scaled as the target's, or not")
    if llama.rope_scaling.kind not in ROPE_KINDS:
        raise InputError("rope_type", llama.rope_scaling.kind, " or ".join(ROPE_KINDS), UNSUPPORTED)
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
        "qk_norm": (llama.qk_norm, "no norm of q and k: a layer of Llama has none"),
        "o_bias": (llama.o_bias, "no bias of o_proj: SafeAILab/EAGLE and Qwen-type heads have none"),
    }
    for field, (value, expected) in {**refused, **common}.items():
        if value:
            raise InputError(field, value, expected, AGAIN)
    if llama.hidden_size % llama.num_heads:
        expected = f"a divisor of hidden_size {llama.hidden_size}: transformers refuses any other"
        raise InputError("num_heads", llama.num_heads, expected, "Train the head for a target of other sizes.")


def max_positions(target: TargetFacts | None) -> int:
    """Return the target's context length, 0 if it is unknown."""
    return 0 if target is None else int(target.raw.get("max_position_embeddings") or 0)


def longest_text(llama: LlamaConfig, target: TargetFacts | None, notes: list[str]) -> int:
    """Return the positions of an imported head: at least the target's."""
    longest = max(llama.max_position, max_positions(target))
    if longest > llama.max_position:
        notes.append(f"max_position_embeddings {llama.max_position} is raised to the target's {longest}, as vLLM does")
    return longest
