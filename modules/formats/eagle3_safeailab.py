"""EAGLE-3 heads of SafeAILab/EAGLE (commit cb7e084: eagle/model/cnets.py, configs.py, ea_model.py).

Loaded with `strict=False`: what it does not know it ignores, what it does not find stays random. It reads none of the
fields that later systems added, and always the target's layers 2, L/2 and L-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle3.net import Eagle3Config
from draftsmith.modules.formats.base import Package, Served, TargetFacts
from draftsmith.modules.formats.draft_vocabulary import fill_d2t
from draftsmith.modules.formats.eagle import SafeAILab, check_layer, check_rope, command, grow_positions, load_embedding
from draftsmith.modules.formats.eagle1 import Biases
from draftsmith.modules.formats.eagle3 import (
    DEFAULT,
    Eagle3Format,
    Flags,
    default_layers,
    said_flag,
    said_ids,
)
from draftsmith.modules.formats.reader import Reader
from draftsmith.modules.formats.rope import Rope, safeailab_rope
from draftsmith.modules.types import InputError

ELSEWHERE = "Export it with --format vllm."
# Targets whose states its code captures (modeling_llama_kv.py, modeling_qwen3_kv.py).
CAPTURED = ("llama", "qwen3")


class SafeAILab3(Eagle3Format):
    """What every other system reads as well, but for the switches and layers that it does not have."""

    name = "eagle"
    system = SafeAILab.system
    accepted = ("midlayer",)
    counts_layers = False
    reads_head_dim = False
    target_index = True
    notes = (
        "Its tree of total_token 60, depth 7 and top_k 10 counts the root: here it is"
        " eagle3-tree:nodes=59:depth=7:topk=10.",
    )

    def check(self, config: Eagle3Config) -> None:
        check_layer(config.llama, self.system)
        for name in Flags._fields:
            if getattr(config, name):
                raise InputError(name, True, f"false: {self.system} ignores it and says nothing", ELSEWHERE)
        count = config.capture[-1] + 3  # the target's layers, if they are the default ones
        if config.capture != (2, count // 2, count - 3):
            expected = f"2, L/2 and L-3, which {self.system} always reads"
            raise InputError("layers", list(config.capture), expected, ELSEWHERE)
        super().check(config)

    def write(
        self, config: Eagle3Config, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        usual = None if target is None else default_layers(target)
        if usual not in (None, config.capture):
            expected = f"{list(usual or ())}, which {self.system} always reads of this target"
            raise InputError("layers", list(config.capture), expected, ELSEWHERE)
        return super().write(config, state, dtype, target)

    def id_fields(self, ids: tuple[int, ...] | None) -> dict[str, Any]:
        return {}

    def serve(self, served: Served) -> str:
        """Its web demo takes EAGLE-3 for what it is told with --no-eagle3 (webui.py: use_eagle3=args.no_eagle3)."""
        return f"{command(served)} --no-eagle3"

    def rope(self, raw: Mapping[str, Any]) -> Rope:
        return safeailab_rope(raw)

    def flags(self, raw: Mapping[str, Any]) -> Flags:
        return Flags()

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        return None

    def num_states(self, raw: Mapping[str, Any]) -> int:
        return len(DEFAULT)

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        return Biases(fc=False, qkv=False, o=False, mlp=False)

    def check_config(self, reader: Reader) -> None:
        raw = reader.raw
        reader.note("architectures", f"does not read it ({raw.get('architectures')})")
        check_rope(reader)
        if "speculators_model_type" in raw:
            reader.error("speculators_model_type", "reads sizes at the top of config.json only, and there are none")
        elif raw.get("draft_vocab_size") is None:
            reader.error("draft_vocab_size", "raises: 'EConfig' object has no attribute 'draft_vocab_size'")
        for name in (*Flags._fields, "norm_before_fc"):
            if said_flag(raw, name):
                reader.error(name, "does not read it")
        said = said_ids(raw, "", "eagle_config")
        if said is not None:
            reader.note("layers", f"does not read {list(said)}")
        if "target_hidden_size" in raw:
            reader.error("target_hidden_size", "does not copy the target's embedding where the field is there")
        if reader.target is not None and reader.target.raw.get("model_type", "llama") not in CAPTURED:
            reader.error("model_type", f"reads no layers of a target of type {reader.target.raw['model_type']}")
        reader.unread("attention_bias", "mlp_bias", "logit_scale")

    def load(self, reader: Reader, name: str) -> None:
        """`load_state_dict(..., strict=False)`; names as they are. Where the vocabulary is whole it has no tables."""
        own, reduced = self.own_name(name), reader.settings["draft_vocab_size"] != reader.settings["llama"].vocab_size
        if own in reader.slots:
            reader.fill(name, reader.package.tensors[name], [own], f"size mismatch for {name}")
        elif name == "d2t" and reduced:
            fill_d2t(reader, name)
        elif name == "t2d" or (name == "d2t" and not reader.package.tensors[name].any()):
            reader.used.append(name)
        elif name == "embed_tokens.weight":
            load_embedding(reader, name)
        elif name.startswith("model."):
            reader.dropped(name, "because of the prefix `model.`, which it does not know")
        else:
            reader.dropped(name, "because it has no such parameter")

    def finish(self, reader: Reader) -> None:
        grow_positions(reader)
