"""What formats of heads with Llama's layers share: a system's row, the fields of `config.json`, tensors and biases."""

from __future__ import annotations

import dataclasses
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.modules.drafters import head_class
from draftsmith.modules.formats.base import (
    HeadFormat,
    ImportedHead,
    NotReadHere,
    Package,
    Problem,
    Served,
    TargetFacts,
    as_stored,
    check_tensors,
    same_values,
)
from draftsmith.modules.formats.families import SERVERS, unserved
from draftsmith.modules.layers import (
    BASE,
    PARTIAL,
    ROPE_KINDS,
    LlamaConfig,
    RopeScaling,
    RotarySettings,
    config_object,
    llama_sizes,
    positive,
    rope_attention_scale,
    rope_frequencies,
    rope_number,
)
from draftsmith.modules.targets.shape import stated_dtype, stated_positions
from draftsmith.modules.types import InputError

Raw = Mapping[str, Any]  # a `config.json`
Wrong = Mapping[str, tuple[Any, str]]  # a field or tensor -> whether it is wrong, and what the system does then
Refusal = tuple[str, Any, str, str]  # a head's setting: field, value, what is expected, remedy

ROTARY_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# Fields that change the forward, and the values under which our heads compute the same.
PLAIN_VALUES: dict[str, Any] = {
    "logit_scale": 1.0,
    "hidden_act": "silu",
    "quantization_config": None,
    "is_causal": True,
}
# Fields that change a distribution and not its first choice.
OF_LOGITS = ("output_multiplier", "final_logit_softcapping", "logits_scaling", "lm_head_multiplier")
BLOCK_KINDS = ("dflash", "dflash2", "dspark")
IDS = "eagle_aux_hidden_state_layer_ids"
VLLM_READS = ("vllm", "speculators")  # formats
AGAIN = "Train it again: heads trained from now on have none."
# Field of `Biases` -> its tensors.
BIASES = {
    "fc": r"fc\.bias",
    "qkv": r".*\.[qkv]_proj\.bias",
    "o": r".*\.o_proj\.bias",
    "mlp": r".*\.(gate|up|down)_proj\.bias",
}
NO_BIAS = (
    'Correct config.json: "bias" (of fc), "attention_bias" and "mlp_bias" are false without; write "qkv_bias": true '
    'in place of "attention_bias" if only q, k and v have one.'
)


class Biases(NamedTuple):
    """Linear layers that a system creates with a bias."""

    fc: bool = False
    qkv: bool = False
    o: bool = False
    mlp: bool = False


class Flags(NamedTuple):
    """Switches of EAGLE-3 heads, as of `Eagle3Config`."""

    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @classmethod
    def read(cls, raw: Raw) -> Flags:
        """Read the switches by their own names, as most systems do."""
        before = bool(raw.get("norm_before_fc") or inner_object(raw, "eagle_config").get("norm_before_fc"))
        return cls(*(bool(raw.get(name)) for name in cls._fields))._replace(norm_before_fc=before)


@dataclass(frozen=True)
class System:
    """How a system reads one kind of head: a row of the table in `systems.py`.

    Attributes:
        name, system, kind: on the command line, in messages, and of our heads.
        fields: (this row, head's config, dtype, target) -> `config.json`.
        serve: (kind, paths) -> the command that serves the head. None, as fields: such directories are only read.
        classes: values of `architectures` by which it builds the head.
        prefix: it also reads names that begin with `model.`.
        strict: it raises for tensors that it does not know.
        zero_bias: it fills attention biases with zeros before it loads.
        biases: `config.json` -> the linear layers that it creates with a bias.
        problems: a directory -> what the system refuses or misreads in it.
        refused: (this row, head's config, target) -> settings that it ignores or computes with in another way.
        loads: settings of `refused` that it computes in others' directories; vLLM, which serves those, does not.
        extra_tensors: (head's config, dtype, target) -> what it wants beside the head's own tensors.
        layer_names: names of an EAGLE-3 head's layer that it knows; the first is written.
        id_places: objects of `config.json` that may name the layers of an EAGLE-3 head; "" is the top. The first that
            has any counts; without one it takes its default layers.
        id_field: the field that names them.
        output_ids: (the numbers, target) -> 1 if number k is the output of layer k, our number k + 1, else 0.
        sorts_ids: it sorts the numbers and drops duplicates.
        flags: `config.json` -> the switches of an EAGLE-3 head.
        fills: `config.json` of a block drafter -> fields that it takes to be there where they are not.
        anchor_first: blocks are anchor-first if `config.json` does not say.
        asks_confidence: `config.json` says whether it uses a confidence head.
        whole_heads: `config.json` -> whether it rotates whole heads, also where a part is named, as in the target's.
        neox_fields: fields of `config.json` that may say that a block drafter rotates neighbors in place of halves.
        markov_types: Markov heads that it computes.
        target_index, notes: as of `HeadFormat`.
    """

    name: str
    system: str
    kind: str
    fields: Callable[[System, Any, torch.dtype, TargetFacts | None], dict[str, Any]] | None = None
    serve: Callable[[str, Served], str] | None = None
    classes: tuple[str, ...] = ()
    prefix: bool = False
    strict: bool = False
    zero_bias: bool = False
    biases: Callable[[Raw], Biases] = lambda raw: Biases()
    problems: Callable[[HeadFiles], Wrong] = lambda files: {}
    refused: Callable[[System, Any, TargetFacts | None], Iterator[Refusal]] = lambda system, config, target: iter(())
    loads: tuple[str, ...] = ()
    extra_tensors: Callable[[Any, torch.dtype, TargetFacts | None], dict[str, Tensor]] = lambda *_: {}
    layer_names: tuple[str, ...] = ("midlayer", "layers.0")
    id_places: tuple[str, ...] = ("",)
    id_field: str = IDS
    output_ids: Callable[[Sequence[int], TargetFacts | None], int] = lambda ids, target: 0
    sorts_ids: bool = False
    flags: Callable[[Raw], Flags] = Flags.read
    fills: Callable[[Raw], Raw] = lambda raw: {}
    anchor_first: bool = False
    asks_confidence: bool = True
    whole_heads: Callable[[Raw], bool] = lambda raw: False
    neox_fields: tuple[str, ...] = ()
    markov_types: tuple[str, ...] = ("vanilla", "gated", "rnn")
    target_index: bool = False
    notes: tuple[str, ...] = ()


@dataclass
class HeadFiles:
    """Files of a head while a system reads them.

    Attributes:
        row: how the system reads.
        package: the directory. raw: its `config.json`, with everything that the system reads at the top.
        target: the model whose states the head reads, if it is known.
        tensors: of the head by our names, what the system does not use left out.
        notes, problems: as of `ImportedHead`.
    """

    row: System
    package: Package
    raw: Raw
    target: TargetFacts | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name, with or without the prefix `model.`."""
        return name in self.package.tensors or f"model.{name}" in self.package.tensors

    @property
    def qk_norm(self) -> bool:
        """True if the file has norms of queries and keys."""
        return any(name.endswith("self_attn.q_norm.weight") for name in self.package.tensors)

    def add_problems(self, wrong: Wrong) -> None:
        """Record what is wrong, each with its condition and what the system does."""
        self.problems += [
            Problem(name, f"{self.row.system} {text}") for name, (is_wrong, text) in wrong.items() if is_wrong
        ]

    def take_tensors(self, our_name: Callable[[str], str]) -> None:
        """Take the file's tensors by our names, without rotary buffers and the target's embedding."""
        # SGLang reads prefixed names in EAGLE-3 but for lm_head.
        known = [name for name in self.package.tensors if self.row.prefix and name != "model.lm_head.weight"]
        prefixed = any(name.startswith("model.") for name in self.package.tensors.keys() - set(known))
        self.add_problems({"model.": (prefixed, "knows the names without it")})
        for on_disk, tensor in self.package.tensors.items():
            name = our_name(on_disk.removeprefix("model."))
            if any(buffer in name for buffer in ROTARY_BUFFERS):
                continue
            if name in self.tensors:
                raise InputError("weights", f"{name} twice, by two names", "each once", "Remove one of them.")
            if name != "embed_tokens.weight":
                self.tensors[name] = tensor
                continue
            if self.target is None or self.target.embed_tokens is None:
                expected = "the target to compare it with"
                raise InputError(on_disk, "an embedding in the head", expected, "Pass --target.")
            if not same_values(tensor, self.target.embed_tokens):
                found, expected = "an embedding that differs from the target's", "the target's: our head reads that one"
                remedy = "Pass the target that the head was trained for, or remove the tensor if it was not trained."
                raise InputError(on_disk, found, expected, remedy)
            self.notes.append(f"{on_disk} is left out: it is the target's embedding")

    def take_biases(self) -> dict[str, bool]:
        """Drop biases that the system does not use, or that are zero; return which layers of our head keep one."""
        kept, created = {}, self.row.biases(self.raw)._asdict()
        for part, pattern in BIASES.items():
            names = [name for name in self.tensors if re.fullmatch(pattern, name)]
            zero = not any(bool(self.tensors[name].any()) for name in names)
            if created[part] and not names and not (part == "o" and self.row.zero_bias):
                # To whoever trains heads, `bias` is that of fc. SGLang's fc has one whatever config.json says.
                if part != "fc" or self.raw.get("bias") is not False:
                    found = f"no {part} bias in the file, where config.json makes {self.row.system} create one"
                    raise InputError("weights", found, "its values, which would be random", NO_BIAS)
                self.add_problems({"fc.bias": (True, "does not find it and makes up a random one")})
            # EAGLE-1 heads of Qwen2 targets keep q, k and v biases of zeros: their layers have them.
            kept[f"{part}_bias"] = created[part] and bool(names)
            kept[f"{part}_bias"] &= not (zero and (part != "qkv" or self.row.kind == "eagle3"))
            if names and not kept[f"{part}_bias"]:
                if not zero:
                    self.notes.append(f"{', '.join(names)}: left out, {self.row.system} does not use them")
                    self.add_problems({names[0]: (True, "drops it and says nothing")})
                for name in names:
                    del self.tensors[name]
        return kept

    def check_options(self, llama: LlamaConfig, vocabularies: Sequence[str]) -> None:
        """Raise InputError for a field that our head cannot follow; note what is left out or assumed.

        vocabularies: fields that must be the target's whole vocabulary.
        """
        raw, target = self.raw, self.target
        if "rms_norm_eps" not in raw:
            self.notes.append("rms_norm_eps is not in config.json: 1e-6, the default of the systems that read it")
        for name in OF_LOGITS:
            value = raw.get(name)
            if value not in (None, 1.0) and (target is None or value != target.text.get(name)):
                self.notes.append(f"{name} {value} is left out: the head's logits are scaled as the target's, or not")
        if llama.rope_scaling.kind not in ROPE_KINDS:
            raise NotReadHere("rope_type", llama.rope_scaling.kind, " or ".join(ROPE_KINDS))
        # A block drafter's layers may have a window, and are causal within it.
        is_block = self.row.kind in BLOCK_KINDS
        for name, plain in PLAIN_VALUES.items():
            if raw.get(name) not in (None, plain) and not (is_block and name == "is_causal"):
                expected = "nothing" if plain is None else f"{plain} or nothing"
                raise NotReadHere(f"config.json, {name}", raw[name], expected)
        if self.row.kind == "eagle" and (window := layer_window(raw, llama.num_layers)):
            raise NotReadHere("config.json, sliding_window", window, "layers without a window")
        theirs: Raw = {} if target is None else target.text
        sizes = {name: (getattr(llama, name), theirs.get(name)) for name in ("vocab_size", "hidden_size")}
        if other := {name: pair for name, pair in sizes.items() if pair[1] not in (None, pair[0])}:
            found = [
                f"{name} {size}" if name in raw else f"no {name} (read as {size})" for name, (size, _) in other.items()
            ]
            expected = ", ".join(f"{name} {size}" for name, (_, size) in other.items())
            remedy = "This is another model's head, or config.json is wrong: pass the target that it was trained for."
            raise InputError("config.json", ", ".join(found), f"the target's {expected}", remedy)
        for name in vocabularies:
            if raw.get(name) not in (None, llama.vocab_size):
                expected = f"the target's whole vocabulary ({llama.vocab_size})"
                raise NotReadHere(f"config.json, {name}", raw[name], expected)

    def num_states(self, size: int) -> int:
        """Return how many states of the target the fusion layer reads, each of width `size`."""
        fc = self.tensors.get("fc.weight")
        if fc is None or fc.ndim != 2 or fc.shape[0] != size or fc.shape[1] % size:
            found = f"none among {', '.join(sorted(self.tensors)[:4])}" if fc is None else f"a tensor {list(fc.shape)}"
            expected = f"{size} rows, as config.json has hidden_size, and columns for states of that width"
            raise InputError("fc.weight", found, expected, "Pass its own target, and check config.json and the file.")
        return fc.shape[1] // size

    def check_layers(self, name: str, shown: Sequence[int], layers: Sequence[int], count: int, outputs: bool) -> None:
        """Raise InputError unless these are `count` layers of the target, ascending.

        shown: as in the file, where `outputs` means numbers of layers whose outputs are read.
        """
        last = None if self.target is None else self.target.num_layers
        fits = len(layers) == count and list(layers) == sorted(set(layers)) and layers[0] >= 0
        if fits and layers[-1] == last:
            expected = "layers before the target's last: systems differ in whether the state after that is normed"
            raise NotReadHere(name, list(shown), expected)
        if not fits or (last is not None and layers[-1] > last):
            expected = f"{count} distinct ones, as fc reads, ascending"
            if last is not None:
                expected += f", outputs of layers below {last - 1}" if outputs else f", below {last}"
            raise InputError(name, list(shown), expected, "Pass the target that the head was trained for.")

    def longest_text(self, llama: LlamaConfig) -> int:
        """Return the positions of an imported head: at least the target's."""
        longest = max(llama.max_position, max_positions(self.target))
        if longest > llama.max_position:
            raised = f"max_position_embeddings {llama.max_position} is raised to the target's {longest}"
            self.notes.append(f"{raised}, as vLLM does")
        return longest


class LlamaFormat(HeadFormat):
    """Directory of a head whose layers are Llama's, in the layout of one system."""

    # Fields of `config.json` that must be the target's whole vocabulary.
    vocabularies: tuple[str, ...] = ("vocab_size",)

    def __init__(self, row: System):
        self.row = row
        self.name, self.system, self.kind = row.name, row.system, row.kind
        self.writes, self.target_index, self.notes = row.serve is not None, row.target_index, row.notes

    @abstractmethod
    def check_common(self, config: Any) -> None:
        """Raise InputError for a head of this kind that no system holds."""

    @abstractmethod
    def read_config(self, files: HeadFiles, llama: LlamaConfig) -> Any:
        """Return the head's config, and drop from `files.tensors` what is no part of the head. llama: sizes."""

    def top_level(self, config: Raw) -> Raw:
        """Return a `config.json` with everything that is read at the top."""
        return config

    def our_name(self, name: str) -> str:
        """Return our name of a tensor, by any system's without the prefix `model.`."""
        return name

    def disk_name(self, name: str) -> str:
        """Return the name in a file of one of our parameters."""
        return name

    def scaled(self, state: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
        """Return a head whose products with the target's lm_head are `factor` times as large.

        Servers do not scale the logits of heads that borrow it, as those of the target. Heads with their own lm_head
        stay as they are.
        """
        return dict(state)

    def disk_tensors(self, config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a head's tensors by their names in the file."""
        return dict(state)

    def check(self, config: Any, target: TargetFacts | None = None) -> None:
        self.check_common(config)
        if target is not None and (reason := unserved(self.name, self.kind, target)):
            others = [name for name in SERVERS if not unserved(name, self.kind, target)]
            remedy = f"Choose --format {' or '.join(others)}." if others else "Train an EAGLE-3 head."
            raise InputError("target", f"{target.family}: {self.system} {reason}", "a family that it takes", remedy)
        for refusal in self.row.refused(self.row, config, target):
            raise InputError(*refusal)

    def write(
        self, config: Any, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        if self.row.fields is None:
            return super().write(config, state, dtype, target)
        self.check(config, target)
        state = state if target is None or target.scale == 1 else self.scaled(state, target.scale)
        tensors = {
            name: tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous().clone()
            for name, tensor in self.disk_tensors(config, state).items()
        }
        tensors |= self.row.extra_tensors(config, dtype, target)
        fields = self.row.fields(self.row, config, dtype, target)
        # SGLang raises for a head of a shorter context than its target, as LongRoPE's targets have here.
        if self.name == "sglang":
            fields["max_position_embeddings"] = max(fields["max_position_embeddings"], max_positions(target))
        return Package(fields, tensors, {"format": "pt"})

    def extra_fields(self, target: Raw, path: str) -> dict[str, Any]:
        """Return the type to run in, the target's, whatever type the weights are stored in; and the verifier's name.

        SGLang would otherwise run a head in another type than its target.
        """
        named = stated_dtype(target)
        verifier = {"name_or_path": path, "architectures": target.get("architectures") or []}
        fields: dict[str, Any] = {"torch_dtype": named, "dtype": named} if named else {}
        return fields | ({"speculators_config": {"verifier": verifier}} if self.name == "speculators" else {})

    def serve(self, served: Served) -> str:
        return super().serve(served) if self.row.serve is None else self.row.serve(self.kind, served)

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        files = HeadFiles(self.row, package, self.top_level(package.config), target)
        llama = llama_sizes(files.raw)
        files.check_options(llama, self.vocabularies)
        reason = "" if target is None else unserved(self.name, self.kind, target)
        files.add_problems({"target": (reason, reason), **self.row.problems(files)})
        files.take_tensors(self.our_name)
        config = self.read_config(files, llama)
        with torch.device("meta"):
            check_tensors(head_class(self.kind)(config), files.tensors, self.disk_name)
        if target is not None and target.scale != 1:
            files.tensors = self.scaled(files.tensors, 1 / target.scale)
        if target is not None and target.window and not config.llama.sliding_window and self.name in VLLM_READS:
            files.notes.append(f"vLLM gives the head the target's window of {target.window} tokens")
        if target is not None and target.left_out and self.kind not in ("eagle3", "dflash2"):
            files.notes.append(f"{self.system} drafts from logits without the target's {target.left_out}")
        # A setting that this system does not compute with.
        refused = [one for one in self.row.refused(self.row, config, None) if one[0] not in self.row.loads]
        for name, value, expected, _ in refused[:1]:
            files.problems.append(Problem(name, f"is {value}, where {self.system} has {expected}"))
        return ImportedHead(config, as_stored(files.tensors), tuple(files.notes), tuple(files.problems))


def architecture(raw: Raw) -> str:
    """Return the first entry of `architectures`, or an empty string."""
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) and first.isprintable() else ""


def inner_object(raw: Raw, name: str) -> Raw:
    """Return an object inside a `config.json`; an empty one if it is absent or of another type."""
    inner = raw.get(name)
    return inner if isinstance(inner, Mapping) else {}


def flat(config: Raw) -> dict[str, Any]:
    """Return a `config.json` with the layer's fields at the top; speculators keep them inside an object."""
    return {**inner_object(config, "transformer_layer_config"), **config}


def layer_window(raw: Raw, num_layers: int) -> int | None:
    """Return the sliding window of all layers: most keys that a token attends to, itself included; None without one.

    Raises:
        InputError: layers differ, or have a window of no size.
    """
    types = raw.get("layer_types") or ["full_attention"]
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise InputError("config.json, layer_types", repr(types)[:80], "a list of names", "Correct config.json.")
    kinds = set(types[:num_layers])
    if len(kinds) > 1 or raw.get("use_swa"):
        raise NotReadHere("config.json, layer_types", ", ".join(sorted(kinds)), "layers of one kind")
    return positive(raw, "sliding_window", 0) if kinds == {"sliding_attention"} else None


def safeailab_rope(raw: Raw) -> RotarySettings:
    """Read rotary settings as SafeAILab/EAGLE does (cnets1.py, _init_rope).

    It knows `rope_theta` and `rope_scaling` only, and its base is 10000 under any scaling.
    """
    if scaling := config_object(raw, "rope_scaling"):
        factor = rope_number("factor", scaling.get("factor"), 1.0)
        return RotarySettings(BASE, RopeScaling(str(scaling.get("type")), factor))
    return RotarySettings(rope_number("rope_theta", raw.get("rope_theta"), BASE), RopeScaling())


def frequencies(llama: LlamaConfig, rope: RotarySettings | None = None) -> Tensor:
    """Return the frequencies [head_dim / 2] in float32; NaN for a kind of scaling that our layers do not compute.

    rope: settings in place of the layer's own.
    """
    rope = rope or RotarySettings.of(llama)
    if rope.kind not in ROPE_KINDS:
        return torch.full((llama.head_dim // 2,), math.nan)
    return rope_frequencies(dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling))


def to_adjacent(rows: Tensor, heads: int, rotated: int | None = None) -> Tensor:
    """Reorder the output rows [heads * D, ...] of q or k from rotary halves to adjacent pairs.

    rotated: dimensions of each head that are rotated, the first ones; None: all.
    """
    return _transposed(rows, heads, rotated, (2, -1))


def to_halves(rows: Tensor, heads: int, rotated: int | None = None) -> Tensor:
    """Reorder the output rows [heads * D, ...] of q or k from adjacent rotary pairs to halves."""
    return _transposed(rows, heads, rotated, (-1, 2))


def _transposed(rows: Tensor, heads: int, rotated: int | None, pairs: tuple[int, int]) -> Tensor:
    by_head = rows.unflatten(0, (heads, -1))
    turned, rest = by_head[:, :rotated], by_head[:, by_head.shape[1] if rotated is None else rotated :]
    return torch.cat([turned.unflatten(1, pairs).transpose(1, 2).flatten(1, 2), rest], 1).reshape(rows.shape)


def rope_fields(scaling: RopeScaling) -> dict[str, Any]:
    """Return transformers' `rope_parameters` of a scaling, without the base."""
    fields: dict[str, Any] = {"rope_type": scaling.kind}
    if scaling.partial_rotary_factor != 1:
        fields[PARTIAL] = scaling.partial_rotary_factor
    if scaling.kind != "default":
        fields["factor"] = float(scaling.factor)
    if scaling.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        fields |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        scale, usual = (rope_attention_scale(one) for one in (scaling, RopeScaling("yarn", scaling.factor)))
        if scale != usual:
            # SGLang reads the second, relative to the usual one; all others read the first.
            fields |= {"attention_factor": scale, "attn_factor": scale / usual}
    return fields


def llama_fields(llama: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of transformers' LlamaConfig, in both spellings of rope and dtype.

    SafeAILab's code wants exactly `type` and a float `factor` in `rope_scaling`.
    """
    name = str(dtype).removeprefix("torch.")
    scaling, new = llama.rope_scaling, rope_fields(llama.rope_scaling)
    # transformers takes `rope_scaling` before `rope_parameters`.
    old = {"default": None, "linear": {"type": "linear", "factor": float(scaling.factor)}}.get(scaling.kind, new)
    return {
        "model_type": "llama",
        "vocab_size": llama.vocab_size,
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_hidden_layers": llama.num_layers,
        "num_attention_heads": llama.num_heads,
        "num_key_value_heads": llama.num_kv_heads,
        "head_dim": llama.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": llama.max_position,
        "rms_norm_eps": llama.rms_eps,
        "rope_theta": llama.rope_theta,
        "rope_scaling": old,
        "rope_parameters": {**new, "rope_theta": llama.rope_theta},
        **({PARTIAL: scaling.partial_rotary_factor} if PARTIAL in new else {}),
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        **({} if llama.sliding_window is None else window_fields(llama)),
        "torch_dtype": name,
        "dtype": name,
    }


def window_fields(llama: LlamaConfig) -> dict[str, Any]:
    """Return the fields by which vLLM and speculators read a sliding window, as transformers' configs have them."""
    kind = "full_attention" if llama.sliding_window is None else "sliding_attention"
    return {
        "layer_types": [kind] * llama.num_layers,
        "use_sliding_window": llama.sliding_window is not None,
        "sliding_window": llama.sliding_window,
    }


def check_layer(llama: LlamaConfig, refused: Mapping[str, tuple[Any, str]]) -> None:
    """Raise InputError for a layer of ours that no system builds. refused: more switches, and what is expected."""
    common = {
        "mlp_bias": (llama.mlp_bias, "no bias in the MLP: SafeAILab/EAGLE and SGLang ignore it"),
        "qk_norm": (llama.qk_norm, "no norm of q and k: a layer of Llama has none"),
        "o_bias": (llama.o_bias, "no bias of o_proj: SafeAILab/EAGLE and Qwen-type heads have none"),
    }
    for name, (value, expected) in {**refused, **common}.items():
        if value:
            raise InputError(name, value, expected, AGAIN)
    if llama.hidden_size % llama.num_heads:
        expected = f"a divisor of hidden_size {llama.hidden_size}: transformers refuses any other"
        raise InputError("num_heads", llama.num_heads, expected, "Train the head for a target of other sizes.")


def max_positions(target: TargetFacts | None) -> int:
    """Return the target's context length as servers take it, 0 if it is unknown."""
    return 0 if target is None else stated_positions(target.text)
