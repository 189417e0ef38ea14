"""EAGLE-3 heads in the directories of other systems: tensor names, the target's layers, the draft vocabulary.

Specified by SafeAILab/EAGLE eagle/model/cnets.py.
"""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.drafters.eagle3.net import Eagle3Config, Eagle3Net
from draftsmith.modules.drafters.eagle3.net import default_layers as layers_of_target
from draftsmith.modules.formats.base import (
    ForeignHead,
    HeadTrial,
    ImportedHead,
    Package,
    Problem,
    TargetFacts,
    as_stored,
    check_tensors,
)
from draftsmith.modules.formats.llama import (
    UNSUPPORTED,
    LlamaFormat,
    check_layer,
    check_options,
    flat,
    llama_config,
    llama_fields,
    longest_text,
)
from draftsmith.modules.layers import LlamaConfig, rope_settings
from draftsmith.modules.types import InputError

# Tensors of a file; some systems say `layers.0` for `midlayer`. d2t and t2d are there only if the draft vocabulary is
# reduced.
#
#   fc.weight                                  [H, n H]   over the target's n states
#   midlayer.self_attn.{q,k,v}_proj.weight     [.., 2 H]  over [norm(embedding); norm(state)]
#   midlayer.{self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj}.weight
#   midlayer.{input_layernorm, hidden_norm, post_attention_layernorm}.weight, norm.weight
#   lm_head.weight                             [draft_vocab_size, H]
#   d2t                                        [draft_vocab_size] int64, added to a drafted id
#   t2d                                        [V] bool, whether a token of the target is drafted
#   fc_norm.{i}.weight                         of the target's i-th state, in EAGLE-3.1
CLASS = "LlamaForCausalLMEagle3"  # of vLLM and SGLang
IDS, COUNT = "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"
NUM_STATES = 3  # that systems read by default
# Norms of the states, under the names that SGLang first had for them.
OLD_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


class Flags(NamedTuple):
    """Switches of EAGLE-3 heads, as of `Eagle3Config`."""

    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False


class Eagle3Format(LlamaFormat):
    """Directory of an EAGLE-3 head.

    layer: name of the head's layer in the file. accepted: all names that the system reads.
    """

    kind = "eagle3"
    layer: ClassVar[str] = "midlayer"
    accepted: ClassVar[tuple[str, ...]] = ("midlayer", "layers.0")

    def flags(self, raw: Mapping[str, Any]) -> Flags:
        """Read the switches."""
        inner = raw.get("eagle_config")
        inner = inner if isinstance(inner, Mapping) else {}
        before = bool(raw.get("norm_before_fc") or inner.get("norm_before_fc"))
        return Flags(*(bool(raw.get(name)) for name in Flags._fields))._replace(norm_before_fc=before)

    @abstractmethod
    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Read the target's layers, in our numbering; None if the system takes its default."""

    def fields(self, config: Eagle3Config, dtype: torch.dtype, ids: tuple[int, ...] | None) -> dict[str, Any]:
        """Return `config.json`. ids: the layers in our numbering, unless they are the target's default."""
        flags = {name: True for name in Flags._fields if getattr(config, name)}
        shape = {"architectures": [CLASS], "draft_vocab_size": config.draft_vocab_size}
        return {**llama_fields(config.llama, dtype), **shape, **flags, **self.id_fields(ids)}

    def id_fields(self, ids: tuple[int, ...] | None) -> dict[str, Any]:
        """Return the fields that name the layers, in the system's numbering; vLLM's."""
        return {} if ids is None else {IDS: list(ids)} | count_field(ids)

    def recognises(self, foreign: ForeignHead) -> bool:
        return foreign.eagle3 and producer(foreign) == self.name

    def check(self, config: Eagle3Config) -> None:
        expected = "no bias of q, k and v: SafeAILab/EAGLE and SGLang have none in EAGLE-3"
        check_layer(config.llama, {"qkv_bias": (config.llama.qkv_bias, expected)})
        self.check_system(config)

    def write(
        self, config: Eagle3Config, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        """Convert a head. Layers are named unless they are those that every system reads of the target."""
        self.check(config)
        usual = target is not None and config.capture == default_layers(target)
        tensors = {
            self.disk_name(name): tensor.detach().to(dtype).contiguous().clone()
            for name, tensor in state.items()
            if name != "d2t"
        }
        if config.reduced:
            ids = state["d2t"].cpu()
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        return Package(self.fields(config, dtype, None if usual else config.capture), tensors, {"format": "pt"})

    def disk_name(self, name: str) -> str:
        """Return the name in a file of one of our parameters."""
        return re.sub(r"^layer\.", f"{self.layer}.", name)

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        """Read settings by this system's fields, and tensors by any system's names."""
        raw, notes = flat(package.config), list[str]()
        llama = llama_config(raw, rope_settings(raw))
        check_options(raw, llama, target, ("vocab_size",), notes)
        inner = raw.get("eagle_config")
        inner = inner if isinstance(inner, Mapping) else {}
        if (width := raw.get("target_hidden_size")) not in (None, raw.get("hidden_size")):
            raise InputError("config.json, target_hidden_size", width, "the head's own width", UNSUPPORTED)
        if inner.get("use_aux_hidden_state") is False:
            raise InputError("config.json, use_aux_hidden_state", False, "true: it is no EAGLE-3 head", UNSUPPORTED)
        problems = self.problems(raw, target)
        tensors = self.own_tensors(package, target, our_name, notes, problems)
        layers = {name.removeprefix("model.").rpartition(".self_attn.q_proj")[0] for name in package.tensors}
        if wrong := sorted(layers - {"", *self.accepted}):
            problems.append(Problem(wrong[0], f"{self.system} knows the layer as {self.accepted[0]} only"))
        # The norms of the target's states show in the file, the other switches only in config.json.
        flags = self.flags(raw)
        if flags.fc_norm != (normed := "fc_norm.0.weight" in tensors):
            found = f"{'norms' if normed else 'no norm'} of the target's states in the file"
            raise InputError("fc_norm", found, f"what config.json says ({flags.fc_norm})", "Correct config.json.")
        capture = self._capture(raw, target, tensors, llama.hidden_size)
        drafted = take_vocabulary(tensors, raw, llama, target, notes, problems)
        biases = self.take_biases(tensors, raw, notes, problems)
        switches: dict[str, Any] = {"qkv_bias": biases.qkv, "o_bias": biases.o, "mlp_bias": biases.mlp}
        switches["qk_norm"] = "layer.self_attn.q_norm.weight" in tensors
        longest = longest_text(llama, target, notes)
        llama = dataclasses.replace(llama, num_layers=1, max_position=longest, **switches)
        config = Eagle3Config(llama, capture, drafted, **flags._asdict())
        with torch.device("meta"):
            check_tensors(Eagle3Net(config), tensors, self.disk_name)
        return ImportedHead(config, as_stored(tensors), tuple(notes), (*problems, *self.unheld(config)))

    def _capture(
        self, raw: Mapping[str, Any], target: TargetFacts | None, tensors: Mapping[str, Tensor], size: int
    ) -> tuple[int, ...]:
        """Return the target's layers that the head reads, as many as its fc has room for."""
        fc = tensors.get("fc.weight")
        if fc is None or fc.ndim != 2 or fc.shape[1] % size:
            found = "none" if fc is None else f"a tensor {list(fc.shape)}"
            raise InputError("fc.weight", found, f"a matrix that reads states of width {size}", UNSUPPORTED)
        num_states, ids = fc.shape[1] // size, self.ids(raw)
        layers = ids if ids is not None else None if target is None else default_layers(target)
        if layers is None:
            expected = "the target: this is a head that reads its target's layers 2, L/2 and L-3"
            raise InputError("target", "none", expected, "Pass --target.")
        # fc says how many states it reads, and nothing else in the file says which.
        count = None if target is None else target.num_layers
        fits = len(layers) == num_states and list(layers) == sorted(set(layers)) and layers[0] >= 0
        if not fits or (count is not None and layers[-1] >= count):
            expected = f"{num_states} distinct ones, as fc reads, ascending"
            expected += "" if count is None else f", below {count}"
            raise InputError("layers", list(layers), expected, "Pass the target that the head was trained for.")
        return layers

    def forward(self, head: Any, trial: HeadTrial) -> list[list[Tensor]]:
        embedding, _ = trial.tables()
        outputs = []
        for probe in trial.probes:
            states = torch.cat([probe.states[number] for number in head.config.capture], -1)[None, :-1]  # [1, T-1, n H]
            embeds = F.pad(embedding[probe.ids[1:]], (0, 0, 0, 1))[None]  # [1, T, H]
            logits = [head.lm_head(head.logits_input(h[0])) for h in head.unroll(embeds, states, 2)]
            # Tokens that the head cannot draft have -inf.
            whole = [part.new_full((len(part), len(embedding)), -torch.inf) for part in logits]  # [T-1, V]
            outputs.append([all.index_copy_(1, head.d2t, part) for all, part in zip(whole, logits, strict=True)])
        return outputs


def our_name(name: str) -> str:
    """Return our name of a tensor, by any system's, without the prefix `model.`."""
    return re.sub(r"^(midlayer|layers\.0)\.", "layer.", OLD_NORMS.get(name, name))


def default_layers(target: TargetFacts) -> tuple[int, ...] | None:
    """Return the layers that all systems read of a target by default; None if its number of layers is unknown."""
    return None if target.num_layers is None else layers_of_target(target.num_layers)


def count_field(ids: tuple[int, ...]) -> dict[str, int]:
    """Return the field by which vLLM builds fc, needed unless there are as many states as by default."""
    return {} if len(ids) == NUM_STATES else {COUNT: len(ids)}


def layer_ids(raw: Mapping[str, Any], *places: str) -> tuple[int, ...] | None:
    """Read layer ids from the first of these objects of `config.json` that has any; "" is the top."""
    for place in places:
        block = (raw.get(place) or {}) if place else raw
        ids = block.get(IDS) if isinstance(block, Mapping) else None
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
            raise InputError(f"config.json, {IDS}", repr(ids), "a list of integers", "Correct config.json.")
        return tuple(ids)
    return None


def producer(foreign: ForeignHead) -> str:
    """Return the format of an EAGLE-3 directory."""
    raw, name = flat(foreign.config), foreign.architecture
    if "speculators_model_type" in raw:
        return "speculators"
    if name == "LlamaEagle3DraftModel":  # NeMo Automodel
        return "vllm"
    if raw.get(IDS) is not None or name.startswith("Eagle3") or raw.get("norm_before_residual"):
        return "vllm"
    # SpecForge and ModelOpt write for SGLang.
    if name == CLASS or raw.get("eagle_config") is not None or foreign.has(r"fc_norm\.|aux_norm_"):
        return "sglang"
    return "eagle" if foreign.has(r"midlayer\.") or name in ("", "LlamaForCausalLM") else "vllm"


def valid_table(ids: Tensor, marks: Tensor | None, vocab: int) -> bool:
    """Return whether ids [N] are different ones of the target's, those that t2d marks."""
    marked = torch.zeros(vocab, dtype=torch.bool)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        return False
    marked[ids] = True
    return int(marked.sum()) == len(ids) and (marks is None or torch.equal(marked, marks.bool()))


def take_vocabulary(
    tensors: dict[str, Tensor],
    raw: Mapping[str, Any],
    llama: LlamaConfig,
    target: TargetFacts | None,
    notes: list[str],
    problems: list[Problem],
) -> int:
    """Return the size of the draft vocabulary.

    Replaces the tables in `tensors` by ascending ids `d2t`, if the vocabulary is reduced; adds a missing lm_head.
    """
    offsets, marks, vocab = tensors.pop("d2t", None), tensors.pop("t2d", None), llama.vocab_size
    lm_head = tensors.get("lm_head.weight")
    for name, tensor, dims in (("d2t", offsets, 1), ("t2d", marks, 1), ("lm_head.weight", lm_head, 2)):
        if tensor is not None and tensor.ndim != dims:
            raise InputError(name, f"a tensor {list(tensor.shape)}", f"{dims} dimension(s)", "Fetch the head again.")
    drafted = raw.get("draft_vocab_size") or (vocab if lm_head is None else len(lm_head))
    if lm_head is not None and len(lm_head) != drafted:
        remedy = "Correct config.json."
        raise InputError("config.json, draft_vocab_size", drafted, f"the {len(lm_head)} rows of lm_head", remedy)
    if drafted != vocab and not raw.get("draft_vocab_size"):
        problems.append(Problem("draft_vocab_size", f"is missing, and lm_head has {drafted} rows"))
    ids = drafted_ids(offsets, marks, vocab, drafted, problems)
    if len(ids) != drafted or not valid_table(ids, marks, vocab):
        expected = f"{drafted} different ones of the target's {vocab}, those that t2d marks"
        raise InputError("d2t", f"ids of {len(ids)} tokens", expected, "Fetch the head again.")
    if lm_head is None:
        if target is None or target.lm_head is None:
            raise InputError("lm_head.weight", "none", "one, or the target whose own it is", "Pass --target.")
        tensors["lm_head.weight"] = target.lm_head[ids].clone()
        notes.append("lm_head is not in the file: it is the target's")
        if drafted != vocab:
            problems.append(Problem("lm_head.weight", "is missing, and the target's has rows for other tokens"))
    # Ours are ascending: a training draws the most frequent tokens in any order.
    order = ids.argsort()
    if not torch.equal(ids[order], ids):
        ids, tensors["lm_head.weight"] = ids[order], tensors["lm_head.weight"][order]
        notes.append("the draft vocabulary is sorted by id")
    if drafted != vocab:
        tensors["d2t"] = ids
    return drafted


def drafted_ids(
    offsets: Tensor | None, marks: Tensor | None, vocab: int, drafted: int, problems: list[Problem]
) -> Tensor:
    """Return the target's ids of the drafted tokens, by d2t or, without it, by t2d."""
    if offsets is not None and offsets.numel():
        ids = offsets.long() + torch.arange(len(offsets))  # [draft_vocab_size]
        # Some trainers store ids where all servers add the entry to the place; of a GGUF file it was subtracted.
        for other, text in (
            (offsets.long(), "has ids where every server wants offsets (d2t[i] = id - i)"),
            (offsets.long() + 2 * torch.arange(len(offsets)), "has offsets where llama.cpp wants ids"),
        ):
            if not valid_table(ids, marks, vocab) and valid_table(other, marks, vocab):
                problems.append(Problem("d2t", text))
                return other
        return ids
    if drafted != vocab and marks is not None:
        problems.append(Problem("d2t", "is missing: servers take drafted ids for the target's. t2d tells them here"))
        return marks.nonzero()[:, 0]
    return torch.arange(vocab)
