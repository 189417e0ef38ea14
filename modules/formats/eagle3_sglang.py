"""EAGLE-3 heads in SGLang 0.5.23 (models/llama_eagle3.py, model_executor/, speculative/eagle_worker_v2.py).

What it does not know it ignores, tensors and fields alike; what it does not find keeps its initial value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draftsmith.modules.drafters.eagle3.net import Eagle3Config
from draftsmith.modules.formats.base import Served
from draftsmith.modules.formats.draft_vocabulary import fill_d2t
from draftsmith.modules.formats.eagle1 import Biases
from draftsmith.modules.formats.eagle3 import (
    CLASS,
    IDS,
    OLD_NORMS,
    Eagle3Format,
    Flags,
    said_flag,
    said_ids,
)
from draftsmith.modules.formats.reader import Reader, parts_of
from draftsmith.modules.formats.sglang import PADDED, check_dtype, check_length, command, load_embedding
from draftsmith.modules.types import InputError


class SGLang3(Eagle3Format):
    """What `--speculative-algorithm EAGLE3` takes. Its number k is the OUTPUT of layer k, the input of layer k+1."""

    name = "sglang"
    system = "SGLang"

    def check(self, config: Eagle3Config) -> None:
        elsewhere = "Export it with --format vllm or --format speculators."
        if config.norm_before_residual:
            expected = f"false: {self.system} does not know it, says nothing, and adds the state as it is"
            raise InputError("norm_before_residual", True, expected, elsewhere)
        if config.capture[0] == 0:
            expected = f"layers from 1: {self.system} counts outputs of layers, and the embedding is none"
            raise InputError("layers", list(config.capture), expected, elsewhere)
        super().check(config)

    def id_fields(self, ids: tuple[int, ...] | None) -> dict[str, Any]:
        block = {"use_aux_hidden_state": True, IDS: [number - 1 for number in ids or ()]}
        return {} if ids is None else {"eagle_config": block}

    def serve(self, served: Served) -> str:
        return command(served, "EAGLE3")

    def flags(self, raw: Mapping[str, Any]) -> Flags:
        return Flags(bool(raw.get("fc_norm") or raw.get("use_aux_norm")), bool(raw.get("norm_output")))

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Read in the order of the layers, whatever the list's (models/llama.py, layers_to_capture)."""
        ids = said_ids(raw, "eagle_config")
        return None if ids is None else tuple(sorted({number + 1 for number in ids}))

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        """q, k and v never have one (models/llama_eagle3.py), o has as any Llama's (models/llama.py)."""
        return Biases(
            fc=bool(raw.get("bias")), qkv=False, o=bool(raw.get("attention_bias") or raw.get("bias")), mlp=False
        )

    def check_config(self, reader: Reader) -> None:
        raw = reader.raw
        reader.check_llama()
        if "speculators_model_type" in raw:
            reader.error("speculators_model_type", "does not know such a config.json")
        first = next(iter(raw.get("architectures") or []), None)
        if first == CLASS:
            reader.note("architectures", f"builds {first}")
        else:
            built = "an ordinary Llama" if first == "LlamaForCausalLM" else "no EAGLE-3 head"
            reader.error("architectures", f"builds {built} for {first}: write {CLASS}")
        if "draft_vocab_size" not in raw:
            reader.error("draft_vocab_size", "raises: 'LlamaConfig' object has no attribute 'draft_vocab_size'")
        if raw.get("norm_before_residual"):
            reader.error("norm_before_residual", "does not read it: the residual is the state as it is")
        if said_flag(raw, "norm_before_fc"):
            reader.error("norm_before_fc", "norms the states as one, which this check and our head do not")
        if self.biases(raw).fc:
            reader.error("bias", "gives fc and o_proj a bias, which our head does not have")
        if raw.get("tie_word_embeddings"):
            reader.error("tie_word_embeddings", "drafts with the embedding in the place of lm_head")
        if raw.get("target_hidden_size") not in (None, raw.get("hidden_size")):
            reader.error("target_hidden_size", "reads states of another width, which this check and our head do not")
        above, inside = said_ids(raw, ""), said_ids(raw, "eagle_config")
        if above is not None and self.ids(raw) != above:
            read = "its default" if inside is None else f"eagle_config's {list(inside)}"
            reader.error(IDS, f"does not read {list(above)} at the top: it goes by {read}")
        reader.unread("mlp_bias", "logit_scale")

    def own_name(self, name: str) -> str:
        bare = name if name == "model.lm_head.weight" else name.removeprefix("model.")
        return super().own_name(OLD_NORMS.get(bare, bare))

    def load(self, reader: Reader, name: str) -> None:
        """A name with `model.` or without it, but for lm_head; d2t is added to 0, 1, 2, ..., t2d is skipped."""
        own = self.own_name(name)
        if "t2d" in name:
            reader.used.append(name)
        elif "d2t" in name:
            reduced = reader.settings["draft_vocab_size"] != reader.settings["llama"].vocab_size
            if reduced or bool(reader.package.tensors[name].any()):
                fill_d2t(reader, name)
            else:
                reader.used.append(name)
        elif own == "lm_head.weight" and "draft_vocab_size" in reader.raw and reader.raw["draft_vocab_size"] is None:
            reader.replaced(name, reader.differs(name, "lm_head"), "puts the target's in its place")
        elif own == "embed_tokens.weight":
            load_embedding(reader, name)
        elif all(slot in reader.slots for slot in parts_of(own)):
            reader.fill_split(name, pads=PADDED, own=own)
        else:
            reader.dropped(name, "because it has no such parameter")

    def finish(self, reader: Reader) -> None:
        lm_head, target = "lm_head.weight", reader.target
        if "draft_vocab_size" in reader.raw and reader.raw["draft_vocab_size"] is None:
            if lm_head not in reader.package.tensors:  # which is not missing, then
                reader.findings = [finding for finding in reader.findings if finding.where != lm_head]
            reader.note(lm_head, "takes the target's: draft_vocab_size is null")
            if target is not None and target.lm_head is not None:
                reader.weights[lm_head] = target.lm_head.to(torch.float32)
        check_length(reader)
        check_dtype(reader)
