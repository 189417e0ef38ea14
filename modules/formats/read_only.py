"""Medusa and Hydra heads of other systems, which are imported and not exported: no maintained server loads them.

Both repositories write `*_lm_head.pt`, and keep all sizes but the heads' in the target's config. List multiplication
repeats ONE block, `[ResBlock(H)] * n`: the file names each copy, and the copies are equal.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.hydra import HydraConfig, HydraHead
from draftsmith.modules.drafters.medusa import MedusaConfig, MedusaHead
from draftsmith.modules.formats.base import (
    ForeignHead,
    HeadFormat,
    HeadTrial,
    ImportedHead,
    Package,
    TargetFacts,
    as_stored,
    check_tensors,
    positive,
    same_values,
)
from draftsmith.modules.formats.llama import ROTARY_BUFFERS, llama_config, max_positions
from draftsmith.modules.formats.rope import BASE, RotarySettings, safeailab_rope
from draftsmith.modules.layers import RopeScaling
from draftsmith.modules.types import FeatureBatch, InputError

PARTS = ("weight", "bias")
FETCH = "Fetch the heads again."
BLOCK, LM_HEAD = r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"(\d+)\.(\d+)\.weight"
MODELOPT = "medusa_heads."
# Hydra's architectures number their modules differently: `prefix-mlp` puts a Dropout before every block and the
# lm_head, and has a LlamaModel of one layer, which is fed states and never reads its embedding.
MLP, PREFIX = "mlp", "prefix-mlp"
PREFIX_LAYER = "prefix_embeding_layer."  # (sic)
TARGET_EMBEDDING = "input_embed_fn.weight"


def target_width(target: TargetFacts | None) -> int:
    """Return the target's hidden size.

    Raises:
        InputError: it is unknown.
    """
    if target is None or target.hidden_size is None or not max_positions(target):
        expected = "the model that the heads read: no file of theirs says its sizes"
        raise InputError("target", "none, or one of unknown sizes", expected, "Pass --target.")
    return target.hidden_size


class Medusa(HeadFormat):
    """Medusa heads of FasterDecoding/Medusa and ModelOpt.

    Head i is `{i}.{j}.linear.*` for its blocks j, and `{i}.{n}.weight` if it has an lm_head of its own. Without one
    (medusa_model_legacy.py, version "2") it reads the target's. ModelOpt puts `medusa_heads.` before the names.
    """

    name, system, kind = "medusa", "FasterDecoding/Medusa", "medusa"
    writes = False

    def recognises(self, foreign: ForeignHead) -> bool:
        return foreign.has(BLOCK) or foreign.has(re.escape(MODELOPT))

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        width, raw = target_width(target), package.config
        assert target is not None
        tensors = package.all_tensors()
        prefix = MODELOPT if any(name.startswith(MODELOPT) for name in tensors) else ""
        # What else is in a checkpoint of ModelOpt is the model.
        bare = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        blocks = [(int(m[1]), int(m[2])) for name in bare if (m := re.fullmatch(BLOCK, name))]
        num_heads, num_layers = (1 + max((block[k] for block in blocks), default=-1) for k in (0, 1))
        own_lm_head = any(re.fullmatch(LM_HEAD, name) for name in bare)
        if own_lm_head and str(raw.get("version")) == "2":
            found = '"2", the layout without lm_heads, and heads with lm_heads of their own'
            raise InputError("config.json, version", found, "heads as it says", "Correct config.json.")
        notes = []
        if not prefix and (said := raw.get("medusa_num_heads", num_heads)) != num_heads:
            notes.append(f"the file's {num_heads} heads are taken; config.json says {said}")
        state, names = {}, dict[str, str]()
        for i in range(num_heads):
            for j in range(num_layers):
                names |= {f"{i}.{j}.linear.{part}": f"heads.{i}.{j}.linear.{part}" for part in PARTS}
            if own_lm_head:
                names[f"{i}.{num_layers}.weight"] = f"lm_heads.{i}.weight"
        for disk, ours in names.items():
            first = re.sub(r"^(\d+)\.\d+\.linear", r"\1.0.linear", disk)
            if disk in bare and prefix + first in tensors and not torch.equal(bare[disk], tensors[prefix + first]):
                found, expected = f"{disk}, which differs from {first}", "copies of one block, as their class has it"
                raise InputError("weights", found, expected, "Such heads are not theirs: ask who trained them.")
            if disk in bare:
                state[ours] = bare.pop(disk).clone()
        table = state.get("lm_heads.0.weight")
        vocab = positive(target.raw, "vocab_size", 1) if table is None else len(table)
        config = MedusaConfig(width, vocab, max_positions(target), num_heads, num_layers, own_lm_head)
        disk_names = {ours: prefix + disk for disk, ours in names.items()}
        with torch.device("meta"):
            check_tensors(MedusaHead(config), {**state, **bare}, lambda name: disk_names.get(name, name))
        return ImportedHead(config, as_stored(state), tuple(notes))

    def forward(self, head: Any, trial: HeadTrial) -> list[list[Tensor]]:
        _, lm_head = trial.tables()
        readers = head.outputs(lambda hidden: hidden @ lm_head.T)
        outputs = []
        for probe in trial.probes:
            states = head(probe.features[:-1])
            outputs.append([output(hidden) for output, hidden in zip(readers, states, strict=True)])  # [T-1, V]
        return outputs


class Hydra(HeadFormat):
    """Grounded Hydra heads of zankner/Hydra, with a prefix layer or without."""

    name, system, kind = "hydra", "zankner/Hydra", "hydra"
    writes = False

    def recognises(self, foreign: ForeignHead) -> bool:
        return foreign.has(r"hydra_mlp\.")

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        target_width(target)
        assert target is not None
        raw = package.config
        arch = raw.get("hydra_head_arch", MLP)
        for field, value, expected in (
            ("hydra_head_arch", arch, f"{MLP} or {PREFIX}" if arch not in (MLP, PREFIX) else ""),
            ("grounded_heads", raw.get("grounded_heads", False), "" if raw.get("grounded_heads") else "true"),
            ("hidden_state_offset", raw.get("hidden_state_offset", 0), "0" if raw.get("hidden_state_offset") else ""),
        ):
            if expected:
                raise InputError(f"config.json, {field}", value, expected, "Such heads are not supported.")
        prefixed = arch == PREFIX
        # Rotary positions as in SafeAILab's code, but for the base, which is always 10000 (modeling_llama_kv.py).
        rope = (
            dataclasses.replace(safeailab_rope(target.raw), theta=BASE)
            if prefixed
            else RotarySettings(BASE, RopeScaling())
        )
        llama = dataclasses.replace(llama_config(target.raw, rope, head_dim=False), num_layers=int(prefixed))
        heads, layers = positive(raw, "hydra_num_heads", 4), positive(raw, "hydra_num_layers", 1)
        config = HydraConfig(llama, heads, layers, own_lm_head=True)
        tensors = dict(package.tensors)
        embedding = tensors.pop(TARGET_EMBEDDING, None)
        theirs = target.embed_tokens
        if embedding is not None and theirs is not None and not same_values(embedding, theirs):
            found, expected = "another embedding than the target's", "the target's own module"
            raise InputError(TARGET_EMBEDDING, found, expected, "Pass the target that the heads were trained for.")
        # The prefix layer is a LlamaModel that is fed states: its embedding is in the file and never read.
        for name in list(tensors):
            unread = name == f"{PREFIX_LAYER}embed_tokens.weight" or any(buffer in name for buffer in ROTARY_BUFFERS)
            if prefixed and unread:
                del tensors[name]
        with torch.device("meta"):
            net = HydraHead(config)
        state, disk_names = {}, {}
        for name, _ in net.named_parameters():
            copies = hydra_names(name, config)
            disk_names[name] = copies[0]
            values = [tensors.pop(copy) for copy in copies if copy in tensors]
            if any(not torch.equal(value, values[-1]) for value in values):
                found, expected = f"copies of {copies[0]} that differ", "copies of one block"
                raise InputError("weights", found, expected, FETCH)
            if values:
                state[name] = values[-1].clone()
        check_tensors(net, {**state, **tensors}, lambda name: disk_names.get(name, name))
        return ImportedHead(config, as_stored(state))

    def forward(self, head: Any, trial: HeadTrial) -> list[list[Tensor]]:
        embedding, lm_head = trial.tables()
        target = _Tables(embedding, lm_head)
        outputs = []
        for probe in trial.probes:
            ids, answered = probe.ids, torch.ones(1, len(probe.ids), dtype=torch.bool)
            batch = FeatureBatch(ids[None], probe.features[None], answered, torch.arange(len(ids))[None])
            states, logits = head.read(batch), []
            for i, (net, output) in enumerate(zip(head.heads, head.outputs(target.lm_head), strict=True)):
                inputs = head.inputs(i, states, answered[:, 1 + i :], batch, target)
                logits.append(output(net(inputs)).flatten(0, -2))  # [T-1-i, V]
            outputs.append(logits)
        return outputs


def hydra_names(name: str, config: HydraConfig) -> list[str]:
    """Return the names in the file of one of our parameters; a repeated block has one for each of its places."""
    first, step = (1, 2) if config.prefix_attention else (0, 1)
    if matched := re.fullmatch(r"heads\.(\d+)\.(linear|skip|block\.linear)\.(\w+)", name):
        number, module, part = matched.groups()
        if module == "block.linear":
            places = [first + step * place for place in range(1, config.num_layers)]
            return [f"hydra_mlp.{number}.{place}.linear.{part}" for place in places]
        return [f"hydra_mlp.{number}.{first}.{'linear' if module == 'linear' else 'res_connection'}.{part}"]
    if matched := re.fullmatch(r"lm_heads\.(\d+)\.(\w+)", name):
        return [f"hydra_lm_head.{matched[1]}{'.1' if config.prefix_attention else ''}.{matched[2]}"]
    return [PREFIX_LAYER + name]


class _Tables:
    """The target's embedding and lm_head [V, H], as a head's inputs ask for them."""

    def __init__(self, embedding: Tensor, lm_head: Tensor):
        self._embedding, self._lm_head = embedding, lm_head

    def embed(self, ids: Tensor) -> Tensor:
        return self._embedding[ids]

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden @ self._lm_head.T
