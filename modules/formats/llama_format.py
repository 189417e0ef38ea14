"""Heads with Llama's layers in other systems' directories: what all of their formats share.

A format is a system's reading of one kind of head. `eagle1.py`, `eagle3.py` and `block.py` have what a kind's formats
share, `systems.py` what each system does in its own way.
"""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from draftsmith.modules.drafters import head_class
from draftsmith.modules.formats.base import (
    HeadFormat,
    ImportedHead,
    NotReadHere,
    Package,
    Problem,
    Raw,
    Served,
    TargetFacts,
    check_tensors,
    largest,
    same_values,
)
from draftsmith.modules.formats.commands import COMMANDS
from draftsmith.modules.formats.llama import Fields, architecture
from draftsmith.modules.llama_config import (
    PARTIAL,
    ROPE_KINDS,
    CaptureConfig,
    LlamaConfig,
    LlamaHeadConfig,
    llama_sizes,
)
from draftsmith.modules.targets.base import final_state
from draftsmith.modules.targets.shape import stated_dtype
from draftsmith.modules.types import InputError

Wrong = Mapping[str, tuple[object, str]]  # a field or tensor -> whether it is wrong, and what the system does then
Refusal = tuple[str, object, str, str]  # a head's setting: field, value, what is expected, remedy
C = TypeVar("C", bound=LlamaHeadConfig)

ROTARY_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# Fields that change the forward, and the values under which our heads compute the same.
PLAIN_VALUES: dict[str, object] = {
    "logit_scale": 1.0,
    "hidden_act": "silu",
    "quantization_config": None,
    "is_causal": True,
}
# Fields that change a distribution and not its first choice.
OF_LOGITS = ("output_multiplier", "final_logit_softcapping", "logits_scaling", "lm_head_multiplier")
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


class BiasFields(NamedTuple):
    """Fields of `config.json`, any of which lets a system create a bias in these linear layers."""

    fc: tuple[str, ...] = ()
    qkv: tuple[str, ...] = ()
    o: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()


@dataclass
class HeadFiles:
    """Files of a head while a system reads them.

    Attributes:
        format: how the system reads.
        package: the directory. raw: its `config.json`, with everything that the system reads at the top.
        target: the model whose states the head reads, if it is known.
        tensors: of the head by our names, what the system does not use left out.
        notes, problems: as of `ImportedHead`.
    """

    format: LlamaFormat[Any]
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
            Problem(name, f"{self.format.system} {text}") for name, (is_wrong, text) in wrong.items() if is_wrong
        ]

    def take_tensors(self) -> None:
        """Take the file's tensors by our names, without rotary buffers and the target's embedding."""
        # SGLang reads prefixed names in EAGLE-3 but for lm_head.
        known = [name for name in self.package.tensors if self.format.prefix and name != "model.lm_head.weight"]
        prefixed = any(name.startswith("model.") for name in self.package.tensors.keys() - set(known))
        self.add_problems({"model.": (prefixed, "knows the names without it")})
        for on_disk, tensor in self.package.tensors.items():
            name = self.format.our_name(on_disk.removeprefix("model."))
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
            if same_values(tensor, self.target.embed_tokens):
                self.notes.append(f"{on_disk} is left out: it is the target's embedding")
            else:
                self.take_embedding(on_disk, tensor, self.target.embed_tokens)

    def take_embedding(self, on_disk: str, tensor: Tensor, target: Tensor) -> None:
        """Take an embedding that differs from the target's: what was trained, whether the system drafts with it or not.

        Raises:
            InputError: it was not trained, so that it belongs to another target; or our head reads the target's.
        """
        frozen = self.raw.get("embed_requires_grad") is False
        if self.format.kind != "eagle3" or frozen or tensor.shape != target.shape:
            found, expected = "an embedding that differs from the target's", "the target's: our head reads that one"
            remedy = "Pass the target that the head was trained for, or remove the tensor if it was not trained."
            raise InputError(on_disk, found, expected, remedy)
        apart = (tensor.float() - target.float()).abs()
        rows = int((apart > 0).any(1).sum())
        differs = f"{rows} of {len(tensor)} rows differ from the target's, by at most {largest(apart):.2g}"
        self.notes.append(f"{on_disk} is the head's own: {differs}. Else the head was trained for another target")
        self.tensors["embed_tokens.weight"] = tensor

    def take_biases(self) -> Biases:
        """Drop biases that the system does not use, or that are zero; return which layers of our head keep one."""
        created, kept = self.format.biases(self.raw)._asdict(), dict[str, bool]()
        for part, pattern in BIASES.items():
            names = [name for name in self.tensors if re.fullmatch(pattern, name)]
            zero = not any(bool(self.tensors[name].any()) for name in names)
            if created[part] and not names and not (part == "o" and self.format.zero_bias):
                # Trainers write `bias` for fc alone. SGLang's fc has a bias whatever config.json says.
                if part != "fc" or self.raw.get("bias") is not False:
                    found = f"no {part} bias in the file, where config.json makes {self.format.system} create one"
                    raise InputError("weights", found, "its values, which would be random", NO_BIAS)
                self.add_problems({"fc.bias": (True, "does not find it and makes up a random one")})
            # EAGLE-1 heads of Qwen2 targets keep q, k and v biases of zeros: their layers have them.
            dropped = zero and (part != "qkv" or self.format.kind == "eagle3")
            kept[part] = created[part] and bool(names) and not dropped
            if names and not kept[part]:
                if not zero:
                    self.notes.append(f"{', '.join(names)}: left out, {self.format.system} does not use them")
                    self.add_problems({names[0]: (True, "drops it and says nothing")})
                for name in names:
                    del self.tensors[name]
        return Biases(**kept)

    def check_options(self, llama: LlamaConfig) -> None:
        """Raise InputError for a field that our head cannot follow; note what is left out or assumed."""
        raw, target = self.raw, self.target
        if "rms_norm_eps" not in raw:
            self.notes.append("rms_norm_eps is not in config.json: 1e-6, the default of the systems that read it")
        for name in OF_LOGITS:
            value = raw.get(name)
            if value not in (None, 1.0) and (target is None or value != target.text.get(name)):
                self.notes.append(f"{name} {value} is left out: the head's logits are scaled as the target's, or not")
        if llama.rope_scaling.kind not in ROPE_KINDS:
            raise NotReadHere("rope_type", llama.rope_scaling.kind, " or ".join(ROPE_KINDS))
        for name, plain in self.format.plain_values.items():
            if raw.get(name) not in (None, plain):
                expected = "nothing" if plain is None else f"{plain} or nothing"
                raise NotReadHere(f"config.json, {name}", raw[name], expected)
        theirs: Raw = {} if target is None else target.text
        sizes = {name: (getattr(llama, name), theirs.get(name)) for name in ("vocab_size", "hidden_size")}
        if other := {name: pair for name, pair in sizes.items() if pair[1] not in (None, pair[0])}:
            found = [
                f"{name} {size}" if name in raw else f"no {name} (read as {size})" for name, (size, _) in other.items()
            ]
            expected = ", ".join(f"{name} {size}" for name, (_, size) in other.items())
            remedy = "This is another model's head, or config.json is wrong: pass the target that it was trained for."
            raise InputError("config.json", ", ".join(found), f"the target's {expected}", remedy)
        for name in self.format.vocabularies:
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

    def in_order(
        self, name: str, shown: Sequence[int], layers: Sequence[int], count: int, outputs: bool
    ) -> tuple[int, ...]:
        """Return the layers of the target that a head reads, ascending; put its `fc` in that order where the system has
        the states in that of the list.

        shown: as in the file, where `outputs` means numbers of layers whose outputs are read.

        Raises:
            InputError: they are not `count` distinct ones.
        """
        last, ordered = None if self.target is None else self.target.num_layers, tuple(sorted(set(layers)))
        if not len(ordered) == len(layers) == count or ordered[0] < 0 or (last is not None and ordered[-1] > last):
            expected = f"{count} distinct ones, as fc reads"
            if last is not None:
                expected += f", outputs of layers below {last}" if outputs else f", at most {last}"
            raise InputError(name, list(shown), expected, "Pass the target that the head was trained for.")
        if list(ordered) != list(layers):
            if self.format.listed_states:
                parts = dict(zip(layers, self.tensors["fc.weight"].chunk(count, 1), strict=True))
                self.tensors["fc.weight"] = torch.cat([parts[layer] for layer in ordered], 1)
            whose = "the list" if self.format.listed_states else "the layers"
            listed = ", ".join(map(str, shown))
            self.notes.append(f"{name} {listed}: {self.format.system} has the states in the order of {whose}")
        if self.format.norms_last and last is not None and ordered[-1] == last:
            self.notes.append(f"{name}: {self.format.system} takes the state after the final norm for the last layer's")
            return *ordered[:-1], final_state(last)
        return ordered

    def longest_text(self, llama: LlamaConfig) -> int:
        """Return the positions of an imported head: at least the target's."""
        longest = max(llama.max_position, 0 if self.target is None else self.target.max_position)
        if longest > llama.max_position:
            raised = f"max_position_embeddings {llama.max_position} is raised to the target's {longest}"
            self.notes.append(f"{raised}, as vLLM does")
        return longest


class LlamaFormat(HeadFormat, Generic[C]):
    """Directory of a head whose layers are Llama's, in the layout of one system.

    Attributes:
        model_type: of the layers in `config.json`. vocabularies: fields that must be the target's whole vocabulary.
        plain_values: fields that change the forward, and the values under which our heads compute the same.
        marks: fields of `config.json`, or values of `architectures`, that no other system's directories have.
        families: model types of targets whose layers' states the system gives the head; None for all.
        lacking: what the system does with other targets, for the error.
        with_last: model types of targets of which it gives the state after the last layer, before the final norm; None
            for all.
        bias_fields: of `config.json`, any of which lets the system create a bias.
        prefix: it also reads names that begin with `model.`.
        zero_bias: it fills attention biases with zeros before it loads.
        whole_heads: its layers rotate all dimensions of a head. windowless: it ignores a sliding window.
        whole_context: it raises for a head of a shorter context than its target.
        listed_states: it joins the target's states in the order of the list that names them, not in that of the layers.
        norms_last: its state after the last layer is that after the final norm, as in transformers' hidden_states.
        own_embedding: it drafts with an embedding in the file that differs from the target's.
        loads: settings of `refused` that it computes in others' directories; vLLM, which serves those, does not.
    """

    model_type = "llama"
    vocabularies: tuple[str, ...] = ("vocab_size",)
    plain_values = PLAIN_VALUES
    marks: tuple[str, ...] = ()
    families: Set[str] | None = None
    lacking = ""
    with_last: Set[str] | None = None
    bias_fields = BiasFields()
    prefix = False
    zero_bias = False
    whole_heads = False
    windowless = False
    whole_context = False
    listed_states = False
    norms_last = False
    own_embedding = True
    loads: tuple[str, ...] = ()

    # -- of a kind of head

    @abstractmethod
    def check_common(self, config: C) -> None:
        """Raise InputError for a head of this kind that no system holds."""

    @abstractmethod
    def read_config(self, files: HeadFiles, llama: LlamaConfig) -> C:
        """Return the head's config, and drop from `files.tensors` what is no part of the head. llama: sizes."""

    def top_level(self, config: Raw) -> Raw:
        """Return a `config.json` with everything that is read at the top."""
        return config

    def our_name(self, name: str) -> str:
        """Return our name of a tensor, by any system's without the prefix `model.`."""
        return name

    def scaled(self, state: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
        """Return a head whose products with the target's lm_head are `factor` times as large.

        Servers do not scale the logits of heads that borrow it, as those of the target. Heads with their own lm_head
        stay as they are.
        """
        return dict(state)

    def disk_tensors(self, config: C, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a head's tensors by their names in the file; of a reduced vocabulary both tables."""
        tensors = {self.disk_name(name): tensor for name, tensor in state.items()}
        if (ids := state.get("d2t")) is not None:
            ids = ids.cpu()
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        return tensors

    # -- of a system

    def unserved(self, target: TargetFacts) -> str:
        return self.without_states(target) if target.family else ""

    def without_states(self, target: TargetFacts) -> str:
        """Return why the system gives the head no states of a target's layers, or an empty string."""
        known = self.families is None or target.served_family in self.families
        return "" if known else self.lacking.format(target.served_family)

    def wrote(self, package: Package) -> bool:
        raw = self.top_level(package.config)
        return architecture(raw) in self.marks or any(raw.get(name) is not None for name in self.marks)

    def biases(self, raw: Raw) -> Biases:
        """Return the linear layers that the system creates with a bias by a `config.json`."""
        return Biases(*(any(raw.get(name) for name in names) for names in self.bias_fields))

    def problems(self, files: HeadFiles) -> Wrong:
        """Return what the system refuses or misreads in a directory."""
        return {}

    def refused(self, config: C, target: TargetFacts | None) -> Iterator[Refusal]:
        """Yield settings that the system ignores or computes with in another way."""
        if isinstance(config, CaptureConfig) and self.writes and target is not None and target.num_layers is not None:
            most = target.num_layers - (self.with_last is not None and target.family not in self.with_last)
            if config.aux_layers[-1] > most:
                expected = f"at most {most}: {self.system} gives no state behind that"
                yield "layers", list(config.aux_layers), expected, "Train it with other --layers, or export for vLLM."
        part, window = config.llama.rope_scaling.partial_rotary_factor, config.llama.sliding_window
        if self.whole_heads and part != 1:
            remedy = "Export it with --format vllm, or train it with --rope plain."
            yield PARTIAL, part, f"1: {self.system} rotates whole heads", remedy
        if self.windowless and window is not None:
            expected = f"none: {self.system} ignores it, and the head attends to the whole text"
            yield "sliding_window", window, expected, "Export it with --format vllm or --format sglang."

    def serve(self, served: Served) -> str:
        return COMMANDS[self.name](self.kind, served)

    def serving_notes(self, config: C, target: TargetFacts | None) -> list[str]:
        """Return what the system's server does with the head that its files do not say."""
        return []

    @abstractmethod
    def fields(self, config: C, dtype: torch.dtype, target: TargetFacts | None) -> Fields:
        """Return `config.json` of one of our heads."""

    def extra_tensors(self, config: C, dtype: torch.dtype, target: TargetFacts | None) -> dict[str, Tensor]:
        """Return what the system wants beside the head's own tensors."""
        return {}

    # -- of all

    def check(self, config: C, target: TargetFacts | None = None) -> None:
        self.check_common(config)
        for refusal in self.refused(config, target):
            raise InputError(*refusal)

    def write(
        self, config: C, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        self.check(config, target)
        state = state if target is None or target.scale == 1 else self.scaled(state, target.scale)
        tensors = {
            name: tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous().clone()
            for name, tensor in self.disk_tensors(config, state).items()
        }
        tensors |= self.extra_tensors(config, dtype, target)
        if self.whole_context and target is not None and target.max_position > config.max_position:
            # As LongRoPE's targets have here.
            llama = dataclasses.replace(config.llama, max_position=target.max_position)
            config = dataclasses.replace(config, llama=llama)
        fields = self.fields(config, dtype, target)
        if target is not None and (named := stated_dtype(target.raw)):
            # SGLang would otherwise run a head in another type than its target, that of its weights.
            fields |= {"torch_dtype": named, "dtype": named}
        return Package(fields, tensors)

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        files = HeadFiles(self, package, self.top_level(package.config), target)
        llama = llama_sizes(files.raw)
        files.check_options(llama)
        reason = "" if target is None else self.unserved(target)
        files.add_problems({"target": (reason, reason), **self.problems(files)})
        files.notes += package.notes
        for name in package.quantized:
            if not re.fullmatch(self.eight_bits, self.our_name(name.removeprefix("model."))):
                files.add_problems({name: (True, "reads it in 16 bits: the file has another type")})
        files.take_tensors()
        config = self.read_config(files, llama)
        with torch.device("meta"):
            check_tensors(head_class(self.kind)(config), files.tensors, self.disk_name)
        if target is not None and target.scale != 1:
            files.tensors = self.scaled(files.tensors, 1 / target.scale)
        files.notes += self.serving_notes(config, target)
        if target is not None and target.left_out and "lm_head.weight" not in files.tensors and self.kind != "dflash2":
            files.notes.append(f"{self.system} drafts from logits without the target's {target.left_out}")
        # A setting that this system does not compute with.
        refused = [one for one in self.refused(config, target) if one[0] not in self.loads]
        for name, value, expected, _ in refused[:1]:
            files.problems.append(Problem(name, f"is {value}, where {self.system} has {expected}"))
        state = {name: one.float() if one.dtype == torch.float64 else one for name, one in files.tensors.items()}
        return ImportedHead(config, state, tuple(files.notes), tuple(files.problems))


def check_layer(llama: LlamaConfig, refused: Mapping[str, tuple[object, str]]) -> None:
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
