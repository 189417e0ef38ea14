"""Whose head a foreign directory holds: from the names and shapes of its tensors first, from its config second.

Names are what a loader goes by; a config is often copied from the target or edited by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import ForeignHead, HeadFormat
from draftsmith.modules.types import InputError

CAN_READ = (
    "an EAGLE-1 or EAGLE-3 head (SafeAILab, vLLM, SGLang, speculators), Medusa heads (FasterDecoding, ModelOpt), Hydra "
    "heads or an acceptance head of SpecDec_pp"
)
LATER = "Importing it is not supported yet."


def detect(config: Mapping[str, Any], names_and_shapes: Mapping[str, tuple[int, ...]]) -> HeadFormat:
    """The format of a head that this package reads: one of `formats`.

    Raises:
        InputError: what it is instead: another public head, a whole model, a head of this package, or nothing known.
    """
    found = ForeignHead(config, names_and_shapes)
    named = f", {found.architecture}" if found.architecture else ""
    for known in REFUSED:
        if known.fits(found):
            raise InputError("directory", known.what + named, CAN_READ, known.remedy)
    for format in formats().values():
        if format.recognises(found):
            return format
    first = ", ".join(sorted(names_and_shapes)[:4]) or "none"
    what = f"tensors of no head that is known ({first}){named}"
    raise InputError("directory", what, CAN_READ, "Check the path, or name its format with --format.")


def named_format(name: str, config: Mapping[str, Any], names_and_shapes: Mapping[str, tuple[int, ...]]) -> HeadFormat:
    """The format of this name that is for the kind of head in a directory, however badly it is written."""
    own = [format for (known, _), format in formats().items() if known == name]
    kind = "eagle3" if ForeignHead(config, names_and_shapes).eagle3 else "eagle"
    return next((format for format in own if format.kind == kind), own[0])


@dataclass(frozen=True)
class KnownFormat:
    """One kind of directory that is known and not read: what it is, what to do, and its marks, of which any decides.

    tensors: what a tensor's bare name begins with. architecture: what the first architecture begins with. config: a
    field, and what its value begins with, as text. rule: what these cannot say.
    """

    what: str
    tensors: str | None = None
    architecture: str | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    rule: Callable[[ForeignHead], bool] = lambda found: False
    remedy: str = LATER

    def fits(self, found: ForeignHead) -> bool:
        values = {name: str(found.config[name]) for name in self.config if name in found.config}
        return (
            (self.tensors is not None and found.has(self.tensors))
            or (self.architecture is not None and re.match(self.architecture, found.architecture) is not None)
            or any(re.match(self.config[name], value) for name, value in values.items())
            or self.rule(found)
        )


def causal_lm(found: ForeignHead) -> bool:
    """Layers and an embedding, as a whole model has them, and nothing that fuses."""
    stack = r"(language_model\.)?(model\.)?(layers|transformer\.h|h|decoder\.layers|gpt_neox\.layers)\.\d+\."
    embedding = found.has(r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings)\.")
    return found.has(stack) and embedding and not found.has(r"(eh_proj|fc|medusa_heads)\.")


TYPE = "speculators_model_type"
# In this order: a rule may rely on those above it having found nothing.
REFUSED = (
    KnownFormat(
        "one of draftsmith's own heads",
        rule=lambda found: isinstance(found.config.get("kind"), str) and isinstance(found.config.get("head"), Mapping),
        remedy="It needs no import: pass it with --draft or --acceptance, or write it for others with draftsmith "
        "export.",
    ),
    KnownFormat(
        "an EAGLE head in the old layout of speculators (fusion_fc, transformer)",
        tensors=r"fusion_fc\.|pre_lm_head_layernorm\.",
        config={TYPE: "eagle$"},
    ),
    KnownFormat("a P-EAGLE head of speculators (peagle)", config={TYPE: "peagle$"}),
    KnownFormat("a DFlash head of speculators (dflash)", config={TYPE: "dflash2?$|dspark$"}),
    KnownFormat(
        "a head of speculators",
        config={TYPE: "(?!None$|eagle3$)"},
        rule=lambda found: TYPE not in found.config and "speculators_config" in found.config,
    ),
    KnownFormat("Medusa heads with the whole model around them (medusa_head)", tensors=r"medusa_head\."),
    KnownFormat(
        "Medusa heads in the layout of vLLM's former MedusaModel",
        tensors=r"blocks\.\d+\.layers\.\d+\.",
        architecture="MedusaModel$",
    ),
    KnownFormat(
        "Hydra heads of another make than its grounded MLPs",
        config={"hydra_head_arch": "(?!mlp$|prefix-mlp$)"},
        rule=lambda found: found.has(r"input_embed_fn\.") and not found.has(r"hydra_mlp\."),
    ),
    KnownFormat(
        "a DFlash head",
        architecture=".*(DFlash|DSpark)",
        config={"dflash_config": ""},
        # One norm of all features, beside the layers; EAGLE-3 has it inside its first layer.
        rule=lambda found: "hidden_norm.weight" in found.bare and found.has(r"layers\.\d+\.self_attn\."),
    ),
    KnownFormat("a P-EAGLE head", architecture="(?i)p-?eagle"),
    KnownFormat(
        "an EAGLE head with norms of its inputs or outputs (HASS, add_para_norm)",
        # At the top only: layers of other models have such norms inside.
        tensors=r"(enorm|hnorm|embedding_layernorm|hidden_states_layernorm|(pre_)?lm_head_layernorm)\.weight$",
        config={"add_para_norm": "True"},
    ),
    KnownFormat("an EAGLE head in the layout of vLLM's former EAGLEModel", architecture="EAGLEModel$"),
    KnownFormat(
        "a causal language model", rule=causal_lm, remedy="A whole model drafts as it is: pass it with --draft."
    ),
    KnownFormat(
        "quantised weights",
        tensors=r".*\.(qweight|qzeros|weight_scale|weight_packed|SCB)$",
        config={"quantization_config": "{'"},
        remedy="Import the directory that they were made from.",
    ),
)
