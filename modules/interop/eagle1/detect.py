"""Whose EAGLE-1 head a directory holds, of the three systems that share its layout."""

from __future__ import annotations

from collections.abc import Mapping

from draftsmith.modules.interop.base import ForeignHead
from draftsmith.modules.interop.detect import CAN_READ, LATER
from draftsmith.modules.types import InputError

SGLANG_CLASS = "LlamaForCausalLMEagle"  # no other system has it


def producer(found: ForeignHead) -> str:
    """Whose EAGLE-1 it is. SafeAILab's code and vLLM share a directory; what only one of them reads decides."""
    name = found.architecture
    if name == "EagleLlamaForCausalLM":
        return "vllm"
    if name not in ("", "LlamaForCausalLM", SGLANG_CLASS):
        raise InputError("directory", f"an EAGLE-1 head of the architecture {name}", CAN_READ, LATER)
    if name == SGLANG_CLASS and _sglang_fills_all(found):
        return "sglang"
    if "fc.bias" in found.bare:  # vLLM drops it
        return "eagle"
    # SafeAILab's layer has head_dim = width / heads, no bias but, with qkv_bias, those of q, k and v, and its rope
    # settings are rope_theta and {type, factor} (eagle/model/cnets1.py).
    wide = found.rows("layers.0.self_attn.q_proj.weight") not in (None, found.rows("fc.weight"))
    biased = found.has(r"layers\.\d+\.(self_attn\.o_proj|mlp\.\w+)\.bias$")
    biased |= found.has(r"layers\.\d+\.self_attn\.q_proj\.bias$") and "qkv_bias" not in found.config
    newer = "rope_parameters" in found.config and "rope_theta" not in found.config
    rope = found.config.get("rope_scaling")
    simple = not rope or (isinstance(rope, Mapping) and rope.keys() == {"type", "factor"})
    if not (wide or biased or newer) and simple:
        return "eagle"  # under SGLang's class name too, which SafeAILab's code does not read
    return "sglang" if name == SGLANG_CLASS else "vllm"


def _sglang_fills_all(found: ForeignHead) -> bool:
    """SGLang's fusion layer always has a bias, and `bias` or `attention_bias` gives q, k and v theirs: it draws at
    random what the file lacks, and drops what it has besides."""
    asked = bool(found.config.get("bias") or found.config.get("attention_bias"))
    return "fc.bias" in found.bare and asked == found.has(r"layers\.\d+\.self_attn\.q_proj\.bias$")
