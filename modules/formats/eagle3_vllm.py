"""EAGLE-3 heads in vLLM 0.33.0 (models/llama_eagle3.py, models/utils.py, v1/spec_decode/, transformers_utils/configs/).

It reads directories of speculators too. An unknown tensor stops it, unless it is a bias; a missing one does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from draftsmith.modules.formats.base import Served
from draftsmith.modules.formats.draft_vocabulary import fill_d2t
from draftsmith.modules.formats.eagle1 import Biases
from draftsmith.modules.formats.eagle3 import CLASS, Eagle3Format, Flags, said_flag, said_ids
from draftsmith.modules.formats.reader import ROTARY_BUFFERS, Reader, parts_of
from draftsmith.modules.formats.vllm import check_length, check_scale, check_window, command, first_unknown

# What it builds the Llama head for, by `architectures` (models/registry.py).
BUILT = "Eagle3LlamaForCausalLM"
CLASSES = (CLASS, BUILT, "LlamaForCausalLM")


class VLLM3(Eagle3Format):
    """What `--speculative-config '{"method": "eagle3", ...}'` takes: a head of any layers and switches."""

    name = "vllm"
    system = "vLLM"
    uninitialised = "uninitialised memory"

    def serve(self, served: Served) -> str:
        return command(served, "eagle3")

    def flags(self, raw: Mapping[str, Any]) -> Flags:
        """A directory of speculators that does not say has norm_before_residual (configs/speculators/algos.py)."""
        before = raw.get("norm_before_residual", "speculators_model_type" in raw)
        return Flags(bool(raw.get("fc_norm")), bool(raw.get("norm_output")), bool(before))

    def ids(self, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Number k is the state after k layers; kept sorted, each once (models/interfaces.py)."""
        ids = said_ids(raw, "", "eagle_config")
        return None if ids is None else tuple(sorted(set(ids)))

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        o = bool(raw.get("attention_bias") or raw.get("bias"))
        return Biases(fc=False, qkv=bool(raw.get("attention_bias")), o=o, mlp=bool(raw.get("mlp_bias")))

    def check_config(self, reader: Reader) -> None:
        raw = reader.raw
        reader.check_llama()
        if raw.get("model_type") != "llama":
            reader.error("model_type", f"builds another layer for {raw.get('model_type')!r} than Llama's")
        name = next(iter(raw.get("architectures") or []), None)
        if "speculators_model_type" in raw:
            reader.note("architectures", f"does not read it ({name}): the directory is one of speculators")
            if "norm_before_residual" not in raw:
                reader.note("norm_before_residual", "takes true: config.json does not say")
        elif name in CLASSES:
            reader.note("architectures", f"builds {BUILT} for {name}")
        else:
            reader.error("architectures", f"builds no EAGLE-3 head of Llama for {name}: write {CLASS}")
        if said_flag(raw, "norm_before_fc"):
            reader.error("norm_before_fc", "norms the states as one, which this check and our head do not")
        if raw.get("target_hidden_size") not in (None, raw.get("hidden_size")):
            reader.error("target_hidden_size", "reads states of another width, which this check and our head do not")
        check_window(reader)
        check_scale(reader)

    def load(self, reader: Reader, name: str) -> None:
        """Prepend `model.` unless the name has `lm_head` in it; `midlayer.` is `layers.0.`; t2d is skipped."""
        own, vocab = self.own_name(name), reader.settings["llama"].vocab_size
        if "t2d" in name or (name.startswith("input_norm.") and said_flag(reader.raw, "norm_before_fc")):
            reader.used.append(name)
        elif name.startswith("input_norm."):
            reader.dropped(name, "because norm_before_fc is not set, and says nothing")
        elif name == "d2t" and reader.settings["draft_vocab_size"] != vocab:
            fill_d2t(reader, name)
        elif any(buffer in name for buffer in ROTARY_BUFFERS):
            reader.dropped(name, "a rotary buffer")
        elif all(slot in reader.slots for slot in parts_of(own)):
            reader.fill_split(name, own=own)
        elif name == "embed_tokens.weight":
            # Kept where it differs from the target's (v1/spec_decode/llm_base_proposer.py, _maybe_share_embeddings).
            same = "finds it identical to the target's and shares that one"
            reader.fill_embedding(name, vocab, "a table of another shape", same)
        elif name.endswith(".bias"):
            reader.dropped(name, "as it drops every bias that it has no place for")
        else:
            unknown, built = unknown_module(name, own, reader)
            reader.error(name, f"raises: There is no module or parameter named {unknown!r} in {built}")

    def finish(self, reader: Reader) -> None:
        share_lm_head(reader)
        check_length(reader)


def unknown_module(name: str, own: str, reader: Reader) -> tuple[str, str]:
    """Where its walk down the modules ends, and the class that it names."""
    if "d2t" in name or "lm_head" in name:
        inner, built = name.removeprefix("model."), "LlamaModel" if name.startswith("model.") else BUILT
        return inner.replace("d2t", "draft_id_to_target_id").split(".")[0], built
    slots = [re.sub(r"^layer\.", "layers.0.", slot) for slot in reader.slots]
    return first_unknown(re.sub(r"^layer\.", "layers.0.", own.removeprefix("/")), slots), "LlamaModel"


def share_lm_head(reader: Reader) -> None:
    """A file without lm_head drafts with the target's (v1/spec_decode/llm_base_proposer.py, _maybe_share_lm_head)."""
    name, target = "lm_head.weight", reader.target
    if name in reader.package.tensors:
        return
    reader.findings = [finding for finding in reader.findings if finding.where != name]
    if "d2t" in reader.weights:
        reader.error(name, "does not find it, and the target's has other rows than the draft vocabulary")
    else:
        reader.note(name, "does not find it and takes the target's")
        if target is not None and target.lm_head is not None:
            reader.weights[name] = target.lm_head.to(torch.float32)
