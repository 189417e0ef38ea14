"""Whose directory is this: detection of a foreign head's format, by names and shapes of its tensors before its config.

Loaders go by names; a config is often copied from the target or edited by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import HeadFormat, Package
from draftsmith.modules.formats.block import CONTEXT, FLAT, settings
from draftsmith.modules.formats.llama import BLOCK_KINDS, IDS, Flags, architecture, flat, inner_object
from draftsmith.modules.formats.systems import EAGLE3, LFM2, SGLANG_EAGLE, TYPE
from draftsmith.modules.types import InputError

CAN_READ = "an EAGLE-1, EAGLE-3, DFlash, DFlash2 or DSpark head, or an acceptance head of SpecDec_pp"
NOT_YET = "Importing it is not supported yet."
SELECTS = r"candidate_selector\.predecessor_codebook$"  # of DFlash2


@dataclass(frozen=True)
class ForeignHead:
    """Config, names and shapes of a foreign directory. bare: shapes by names without the prefix `model.`.

    exported: the record that an export of ours leaves in its directory, if there is one.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    exported: Mapping[str, Any] | None = None
    bare: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bare", {name.removeprefix("model."): shape for name, shape in self.shapes.items()})

    @classmethod
    def of(cls, package: Package, exported: Mapping[str, Any] | None = None) -> ForeignHead:
        shapes = {name: tuple(tensor.shape) for name, tensor in package.tensors.items()}
        return cls(package.config, shapes, exported)

    @property
    def architecture(self) -> str:
        """The first entry of `architectures`, or an empty string."""
        return architecture(self.config)

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
        if name.startswith("dflash2") or self.has(SELECTS):
            return "dflash2"
        return "dspark" if ranked or parts else "dflash"

    @property
    def eagle3(self) -> bool:
        """True if the tensors or the config have a mark of EAGLE-3."""
        if self.block:
            return False
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


def detect(foreign: ForeignHead) -> HeadFormat:
    """Return the format of a directory, one of `formats`.

    Raises:
        InputError: names what it is instead: another public head, a whole model, one of our heads, or unknown.
    """
    named = f", {foreign.architecture}" if foreign.architecture else ""
    for what, matches, remedy in unsupported(foreign):
        if matches:
            raise InputError("directory", what + named, CAN_READ, remedy)
    if (found := producer(foreign)) is not None:
        return formats()[found]
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
    return foreign.has(stack) and embedding and not foreign.has(r"(eh_proj|fc|medusa_heads|context_proj)\.")


def unsupported(foreign: ForeignHead) -> Iterator[tuple[str, bool, str]]:
    """Yield kinds of directories that are not read, whether this is one, and the remedy.

    Listed are those that would pass for a head of ours. Of any other head `read` finds unknown or missing tensors.
    """
    config, name = foreign.config, foreign.architecture.lower()
    own = isinstance(config.get("kind"), str) and isinstance(config.get("head"), Mapping)
    remedy = "It needs no import: pass it with --draft or --acceptance, or write it for others with draftsmith export."
    yield "one of draftsmith's own heads", own, remedy
    speculators = config.get("speculators_model_type", "eagle3" if "speculators_config" not in config else None)
    unread = speculators not in ("eagle3", *BLOCK_KINDS)
    yield "a head of speculators of a kind that is not read", unread, NOT_YET
    # FasterDecoding's heads are numbered, ModelOpt's and those with the whole model around them have a prefix.
    medusa = foreign.has(r"medusa_heads?\.|\d+\.\d+\.linear\.(weight|bias)")
    yield "Medusa heads", medusa, "Train them for this target: draftsmith train medusa."
    hydra = "hydra_head_arch" in config or foreign.has(r"hydra_mlp\.|input_embed_fn\.")
    yield "Hydra heads", hydra, "Train one for this target: draftsmith train hydra."
    yield "a head that drafts several tokens at once (P-EAGLE)", "peagle" in name, NOT_YET
    domino = "domino" in name or foreign.has(r"prefix_gru\.")
    yield "a DFlash head with a recurrent network over its drafts (Domino)", domino, NOT_YET
    yield "a head with latent attention (MLA)", foreign.has(r".*\.kv_a_proj_with_mqa\."), NOT_YET
    conv = foreign.has(r"candidate_selector\.|selector_hidden\.|.*conv_(base|proj)") and not foreign.has(SELECTS)
    other = any(word in name for word in ("dflash", "dspark")) and not foreign.block
    yield "a block drafter whose layers are not Qwen3's", other or (conv and bool(foreign.block)), NOT_YET
    yield "a causal language model", causal_lm(foreign), "A whole model drafts as it is: pass it with --draft."
    quantized = foreign.has(r".*\.(qweight|qzeros|weight_scale|weight_packed|SCB)$")
    yield "quantized weights", quantized, "Import the directory that they were made from."


def producer(foreign: ForeignHead) -> tuple[str, str] | None:
    """Return the format's name and the kind of head of a directory; None if it is no head that is known."""
    # Formats share layouts: only the record of an export knows which was meant.
    if foreign.exported and (found := (foreign.exported["format"], foreign.exported["kind"])) in formats():
        return found
    if is_specdec_pp(foreign):
        return "specdec_pp", "acceptance"
    if foreign.config.get("gguf") == "eagle3":
        return "llamacpp", "eagle3"
    if foreign.block:
        return block_producer(foreign), foreign.block
    if foreign.eagle3:
        return eagle3_producer(foreign), "eagle3"
    return (eagle1_producer(foreign), "eagle") if foreign.fuses_two else None


def is_specdec_pp(foreign: ForeignHead) -> bool:
    """Return whether all tensors are residual blocks numbered in one Sequential, and a last layer of two classes."""
    matched = [re.fullmatch(r"model\.(\d+)\.(linear\.)?(weight|bias)", name) for name in foreign.shapes]
    names = [name for name in matched if name is not None]
    if not names or len(names) != len(matched):
        return False
    last = [name[1] for name in names if name[2] is None and name[3] == "weight"]
    return len(last) == 1 and foreign.shapes[f"model.{last[0]}.weight"][0] == 2


def eagle1_producer(foreign: ForeignHead) -> str:
    """Return the format of an EAGLE-1 directory. SafeAILab and vLLM share one: what only one of them reads decides."""
    name = foreign.architecture
    if name == "EagleLlamaForCausalLM":
        return "vllm"
    if name not in ("", "LlamaForCausalLM", SGLANG_EAGLE):
        raise InputError("directory", f"an EAGLE-1 head of the architecture {name}", CAN_READ, NOT_YET)
    # SGLang's fusion layer always has a bias, and `bias` or `attention_bias` gives q, k and v theirs: it draws at
    # random what the file lacks, and drops what it has besides.
    asked = bool(foreign.config.get("bias") or foreign.config.get("attention_bias"))
    biased = foreign.has(r"layers\.\d+\.self_attn\.q_proj\.bias$")
    if name == SGLANG_EAGLE and "fc.bias" in foreign.bare and asked == biased:
        return "sglang"
    if "fc.bias" in foreign.bare:  # vLLM drops it
        return "eagle"
    # SafeAILab's layer has head_dim = width / heads, no bias but, with qkv_bias, those of q, k and v, and its rope
    # settings are rope_theta and {type, factor} (eagle/model/cnets1.py).
    wide = foreign.size("layers.0.self_attn.q_proj.weight", 0) not in (None, foreign.size("fc.weight", 0))
    odd_bias = foreign.has(r"layers\.\d+\.(self_attn\.o_proj|mlp\.\w+)\.bias$")
    odd_bias = odd_bias or (biased and "qkv_bias" not in foreign.config)
    newer = "rope_parameters" in foreign.config and "rope_theta" not in foreign.config
    rope = foreign.config.get("rope_scaling")
    simple = not rope or (isinstance(rope, Mapping) and rope.keys() == {"type", "factor"})
    if not (wide or odd_bias or newer) and simple:
        return "eagle"  # under SGLang's class name too, which SafeAILab's code does not read
    return "sglang" if name == SGLANG_EAGLE else "vllm"


def eagle3_producer(foreign: ForeignHead) -> str:
    """Return the format of an EAGLE-3 directory."""
    raw, name = flat(foreign.config), foreign.architecture
    if TYPE in raw:
        return "speculators"
    if name == "Qwen3Eagle3Model":
        return "deepspec"
    if name == "LlamaEagle3DraftModel":  # NeMo Automodel
        return "vllm"
    if raw.get(IDS) is not None or name.startswith("Eagle3") or raw.get("norm_before_residual"):
        return "vllm"
    # SpecForge and ModelOpt write for SGLang. SafeAILab's have a class, and no norms of the target's states.
    normed = any(Flags.read(raw)) or foreign.has(r"fc_norm\.|aux_norm_|input_norm\.")
    if name in ("", EAGLE3) or raw.get("eagle_config") is not None or normed:
        return "sglang"
    return "eagle" if foreign.has(r"midlayer\.") or name == "LlamaForCausalLM" else "vllm"


def block_producer(foreign: ForeignHead) -> str:
    """Return the format of a block drafter's directory."""
    raw, name = settings(foreign.config), foreign.architecture
    if foreign.config.get("gguf"):
        return "llamacpp"
    if TYPE in raw:
        return "speculators"
    if "shift_label" in raw or any(part.split(".")[0] in FLAT for part in foreign.bare):
        return "modelopt"
    if any(part.split(".")[0] in CONTEXT for part in foreign.bare):
        return "torchspec"
    if name == LFM2:
        return "sglang"
    if name == "DSparkDraftModel":
        return "specforge"
    return "deepspec" if name == "Qwen3DSparkModel" and "num_anchors" in raw else "vllm"
