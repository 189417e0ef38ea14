"""Whose head a foreign directory holds: from the names and shapes of its tensors first, from its config second.

Names are what a loader goes by; a config is often copied from the target or edited by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.modules.interop import formats
from draftsmith.modules.interop.base import ForeignHead
from draftsmith.modules.types import InputError

CAN_READ = "an EAGLE-1 head (SafeAILab, vLLM, SGLang) or an acceptance head of SpecDec_pp"
LATER = "Importing it is not supported yet."


def detect(config: Mapping[str, Any], names_and_shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The format of a head that this package reads: a name of `formats`.

    Raises:
        InputError: what it is instead: another public head, a whole model, a head of this package, or nothing known.
    """
    found = ForeignHead(config, names_and_shapes)
    for rule in REFUSED:
        if rule.applies(found):
            raise InputError("directory", rule.what + _named(found), CAN_READ, rule.remedy)
    for name, format in formats().items():
        if format.recognises(found):
            return name
    first = ", ".join(sorted(names_and_shapes)[:4]) or "none"
    what = f"tensors of no head that is known ({first}){_named(found)}"
    raise InputError("directory", what, CAN_READ, "Check the path, or name its format with --format.")


def _named(found: ForeignHead) -> str:
    return f", {found.architecture}" if found.architecture else ""


@dataclass(frozen=True)
class KnownFormat:
    """One kind of directory that is known and not read: how it is recognised, what it is, what to do."""

    what: str
    applies: Callable[[ForeignHead], bool]
    remedy: str = LATER


def _speculators(found: ForeignHead, kinds: tuple[str, ...] = ()) -> bool:
    kind = found.config.get("speculators_model_type")
    return kind in kinds if kinds else kind is not None or "speculators_config" in found.config


def _own(found: ForeignHead) -> bool:
    return isinstance(found.config.get("kind"), str) and isinstance(found.config.get("head"), Mapping)


def _old_speculators(found: ForeignHead) -> bool:
    return _speculators(found, ("eagle",)) or found.has(r"fusion_fc\.") or found.has(r"pre_lm_head_layernorm\.")


def _quantised(found: ForeignHead) -> bool:
    packed = any(re.search(r"\.(qweight|qzeros|weight_scale|weight_packed|SCB)$", name) for name in found.shapes)
    return packed or bool(found.config.get("quantization_config"))


def _medusa_with_heads(found: ForeignHead) -> bool:
    return found.has(r"\d+\.\d+\.linear\.") and found.has(r"\d+\.\d+\.weight$")


def _hydra(found: ForeignHead) -> bool:
    by_name = found.has(r"hydra_|prefix_embeding_layer\.|input_embed_fn\.")
    return by_name or any(key.startswith("hydra_") for key in found.config)


def _dflash(found: ForeignHead) -> bool:
    named = re.search(r"DFlash|DSpark", found.architecture) is not None or "dflash_config" in found.config
    # One norm of all features, beside the layers; EAGLE-3 has it inside its first layer.
    return named or ("hidden_norm.weight" in found.bare and found.has(r"layers\.\d+\.self_attn\."))


def _extra_norms(found: ForeignHead) -> bool:
    # At the top only: layers of other models have such norms inside.
    norms = r"(enorm|hnorm|embedding_layernorm|hidden_states_layernorm|(pre_)?lm_head_layernorm)\.weight$"
    return found.has(norms) or bool(found.config.get("add_para_norm"))


def _eagle3(found: ForeignHead) -> bool:
    if found.has(r"midlayer\.|layers\.\d+\.hidden_norm\.|fc_norm\.|aux_norm_|d2t$|t2d$"):
        return True
    query, output = (f"layers.0.self_attn.{name}_proj.weight" for name in ("q", "o"))
    width = found.rows(output)
    if width is not None and found.columns(query) == 2 * width:  # attention reads embedding and feature side by side
        return True
    several = found.columns("fc.weight") is not None and not found.fuses_two and "norm.weight" in found.bare
    named = "eagle3" in found.architecture.lower() or "eagle_config" in found.config
    return several or (named and not found.fuses_two)


def _causal_lm(found: ForeignHead) -> bool:
    """Layers and an embedding, as a whole model has them, and nothing that fuses."""
    stack = r"(language_model\.)?(model\.)?(layers|transformer\.h|h|decoder\.layers|gpt_neox\.layers)\.\d+\."
    embedding = any(re.search(r"(embed_tokens|wte|embed_in|word_embeddings)\.", name) for name in found.bare)
    return found.has(stack) and embedding and not found.has(r"(eh_proj|fc)\.")


# In this order: a rule may rely on those above it having found nothing.
REFUSED = (
    KnownFormat(
        "one of draftsmith's own heads",
        _own,
        "It needs no import: pass it with --draft or --acceptance, or write it for others with draftsmith export.",
    ),
    KnownFormat("an EAGLE head in the old layout of speculators (fusion_fc, transformer)", _old_speculators),
    KnownFormat("a P-EAGLE head of speculators (peagle)", lambda found: _speculators(found, ("peagle",))),
    KnownFormat("an EAGLE-3 head of speculators (eagle3)", lambda found: _speculators(found, ("eagle3",))),
    KnownFormat(
        "a DFlash head of speculators (dflash)", lambda found: _speculators(found, ("dflash", "dflash2", "dspark"))
    ),
    KnownFormat("a head of speculators", _speculators),
    KnownFormat(
        "Medusa heads with the whole model around them (medusa_head)", lambda found: found.has(r"medusa_head\.")
    ),
    KnownFormat("Medusa heads in the layout of a server (medusa_heads)", lambda found: found.has(r"medusa_heads\.")),
    KnownFormat(
        "Medusa heads in the layout of vLLM's former MedusaModel",
        lambda found: found.has(r"blocks\.\d+\.layers\.\d+\.") or found.architecture == "MedusaModel",
    ),
    KnownFormat("Medusa heads (v1, with their own output layers)", _medusa_with_heads),
    KnownFormat("Medusa heads (v2, with the target's output layer)", lambda found: found.has(r"\d+\.\d+\.linear\.")),
    KnownFormat("Hydra heads", _hydra),
    KnownFormat("a DFlash head", _dflash),
    KnownFormat("a P-EAGLE head", lambda found: re.match("p-?eagle", found.architecture, re.IGNORECASE) is not None),
    KnownFormat("an EAGLE-3 head", _eagle3),
    KnownFormat("an EAGLE head with norms of its inputs or outputs (HASS, add_para_norm)", _extra_norms),
    KnownFormat(
        "an EAGLE head in the layout of vLLM's former EAGLEModel", lambda found: found.architecture == "EAGLEModel"
    ),
    KnownFormat("a causal language model", _causal_lm, "A whole model drafts as it is: pass it with --draft."),
    KnownFormat("quantised weights", _quantised, "Import the directory that they were made from."),
)
