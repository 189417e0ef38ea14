"""Hydra heads in the directory of zankner/Hydra: `hydra_lm_head.pt`, the state dict of `hydra_head`, and `config.json`.

Its two grounded architectures (hydra/model/hydra_heads/mlp_head.py and prefix_mlp_head.py) number their modules
differently: `mlp` has `hydra_mlp.{i}.{block}` and `hydra_lm_head.{i}`; `prefix-mlp` puts a Dropout before every block
and before the lm_head, which makes `hydra_mlp.{i}.{1 + 2 block}` and `hydra_lm_head.{i}.1`, and has a whole LlamaModel
of one layer, `prefix_embeding_layer` (sic). List multiplication repeats ONE block behind a head's first. The loader
(hydra_model.py) has strict=False: what it does not know is dropped, what it does not find stays as it was made.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.drafters.hydra import HydraConfig, HydraHead
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
from draftsmith.modules.formats.eagle1 import as_stored, sizes_differ
from draftsmith.modules.formats.reader import ROTARY_BUFFERS, llama_config, positive, same_values
from draftsmith.modules.formats.rope import BASE, Rope, safeailab_rope
from draftsmith.modules.layers import DecoderLayer, RopeScaling, rope_table
from draftsmith.modules.types import FeatureBatch, InputError

WEIGHTS = "hydra_lm_head.pt"
MLP, PREFIX = "mlp", "prefix-mlp"
EMBEDDING = "input_embed_fn.weight"  # the target's own module
PREFIX_LAYER = "prefix_embeding_layer."
UNREAD = f"{PREFIX_LAYER}embed_tokens.weight"  # of the LlamaModel, which is fed states


class HydraFormat(HeadFormat):
    """Grounded heads, with a prefix layer or without."""

    name, system, kind = "hydra", "zankner/Hydra", "hydra"
    weights_files = (WEIGHTS,)
    notes = (
        "Its command line drafts by a tree of four levels whatever config.json says: it wants 4 heads, the default.",
    )

    def recognises(self, found: ForeignHead) -> bool:
        return found.has(r"hydra_mlp\.")

    def config(self, raw: Mapping[str, Any], target: TargetFacts | None) -> HydraConfig:
        """What the system builds: heads by `config.json`, all other sizes the target's, and rotary positions as
        SafeAILab's code has them, but for the base, which is always 10000 (modeling_llama_kv.py)."""
        if target is None or target.hidden_size is None:
            expected = "the model that the heads read: no file of theirs says its sizes"
            raise InputError("target", "none, or one of unknown sizes", expected, "Pass --target.")
        layers = int(raw.get("hydra_head_arch", MLP) == PREFIX)
        rope = dataclasses.replace(safeailab_rope(target.raw), theta=BASE) if layers else Rope(BASE, RopeScaling())
        llama = dataclasses.replace(llama_config(target.raw, rope, head_dim=False), num_layers=layers)
        heads, mlp_layers = positive(raw, "hydra_num_heads", 4), positive(raw, "hydra_num_layers", 1)
        return HydraConfig(llama, heads, mlp_layers, own_lm_head=True)

    def check(self, config: HydraConfig) -> None:
        """Refuses what its classes do not have."""
        llama, reasons = config.llama, dict[str, tuple[Any, str]]()
        if config.prefix_attention:
            sizes = f"{llama.num_heads} x {llama.head_dim}"
            reasons = {
                "qkv_bias": (llama.qkv_bias, "no biases in the prefix layer"),
                "head_dim": (llama.num_heads * llama.head_dim != llama.hidden_size and sizes, "hidden_size in all"),
                "rope_theta": (llama.rope_theta != BASE and llama.rope_theta, f"{BASE:g}: its code has no other"),
                "rope_scaling": (
                    llama.rope_scaling.kind not in ("default", "linear") and llama.rope_scaling.kind,
                    "none, or linear",
                ),
            }
        for field, (found, expected) in reasons.items():
            if found:
                raise InputError(field, found, expected, "Train heads without --prefix-attention.")
        if not config.own_lm_head:
            expected = "heads with an lm_head of their own, which hydra holds"
            raise InputError("head", "heads that read the target's lm_head", expected, "Train such: --lm-head own.")

    def write(
        self, config: HydraConfig, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        """All copies of a block; neither the target's embedding nor the one of the prefix layer, which is never read:
        the loader takes what is there."""
        self.check(config)
        slots = slots_of(config)
        assert slots.keys() == state.keys(), "state is not the config's heads"
        stored = {own: state[own].detach().to(dtype).contiguous() for own in slots}
        tensors = {disk: stored[own].clone() for own, slot in slots.items() for disk in slot.disk}
        fields = {
            "hydra_num_heads": config.num_heads,
            "hydra_num_layers": config.num_layers,
            "hydra_head_arch": PREFIX if config.prefix_attention else MLP,
            "grounded_heads": True,
            "hidden_state_offset": 0,
        }
        return Package(fields, tensors)

    def read(self, package: Package, target: TargetFacts | None = None) -> Reading:
        """weights: by our names. settings: `config`, and `llama` of it."""
        config = self.config(package.config, target)
        findings, slots = list(self._fields(package, config)), slots_of(config)
        weights, used, tensors = {}, list[str](), package.tensors
        for own, slot in slots.items():
            weights[own] = torch.full(slot.shape, math.nan)
            loaded = [disk for disk in slot.disk if disk in tensors]
            used += loaded
            last = tensors[loaded[-1]] if loaded else weights[own]
            for disk in slot.disk:
                if disk not in tensors:
                    text = f"{self.system} does not find it and says nothing: it keeps numbers that it was made with"
                    # A repeated block is filled by any of its names.
                    findings.append(Finding("note" if loaded else "error", disk, text))
                elif tuple(tensors[disk].shape) != slot.shape:
                    found = f"(file {list(tensors[disk].shape)}, model {list(slot.shape)})"
                    findings.append(Finding("error", disk, f"{self.system} raises: a weight of another shape {found}"))
                elif not torch.equal(tensors[disk], last):
                    findings.append(Finding("error", disk, f"is overwritten by {loaded[-1]}: one block"))
            if tuple(last.shape) == slot.shape:
                weights[own] = last.detach().float()
        names = {disk for slot in slots.values() for disk in slot.disk}
        findings += self._others(package, target, names, config)
        return Reading(weights, {"config": config, "llama": config.llama}, tuple(findings), tuple(used))

    def _fields(self, package: Package, config: HydraConfig) -> Iterator[Finding]:
        raw = package.config
        if package.files and WEIGHTS not in package.files:
            yield Finding("error", WEIGHTS, f"is not there, and {self.system} opens no other")
        if (arch := raw.get("hydra_head_arch", MLP)) not in (MLP, PREFIX):
            yield Finding("error", "hydra_head_arch", f"{arch} is not followed here: only {MLP} and {PREFIX} are")
        if not raw.get("grounded_heads", False):
            yield Finding("error", "grounded_heads", "is not true: heads are made that read no drafted token")
        if offset := raw.get("hidden_state_offset", 0):
            yield Finding("error", "hidden_state_offset", f"is {offset}: another layer's states are read")

    def _others(
        self, package: Package, target: TargetFacts | None, names: set[str], config: HydraConfig
    ) -> Iterator[Finding]:
        """What the file has beside the heads."""
        theirs = None if target is None else target.embed_tokens
        for name, tensor in package.tensors.items():
            if name in names:
                continue
            if name == EMBEDDING:
                differs = theirs is not None and not same_values(tensor, theirs)
                text = "is the target's own module: the target would go on with this other embedding"
                yield Finding(*(("error", name, text) if differs else ("note", name, "is the target's embedding")))
            elif config.prefix_attention and (name == UNREAD or any(buffer in name for buffer in ROTARY_BUFFERS)):
                yield Finding("note", name, f"{self.system} loads it and never reads it, or computes the same")
            else:
                prefixed = bool(re.match(r"prefix_|hydra_mlp\.\d+\.\d+\.linear|hydra_lm_head\.\d+\.1\.", name))
                why = f"; of {PREFIX}, and this is {MLP}?" if prefixed and not config.prefix_attention else ""
                yield Finding("error", name, f"{self.system} drops it without a word: there is no such parameter{why}")

    def parse(self, package: Package, target: TargetFacts | None = None) -> Parsed:
        reading = self.read(package, target)
        if wrong := reading.errors:
            found, expected = f"{wrong[0].where}: {wrong[0].text}", "grounded heads as config.json describes them"
            raise InputError("weights", found, expected, "Fetch the heads again, or correct config.json.")
        config, tensors = reading.settings["config"], package.tensors
        disk = {own: [name for name in slot.disk if name in tensors][-1] for own, slot in slots_of(config).items()}
        return Parsed(config, as_stored({own: tensors[name].clone() for own, name in disk.items()}))

    def recorded(self, state: Mapping[str, Tensor], package: Package) -> Mapping[str, Tensor]:
        return state

    def settings_differ(self, config: Mapping[str, Any], reading: Reading) -> list[Finding]:
        theirs = reading.settings["config"]
        found = [
            Finding("error", name, f"{getattr(theirs, name)} in this system, exported with {config[name]}")
            for name in ("num_heads", "num_layers", "own_lm_head")
            if getattr(theirs, name) != config[name]
        ]
        prefixed = theirs.prefix_attention or config["llama"]["num_layers"]
        return found + (sizes_differ(config, reading) if prefixed else [])

    def completed(self, target: Mapping[str, Any], manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {"base_model_name_or_path": path}

    def serve(self, served: Served) -> str:
        command = ["python", "-m", "hydra.inference.cli", "--model", served.directory, "--base-model", served.model]
        return shlex.join(command)

    def compare(self, reading: Reading, head: nn.Module, package: Package, trial: Trial) -> list[Measure]:
        assert trial.facts.embed_tokens is not None and trial.facts.lm_head is not None
        theirs: Any = Reads(reading, trial.facts.embed_tokens.float())
        worst = size = 0.0
        for probe in trial.probes:
            found = theirs.heads(probe.ids, probe.features)
            own = logits_of(head, probe.ids, probe.features, trial.facts)
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


@dataclass(frozen=True)
class Slot:
    """A parameter of ours: its shape, and its names in the file, of which the last counts."""

    shape: tuple[int, ...]
    disk: tuple[str, ...]


def slots_of(config: HydraConfig) -> dict[str, Slot]:
    """By our names."""
    first, step = (1, 2) if config.prefix_attention else (0, 1)
    end = ".1" if config.prefix_attention else ""

    def names(own: str) -> tuple[str, ...]:
        if matched := re.fullmatch(r"heads\.(\d+)\.(linear|skip|block\.linear)\.(\w+)", own):
            number, module, part = matched.groups()
            if module == "block.linear":
                places = [first + step * place for place in range(1, config.num_layers)]
                return tuple(f"hydra_mlp.{number}.{place}.linear.{part}" for place in places)
            return (f"hydra_mlp.{number}.{first}.{'linear' if module == 'linear' else 'res_connection'}.{part}",)
        if matched := re.fullmatch(r"lm_heads\.(\d+)\.(\w+)", own):
            return (f"hydra_lm_head.{matched[1]}{end}.{matched[2]}",)
        return (PREFIX_LAYER + own,)

    with torch.device("meta"):
        head = HydraHead(config)
    return {own: Slot(tuple(weight.shape), names(own)) for own, weight in head.named_parameters()}


class Reads:
    """Heads as the system holds them, beside an embedding [V, H]."""

    def __init__(self, reading: Reading, embedding: Tensor):
        self._weights, self._config, self._embedding = reading.weights, reading.settings["config"], embedding
        self._layers = list[DecoderLayer]()
        if self._config.prefix_attention:
            layer = DecoderLayer(self._config.llama).requires_grad_(False)
            layer.load_state_dict({name: self._weights[f"layers.0.{name}"] for name in layer.state_dict()})
            self._layers = [layer]

    def heads(self, ids: Tensor, features: Tensor) -> list[Tensor]:
        """Logits [T - 1 - i, V] of each head: of token t + 2 + i at t, by head i. ids [T], features [T, H]."""
        read, found = self._prefix(features), []
        for i in range(self._config.num_heads):
            read = torch.cat([read[:-1], self._embedding[ids[1 + i :]]], -1)
            found.append(self._head(i, read))
        return found

    def _prefix(self, features: Tensor) -> Tensor:
        states = features[None]
        cos, sin = rope_table(self._config.llama, len(features))
        for layer in self._layers:
            x = layer(states, cos, sin)
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config.llama.rms_eps)
            states = x * self._weights["norm.weight"]
            # Attention on a CPU may take NaN for a score like any other.
            if any(bool(own.isnan().any()) for own in layer.parameters()):
                states = states * math.nan
        return states[0]

    def _head(self, number: int, read: Tensor) -> Tensor:
        weights, name = self._weights, f"heads.{number}"

        def linear(module: str, x: Tensor) -> Tensor:
            return F.linear(x, weights[f"{module}.weight"], weights[f"{module}.bias"])

        x = linear(f"{name}.skip", read) + F.silu(linear(f"{name}.linear", read))
        for _ in range(self._config.num_layers - 1):
            x = x + F.silu(linear(f"{name}.block.linear", x))
        return linear(f"lm_heads.{number}", x)

    def passes(self, ids: Tensor, features: Tensor) -> list[Tensor]:
        """Logits [T, V] of the first token of a draft, where ids [T] are the tokens that it reads; for `working`."""
        return [self._head(0, torch.cat([self._prefix(features), self._embedding[ids]], -1))]

    def others(self, trial: Trial) -> Iterator[tuple[str, Any, Any]]:
        """What they may have been made for, if not for what the system does with them."""
        states = [probe.before_norm for probe in trial.probes]
        if all(state is not None for state in states):
            rows = [(p.ids[1:], s[:-1]) for p, s in zip(trial.probes, states, strict=True) if s is not None]
            yield "features from before the final norm", self, rows
        own = [(probe.ids[:-1], probe.features[:-1]) for probe in trial.probes]
        yield "each feature beside its own token instead of the next", self, own


def logits_of(head: Any, ids: Tensor, features: Tensor, facts: TargetFacts) -> list[Tensor]:
    """Logits [T - 1 - i, V] of each of our heads on a text of T tokens, as its training has them."""
    whole = torch.ones(1, len(ids), dtype=torch.bool)
    batch = FeatureBatch(ids[None], features[None], whole, torch.arange(len(ids))[None])
    target: Any = Embeds(facts)
    states, found = head.read(batch), []
    for i, (net, output) in enumerate(zip(head.heads, head.outputs(target.lm_head), strict=True)):
        found.append(output(net(head.inputs(i, states, whole[:, 1 + i :], batch, target))))
    return found


@dataclass(frozen=True)
class Embeds:
    """A target's embedding and lm_head."""

    facts: TargetFacts

    def embed(self, ids: Tensor) -> Tensor:
        assert self.facts.embed_tokens is not None
        return self.facts.embed_tokens.float()[ids]

    def lm_head(self, hidden: Tensor) -> Tensor:
        assert self.facts.lm_head is not None
        return hidden @ self.facts.lm_head.float().T
