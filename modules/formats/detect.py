"""Detection of a foreign directory's format, by the names and shapes of its tensors before its config.

Loaders go by names; a config is often copied from the target or edited by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import CAN_READ, NOT_YET, ForeignHead, HeadFormat
from draftsmith.modules.types import InputError


def detect(foreign: ForeignHead) -> HeadFormat:
    """Return the format of a directory, one of `formats`.

    Raises:
        InputError: names what it is instead: another public head, a whole model, one of our heads, or unknown.
    """
    named = f", {foreign.architecture}" if foreign.architecture else ""
    for what, matches, remedy in unsupported(foreign):
        if matches:
            raise InputError("directory", what + named, CAN_READ, remedy)
    for format in formats().values():
        if format.recognises(foreign):
            return format
    first = ", ".join(sorted(foreign.shapes)[:4]) or "none"
    what = f"tensors of no head that is known ({first}){named}"
    raise InputError("directory", what, CAN_READ, "Check the path, or name its format with --format.")


def named_format(name: str, foreign: ForeignHead) -> HeadFormat:
    """Return the format of this name for the kind of head in a directory, however badly it is written."""
    candidates = [format for (known, _), format in formats().items() if known == name]
    kind = foreign.block or ("eagle3" if foreign.eagle3 else "eagle")
    return next((format for format in candidates if format.kind == kind), candidates[0])


def causal_lm(foreign: ForeignHead) -> bool:
    """Return whether this is a whole model: layers and an embedding, and nothing that fuses."""
    stack = r"(language_model\.)?(model\.)?(layers|transformer\.h|h|decoder\.layers|gpt_neox\.layers)\.\d+\."
    embedding = foreign.has(r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings)\.")
    return foreign.has(stack) and embedding and not foreign.has(r"(eh_proj|fc|medusa_heads)\.")


def unsupported(foreign: ForeignHead) -> Iterator[tuple[str, bool, str]]:
    """Yield kinds of directories that are not read, whether this is one, and the remedy.

    Listed are those that would pass for a head of ours. Of any other head `read` finds unknown or missing tensors.
    """
    config, name = foreign.config, foreign.architecture.lower()
    own = isinstance(config.get("kind"), str) and isinstance(config.get("head"), Mapping)
    remedy = "It needs no import: pass it with --draft or --acceptance, or write it for others with draftsmith export."
    yield "one of draftsmith's own heads", own, remedy
    speculators = config.get("speculators_model_type", "eagle3" if "speculators_config" not in config else None)
    unread = speculators not in ("eagle3", "dflash", "dspark")
    yield "a head of speculators of a kind that is not read", unread, NOT_YET
    yield "Medusa heads with the whole model around them", foreign.has(r"medusa_head\."), NOT_YET
    hydra = "hydra_head_arch" in config or foreign.has(r"hydra_mlp\.|input_embed_fn\.")
    yield "Hydra heads", hydra, "Train one for this target: draftsmith train hydra."
    yield "a head that drafts several tokens at once (P-EAGLE)", "peagle" in name, NOT_YET
    conv = foreign.has(r"candidate_selector\.|selector_hidden\.|.*conv_(base|proj)")
    other = any(word in name for word in ("dflash", "dspark")) and not foreign.block
    yield "a block drafter whose layers are not Qwen3's", other or (conv and bool(foreign.block)), NOT_YET
    yield "a causal language model", causal_lm(foreign), "A whole model drafts as it is: pass it with --draft."
    quantised = foreign.has(r".*\.(qweight|qzeros|weight_scale|weight_packed|SCB)$")
    yield "quantised weights", quantised, "Import the directory that they were made from."
