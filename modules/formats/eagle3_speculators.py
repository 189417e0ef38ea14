"""EAGLE-3 heads of speculators 0.9.0 (config.py, model.py, models/eagle3/), which vLLM reads as they are.

The layer's settings are a config of their own inside `config.json`; unknown tensors are warned of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle3.net import Eagle3Config
from draftsmith.modules.formats.base import Package, Served, TargetFacts
from draftsmith.modules.formats.draft_vocabulary import fill_d2t
from draftsmith.modules.formats.eagle1 import Biases, llama_fields
from draftsmith.modules.formats.eagle3 import DEFAULT, IDS, Eagle3Format, Flags, said_ids
from draftsmith.modules.formats.eagle3_vllm import VLLM3
from draftsmith.modules.formats.reader import Reader
from draftsmith.modules.formats.vllm import check_window
from draftsmith.modules.types import InputError

VERSION = "0.9.0"
TYPE = "speculators_model_type"


class Speculators(Eagle3Format):
    """A head of any layers and switches, with the target's embedding: that is not filled in where the file has none."""

    name = system = "speculators"
    layer = "layers.0"
    accepted = ("layers.0",)

    def write(
        self, config: Eagle3Config, state: Mapping[str, Tensor], dtype: torch.dtype, target: TargetFacts | None = None
    ) -> Package:
        if target is None or target.embed_tokens is None:
            raise InputError("target", "none", "the target, whose embedding the file has", "Pass --target.")
        package = super().write(config, state, dtype, target)
        table = target.embed_tokens.detach().to(dtype).contiguous().clone()
        return Package(package.config, {**package.tensors, "embed_tokens.weight": table}, package.metadata)

    def fields(self, config: Eagle3Config, dtype: torch.dtype, ids: tuple[int, ...] | None) -> dict[str, Any]:
        return {
            TYPE: "eagle3",
            "speculators_version": VERSION,
            "architectures": ["Eagle3DraftModel"],
            "speculators_config": speculators_config(None, None),
            "transformer_layer_config": {
                **llama_fields(config.llama, dtype),
                "attention_bias": False,
                "mlp_bias": False,
                **(self.count_field(ids) if ids is not None else {}),  # vLLM's code builds fc by it, and not by the ids
            },
            "draft_vocab_size": config.draft_vocab_size,
            **{name: getattr(config, name) for name in Flags._fields},  # vLLM and speculators have other defaults
            "norm_before_fc": False,
            "target_hidden_size": None,
            IDS: None if ids is None else list(ids),
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
        }

    def completed(self, target: Mapping[str, Any], manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        config = speculators_config(path, target.get("architectures"))
        return {**super().completed(target, manifest, path), "speculators_config": config}

    def serve(self, served: Served) -> str:
        """vLLM reads these directories as they are."""
        return VLLM3().serve(served)

    def flags(self, raw: Mapping[str, Any]) -> Flags:
        return Flags(*(bool(raw.get(name)) for name in Flags._fields))

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        return said_ids(raw, "")

    def num_states(self, raw: Mapping[str, Any]) -> int:
        return len(said_ids(raw, "") or DEFAULT)

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        attention = bool(raw.get("attention_bias"))
        return Biases(fc=False, qkv=attention, o=attention, mlp=bool(raw.get("mlp_bias")))

    def check_config(self, reader: Reader) -> None:
        raw = reader.raw
        if raw.get(TYPE) != "eagle3":
            reader.error(TYPE, f"does not load {raw.get(TYPE)!r} as a head of eagle3")
        if not isinstance(raw.get("transformer_layer_config"), Mapping):
            reader.error("transformer_layer_config", "does not find it and takes the sizes of another model")
        reader.check_llama()
        if raw.get("model_type") != "llama":
            reader.error("model_type", f"builds the layer of {raw.get('model_type', 'qwen3')!r}, not Llama's")
        if "norm_before_residual" not in raw:
            reader.note("norm_before_residual", "takes false: config.json does not say; vLLM takes true")
        if raw.get("norm_before_fc"):
            reader.error("norm_before_fc", "norms the states as one, which this check and our head do not")
        check_window(reader)
        reader.unread("logit_scale")

    def load(self, reader: Reader, name: str) -> None:
        """transformers' own loading: names as they are."""
        own, llama = self.own_name(name), reader.settings["llama"]
        reduced = reader.settings["draft_vocab_size"] != llama.vocab_size
        if own in reader.slots:
            reader.fill(name, reader.package.tensors[name], [own], f"size mismatch for {name}")
        elif name == "d2t" and reduced:
            fill_d2t(reader, name)
        elif name == "t2d" or (name == "d2t" and not reader.package.tensors[name].any()):
            reader.used.append(name)
        elif name == "embed_tokens.weight":
            reader.fill_embedding(name, llama.vocab_size, f"size mismatch for {name}", "loads it, the target's")
        else:
            reader.dropped(name, "because it has no such parameter, with a warning")

    def finish(self, reader: Reader) -> None:
        if "embed_tokens.weight" not in reader.package.tensors:
            reader.error("embed_tokens.weight", "does not find it and may leave it undefined")
        if "d2t" in reader.weights and "t2d" not in reader.package.tensors:
            reader.error("t2d", "raises: t2d tensor hasn't been set")


def speculators_config(target: str | None, architectures: Any) -> dict[str, Any]:
    """What a directory says of its use. target: path or hub id."""
    method = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target, "architectures": architectures or []},
    }
