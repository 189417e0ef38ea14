"""Whose head a foreign directory holds: from the names and shapes of its tensors first, from its config second.

Names are what a loader goes by; a config is often copied from the target or edited by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.modules.interop.acceptance import FORMAT
from draftsmith.modules.types import InputError

CAN_READ = "an EAGLE-1 head (SafeAILab, vLLM, SGLang) or an acceptance head of SpecDec_pp"
SGLANG_CLASS = "LlamaForCausalLMEagle"
LATER = "Importing it is not supported yet."


@dataclass(frozen=True)
class Seen:
    """A foreign directory without its values. names: as stored; bare: without the prefix `model.`."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    bare: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bare", {name.removeprefix("model."): shape for name, shape in self.shapes.items()})

    @property
    def architecture(self) -> str:
        """The first of `architectures`, which every system goes by; empty where there is none."""
        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) and first.isprintable() else ""

    def has(self, pattern: str) -> bool:
        """Does a tensor's bare name begin with this?"""
        return any(re.match(pattern, name) for name in self.bare)

    def columns(self, name: str) -> int | None:
        """Inputs of a linear layer; None where there is no such matrix."""
        return _at(self.bare.get(name), 1)

    def rows(self, name: str) -> int | None:
        """Outputs of a linear layer; None where there is no such matrix."""
        return _at(self.bare.get(name), 0)

    @property
    def fuses_two(self) -> bool:
        """EAGLE-1's mark: fc reads an embedding and one feature, both of the width that it gives."""
        width = self.rows("fc.weight")
        return width is not None and self.columns("fc.weight") == 2 * width


def _at(shape: tuple[int, ...] | None, index: int) -> int | None:
    return shape[index] if shape is not None and len(shape) == 2 else None


def detect(config: Mapping[str, Any], names_and_shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The format of a head that this package reads: a name of `FORMATS`.

    Raises:
        InputError: what it is instead: another public head, a whole model, a head of this package, or nothing known.
    """
    seen = Seen(config, names_and_shapes)
    for rule in REFUSED:
        if rule.applies(seen):
            raise InputError("directory", rule.what + _named(seen), CAN_READ, rule.remedy)
    if seen.config.get("format") == FORMAT:
        return "acceptance"
    if is_specdec_pp(seen):
        return "specdec_pp"
    if seen.fuses_two:
        return eagle_format(seen)
    first = ", ".join(sorted(names_and_shapes)[:4]) or "none"
    found = f"tensors of no head that is known ({first}){_named(seen)}"
    raise InputError("directory", found, CAN_READ, "Check the path, or name its format with --format.")


def _named(seen: Seen) -> str:
    return f", {seen.architecture}" if seen.architecture else ""


def eagle_format(seen: Seen) -> str:
    """Whose EAGLE-1 it is. SafeAILab's code and vLLM share a directory; what only one of them reads decides."""
    name = seen.architecture
    if name == "EagleLlamaForCausalLM":
        return "vllm"
    if name not in ("", "LlamaForCausalLM", SGLANG_CLASS):
        raise InputError("directory", f"an EAGLE-1 head of the architecture {name}", CAN_READ, LATER)
    if name == SGLANG_CLASS and _sglang_fills_all(seen):
        return "sglang"
    if "fc.bias" in seen.bare:  # vLLM drops it
        return "eagle"
    # SafeAILab's layer has head_dim = width / heads, no bias but, with qkv_bias, those of q, k and v, and its rope
    # settings are rope_theta and {type, factor} (eagle/model/cnets1.py).
    wide = seen.rows("layers.0.self_attn.q_proj.weight") not in (None, seen.rows("fc.weight"))
    biased = seen.has(r"layers\.\d+\.(self_attn\.o_proj|mlp\.\w+)\.bias$")
    biased |= seen.has(r"layers\.\d+\.self_attn\.q_proj\.bias$") and "qkv_bias" not in seen.config
    newer = "rope_parameters" in seen.config and "rope_theta" not in seen.config
    rope = seen.config.get("rope_scaling")
    simple = not rope or (isinstance(rope, Mapping) and rope.keys() == {"type", "factor"})
    if not (wide or biased or newer) and simple:
        return "eagle"  # under SGLang's class name too, which SafeAILab's code does not read
    return "sglang" if name == SGLANG_CLASS else "vllm"


def _sglang_fills_all(seen: Seen) -> bool:
    """SGLang's fusion layer always has a bias, and `bias` or `attention_bias` gives q, k and v theirs: it draws at
    random what the file lacks, and drops what it has besides."""
    asked = bool(seen.config.get("bias") or seen.config.get("attention_bias"))
    return "fc.bias" in seen.bare and asked == seen.has(r"layers\.\d+\.self_attn\.q_proj\.bias$")


def is_specdec_pp(seen: Seen) -> bool:
    """Residual blocks numbered in one Sequential, and a last layer of two classes (SpecDec_pp, wrap_model.py)."""
    names = [re.fullmatch(r"model\.(\d+)\.(linear\.)?(weight|bias)", name) for name in seen.shapes]
    found = [name for name in names if name is not None]
    if not found or len(found) != len(names):
        return False
    last = [name[1] for name in found if name[2] is None and name[3] == "weight"]
    return len(last) == 1 and _at(seen.shapes[f"model.{last[0]}.weight"], 0) == 2


@dataclass(frozen=True)
class Rule:
    """One kind of directory that is known and not read: how it is recognised, what it is, what to do."""

    what: str
    applies: Callable[[Seen], bool]
    remedy: str = LATER


def _speculators(seen: Seen, kinds: tuple[str, ...] = ()) -> bool:
    kind = seen.config.get("speculators_model_type")
    return kind in kinds if kinds else kind is not None or "speculators_config" in seen.config


def _own(seen: Seen) -> bool:
    return seen.config.get("kind") in ("eagle", "acceptance") and isinstance(seen.config.get("head"), Mapping)


def _old_speculators(seen: Seen) -> bool:
    return _speculators(seen, ("eagle",)) or seen.has(r"fusion_fc\.") or seen.has(r"pre_lm_head_layernorm\.")


def _quantised(seen: Seen) -> bool:
    packed = any(re.search(r"\.(qweight|qzeros|weight_scale|weight_packed|SCB)$", name) for name in seen.shapes)
    return packed or bool(seen.config.get("quantization_config"))


def _medusa_with_heads(seen: Seen) -> bool:
    return seen.has(r"\d+\.\d+\.linear\.") and seen.has(r"\d+\.\d+\.weight$")


def _hydra(seen: Seen) -> bool:
    by_name = seen.has(r"hydra_|prefix_embeding_layer\.|input_embed_fn\.")
    return by_name or any(key.startswith("hydra_") for key in seen.config)


def _dflash(seen: Seen) -> bool:
    named = re.search(r"DFlash|DSpark", seen.architecture) is not None or "dflash_config" in seen.config
    # One norm of all features, beside the layers; EAGLE-3 has it inside its first layer.
    return named or ("hidden_norm.weight" in seen.bare and seen.has(r"layers\.\d+\.self_attn\."))


def _extra_norms(seen: Seen) -> bool:
    # At the top only: layers of other models have such norms inside.
    norms = r"(enorm|hnorm|embedding_layernorm|hidden_states_layernorm|(pre_)?lm_head_layernorm)\.weight$"
    return seen.has(norms) or bool(seen.config.get("add_para_norm"))


def _eagle3(seen: Seen) -> bool:
    if seen.has(r"midlayer\.|layers\.\d+\.hidden_norm\.|fc_norm\.|aux_norm_|d2t$|t2d$"):
        return True
    query, output = (f"layers.0.self_attn.{name}_proj.weight" for name in ("q", "o"))
    width = seen.rows(output)
    if width is not None and seen.columns(query) == 2 * width:  # attention reads embedding and feature side by side
        return True
    several = seen.columns("fc.weight") is not None and not seen.fuses_two and "norm.weight" in seen.bare
    named = "eagle3" in seen.architecture.lower() or "eagle_config" in seen.config
    return several or (named and not seen.fuses_two)


def _causal_lm(seen: Seen) -> bool:
    """Layers and an embedding, as a whole model has them, and nothing that fuses."""
    stack = r"(language_model\.)?(model\.)?(layers|transformer\.h|h|decoder\.layers|gpt_neox\.layers)\.\d+\."
    embedding = any(re.search(r"(embed_tokens|wte|embed_in|word_embeddings)\.", name) for name in seen.bare)
    return seen.has(stack) and embedding and not seen.has(r"(eh_proj|fc)\.")


# In this order: a rule may rely on those above it having found nothing.
REFUSED = (
    Rule(
        "one of draftsmith's own heads",
        _own,
        "It needs no import: pass it with --eagle or --acceptance, or write it for others with draftsmith export.",
    ),
    Rule("an EAGLE head in the old layout of speculators (fusion_fc, transformer)", _old_speculators),
    Rule("a P-EAGLE head of speculators (peagle)", lambda seen: _speculators(seen, ("peagle",))),
    Rule("an EAGLE-3 head of speculators (eagle3)", lambda seen: _speculators(seen, ("eagle3",))),
    Rule("a DFlash head of speculators (dflash)", lambda seen: _speculators(seen, ("dflash", "dflash2", "dspark"))),
    Rule("a head of speculators", _speculators),
    Rule("Medusa heads with the whole model around them (medusa_head)", lambda seen: seen.has(r"medusa_head\.")),
    Rule("Medusa heads in the layout of a server (medusa_heads)", lambda seen: seen.has(r"medusa_heads\.")),
    Rule(
        "Medusa heads in the layout of vLLM's former MedusaModel",
        lambda seen: seen.has(r"blocks\.\d+\.layers\.\d+\.") or seen.architecture == "MedusaModel",
    ),
    Rule("Medusa heads (v1, with their own output layers)", _medusa_with_heads),
    Rule("Medusa heads (v2, with the target's output layer)", lambda seen: seen.has(r"\d+\.\d+\.linear\.")),
    Rule("Hydra heads", _hydra),
    Rule("a DFlash head", _dflash),
    Rule("a P-EAGLE head", lambda seen: re.match("p-?eagle", seen.architecture, re.IGNORECASE) is not None),
    Rule("an EAGLE-3 head", _eagle3),
    Rule("an EAGLE head with norms of its inputs or outputs (HASS, add_para_norm)", _extra_norms),
    Rule("an EAGLE head in the layout of vLLM's former EAGLEModel", lambda seen: seen.architecture == "EAGLEModel"),
    Rule("a causal language model", _causal_lm, "A whole model drafts as it is: pass it with --draft."),
    Rule("quantised weights", _quantised, "Import the directory that they were made from."),
)
