"""Medusa heads of other systems, which are imported and not exported: no maintained server loads them.

Their repository writes `*_lm_head.pt`, and keeps all sizes but the heads' in the target's config. List multiplication
repeats ONE block, `[ResBlock(H)] * n`: the file names each copy, and the copies are equal.
"""

from __future__ import annotations

import re

import torch

from draftsmith.modules.drafters.medusa import MedusaConfig, MedusaHead
from draftsmith.modules.formats.base import (
    HeadFormat,
    ImportedHead,
    Package,
    TargetFacts,
    as_stored,
    check_tensors,
)
from draftsmith.modules.formats.llama import max_positions
from draftsmith.modules.layers import positive
from draftsmith.modules.types import InputError

PARTS = ("weight", "bias")
BLOCK, LM_HEAD = r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"(\d+)\.(\d+)\.weight"
MODELOPT = "medusa_heads."


class Medusa(HeadFormat):
    """Medusa heads of FasterDecoding/Medusa and ModelOpt.

    Head i is `{i}.{j}.linear.*` for its blocks j, and `{i}.{n}.weight` if it has an lm_head of its own. Without one
    (medusa_model_legacy.py, version "2") it reads the target's. ModelOpt puts `medusa_heads.` before the names.
    """

    name, system, kind = "medusa", "FasterDecoding/Medusa", "medusa"
    writes = False

    def read(self, package: Package, target: TargetFacts | None = None) -> ImportedHead:
        if target is None or target.hidden_size is None or not max_positions(target):
            expected = "the model that the heads read: no file of theirs says its sizes"
            raise InputError("target", "none, or one of unknown sizes", expected, "Pass --target.")
        width, raw = target.hidden_size, package.config
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
        vocab = positive(target.text, "vocab_size", 1) if table is None else len(table)
        config = MedusaConfig(width, vocab, max_positions(target), num_heads, num_layers, own_lm_head)
        disk_names = {ours: prefix + disk for disk, ours in names.items()}
        with torch.device("meta"):
            check_tensors(MedusaHead(config), {**state, **bare}, lambda name: disk_names.get(name, name))
        return ImportedHead(config, as_stored(state), tuple(notes))
