"""Medusa heads in other systems' directories: the two layouts of FasterDecoding/Medusa, and the names of ModelOpt.

A head there is `Sequential(*([ResBlock(H)] * n), Linear(H, V))`: list multiplication repeats ONE block, so that the n
blocks of a head share their weights and the state dict of the list of heads names each of them. v1
(medusa/model/medusa_model.py) has that Linear; v2 (medusa_model_legacy.py, what the repository's trainer writes) ends
with the blocks and reads the target's lm_head. Both loaders open `medusa_lm_head.pt` alone, with strict=False. ModelOpt
exports `medusa_heads.{i}.{j}.linear.*` and `medusa_heads.{i}.1.weight` with the model, for TensorRT-LLM
(export/plugins/mcore_llama.py, unified_export_megatron.py). Sizes are the target's and in none of the files.
"""

from __future__ import annotations

import math
import re
import shlex
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.drafters.medusa import MedusaConfig
from draftsmith.modules.formats.base import (
    Finding,
    ForeignHead,
    HeadFormat,
    Measure,
    Package,
    Parsed,
    Reading,
    Served,
    TargetFacts,
    Trial,
    largest,
)
from draftsmith.modules.formats.compare import difference, working
from draftsmith.modules.formats.eagle1 import as_stored
from draftsmith.modules.formats.reader import max_positions, positive
from draftsmith.modules.types import InputError

WEIGHTS = "medusa_lm_head.pt"  # the only file that the loaders open
BLOCK, LM_HEAD = r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"(\d+)\.(\d+)\.weight"
PARTS = ("weight", "bias")
FORCED = 5  # heads that v1's loader makes whatever the config says


@dataclass(frozen=True)
class Layout:
    """Heads, residual blocks of each, and whether an lm_head follows them."""

    num_heads: int
    num_layers: int
    own_lm_head: bool


class MedusaFormat(HeadFormat):
    """prefix: of the tensors' names. own_lm_head: each head ends with an lm_head. shared: a head's blocks are one
    object."""

    kind = "medusa"
    prefix: ClassVar[str] = ""
    own_lm_head: ClassVar[bool]
    shared: ClassVar[bool] = True

    @abstractmethod
    def layout(self, raw: Mapping[str, Any]) -> Layout:
        """What the system builds, by `config.json`."""

    @abstractmethod
    def fields(self, config: MedusaConfig) -> dict[str, Any]:
        """`config.json`."""

    def check_fields(self, package: Package, findings: list[Finding]) -> None:
        """Findings about the config and the files."""

    def check(self, config: MedusaConfig) -> None:
        """Refuses heads of the other layout."""
        if config.own_lm_head != self.own_lm_head:
            said = {True: "heads with an lm_head of their own", False: "heads that read the target's lm_head"}
            expected = f"{said[self.own_lm_head]}, which {self.name} holds"
            remedy = f"Choose another format; or train such: --lm-head {'own' if self.own_lm_head else 'target'}."
            raise InputError("head", said[config.own_lm_head], expected, remedy)

    def disk_names(self, layout: Layout) -> dict[str, str]:
        """Our name of every tensor -> the system's."""
        names: dict[str, str] = {}
        for i in range(layout.num_heads):
            for j in range(layout.num_layers):
                names |= {f"heads.{i}.{j}.linear.{part}": f"{self.prefix}{i}.{j}.linear.{part}" for part in PARTS}
            if layout.own_lm_head:
                names[f"lm_heads.{i}.weight"] = f"{self.prefix}{i}.{layout.num_layers}.weight"
        return names

    def write(
        self, config: MedusaConfig, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        self.check(config)
        names = self.disk_names(Layout(config.num_heads, config.num_layers, config.own_lm_head))
        assert names.keys() == state.keys(), "state is not the config's heads"
        if self.shared and (apart := differing_blocks(state, names)):
            found, expected = f"{apart}, whose blocks differ", "blocks that are equal: the class repeats one object"
            raise InputError("head", found, expected, "Train heads of one block: --num-layers 1.")
        tensors = {disk: state[own].detach().to(dtype).contiguous().clone() for own, disk in names.items()}
        return Package(self.fields(config), tensors)

    def read(self, package: Package, target: TargetFacts | None = None) -> Reading:
        """weights: by our names. settings: `layout`."""
        layout, findings = self.layout(package.config), list[Finding]()
        if WEIGHTS in self.weights_files and package.files and WEIGHTS not in package.files:
            text = f"is not there, and {self.system} opens no other: torch.save the tensors of {package.files[0]} so"
            findings.append(Finding("error", WEIGHTS, text))
        self.check_fields(package, findings)
        tensors, names = stored(package), self.disk_names(layout)
        shapes = _shapes(names, tensors, target)
        weights, used = {}, list[str]()
        for own, disk in names.items():
            weights[own] = torch.full(shapes[own], math.nan)
            if disk not in tensors:
                what = "keeps numbers that it was made with" if ".linear." in disk else "its lm_head is random"
                findings.append(Finding("error", disk, f"{self.system} does not find it and says nothing: {what}"))
            elif tuple(tensors[disk].shape) != shapes[own]:
                used.append(disk)
                found = f"(file {list(tensors[disk].shape)}, model {list(shapes[own])})"
                findings.append(Finding("error", disk, f"{self.system} raises: a weight of another shape {found}"))
            else:
                used.append(disk)
                weights[own] = tensors[disk].detach().float()
        if self.shared:
            findings += self._share(weights, names, layout)
        findings += self._unknown(package, names, layout)
        return Reading(weights, {"layout": layout}, tuple(findings), tuple(n for n in used if n in package.tensors))

    def _share(self, weights: dict[str, Tensor], names: Mapping[str, str], layout: Layout) -> Iterator[Finding]:
        """Give a head's blocks the weights that its one block holds once all are loaded: those that came last."""
        for i in range(layout.num_heads):
            for part in PARTS:
                blocks = [f"heads.{i}.{j}.linear.{part}" for j in range(layout.num_layers)]
                loaded = [name for name in blocks if not bool(weights[name].isnan().any())]
                if loaded:
                    last = weights[loaded[-1]]
                    for name in loaded[:-1]:
                        if not torch.equal(weights[name], last):
                            yield Finding("error", names[name], f"is overwritten by {names[loaded[-1]]}: one block")
                    weights |= dict.fromkeys(blocks, last)

    def _unknown(self, package: Package, names: Mapping[str, str], layout: Layout) -> Iterator[Finding]:
        """What the system drops without a word."""
        known = set(names.values())
        for name in package.tensors:
            bare = name.removeprefix(self.prefix)
            if name in known or (self.prefix and not name.startswith(self.prefix)):
                continue  # the second is the model's own
            matched = re.fullmatch(LM_HEAD, bare)
            why = "there is no such parameter"
            if (block := re.fullmatch(BLOCK, bare)) and int(block[1]) >= layout.num_heads:
                why = f"it makes {layout.num_heads} heads"
            elif matched and not layout.own_lm_head:
                why = "its heads read the target's lm_head: this is a file of the layout v1"
            yield Finding("error", name, f"{self.system} drops it without a word: {why}")

    def parse(self, package: Package, target: TargetFacts | None = None) -> Parsed:
        """The heads that the file holds."""
        if target is None or target.hidden_size is None or not max_positions(target):
            expected = "the model that the heads read: no file of theirs says its sizes"
            raise InputError("target", "none, or one of unknown sizes", expected, "Pass --target.")
        tensors, notes = stored(package), list[str]()
        bare = {n.removeprefix(self.prefix): t for n, t in tensors.items() if n.startswith(self.prefix)}
        blocks = [(int(m[1]), int(m[2])) for name in bare if (m := re.fullmatch(BLOCK, name))]
        heads, layers = (1 + max((block[k] for block in blocks), default=-1) for k in (0, 1))
        lm_heads = [name for name in bare if re.fullmatch(LM_HEAD, name)]
        if bool(lm_heads) != self.own_lm_head:
            found = f"{len(lm_heads)} lm_heads ({', '.join(lm_heads[:2]) or 'none'})"
            expected = f"one for each of {heads} heads" if self.own_lm_head else "none: the target's is read"
            raise InputError("weights", found, expected, f"Import it as the other layout, {self.other}.")
        layout, said = Layout(heads, layers, self.own_lm_head), self.layout(package.config)
        if layout != said:
            notes.append(f"the file's {heads} heads of {layers} block(s) are taken; config.json makes it build {said}")
        names = self.disk_names(layout)
        if wrong := sorted(set(names.values()) ^ {self.prefix + name for name in bare}):
            lost = [name for name in wrong if name not in tensors]
            found = f"{(lost or wrong)[0]} {'missing' if lost else 'unknown'}"
            raise InputError("weights", found, f"{heads} heads of {layers} block(s)", "Fetch the heads again.")
        state = {own: tensors[disk] for own, disk in names.items()}
        if self.shared and (apart := differing_blocks(state, names)):
            found, expected = f"{apart}, whose blocks differ", "copies of one block, as their class has it"
            raise InputError("weights", found, expected, "Such heads are not theirs: ask who trained them.")
        vocab = len(state["lm_heads.0.weight"]) if self.own_lm_head else positive(target.raw, "vocab_size")
        config = MedusaConfig(target.hidden_size, vocab, max_positions(target), heads, layers, self.own_lm_head)
        return Parsed(config, as_stored({name: tensor.clone() for name, tensor in state.items()}), tuple(notes))

    @property
    def other(self) -> str:
        """The name of the layout whose heads end otherwise."""
        return "medusa-v2" if self.own_lm_head else "medusa-v1"

    def recorded(self, state: Mapping[str, Tensor], package: Package) -> Mapping[str, Tensor]:
        return state

    def settings_differ(self, config: Mapping[str, Any], reading: Reading) -> list[Finding]:
        layout = reading.settings["layout"]
        return [
            Finding("error", name, f"{getattr(layout, name)} in this system, exported with {config[name]}")
            for name in ("num_heads", "num_layers", "own_lm_head")
            if getattr(layout, name) != config[name]
        ]

    def completed(self, target: Mapping[str, Any], manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {"base_model_name_or_path": path}

    def serve(self, served: Served) -> str:
        """No server loads it: how to check the directory."""
        return shlex.join(["draftsmith", "check", served.directory, "--format", self.name, "--target", served.model])

    def compare(self, reading: Reading, head: nn.Module, package: Package, trial: Trial) -> list[Measure]:
        assert trial.facts.lm_head is not None
        lm_head = trial.facts.lm_head.float()
        theirs: Any = Reads(reading, lm_head)
        worst = size = 0.0
        for probe in trial.probes:
            own, found = logits_of(head, probe.features, lm_head), theirs.heads(probe.features)
            if len(own) != len(found):
                return [Measure("heads", f"{len(found)}", f"{len(own)}", False)]
            for one, two in zip(found, own, strict=True):
                worst, size = max(worst, largest(one - two)), max(size, largest(two))
        rows = [(probe.ids[1:], probe.features[:-1]) for probe in trial.probes]
        number = sum(len(probe.ids) for probe in trial.probes)
        return [
            difference(f"logits of {number} rows", worst, size),
            working(trial, theirs, rows, theirs.others(trial)),
        ]


class Reads:
    """Heads as a system holds them, on features [T, H]."""

    def __init__(self, reading: Reading, lm_head: Tensor):
        """lm_head: the target's [V, H]."""
        self._weights, self._layout, self._shared = reading.weights, reading.settings["layout"], lm_head

    def heads(self, features: Tensor) -> list[Tensor]:
        """Logits [T, V] of each head: of token t + 2 + i at t, by head i."""
        found = []
        for i in range(self._layout.num_heads):
            states = features
            for j in range(self._layout.num_layers):
                block = (self._weights[f"heads.{i}.{j}.linear.{part}"] for part in PARTS)
                states = states + F.silu(F.linear(states, *block))
            found.append(F.linear(states, self._weights.get(f"lm_heads.{i}.weight", self._shared)))
        return found

    def passes(self, ids: Tensor, features: Tensor) -> list[Tensor]:
        """Logits [T, V] of the first token of a draft, for `working`."""
        return self.heads(features)[:1]

    def others(self, trial: Trial) -> Iterator[tuple[str, Any, Any]]:
        """What they may have been made for, if not for what the system does with them."""
        states = [probe.before_norm for probe in trial.probes]
        if all(state is not None for state in states):
            rows = [(p.ids[1:], s[:-1]) for p, s in zip(trial.probes, states, strict=True) if s is not None]
            yield "features from before the final norm", self, rows
        if self._layout.own_lm_head:
            bare = {name: weight for name, weight in self._weights.items() if not name.startswith("lm_heads")}
            other = Reads(Reading(bare, {"layout": self._layout}, (), ()), self._shared)
            yield (
                "the target's lm_head in the place of its own",
                other,
                [(p.ids[1:], p.features[:-1]) for p in trial.probes],
            )


def logits_of(head: Any, features: Tensor, lm_head: Tensor) -> list[Tensor]:
    """Logits [T, V] of each of our heads. lm_head: the target's."""
    outputs: Sequence[Callable[[Tensor], Tensor]] = head.outputs(lambda hidden: hidden @ lm_head.T)
    return [output(states) for output, states in zip(outputs, head(features), strict=True)]


def stored(package: Package) -> dict[str, Tensor]:
    """The tensors, with those that share storage under each of their names: safetensors keeps one, and its metadata the
    others' names."""
    own = package.tensors
    return {**own, **{alias: own[name] for alias, name in package.metadata.items() if name in own}}


def differing_blocks(state: Mapping[str, Tensor], names: Mapping[str, str]) -> str:
    """The first tensor of a block, by the system's name, that is another than its head's first block has; or ''."""
    for own, disk in names.items():
        block = re.fullmatch(r"heads\.(\d+)\.\d+\.(linear\.\w+)", own)
        if block and not torch.equal(state[own], state[f"heads.{block[1]}.0.{block[2]}"]):
            return disk
    return ""


def _shapes(
    names: Mapping[str, str], tensors: Mapping[str, Tensor], target: TargetFacts | None
) -> dict[str, tuple[int, ...]]:
    """Of every tensor, by the target's sizes; where these are not known, by the file's own."""
    any_block = next((t for n, t in tensors.items() if re.search(r"\.linear\.weight$", n)), torch.empty(0, 0))
    any_head = next((t for n, t in tensors.items() if re.search(LM_HEAD + "$", n)), any_block)
    width = (None if target is None else target.hidden_size) or any_block.shape[-1]
    vocab = (None if target is None else target.raw.get("vocab_size")) or any_head.shape[0]
    kinds = {"linear.weight": (width, width), "linear.bias": (width,)}
    return {own: next((s for end, s in kinds.items() if own.endswith(end)), (vocab, width)) for own in names}


class MedusaV1(MedusaFormat):
    """What medusa/model/medusa_model.py loads, and the released heads are."""

    name = "medusa-v1"
    system = "FasterDecoding/Medusa"
    weights_files = (WEIGHTS,)
    own_lm_head = True

    def recognises(self, found: ForeignHead) -> bool:
        return found.has(BLOCK) and found.has(LM_HEAD + "$")

    def check(self, config: MedusaConfig) -> None:
        super().check(config)
        if config.num_heads != FORCED:
            expected = f"{FORCED}: the loader makes so many whatever config.json says"
            raise InputError("head", f"{config.num_heads} heads", expected, "Train heads of --num-heads 5.")

    def layout(self, raw: Mapping[str, Any]) -> Layout:
        return Layout(FORCED, positive(raw, "medusa_num_layers", 1), True)

    def fields(self, config: MedusaConfig) -> dict[str, Any]:
        return {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}

    def check_fields(self, package: Package, findings: list[Finding]) -> None:
        asked = package.config.get("medusa_num_heads")
        if str(package.config.get("version")) == "2":
            text = '"2" names heads that read the target\'s lm_head, and these have their own: a v1 file declared as v2'
            findings.append(Finding("error", "version", text))
        if asked != FORCED:
            findings.append(Finding("note", "medusa_num_heads", f"makes {FORCED} heads, and not the {asked} it says"))

    def serve(self, served: Served) -> str:
        command = ["python", "-m", "medusa.inference.cli", "--model", served.directory, "--base-model", served.model]
        return shlex.join(command)


class MedusaV2(MedusaFormat):
    """What medusa/model/medusa_model_legacy.py loads, and the trainer of the repository writes, under another name."""

    name = "medusa-v2"
    system = "FasterDecoding/Medusa (legacy)"
    weights_files = ("medusa_lm_head.safetensors", WEIGHTS)
    own_lm_head = False
    notes = ("medusa_lm_head.safetensors is what the repository's trainer writes, medusa_lm_head.pt what it loads",)

    def recognises(self, found: ForeignHead) -> bool:
        return found.has(BLOCK)

    def layout(self, raw: Mapping[str, Any]) -> Layout:
        return Layout(positive(raw, "medusa_num_heads", 4), positive(raw, "medusa_num_layers", 1), False)

    def fields(self, config: MedusaConfig) -> dict[str, Any]:
        return {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, "version": "2"}

    def check_fields(self, package: Package, findings: list[Finding]) -> None:
        version = package.config.get("version", "2")
        if str(version) != "2":
            text = f'is "{version}", and these heads have no lm_head, which only "2" says'
            findings.append(Finding("error", "version", text))


class ModelOpt(MedusaFormat):
    """The names of heads in a checkpoint that ModelOpt exports; what else is in it is the model."""

    name = "modelopt"
    system = "ModelOpt"
    prefix = "medusa_heads."
    own_lm_head = True
    shared = False
    notes = (
        "These are the heads alone, by their names: TensorRT-LLM reads them in the checkpoint of their model. It was "
        "not run.",
    )

    def recognises(self, found: ForeignHead) -> bool:
        return found.has(r"medusa_heads\.")

    def check(self, config: MedusaConfig) -> None:
        super().check(config)
        if config.num_layers != 1:
            found, expected = f"{config.num_layers} blocks a head", "1: the lm_head is always tensor 1 of its head"
            raise InputError("head", found, expected, "Train heads of --num-layers 1.")

    def layout(self, raw: Mapping[str, Any]) -> Layout:
        own = raw.get("medusa")
        sizes = own if isinstance(own, Mapping) else {}
        return Layout(positive(sizes, "num_medusa_heads", 1), positive(sizes, "num_medusa_layers", 1), True)

    def fields(self, config: MedusaConfig) -> dict[str, Any]:
        return {"medusa": {"num_medusa_heads": config.num_heads, "num_medusa_layers": config.num_layers}}

    def completed(self, target: Mapping[str, Any], manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {}
