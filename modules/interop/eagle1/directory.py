"""Our EAGLE head to and from the directory that SafeAILab/EAGLE, vLLM and SGLang share: the fields of a Llama
`config.json` and the tensors of its layers. What differs between the three is in the file of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle.head import EagleConfig, EagleHead
from draftsmith.modules.interop.base import Package, Parsed, TargetFacts
from draftsmith.modules.interop.eagle1.reader import (
    ROTARY_BUFFERS,
    Biases,
    Sizes,
    config_number,
    max_positions,
    positive,
    same_values,
)
from draftsmith.modules.interop.eagle1.rope import conflict, missing_keys, transformers_rope
from draftsmith.modules.layers import LlamaConfig, RopeScaling, rope_settings
from draftsmith.modules.types import InputError

AGAIN = "Train it again: heads trained from now on have none."


@dataclass(frozen=True)
class Producer:
    """The system by whose rules a directory is parsed.

    biases, sizes: as it takes them from `config.json`. zero_o_bias: it fills a missing bias of o_proj with zeros.
    """

    system: str
    biases: Biases
    sizes: Sizes
    zero_o_bias: bool = False


def head_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of our head, name -> shape."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in EagleHead(config).named_parameters()}


def write_head(
    config: EagleConfig, state: Mapping[str, Tensor], dtype: torch.dtype, fields: Mapping[str, Any]
) -> Package:
    """The tensors as they are, in `dtype`, beside the Llama fields of the config and the format's own `fields`.

    Raises:
        InputError: for a switch that none of the three systems holds.
    """
    llama = config.llama
    reasons = {
        "fc_bias": (config.fc_bias, "no bias: vLLM drops it silently, and no two systems keep it alike"),
        "qk_norm": (llama.qk_norm, "no norm of q and k: none of these systems has one in an EAGLE-1 head"),
        "o_bias": (llama.o_bias, "no bias of o_proj: SafeAILab/EAGLE and Qwen-type heads have none"),
        "mlp_bias": (llama.mlp_bias, "no bias in the MLP: SafeAILab/EAGLE and SGLang ignore it"),
    }
    for field, (found, expected) in reasons.items():
        if found:
            raise InputError(field, found, expected, AGAIN)
    if llama.hidden_size % llama.num_heads:
        raise InputError(
            "num_heads",
            llama.num_heads,
            f"a divisor of hidden_size {llama.hidden_size}: transformers refuses any other",
            "Train the head for a target of other sizes.",
        )
    if llama.sliding_window is not None:
        raise InputError("sliding_window", llama.sliding_window, "none: these systems' heads see everything", AGAIN)
    shapes = head_shapes(config)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes, "state is not the config's head"
    tensors = {name: state[name].detach().to(dtype).contiguous().clone() for name in shapes}
    return Package({**_llama_fields(llama, dtype), **fields}, tensors, {"format": "pt"})


def _llama_fields(llama: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of transformers' LlamaConfig, with names of both its generations for rope and dtype."""
    name = str(dtype).removeprefix("torch.")
    old, new = _rope_fields(llama.rope_scaling)
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


def _rope_fields(scaling: RopeScaling) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """`rope_scaling` and `rope_parameters` (less its base). SafeAILab's wants exactly `type` and a float `factor`."""
    if scaling.kind == "default":
        return None, {"rope_type": "default"}
    factor = float(scaling.factor)
    if scaling.kind == "linear":
        return {"type": "linear", "factor": factor}, {"rope_type": "linear", "factor": factor}
    fields = {
        "rope_type": scaling.kind,
        "factor": factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    return fields, dict(fields)


def parse_head(package: Package, target: TargetFacts | None, producer: Producer) -> Parsed:
    """A directory as our head, by the rules of the system it was made for; state in float32.

    Raises:
        InputError: for what our head cannot be, and where that system would compute with numbers of no one's choosing.
    """
    raw, size, notes = package.config, producer.sizes, list[str]()
    theta, scaling = _checked_fields(raw, size, target)
    tensors = _own_tensors(package, target, notes)
    kept = _kept_biases(tensors, producer, raw.get("bias") is False, notes)
    max_position = positive(raw, "max_position_embeddings")
    longest = max(max_position, max_positions(target))
    if longest > max_position:
        notes.append(f"max_position_embeddings {max_position} is raised to the target's {longest}, as vLLM does")
    if "rms_norm_eps" not in raw:
        notes.append("rms_norm_eps is not in config.json: 1e-6, the default of the systems that read it")
    llama = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position=longest,
        rms_eps=config_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=kept.qkv,
        o_bias=kept.o,
        mlp_bias=kept.mlp,
    )
    config = EagleConfig(llama, fc_bias=kept.fc)
    _check_tensors(tensors, head_shapes(config))
    return Parsed(config, {name: tensor.to(torch.float32) for name, tensor in tensors.items()}, tuple(notes))


def _checked_fields(raw: Mapping[str, Any], size: Sizes, target: TargetFacts | None) -> tuple[float, RopeScaling]:
    """Rotary base and scaling, once every field that our head could not follow is refused."""
    both = conflict(raw)
    if both:
        raise InputError("rope_parameters", both, "one rotary setting", "Keep in config.json what it was trained with.")
    lacking = missing_keys(raw)
    if lacking:
        raise InputError("rope_scaling", f"no {', '.join(lacking)}", "all that its kind needs", "Complete config.json.")
    plain = {"logit_scale": 1.0, "hidden_act": "silu", "quantization_config": None}
    for field, value in plain.items():
        found = raw.get(field)
        if found is not None and found != value:
            expected = "nothing" if value is None else f"{value} or nothing"
            raise InputError(f"config.json, {field}", found, expected, "Such heads are not supported.")
    if transformers_rope(raw).partial != 1.0:
        raise InputError(
            "partial_rotary_factor", transformers_rope(raw).partial, "1.0 or nothing", "Such heads are not supported."
        )
    vocab = size.vocab if target is None else target.raw.get("vocab_size", size.vocab)
    for field in ("vocab_size", "draft_vocab_size", "hot_vocab_size"):
        if raw.get(field) not in (None, vocab):
            raise InputError(
                f"config.json, {field}",
                raw[field],
                f"the target's whole vocabulary ({vocab})",
                "Heads of a truncated vocabulary are not supported.",
            )
    if target is not None and target.raw.get("hidden_size", size.hidden) != size.hidden:
        raise InputError(
            "config.json, hidden_size", size.hidden, f"the target's {target.raw['hidden_size']}", "Pass its own target."
        )
    return rope_settings(raw, "Heads with other rotary positions are not supported.")


def _own_tensors(package: Package, target: TargetFacts | None, notes: list[str]) -> dict[str, Tensor]:
    """Tensors without prefix, and without what is not of the head: rotary buffers, the target's tables, a norm that no
    system applies."""
    tensors: dict[str, Tensor] = {}
    for on_disk, tensor in package.tensors.items():
        name = on_disk.removeprefix("model.")
        if any(buffer in name for buffer in ROTARY_BUFFERS):
            continue
        if name in tensors:
            raise InputError("weights", f"{name} twice, with and without `model.`", "each once", "Remove one of them.")
        if name.startswith("lm_head"):
            notes.append(f"{on_disk} is left out: the target's lm_head is used")
        elif name == "layers.0.input_layernorm.weight":
            notes.append(f"{on_disk} is left out: EAGLE-1 has no norm before the attention of layer 0")
        elif name == "embed_tokens.weight":
            _check_embedding(on_disk, tensor, target)
            notes.append(f"{on_disk} is left out: it is the target's embedding")
        else:
            tensors[name] = tensor
    return tensors


def _check_embedding(name: str, tensor: Tensor, target: TargetFacts | None) -> None:
    if target is None or target.embed_tokens is None:
        raise InputError(name, "an embedding in the head", "the target to compare it with", "Pass --target.")
    if not same_values(tensor, target.embed_tokens):
        raise InputError(
            name,
            "an embedding that differs from the target's",
            "the target's: our head reads that one",
            "Pass the target that the head was trained for, or remove the tensor if it was not trained.",
        )


def _kind(name: str) -> str | None:
    """Field of `Biases` that a tensor belongs to, or None: no bias of the head."""
    if not name.endswith(".bias"):
        return None
    if name == "fc.bias":
        return "fc"
    if name.endswith(("gate_proj.bias", "up_proj.bias", "down_proj.bias")):
        return "mlp"
    if name.endswith("o_proj.bias"):
        return "o"
    return "qkv" if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) else None


def _kept_biases(tensors: dict[str, Tensor], producer: Producer, unbiased: bool, notes: list[str]) -> Biases:
    """Which biases our head has; the others are taken out of `tensors`.

    Kept: those that the system uses, unless they are zero (a format's filling), except in q, k and v.
    unbiased: config.json says `bias: false`, by which whoever trained the head means fc.
    """
    remedies = {
        "fc": 'Add "bias": false to config.json if the head was trained without.',
        "qkv": 'Set "attention_bias" and "qkv_bias" to false in config.json if the head was trained without.',
        "o": 'Write "qkv_bias": true in place of "attention_bias" if only q, k and v have one.',
        "mlp": 'Set "mlp_bias" to false in config.json if the head was trained without.',
    }
    kept = {}
    for kind, remedy in remedies.items():
        names = [name for name in tensors if _kind(name) == kind]
        used = getattr(producer.biases, kind)
        if kind == "fc" and used and not names and unbiased:
            notes.append(f"fc has no bias, as config.json says; {producer.system} itself would make up a random one")
        elif used and not names and not (kind == "o" and producer.zero_o_bias):
            found = f"no {kind} bias in the file, where config.json makes {producer.system} create one"
            raise InputError("weights", found, "its values, which would be random", remedy)
        zero = not any(bool(tensors[name].any()) for name in names)
        kept[kind] = used and bool(names) and (kind == "qkv" or not zero)
        if names and not kept[kind]:
            if not zero:
                notes.append(f"{', '.join(names)}: left out, {producer.system} does not use them")
            for name in names:
                del tensors[name]
    return Biases(**kept)


def _check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    wrong += [f"{name} is unknown" for name in sorted(tensors.keys() - shapes.keys())]
    wrong += [
        f"{name} is {list(tensors[name].shape)} in place of {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if wrong:
        listed = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise InputError("weights", listed, "the tensors that config.json asks for", "Check config.json and the file.")
