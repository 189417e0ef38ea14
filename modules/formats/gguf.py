"""Names and rotary layout in GGUF files: models of the Llama family, EAGLE-3 heads and block drafters.

Written from llama.cpp's src/llama-arch.cpp, conversion/llama.py and qwen.py, src/models/eagle3.cpp and dflash.cpp. A
head's file holds the target's tokenizer too. `head_to_gguf` and `head_from_gguf` map between such a file and a
directory in vLLM's layout, so that settings and tensors are read by the rules of the other formats.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.block import OUTPUTS, SELECTOR, SOFTCAP, settings, windows
from draftsmith.modules.formats.llama import IDS, Fields, layer_ids, rope_fields, to_adjacent, to_halves
from draftsmith.modules.llama_config import LlamaConfig, RopeScaling, llama_sizes
from draftsmith.modules.rotary import rope_attention_scale, rope_frequencies
from draftsmith.modules.types import InputError

# Modules of a decoder layer in transformers' files -> in GGUF, each with .weight or .bias.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",  # of DFlash2, as the next
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
# The same of the modules around the layers: of a whole model, and of a head's directory by the architecture of its
# file. A tied model has no output.weight.
NAMES = {
    "model": {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    "eagle3": {
        "fc": "fc",
        "input_norm": "enc.output_norm",
        "norm": "output_norm",
        "lm_head": "output",
        "embed_tokens": "token_embd",
        **{f"midlayer.{ours}": f"blk.0.{theirs}" for ours, theirs in LAYER_NAMES.items()},
        "midlayer.hidden_norm": "blk.0.attn_norm_2",
    },
    "dflash": {
        "fc": "fc",
        "hidden_norm": "enc.output_norm",
        "norm": "output_norm",
        "lm_head": "output",
        "markov_head.markov_w1": "markov_w1",
        "markov_head.markov_w2": "markov_w2",
        "confidence_head.proj": "conf_proj",
        "candidate_selector.hidden_projection": "selector_hidden",
    },
}
# Parameters of DFlash2 that are no module's weight or bias in directories; names inside a layer or outside of all.
PARAMETERS = {
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
}
HEADS = ("eagle3", "dflash")
LAYERS = {"model": "model.layers.", "dflash": "layers."}  # in front of a layer's number
REMEDY = "Use another model, or its transformers directory."
# Architectures whose rotary pairs are neighbors (0, 1) in GGUF, and halves (0, d/2) in transformers' files. "dflash",
# of DSpark too, keeps halves.
ADJACENT_ROPE = ("llama", "eagle3")
BETAS = (32.0, 1.0)  # of YaRN in llama.cpp


def llama_metadata(kind: str, llama: LlamaConfig) -> Fields:
    """Return the metadata of a model or head of architecture `kind` with Llama's layers.

    What a rotary scaling does to frequencies may be the tensor `rope_freqs.weight` (`rope_divisors`).
    """
    metadata: Fields = {
        "block_count": llama.num_layers,
        "context_length": llama.max_position,
        "embedding_length": llama.hidden_size,
        "feed_forward_length": llama.intermediate_size,
        "attention.head_count": llama.num_heads,
        "attention.head_count_kv": llama.num_kv_heads,
        "attention.key_length": llama.head_dim,
        "attention.value_length": llama.head_dim,
        "attention.layer_norm_rms_epsilon": llama.rms_eps,
        "rope.freq_base": llama.rope_theta,
        "rope.dimension_count": llama.rotary_dim,
        "vocab_size": llama.vocab_size,
    }
    scaling = llama.rope_scaling
    if scaling.kind == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    elif scaling.kind == "yarn":
        # llama.cpp multiplies the usual scale into its own YaRN. With type "none" it reads the attention factor alone.
        scale, usual = rope_attention_scale(scaling), rope_attention_scale(RopeScaling("yarn", scaling.factor))
        metadata |= {
            "rope.scaling.type": "yarn" if has_yarn(scaling) else "none",
            "rope.scaling.factor": float(scaling.factor),
            "rope.scaling.original_context_length": scaling.original_max_position,
            "rope.scaling.yarn_beta_fast": scaling.beta_fast,
            "rope.scaling.yarn_beta_slow": scaling.beta_slow,
            "rope.scaling.attn_factor": scale / usual if has_yarn(scaling) else scale,
        }
    return {f"{kind}.{name}": value for name, value in metadata.items()}


def has_yarn(scaling: RopeScaling) -> bool:
    """Return whether llama.cpp computes this YaRN: it rounds the ends of the ramp, and reads no betas for heads."""
    return scaling.truncate and (scaling.beta_fast, scaling.beta_slow) == BETAS


def rope_divisors(kind: str, llama: LlamaConfig) -> dict[str, Tensor]:
    """Return `rope_freqs.weight`, which divides the rotary frequencies, for scalings that llama.cpp does not compute.

    They are Llama 3's, and YaRN's of other ramps, as gpt-oss's. Its length is rotary_dim / 2, of "dflash" head_dim / 2.
    """
    scaling = llama.rope_scaling
    if scaling.kind != "llama3" and (scaling.kind != "yarn" or has_yarn(scaling)):
        return {}
    plain = dataclasses.replace(llama, rope_scaling=RopeScaling(partial_rotary_factor=scaling.partial_rotary_factor))
    divisors = rope_frequencies(plain) / rope_frequencies(llama)
    unused = llama.head_dim // 2 - len(divisors) if kind == "dflash" else 0
    return {"rope_freqs.weight": F.pad(divisors, (0, unused), value=1.0)}


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Settings in a GGUF file, by their names behind that of the architecture `kind`."""

    kind: str
    fields: Mapping[str, object]

    def get(self, name: str, default: object = None) -> object:
        return self.fields.get(f"{self.kind}.{name}", default)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number; raise InputError if there is none."""
        value = self.get(name, default)
        if not isinstance(value, int | float):
            found = "nothing" if value is None else value
            raise InputError(f"{self.kind}.{name}", found, "one number, for all layers", REMEDY)
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return an integer above 0; raise InputError if there is none."""
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{self.kind}.{name}", value, "one number above 0, for all layers", REMEDY)
        return value

    def listed(self, name: str) -> list[object] | None:
        """Return a list; None if there is none."""
        value = self.get(name)
        return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None


def read_layers(kind: str, fields: Mapping[str, object], divisors: Tensor | None) -> Fields:
    """Return sizes and rotary settings of a GGUF file as fields of `config.json`, as llama.cpp reads them.

    kind: the architecture (src/llama-model.cpp, load_hparams). divisors: the file's `rope_freqs.weight`.

    Raises:
        InputError: a setting is missing, or one that our layers do not compute with.
    """
    metadata = Metadata(kind, fields)
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    sizes: Fields = {
        "hidden_size": hidden,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": metadata.size("attention.key_length", hidden // heads),
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": shortest(metadata.number("attention.layer_norm_rms_epsilon")),
    }
    theta = shortest(metadata.number("rope.freq_base", 10000.0))
    scaling = _read_rope(metadata, llama_sizes({**sizes, "rope_theta": theta}), divisors)
    return sizes | {"rope_parameters": {**rope_fields(scaling), "rope_theta": theta}}


def _read_rope(metadata: Metadata, plain: LlamaConfig, divisors: Tensor | None) -> RopeScaling:
    """Return the rotary scaling. plain: sizes and rotary base."""
    kind = metadata.kind
    # Without a type the scaling is linear, and a factor of 0 is none. scale_linear is the name in files of 2023.
    scaling = metadata.get("rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0))
    rotated = metadata.size("rope.dimension_count", plain.head_dim)
    scale = metadata.number("rope.scaling.attn_factor", 1.0)
    is_scaled = scaling == "yarn" or (scaling == "none" and divisors is not None)
    for name, value, allowed in (
        ("attention.value_length", metadata.get("attention.value_length", plain.head_dim), (plain.head_dim,)),
        ("rope.dimension_count", rotated, range(2, plain.head_dim + 1, 2) if kind in HEADS else (plain.head_dim,)),
        ("rope.scaling.attn_factor", scale, (scale if is_scaled else 1.0,)),
        ("rope.scaling.yarn_log_multiplier", metadata.get("rope.scaling.yarn_log_multiplier", 0.0), (0.0,)),
        ("rope.scaling.type", scaling, ("none", "linear", "yarn")),
    ):
        if value not in allowed:
            raise InputError(f"{kind}.{name}", value, " or ".join(map(str, allowed)), REMEDY)
    part = RopeScaling(partial_rotary_factor=rotated / plain.head_dim)
    fast, slow = (metadata.number(f"rope.scaling.yarn_beta_{end}", 1.0) for end in ("fast", "slow"))
    fast, slow = BETAS if scaling == "yarn" else (fast, slow)
    yarn = dataclasses.replace(
        part,
        kind="yarn",
        factor=shortest(factor) or 1.0,
        original_max_position=metadata.size("rope.scaling.original_context_length", plain.max_position),
        beta_fast=shortest(fast),
        beta_slow=shortest(slow),
    )
    usual = rope_attention_scale(yarn)
    scale = scale * usual if scaling == "yarn" else scale
    if not math.isclose(scale, usual, rel_tol=1e-6):
        yarn = dataclasses.replace(yarn, attention_factor=shortest(scale))
    is_linear = scaling == "linear" and factor not in (0, 1)
    if divisors is None:
        linear = dataclasses.replace(part, kind="linear", factor=shortest(factor) or 1.0)
        return yarn if scaling == "yarn" else linear if is_linear else part
    length = plain.head_dim // 2 if kind == "dflash" else rotated // 2
    if is_linear or scaling == "yarn" or divisors.shape != (length,):
        found = f"{list(divisors.shape)}{f', beside {scaling} scaling' if is_linear or scaling == 'yarn' else ''}"
        raise InputError("rope_freqs.weight", found, f"[{length}], without another scaling", REMEDY)
    # Only the effect on each frequency is stored. All published models have Llama 3's own numbers but for the factor.
    tried = [dataclasses.replace(part, kind="llama3", factor=shortest(float(divisors.max())))]
    if factor not in (0, 1):
        tried = [dataclasses.replace(yarn, truncate=False), yarn]
    base, *scaled = (rope_frequencies(dataclasses.replace(plain, rope_scaling=one)) for one in (part, *tried))
    given = base / divisors[: len(base)].float()
    for one, frequencies in zip(tried, scaled, strict=True):
        if torch.allclose(given, frequencies, rtol=1e-4, atol=0):
            return one
    raise InputError("rope_freqs.weight", "another scaling", "Llama 3's of 8,192 positions, or YaRN's", REMEDY)


def shortest(value: float) -> float:
    """Return the shortest decimal number of a float32: GGUF stores 1e-5 as 9.999999747e-06."""
    return float(format(value, ".7g"))


def gguf_name(kind: str, name: str) -> str | None:
    """Return the name in a GGUF file of a tensor; None if such files do not hold it. kind: of NAMES."""
    layer = re.fullmatch(rf"{LAYERS.get(kind)}(\d+)\.(.+)", name)
    known = _renamed(layer[2] if layer else name, LAYER_NAMES if layer else NAMES[kind], PARAMETERS)
    return f"blk.{layer[1]}.{known}" if layer and known else known


def directory_name(kind: str, name: str) -> str | None:
    """Return the name in a directory of a tensor in a GGUF file; None for an unknown one. kind: of NAMES."""
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name) if kind in LAYERS else None
    modules, parameters = (
        {theirs: ours for ours, theirs in table.items()}
        for table in (LAYER_NAMES if layer else NAMES[kind], PARAMETERS)
    )
    known = _renamed(layer[2] if layer else name, modules, parameters)
    return f"{LAYERS[kind]}{layer[1]}.{known}" if layer and known else known


def _renamed(name: str, modules: Mapping[str, str], parameters: Mapping[str, str]) -> str | None:
    module, _, part = name.rpartition(".")
    return parameters.get(name) or (f"{modules[module]}.{part}" if module in modules else None)


def reordered(
    kind: str,
    name: str,
    tensor: Tensor,
    llama: LlamaConfig,
    reorder: Callable[[Tensor, int, int | None], Tensor],
) -> Tensor:
    """Reorder a tensor of q or k if GGUF files of this architecture hold rotary pairs as neighbors.

    name: in a directory. llama: sizes. reorder: `to_adjacent` or `to_halves`.
    """
    if kind not in ADJACENT_ROPE or not re.search(r"[qk]_proj\.", name):
        return tensor
    return reorder(tensor, len(tensor) // llama.head_dim, llama.rotary_dim)


def head_to_gguf(package: Package) -> tuple[Fields, dict[str, Tensor]]:
    """Return metadata and tensors of a head's GGUF file; the tokenizer's other fields are the caller's."""
    raw, kind = settings(package.config), str(package.config["gguf"])
    llama = llama_sizes(raw)
    tensors = rope_divisors(kind, llama)
    for name, tensor in package.tensors.items():
        if name == "d2t":
            # The target's ids, where other systems store what is added to the drafted one.
            tensors["d2t"] = tensor + torch.arange(len(tensor))
        elif name != "t2d":
            tensors[str(gguf_name(kind, name))] = reordered(kind, name, tensor, llama, to_adjacent)
    if kind == "eagle3":
        own: Fields = {
            "target_layers": [*(layer_ids(raw) or ())],
            "target_hidden_size": llama.hidden_size,
            "norm_before_residual": bool(raw.get("norm_before_residual")),
            "norm_before_fc": bool(raw.get("norm_before_fc")),
        }
        return llama_metadata(kind, llama) | {f"{kind}.{name}": value for name, value in own.items()}, tensors
    span = windows(raw, llama.num_layers, 1)
    own = {
        "target_layers": [number + 1 for number in layer_ids(raw, field=OUTPUTS) or ()],
        "block_size": raw["block_size"],
        "sample_from_anchor": bool(raw["sample_from_anchor"]),
        "has_confidence_head": bool(raw.get("enable_confidence_head")),
        "attention.causal": span.causal,
    }
    if span.window is not None:
        pattern = [layer not in span.full_layers for layer in range(llama.num_layers)]
        own |= {"attention.sliding_window": span.window, "attention.sliding_window_pattern": pattern}
    own |= {name: raw[name] for name in (*SELECTOR.values(), SOFTCAP) if raw.get(name)}
    metadata = llama_metadata(kind, llama) | {f"{kind}.{name}": value for name, value in own.items()}
    return metadata | {"tokenizer.ggml.mask_token_id": raw["mask_token_id"]}, tensors


def head_from_gguf(fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Package:
    """Return a head's GGUF file as a directory in vLLM's layout. fields: its metadata.

    Raises:
        InputError: metadata are missing, or other ones than our layers compute with.
    """
    kind = str(fields["general.architecture"])
    metadata, layers = Metadata(kind, fields), read_layers(kind, fields, tensors.get("rope_freqs.weight"))
    if (numbers := metadata.listed("target_layers")) is None:
        found = f"a GGUF file without {kind}.target_layers"
        raise InputError("directory", found, "it", "Export the head again.")
    words = fields.get("tokenizer.ggml.tokens")
    vocab_size = metadata.size("vocab_size", len(words) if isinstance(words, Sequence) else None)
    config: Fields = {"gguf": kind, "vocab_size": vocab_size, **layers}
    if "output.weight" in tensors:
        config["draft_vocab_size"] = len(tensors["output.weight"])
    if kind == "eagle3":
        config |= {
            IDS: numbers,
            "norm_before_residual": bool(metadata.get("norm_before_residual")),
            "norm_before_fc": bool(metadata.get("norm_before_fc")),
        }
    else:
        markov = tensors.get("markov_w1.weight")
        slides = metadata.listed("attention.sliding_window_pattern") or []
        config |= {
            "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
            "sliding_window": metadata.get("attention.sliding_window"),
            "use_sliding_window": True,
            "is_causal": bool(metadata.get("attention.causal")),
            OUTPUTS: [number - 1 for number in numbers if isinstance(number, int)],
            "block_size": metadata.get("block_size"),
            "mask_token_id": fields.get("tokenizer.ggml.mask_token_id"),
            # A file without a Markov head is drafted with as DFlash, whatever it says.
            "sample_from_anchor": markov is not None and bool(metadata.get("sample_from_anchor", True)),
            "markov_rank": 0 if markov is None else markov.shape[-1],
            "enable_confidence_head": bool(metadata.get("has_confidence_head", "conf_proj.weight" in tensors)),
            **{name: value for name in (*SELECTOR.values(), SOFTCAP) if (value := metadata.get(name)) is not None},
        }
    llama = llama_sizes(layers)
    package: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "d2t":
            package["d2t"] = tensor - torch.arange(len(tensor))
        elif name != "rope_freqs.weight":
            known = directory_name(kind, name) or name
            package[known] = reordered(kind, known, tensor, llama, to_halves)
    return Package(config, package)
