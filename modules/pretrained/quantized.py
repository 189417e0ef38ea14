"""Quantized checkpoints: the engines that compute their weights, and a weight from the tensors that it is stored in.

Published methods store a weight as numbers with scales. Those of `FORMS` are multiplied at load, so that every engine
has plain weights, in any floating-point type. All other files are refused before weights are read: numbers without
their scales are another model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.modules.llama_config import config_object
from draftsmith.modules.pretrained.reading import StoredTensor
from draftsmith.modules.targets.shape import text_config
from draftsmith.modules.types import InputError

# `quant_method` in config.json of the methods whose files hold these forms.
METHODS = ("fp8", "modelopt", "modelopt_fp4", "compressed-tensors", "mxfp4", "awq", "gptq")
# Types that layers compute with, as safetensors names them.
COMPUTED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOATS, FP8 = " ".join(COMPUTED), "F8_E4M3 F8_E5M2"
# Tensors of a weight, the one with the numbers first, and those that it may have; each with its types.
FORMS: tuple[tuple[dict[str, str], dict[str, str]], ...] = (
    ({"weight": FP8, "weight_scale_inv": f"{FLOATS} F8_E8M0"}, {}),
    ({"weight": FP8, "weight_scale": FLOATS}, {}),
    ({"weight": "I8", "weight_scale": FLOATS}, {"weight_zero_point": "I8"}),
    ({"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}, {}),
    ({"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"}, {}),
    ({"weight_packed": "U8", "weight_scale": "U8 F8_E8M0"}, {}),
    ({"weight_packed": "I32", "weight_scale": FLOATS, "weight_shape": "I32 I64"}, {"weight_zero_point": "I32"}),
    ({"blocks": "U8", "scales": "U8"}, {}),
    ({"qweight": "I32", "qzeros": "I32", "scales": FLOATS}, {"g_idx": "I32"}),
)  # fmt: skip
NUMBERS = re.compile(r"(?:(?<=_)blocks|(?<=\.)(?:weight|weight_packed|qweight))$")
# Weights, which are integers only if they are quantized. (`attn.bias` is a mask in old files of GPT-2.) Their scales.
WEIGHT = re.compile(r"(weight|weight_packed|_blocks|proj(\.bias)?)$")
SCALE = re.compile(
    r"((weight|proj)_(scale|zero_point|global_scale|g_idx)\w*|pre_quant_scale|\.(scales|qzeros|SCB|absmax))$"
)
# Scales of activations and of a server's cache, which belong to no weight.
ACTIVATION = re.compile(r"\.((input|output)_(scale|zero_point)|input_global_scale|activation_scale|[qkv]_scale)$")
# Settings by which numbers mean something else, and their values that are computed here.
SETTINGS = {"transform_config": "none {}"}
SETTINGS_OF = {
    "awq": {"version": "none gemm"},
    "gptq": {"checkpoint_format": "none gptq gptq_v2", "format": "none gptq gptq_v2"},
}
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # places of eight numbers in a word of AutoAWQ
RUN_IT = "data responses --engine openai, train --server URL, eval served --engine vllm"
SERVED = f"Use the model that it was made from, or let vLLM run it: {RUN_IT}."


@dataclass(frozen=True)
class Quantized:
    """Quantization of a checkpoint.

    method: for messages; empty if it is not quantized. weights: names of the tensors of each weight that is computed
    here, by `FORMS`. problem: why no engine reads it. by_transformers: transformers alone computes the method.
    """

    method: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    problem: str = ""
    by_transformers: bool = False

    @property
    def fp4(self) -> bool:
        """True if weights are FP4 numbers, to which servers may round the inputs of their layers too."""
        kinds = {frozenset(parts) for parts in self.weights.values()}
        return any(
            "weight_scale_2" in kind or ("weight_packed" in kind and "weight_shape" not in kind) for kind in kinds
        )

    def error(self, model: object, problem: str, remedy: str = SERVED) -> InputError:
        """Return the error of a model that is not computed here."""
        found = f"{model}, which is quantized ({': '.join(filter(None, (self.method, problem)))})"
        return InputError("model", found, f"plain weights, or those of {', '.join(METHODS)}", remedy)

    def compute(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Compute a weight in float32. parts: its tensors, by `FORMS`. Raises InputError if their sizes do not fit."""
        try:
            return _compute(parts, self.settings)
        except (ValueError, RuntimeError, LookupError, TypeError) as error:
            raise self.error(name, str(error)) from error


def decide(config: Mapping[str, object], other: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> Quantized:
    """Decide by settings and the tensors' headers who computes a checkpoint's weights.

    config: config.json. other: ModelOpt's hf_quant_config.json.
    """
    text = text_config(config)
    settings = dict(config_object(text, "quantization_config") or config_object(text, "compression_config"))
    settings = settings or dict(config_object(other, "quantization"))
    if "quant_algo" in settings:
        settings.setdefault("quant_method", "modelopt")
    switched = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    kind = str(settings.get("quant_method") or ("bitsandbytes" if switched else ""))
    method = " ".join(str(name) for name in (kind, *map(settings.get, ("quant_algo", "format", "bits"))) if name)
    if kind and kind not in METHODS:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

        # There bitsandbytes is named by its bits.
        known = not AUTO_QUANTIZATION_CONFIG_MAPPING.keys().isdisjoint((kind, f"{kind}_4bit"))
        return Quantized(method, settings, {}, "" if known else "an unknown method", known)

    weights, left = dict[str, dict[str, str]](), list[str]()
    promised = _promised(settings)
    for name, stored in tensors.items():
        if stored.dtype not in COMPUTED and (numbers := NUMBERS.search(name)):
            stem = name[: numbers.start()]
            for needed, more in FORMS:
                there = {part for part, types in (needed | more).items()
                         if stem + part in tensors and tensors[stem + part].dtype in types.split()}  # fmt: skip
                if next(iter(needed)) == numbers[0] and needed.keys() <= there:
                    whole = stem.removesuffix("_") if "blocks" in needed else f"{stem}weight"
                    weights[whole] = {part: stem + part for part in there}
                    left += [f"{name} without {part}" for part in promised & more.keys() - there]
                    break
    used = {name for parts in weights.values() for name in parts.values()}
    used.update(filter(ACTIVATION.search, tensors))
    for name, stored in tensors.items():
        odd = stored.dtype not in COMPUTED and (stored.dtype[0] == "F" or WEIGHT.search(name))
        if name not in used and (odd or SCALE.search(name)):
            left.append(f"{name} in {stored.dtype}")
    expected = SETTINGS | SETTINGS_OF.get(kind, {})
    left += [f"{key} {settings[key]}" for key, right in expected.items()
             if str(settings.get(key)).lower() not in right.split()]  # fmt: skip
    if weights and not kind:
        left.append(f"{min(weights)} of a method that config.json does not name")
    # Settings of a cache of keys alone name no weights.
    if not weights and settings.get("quant_algo" if kind.startswith("modelopt") else "config_groups", kind):
        left.append("files without quantized weights")
    return Quantized(method if weights or left else "", settings, weights, next(iter(left), ""))


def _promised(settings: Mapping[str, object]) -> set[str]:
    """Return the tensors of `FORMS` that weights may have, and by these settings all of them do."""
    groups = [group for group in config_object(settings, "config_groups").values() if isinstance(group, dict)]
    asymmetric = any(config_object(group, "weights").get("symmetric") is False for group in groups)
    return {"weight_zero_point"} if asymmetric else {"g_idx"} if settings.get("desc_act") else set()


def _compute(parts: Mapping[str, Tensor], settings: Mapping[str, object]) -> Tensor:
    """Compute a weight [N, K] in float32; ValueError if the sizes of its tensors do not fit."""
    if "blocks" in parts:  # MXFP4
        values = _fp4(parts["blocks"]) * _scale(parts["scales"])[..., None]  # [E, N, K / 32, 32]
        return values.flatten(2).transpose(1, 2)  # [E, K, N], as gpt-oss has it
    if "qweight" in parts:
        return _integers(parts, settings)
    stored = parts["weight_packed" if "weight_packed" in parts else "weight"]
    zero, block = parts.get("weight_zero_point"), _block(settings)
    scale = next(_scale(parts[name]) for name in ("weight_scale", "weight_scale_inv") if name in parts)
    if scale.ndim == 4:  # FP8_PB_WO of ModelOpt
        scale, block = scale[:, 0, :, 0], (128, 128)
    if stored.dtype == torch.uint8:
        values = _fp4(stored)
        # One number each: float() refuses others.
        scale = scale * float(parts.get("weight_scale_2", 1)) / float(parts.get("weight_global_scale", 1))
    elif stored.dtype == torch.int32:
        rows, columns = parts["weight_shape"].tolist()
        bits = _bits(stored.shape[1], columns)
        values = _unpack(stored, bits, 1)[:, :columns].float() - 2 ** (bits - 1)
        zero = None if zero is None else _unpack(zero, bits, 0)[:rows] - 2 ** (bits - 1)
    else:
        values = stored.float()
    if zero is not None:
        values = values - _spread(zero.float(), values.shape, block)
    return values * _spread(scale, values.shape, block)


def _block(settings: Mapping[str, object]) -> Sequence[int] | None:
    """Return the sizes of blocks that share a scale, if the settings name them."""
    each = [settings.get("weight_block_size")]
    for group in config_object(settings, "config_groups").values():
        each.append(config_object(group, "weights").get("block_structure") if isinstance(group, dict) else None)
    sizes = {tuple(own) for own in each if isinstance(own, list)}
    return sizes.pop() if len(sizes) == 1 else None


def _spread(scale: Tensor, shape: Sequence[int], block: Sequence[int] | None) -> Tensor:
    """Repeat scales of a whole weight, of its rows, or of blocks, of which the last may be cut, to its shape."""
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    for dim, size in enumerate(shape):
        count = scale.shape[dim]
        width = block[dim] if block and count not in (1, size) else -(-size // count)
        # Without the size of blocks, groups of columns alone are sure: 2 scales of 192 rows may be of 128 and 64.
        sure = count in (1, size) or block or (dim == 1 and size % count == 0)
        if scale.ndim != len(shape) or not sure or -(-size // width) != count:
            raise ValueError(f"scales of {list(scale.shape)} for a weight of {list(shape)}, in blocks of {block}")
        scale = scale.repeat_interleave(width, dim).narrow(dim, 0, size) if count > 1 else scale
    return scale


def _scale(scale: Tensor) -> Tensor:
    """Return scales in float32. Bytes are exponents of 2."""
    return (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()


def _bits(words: int, count: int) -> int:
    """Return the bits of each of so many integers in so many words of 32."""
    if fitting := [bits for bits in (2, 4, 8) if -(-count * bits // 32) == words]:
        return min(fitting, key=lambda bits: -count * bits % 32)
    raise ValueError(f"{count} integers in {words} words of 32 bits, expected 2, 4 or 8 bits each")


def _unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Split words into integers without a sign along a dimension, the lowest bits first."""
    shifts = torch.arange(0, words.element_size() * 8, bits, dtype=words.dtype)
    shape = [-1 if each == dim + 1 else 1 for each in range(words.ndim + 1)]
    return ((words.unsqueeze(dim + 1) >> shifts.view(shape)) & (2**bits - 1)).flatten(dim, dim + 1)


def _fp4(stored: Tensor) -> Tensor:
    """Decode two FP4 numbers a byte, the lower half first."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([positive, -positive])[_unpack(stored, 4, stored.ndim - 1).int()]


def _integers(parts: Mapping[str, Tensor], settings: Mapping[str, object]) -> Tensor:
    """Compute a weight of AutoAWQ or GPTQ, which store its transpose."""
    scales, stored, zeros = parts["scales"].float(), parts["qweight"], parts["qzeros"]  # [G, N]
    bits = _bits(zeros.shape[1], scales.shape[1])
    zeros = _unpack(zeros, bits, 1)
    if settings.get("quant_method") == "awq":
        values = _unpack(stored, 4, 1)
        values, zeros = (own.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1) for own in (values, zeros))
    else:
        values = _unpack(stored, bits, 0)
        # The first format stores zero points less one.
        zeros = zeros + ("gptq_v2" not in (settings.get("checkpoint_format"), settings.get("format")))
    stated = settings.get("group_size")
    size = stated if isinstance(stated, int) and stated > 0 else len(values) // len(scales)
    groups = parts.get("g_idx", torch.arange(len(values)) // size)
    if (int(groups.min()), int(groups.max())) != (0, len(scales) - 1):
        raise ValueError(f"{len(scales)} groups of {size} for {len(values)} inputs")
    return ((values - zeros[groups]) * scales[groups]).T
