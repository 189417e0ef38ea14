"""Whose directory is this: the kind of a foreign head by names and shapes of its tensors, its system by who reads it.

Loaders go by names; a config is often copied from the target or edited by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import HeadFormat, Package, TargetFacts
from draftsmith.modules.formats.block import KINDS
from draftsmith.modules.formats.eagle1 import LAST_NORM
from draftsmith.modules.formats.llama import architecture, inner_object
from draftsmith.modules.formats.systems import EAGLE1_CLASSES
from draftsmith.modules.types import InputError

CAN_READ = "an EAGLE-1, EAGLE-3, DFlash, DFlash2 or DSpark head, or an acceptance head of SpecDec_pp"
NOT_YET = "Importing it is not supported yet."
NAMES = ("architectures", "model_type")  # fields
SELECTS = r"candidate_selector\.predecessor_codebook$"  # of DFlash2


def detect(package: Package, target: TargetFacts | None = None) -> HeadFormat:
    """Return the format of a directory, one of `formats`.

    An export of ours records it, and some systems' directories have a mark that no other's has. Any other directory is
    that of the system that finds least wrong in it: of those that read it alike, the first of the table.

    Raises:
        InputError: as of `head_kind`.
    """
    if package.exported and (known := formats().get((package.exported["format"], package.exported["kind"]))):
        return known
    kind = head_kind(package)
    readers = [format for format in formats().values() if format.kind == kind]
    if marked := [format for format in readers if format.wrote(package)]:
        return marked[0]
    # Trainers' own formats, which are only read, have a mark.
    servers = [format for format in readers if format.writes] or readers
    return min(servers, key=lambda format: misread(format, package, target))


def misread(format: HeadFormat, package: Package, target: TargetFacts | None) -> tuple[float, bool]:
    """Return how many things a system misreads in a directory, infinity if it refuses it, and if it has another's name.

    Names are often copied from the target or edited, and a target that is not served is no fault of the directory.
    """
    try:
        problems = [one for one in format.read(package, target).problems if one.where not in ("target", *NAMES)]
    except InputError:
        return math.inf, True
    return len(problems), architecture(package.config) not in format.classes


def named_format(name: str, package: Package) -> HeadFormat:
    """Return the format of this name for the kind of head in a directory, however badly it is written."""
    candidates = [format for (known, _), format in formats().items() if known == name]
    kind = Names(package).kind or "eagle"
    return next((format for format in candidates if format.kind == kind), candidates[0])


def head_kind(package: Package) -> str:
    """Return the kind of our heads that a directory holds.

    Raises:
        InputError: another public head, a whole model, one of our heads, or an unknown directory; it says which.
    """
    names = Names(package)
    named = f", {names.architecture}" if names.architecture else ""
    for what, matches, remedy in unsupported(names):
        if matches:
            raise InputError("directory", what + named, CAN_READ, remedy)
    if is_specdec_pp(names.shapes):
        return "acceptance"
    if names.kind:
        return names.kind
    first = ", ".join(sorted(names.shapes)[:4]) or "none"
    what = f"tensors of no head that is known ({first}){named}"
    raise InputError("directory", what, CAN_READ, "Check the path, or name its format with --format.")


class Names:
    """Config, names and shapes of a foreign directory. bare: shapes by names without the prefix `model.`."""

    def __init__(self, package: Package):
        self.config = package.config
        self.shapes = {name: tuple(tensor.shape) for name, tensor in package.tensors.items()}
        self.bare = {name.removeprefix("model."): shape for name, shape in self.shapes.items()}
        self.architecture = architecture(package.config)

    def has(self, pattern: str) -> bool:
        """Return whether a tensor's bare name begins with this regular expression."""
        return any(re.match(pattern, name) for name in self.bare)

    def size(self, name: str, dim: int) -> int | None:
        """Return the rows (0) or columns (1) of a matrix; None if there is no such matrix."""
        shape = self.bare.get(name)
        return shape[dim] if shape is not None and len(shape) == 2 else None

    @property
    def fuses_two(self) -> bool:
        """Mark of EAGLE-1: fc reads an embedding and one feature, both as wide as its output."""
        width = self.size("fc.weight", 0)
        return width is not None and self.size("fc.weight", 1) == 2 * width

    @property
    def block(self) -> str:
        """The kind of a block drafter, `dflash`, `dflash2` or `dspark`; empty for any other head.

        One norm of all features stands beside the layers; EAGLE-3 has it inside its first layer.
        """
        name = self.architecture.lower()
        named = name.startswith(("dflash", "qwen3dflash", "dspark", "qwen3dspark", "lfm2dspark"))
        others = not named and any(word in name for word in ("dflash", "dspark", "peagle", "domino"))
        if others or ("hidden_norm.weight" not in self.bare and not named):
            return ""
        inner = inner_object(self.config, "dflash_config")
        ranked = self.config.get("markov_rank") or inner.get("markov_rank")
        parts = self.has(r"markov_(head\.|w1\.)|confidence_(head|proj)\.")
        parts |= self.config.get("speculators_model_type") == "dspark"  # which has one without a Markov head
        if name.startswith("dflash2") or self.has(SELECTS):
            return "dflash2"
        return "dspark" if ranked or parts else "dflash"

    @property
    def eagle3(self) -> bool:
        """True if the tensors or the config have a mark of EAGLE-3."""
        if self.has(r"midlayer\.|layers\.\d+\.hidden_norm\.|fc_norm\.|aux_norm_|d2t$|t2d$"):
            return True
        # Attention that reads embedding and state side by side.
        width = self.size("layers.0.self_attn.o_proj.weight", 0)
        if width is not None and self.size("layers.0.self_attn.q_proj.weight", 1) == 2 * width:
            return True
        several_states = self.size("fc.weight", 1) is not None and not self.fuses_two and "norm.weight" in self.bare
        named = "eagle3" in self.architecture.lower() or "eagle_config" in self.config
        named = named or self.config.get("speculators_model_type") == "eagle3"
        return several_states or (named and not self.fuses_two)

    @property
    def kind(self) -> str:
        """The kind of a drafting head; empty for anything else."""
        return self.block or ("eagle3" if self.eagle3 else "eagle" if self.fuses_two else "")

    @property
    def causal_lm(self) -> bool:
        """True for a whole model: layers and an embedding, and nothing that fuses."""
        stack = r"(language_model\.)?(model\.)?(layers|transformer\.h|h|decoder\.layers|gpt_neox\.layers)\.\d+\."
        embedding = self.has(r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings)\.")
        return self.has(stack) and embedding and not self.has(r"(eh_proj|fc|medusa_heads|context_proj)\.")


def causal_lm(package: Package) -> bool:
    """Return whether a directory is a whole model."""
    return Names(package).causal_lm


def unsupported(names: Names) -> Iterator[tuple[str, bool, str]]:
    """Yield kinds of directories that are not read, whether this is one, and the remedy.

    Listed are those that would pass for a head of ours. Of any other head `read` finds unknown or missing tensors.
    """
    config, name = names.config, names.architecture.lower()
    own = isinstance(config.get("kind"), str) and isinstance(config.get("head"), Mapping)
    remedy = "It needs no import: pass it with --draft or --acceptance, or write it for others with draftsmith export."
    yield "one of draftsmith's own heads", own, remedy
    speculators = config.get("speculators_model_type", "eagle3" if "speculators_config" not in config else None)
    unread = speculators not in ("eagle3", *KINDS)
    yield "a head of speculators of a kind that is not read", unread, NOT_YET
    # FasterDecoding's heads are numbered, ModelOpt's and those with the whole model around them have a prefix.
    medusa = names.has(r"medusa_heads?\.|\d+\.\d+\.linear\.(weight|bias)")
    yield "Medusa heads", medusa, NOT_YET
    hydra = "hydra_head_arch" in config or names.has(r"hydra_mlp\.|input_embed_fn\.")
    yield "Hydra heads", hydra, NOT_YET
    yield "a head that drafts several tokens at once (P-EAGLE)", "peagle" in name, NOT_YET
    domino = "domino" in name or names.has(r"prefix_gru\.")
    yield "a DFlash head with a recurrent network over its drafts (Domino)", domino, NOT_YET
    yield "a head with latent attention (MLA)", names.has(r".*\.kv_a_proj_with_mqa\."), NOT_YET
    conv = names.has(r"candidate_selector\.|selector_hidden\.|.*conv_(base|proj)") and not names.has(SELECTS)
    other = any(word in name for word in ("dflash", "dspark")) and not names.block
    yield "a block drafter whose layers are not Qwen3's", other or (conv and bool(names.block)), NOT_YET
    yield "a causal language model", names.causal_lm, "A whole model drafts as it is: pass it with --draft."
    # One with a last norm is told from others as it is read.
    other = names.kind == "eagle" and names.architecture not in ("", *EAGLE1_CLASSES) and LAST_NORM not in names.bare
    yield "an EAGLE-1 head of a class that is not read", other, NOT_YET
    quantized = names.has(r".*\.(qweight|qzeros|weight_scale|weight_packed|SCB)$")
    yield "quantized weights", quantized, "Import the directory that they were made from."


def is_specdec_pp(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether all tensors are residual blocks numbered in one Sequential, and a last layer of two classes."""
    matched = [re.fullmatch(r"model\.(\d+)\.(linear\.)?(weight|bias)", name) for name in shapes]
    names = [name for name in matched if name is not None]
    if not names or len(names) != len(matched):
        return False
    last = [name[1] for name in names if name[2] is None and name[3] == "weight"]
    return len(last) == 1 and shapes[f"model.{last[0]}.weight"][0] == 2
