"""Detection of a foreign directory's format, by the names and shapes of its tensors before its config.

Loaders go by names; a config is often copied from the target or edited by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import CAN_READ, NOT_YET, ForeignHead, HeadFormat
from draftsmith.modules.types import InputError

TYPE = "speculators_model_type"


def detect(foreign: ForeignHead) -> HeadFormat:
    """Return the format of a directory, one of `formats`.

    Raises:
        InputError: names what it is instead: another public head, a whole model, one of our heads, or unknown.
    """
    named = f", {foreign.architecture}" if foreign.architecture else ""
    for layout in UNSUPPORTED:
        if layout.matches(foreign):
            raise InputError("directory", layout.what + named, CAN_READ, layout.remedy)
    for format in formats().values():
        if format.recognises(foreign):
            return format
    first = ", ".join(sorted(foreign.shapes)[:4]) or "none"
    what = f"tensors of no head that is known ({first}){named}"
    raise InputError("directory", what, CAN_READ, "Check the path, or name its format with --format.")


def named_format(name: str, foreign: ForeignHead) -> HeadFormat:
    """Return the format of this name for the kind of head in a directory, however badly it is written."""
    candidates = [format for (known, _), format in formats().items() if known == name]
    kind = "eagle3" if foreign.eagle3 else "eagle"
    return next((format for format in candidates if format.kind == kind), candidates[0])


def causal_lm(foreign: ForeignHead) -> bool:
    """Return whether this is a whole model: layers and an embedding, and nothing that fuses."""
    stack = r"(language_model\.)?(model\.)?(layers|transformer\.h|h|decoder\.layers|gpt_neox\.layers)\.\d+\."
    embedding = foreign.has(r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings)\.")
    return foreign.has(stack) and embedding and not foreign.has(r"(eh_proj|fc|medusa_heads)\.")


@dataclass(frozen=True)
class UnsupportedLayout:
    """A known kind of directory that is not read, and its marks, of which any decides.

    tensors: begins a tensor's bare name. architecture: begins the first architecture. config: field -> begins its value
    as text. rule: for everything else.
    """

    what: str
    tensors: str | None = None
    architecture: str | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    rule: Callable[[ForeignHead], bool] = lambda foreign: False
    remedy: str = NOT_YET

    def matches(self, foreign: ForeignHead) -> bool:
        values = {name: str(foreign.config[name]) for name in self.config if name in foreign.config}
        return (
            (self.tensors is not None and foreign.has(self.tensors))
            or (self.architecture is not None and re.match(self.architecture, foreign.architecture) is not None)
            or any(re.match(self.config[name], value) is not None for name, value in values.items())
            or self.rule(foreign)
        )


# In this order: a rule may rely on those above it having found nothing.
UNSUPPORTED = (
    UnsupportedLayout(
        "one of draftsmith's own heads",
        rule=lambda found: isinstance(found.config.get("kind"), str) and isinstance(found.config.get("head"), Mapping),
        remedy="It needs no import: pass it with --draft or --acceptance, or write it for others with draftsmith "
        "export.",
    ),
    UnsupportedLayout(
        "an EAGLE head in the old layout of speculators (fusion_fc, transformer)",
        tensors=r"fusion_fc\.|pre_lm_head_layernorm\.",
        config={TYPE: "eagle$"},
    ),
    UnsupportedLayout("a P-EAGLE head of speculators (peagle)", config={TYPE: "peagle$"}),
    UnsupportedLayout("a DFlash head of speculators (dflash)", config={TYPE: "dflash2?$|dspark$"}),
    UnsupportedLayout(
        "a head of speculators",
        config={TYPE: "(?!None$|eagle3$)"},
        rule=lambda found: TYPE not in found.config and "speculators_config" in found.config,
    ),
    UnsupportedLayout("Medusa heads with the whole model around them (medusa_head)", tensors=r"medusa_head\."),
    UnsupportedLayout(
        "Medusa heads in the layout of vLLM's former MedusaModel",
        tensors=r"blocks\.\d+\.layers\.\d+\.",
        architecture="MedusaModel$",
    ),
    UnsupportedLayout(
        "Hydra heads of another make than its grounded MLPs",
        config={"hydra_head_arch": "(?!mlp$|prefix-mlp$)"},
        rule=lambda found: found.has(r"input_embed_fn\.") and not found.has(r"hydra_mlp\."),
    ),
    UnsupportedLayout(
        "a DFlash head",
        architecture=".*(DFlash|DSpark)",
        config={"dflash_config": ""},
        # One norm of all features, beside the layers; EAGLE-3 has it inside its first layer.
        rule=lambda found: "hidden_norm.weight" in found.bare and found.has(r"layers\.\d+\.self_attn\."),
    ),
    UnsupportedLayout("a P-EAGLE head", architecture="(?i)p-?eagle"),
    UnsupportedLayout(
        "an EAGLE head with norms of its inputs or outputs (HASS, add_para_norm)",
        # At the top only: layers of other models have such norms inside.
        tensors=r"(enorm|hnorm|embedding_layernorm|hidden_states_layernorm|(pre_)?lm_head_layernorm)\.weight$",
        config={"add_para_norm": "True"},
    ),
    UnsupportedLayout("an EAGLE head in the layout of vLLM's former EAGLEModel", architecture="EAGLEModel$"),
    UnsupportedLayout(
        "a causal language model", rule=causal_lm, remedy="A whole model drafts as it is: pass it with --draft."
    ),
    UnsupportedLayout(
        "quantised weights",
        tensors=r".*\.(qweight|qzeros|weight_scale|weight_packed|SCB)$",
        config={"quantization_config": "{'"},
        remedy="Import the directory that they were made from.",
    ),
)
