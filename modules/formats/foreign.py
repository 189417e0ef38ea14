"""Whose directory is this: the kind of a foreign head by names and shapes of its tensors, its system by who reads it.

Loaders go by names; a config is often copied from the target or edited by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from draftsmith.modules.formats import GGUF, formats
from draftsmith.modules.formats.base import HeadFormat, NotReadHere, Package, TargetFacts, with_versions
from draftsmith.modules.formats.block import KINDS
from draftsmith.modules.formats.eagle1 import LAST_NORM
from draftsmith.modules.formats.llama import architecture, inner_object
from draftsmith.modules.formats.systems import EAGLE1_CLASSES, TYPE
from draftsmith.modules.types import InputError

CAN_READ = "an EAGLE-1, EAGLE-3, DFlash, DFlash2 or DSpark head, or an acceptance head of SpecDec_pp"
NAMES = ("architectures", "model_type")  # fields
SELECTS = r"candidate_selector\."  # of DFlash2
# Tensors that heads have and whole models do not.
OF_HEADS = r"(eh_proj|fc|medusa_heads?|context_proj|midlayer|layers\.\d+\.hidden_norm)\.|[dt]2[dt]$"


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
    except NotReadHere:
        # Rather what we lack than a reading that misses something.
        return 0.5, architecture(package.config) not in format.classes
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
        NotReadHere: another public head; it says which, and who trains and serves it.
        InputError: a whole model, one of our heads, or an unknown directory.
    """
    names = Names(package)
    for matches, error in unsupported(names):
        if matches:
            raise error
    if is_specdec_pp(names.shapes):
        return "acceptance"
    if names.kind:
        return names.kind
    first = ", ".join(sorted(names.shapes)[:4]) or "none"
    named = f", {names.architecture}" if names.architecture else ""
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
        others |= any(self.architecture in classes for classes in SERVED.values())
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
        return self.has(stack) and embedding and not self.has(OF_HEADS) and TYPE not in self.config


class Unread(NamedTuple):
    """Kind of heads that our drafters lack.

    names: pattern of classes and of speculators' kinds, in lower case. tensors: pattern of bare names. trained: systems
    that write it. served: those that load it; None: those with its class (`SERVED`).
    """

    what: str
    names: str
    tensors: str
    trained: tuple[str, ...]
    served: tuple[str, ...] | None = None


UNREAD = (
    Unread("Hydra heads", "hydra", r"hydra_mlp\.|input_embed_fn\.", ("Hydra",), ()),
    # FasterDecoding's heads are numbered, ModelOpt's and those with the whole model around them have a prefix.
    Unread("Medusa heads", "medusa", r"medusa_heads?\.|\d+\.\d+\.linear\.(weight|bias)", ("ModelOpt",), ()),
    Unread("an XPress head", "xpress", r"refiner_head\.", ("speculators",), ("vLLM",)),
    Unread("a P-EAGLE head", "peagle", r"mask_hidden$", ("speculators", "SpecForge", "Automodel"), ("vLLM",)),
    Unread("a DSpine head", "dspine", r"transfer_codes$|injection\.", ("SpecForge main",), ()),
    Unread("a LiLiCorr head", "lilicorr", r"lilicorr\.", ("ModelOpt main",), ("vLLM", "SGLang")),
    Unread("a Domino head", "domino", r"prefix_gru\.", ("SpecForge", "ModelOpt", "Automodel"), ("SGLang",)),
    Unread("an EAGLE-4 head", "eagle4", "$.", (), ("eagle-harness",)),
    Unread(
        "a head with latent attention (MLA)", "eagle3deepseek|deepseekv3eagle3", r".*\.kv_a_proj_with_mqa\.",
        ("TorchSpec", "Automodel"), ("vLLM", "SGLang"),
    ),
)  # fmt: skip
# Classes of heads with other layers than we read, by the systems that have them.
BOTH = ("DFlash2BeamDraftModel", "DFlashLagunaForCausalLM")
VLLM_EAGLE = ("Llama4", "MiniCPM", "Cohere", "Mistral", "MistralLarge3")
SERVED = {
    "vLLM": {
        "Gemma4DSparkModel", "K3DSparkModel", "MuseSparkDSparkModel", "DSparkV41DraftModel", "Qwen3OmniDSparkModel",
        *BOTH, "EagleDeepSeekMTPModel", *(f"Eagle{family}ForCausalLM" for family in VLLM_EAGLE),
    },
    "SGLang": {
        "MiniMaxDFlash2DraftModel", "LingDSparkModel", "DSparkMiniMaxDraftModel", "DeepseekV4ForCausalLMDSpark", *BOTH,
        "Qwen2ForCausalLMEagle", "MistralForCausalLMEagle", "MistralLarge3ForCausalLMEagle",
    },
    "llama.cpp": {"DeepseekV4DSparkModel"},
}  # fmt: skip


def builders(package: Package, kind: str) -> str:
    """Return the systems, with the versions that were read, that build heads of a kind of ours for a directory."""
    name = architecture(package.config)

    def builds(format: HeadFormat) -> bool:
        # Directories of speculators and GGUF files have marks of their own; vLLM reads the former, too.
        by_class = name in format.classes and format.name not in ("speculators", GGUF)
        return format.wrote(package) or by_class or (format.name == "vllm" and TYPE in package.config)

    return with_versions(format.system for format in formats().values() if format.kind == kind and builds(format))


def unsupported(names: Names) -> Iterator[tuple[bool, InputError]]:
    """Yield whether a directory is of a kind that is not read, and the error that says so.

    Listed are those that would pass for a head of ours. Of any other head `read` finds unknown or missing tensors.
    """
    config, called = names.config, f", {names.architecture}" if names.architecture else ""

    def refused(what: str, remedy: str) -> InputError:
        return InputError("directory", what + called, CAN_READ, remedy)

    def unread(what: str, trained: Sequence[str] = (), served: Sequence[str] | None = None) -> InputError:
        if served is None:
            served = [system for system, classes in SERVED.items() if names.architecture in classes]
        by = with_versions(served) if served else f"none of {with_versions(SERVED)}"
        trainers = f"trained by {with_versions(trained)}, " if trained else ""
        return NotReadHere("directory", what + called, CAN_READ, f"Such heads are {trainers}served by {by}.")

    own = isinstance(config.get("kind"), str) and isinstance(config.get("head"), Mapping)
    needed = "It needs no import: pass it with --head or --acceptance, or write it for others with draftsmith export."
    yield own, refused("one of draftsmith's own heads", needed)
    yield names.causal_lm, refused("a causal language model", "A whole model drafts as it is: pass it with --head.")
    speculators = config.get(TYPE, "eagle3" if "speculators_config" not in config else None)
    classes = f"{names.architecture} {speculators} {'hydra' if 'hydra_head_arch' in config else ''}".lower()
    for one in UNREAD:
        known = re.search(one.names, classes) is not None or names.has(one.tensors)
        yield known, unread(one.what, one.trained, one.served)
    yield speculators not in ("eagle3", *KINDS), unread(f"a head of speculators of kind {speculators}", ["speculators"])
    conv = names.has(r"selector_hidden\.|.*conv_(base|proj)") and not names.has(SELECTS)
    other = any(word in names.architecture.lower() for word in ("dflash", "dspark")) and not names.block
    yield other or (conv and bool(names.block)), unread("a block drafter whose layers are not Qwen3's")
    # A head with a last norm is refused by `Eagle1Format.read_config`, which names its trainer.
    other = names.kind == "eagle" and names.architecture not in ("", *EAGLE1_CLASSES) and LAST_NORM not in names.bare
    what = "an EAGLE-1 head of a class that is not read"
    yield other and any(names.architecture in classes for classes in SERVED.values()), unread(what)
    yield other, refused(what, "Name the system that reads it with --format.")
    quantized = names.has(r".*\.(qweight|qzeros|weight_scale|weight_packed|SCB)$")
    yield quantized, refused("quantized weights", "Import the directory that they were made from.")


def not_read_here(package: Package) -> NotReadHere | None:
    """Return why a directory's kind of head is not read; None of others, damaged ones too."""
    error = next((error for matches, error in unsupported(Names(package)) if matches), None)
    return error if isinstance(error, NotReadHere) else None


def is_specdec_pp(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether all tensors are residual blocks numbered in one Sequential, and a last layer of two classes."""
    matched = [re.fullmatch(r"model\.(\d+)\.(linear\.)?(weight|bias)", name) for name in shapes]
    names = [name for name in matched if name is not None]
    if not names or len(names) != len(matched):
        return False
    last = [name[1] for name in names if name[2] is None and name[3] == "weight"]
    return len(last) == 1 and shapes[f"model.{last[0]}.weight"][0] == 2
