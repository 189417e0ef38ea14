"""EAGLE-1 heads of SafeAILab/EAGLE (commit cb7e084: eagle/model/cnets1.py, configs.py, ea_model.py).

A directory of `config.json` and one weights file, loaded with `strict=False`: what it does not know it ignores, what it
does not find stays random, and only a wrong shape stops it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from draftsmith.modules.drafters.eagle.net import EagleConfig
from draftsmith.modules.formats.base import Package, Parsed, Served, TargetFacts
from draftsmith.modules.formats.eagle1 import Biases, EagleFormat
from draftsmith.modules.formats.reader import Reader, max_positions
from draftsmith.modules.formats.rope import PARTIAL, Rope, conflict, safeailab_rope, transformers_rope
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.types import InputError

ELSEWHERE = "Export it with --format vllm or --format sglang."


class SafeAILab(EagleFormat):
    """vLLM reads what is written for it as well."""

    name = "eagle"
    system = "SafeAILab/EAGLE"
    truncates = False
    reads_head_dim = False
    target_index = True
    notes = (
        "Its tree of total_token 60, depth 5 and top_k 10 counts the root: here it is eagle2:nodes=59:depth=5:topk=10.",
    )

    def check(self, config: EagleConfig) -> None:
        check_layer(config.llama, self.system)
        super().check(config)

    def parse(self, package: Package, target: TargetFacts | None = None) -> Parsed:
        """head_dim and llama3 scaling, which that code cannot have, are taken by the field: heads for vLLM come in the
        same kind of directory."""
        raw = package.config
        theirs, said = safeailab_rope(raw), transformers_rope(raw)
        differ = (said.kind, said.theta) != (theirs.kind, theirs.theta) and said.kind in ("default", "linear")
        if differ and conflict(raw) is None:
            expected = f"{theirs}, which {self.system} computes with here, where vLLM goes by the field"
            remedy = "Import it with --format vllm if vLLM's rule is meant"
            remedy += f", else write {theirs.theta:g} into config.json."
            raise InputError("rope_theta", str(said), expected, remedy)
        return super().parse(package, target)

    def serve(self, served: Served) -> str:
        return command(served)

    def biases(self, raw: Mapping[str, Any]) -> Biases:
        """`bias` is fc's and true unless said (ea_model.py); `qkv_bias` is that of q, k and v (cnets1.py)."""
        return Biases(fc=bool(raw.get("bias", True)), qkv=bool(raw.get("qkv_bias", False)), o=False, mlp=False)

    def rope(self, raw: Mapping[str, Any]) -> Rope:
        return safeailab_rope(raw)

    def check_config(self, reader: Reader) -> None:
        raw = reader.raw
        reader.note("architectures", f"does not read it ({raw.get('architectures')})")
        reader.note(
            "release",
            "is read here as in its repository, which needs transformers 4; the older package eagle-llm 1.2.1 wants"
            " pytorch_model.bin with the embedding in it, knows no qkv_bias and has base 10000 always",
        )
        if "bias" not in raw:
            reader.note("bias", "gives fc a bias: the field is absent and its default is true")
        check_rope(reader)
        reader.unread("attention_bias", "mlp_bias", "hot_vocab_size", "logit_scale")

    def load(self, reader: Reader, name: str) -> None:
        """`load_state_dict(..., strict=False)`; names as they are."""
        if name in reader.slots:
            reader.fill(name, reader.package.tensors[name], [name], f"size mismatch for {name}")
        elif name == "embed_tokens.weight":
            load_embedding(reader, name)
        elif "lm_head" in name:
            reader.replaced(name, reader.differs(name, "lm_head"), "drops it and takes the target's")
        elif name == "fc.bias":
            reader.dropped(name, "because config.json says `bias: false`")
        elif name.removeprefix("model.") in reader.slots:
            reader.dropped(name, "because of the prefix `model.`, which it does not know")
        else:
            reader.dropped(name, "because it has no such parameter")

    def finish(self, reader: Reader) -> None:
        grow_positions(reader)


def command(served: Served) -> str:
    """Its web demo. The size of its tree is set in its code: the number of drafted tokens has no flag there."""
    return (
        f"python -m eagle.application.webui --base-model-path {shlex.quote(served.model)}"
        f" --ea-model-path {shlex.quote(served.directory)}"
    )


def load_embedding(reader: Reader, name: str) -> None:
    """It fills its embedding from the target and loads the file over it."""
    rows = reader.raw.get("vocab_size") if reader.target is None else reader.target.raw.get("vocab_size")
    reader.fill_embedding(name, rows, f"size mismatch for {name}", "loads it over the target's, which is the same")


def grow_positions(reader: Reader) -> None:
    """Its rotary table is as long as the text."""
    longest = max_positions(reader.target)
    if longest > reader.settings["max_position"]:
        reader.note("max_position_embeddings", f"grows its rotary table on demand, to the target's {longest}")
        reader.settings["max_position"] = longest


def check_layer(llama: LlamaConfig, system: str) -> None:
    """Refuses sizes and rotary settings that its code does not go by."""
    scaling = llama.rope_scaling
    if llama.head_dim * llama.num_heads != llama.hidden_size:
        expected = f"hidden_size / num_heads = {llama.hidden_size // llama.num_heads}"
        raise InputError("head_dim", llama.head_dim, f"{expected}: {system} ignores the field", ELSEWHERE)
    if scaling.kind == "llama3":
        raise InputError("rope_scaling", "llama3", f"none or linear: {system} refuses every other", ELSEWHERE)
    if scaling.kind == "linear" and (llama.rope_theta != 10000 or scaling.factor <= 1):
        found = f"linear by {scaling.factor:g} on base {llama.rope_theta:g}"
        rule = f"{system} takes that base under linear scaling, whatever rope_theta says"
        raise InputError("rope_scaling", found, f"a factor over 1 on base 10000: {rule}", ELSEWHERE)


def check_rope(reader: Reader) -> None:
    """Fields of the layer that it goes by in its own way."""
    raw = reader.raw
    heads, head_dim = reader.settings["llama"].num_heads, reader.settings["llama"].head_dim
    if raw.get("head_dim") not in (None, head_dim):
        reader.error("head_dim", f"ignores {raw['head_dim']} and takes hidden_size / {heads} heads = {head_dim}")
    if scaling := raw.get("rope_scaling"):
        _check_scaling(reader, scaling)
    meant, does = transformers_rope(raw), safeailab_rope(raw)
    if meant.theta != does.theta or (meant.kind != does.kind and not meant.kind.startswith(PARTIAL)):
        rule = "it reads rope_theta and rope_scaling only, not rope_parameters"
        if scaling:
            rule = "under rope_scaling its base is always 10000"
        reader.error("rope_theta", f"computes with {does}, not with {meant} as config.json says: {rule}")
    if raw.get("hidden_act", "silu") != "silu":
        reader.error("hidden_act", f"computes with {raw['hidden_act']}, which this check and our head do not")


def _check_scaling(reader: Reader, scaling: Mapping[str, Any]) -> None:
    """What transformers 4 asks of `rope_scaling`."""
    factor, kind = scaling.get("factor"), scaling.get("type")
    if len(scaling) != 2:
        said = f"must be a dictionary with with two fields, `name` and `factor`, got {dict(scaling)}"
        reader.error("rope_scaling", f"raises: `rope_scaling` {said}")
    elif kind not in ("linear", "dynamic"):
        said = f"name field must be one of ['linear', 'dynamic'], got {kind}"
        reader.error("rope_scaling", f"raises: `rope_scaling`'s {said}")
    elif not isinstance(factor, float) or factor <= 1:
        said = f"factor field must be an float > 1, got {factor}"
        reader.error("rope_scaling", f"raises: `rope_scaling`'s {said}")
