"""EAGLE-1 heads of SafeAILab/EAGLE (commit cb7e084: eagle/model/cnets1.py, configs.py, ea_model.py).

A directory of `config.json` and one weights file, loaded with `strict=False`: what it does not know it ignores, what it
does not find stays random, and only a wrong shape stops it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.drafters.eagle.head import EagleConfig
from draftsmith.modules.interop.base import Package, Parsed, Reading, TargetFacts
from draftsmith.modules.interop.eagle1.directory import Producer, parse_head, write_head
from draftsmith.modules.interop.eagle1.reader import Biases, Reader, positions, sizes, slots
from draftsmith.modules.interop.eagle1.rope import conflict, safeailab_rope, transformers_rope
from draftsmith.modules.types import InputError

SYSTEM = "SafeAILab/EAGLE"


def write(config: EagleConfig, state: Mapping[str, Tensor], dtype: torch.dtype) -> Package:
    """For SafeAILab/EAGLE; vLLM reads it as well.

    Raises:
        InputError: where that code can not hold the head.
    """
    llama = config.llama
    if llama.head_dim * llama.num_heads != llama.hidden_size:
        raise InputError(
            "head_dim",
            llama.head_dim,
            f"hidden_size / num_heads = {llama.hidden_size // llama.num_heads}: {SYSTEM} ignores the field",
            "Export it with --format vllm or --format sglang.",
        )
    scaling = llama.rope_scaling
    if scaling.kind == "llama3":
        raise InputError(
            "rope_scaling",
            "llama3",
            f"none or linear: {SYSTEM} refuses every other",
            "Export it with --format vllm or --format sglang.",
        )
    if scaling.kind == "linear" and (llama.rope_theta != 10000 or scaling.factor <= 1):
        raise InputError(
            "rope_scaling",
            f"linear by {scaling.factor:g} on base {llama.rope_theta:g}",
            f"a factor over 1 on base 10000: {SYSTEM} takes that base under linear scaling, whatever rope_theta says",
            "Export it with --format vllm or --format sglang.",
        )
    fields = {"architectures": ["LlamaForCausalLM"], "bias": False}
    return write_head(config, state, dtype, fields | ({"qkv_bias": True} if llama.qkv_bias else {}))


def parse(package: Package, target: TargetFacts | None) -> Parsed:
    """As a head of ours. head_dim and llama3 scaling, which that code can not have, are taken by the field: heads for
    vLLM come in the same kind of directory.

    Raises:
        InputError: for what our head can not be, or where that code would compute with random numbers.
    """
    raw = package.config
    theirs, said = safeailab_rope(raw), transformers_rope(raw)
    differ = (said.kind, said.theta) != (theirs.kind, theirs.theta) and said.kind in ("default", "linear")
    if differ and conflict(raw) is None:
        raise InputError(
            "rope_theta",
            str(said),
            f"{theirs}, which {SYSTEM} computes with here, where vLLM goes by the field",
            f"Import it with --format vllm if vLLM's rule is meant, else write {theirs.theta:g} into config.json.",
        )
    biases = _biases(raw)
    return parse_head(package, target, Producer(SYSTEM, biases, sizes(raw)))


def serve(target: str, directory: str, num_drafted: int) -> str:
    """Its web demo. The size of its tree is set in its code: num_drafted has no flag there."""
    return (
        f"python -m eagle.application.webui --base-model-path {shlex.quote(target)}"
        f" --ea-model-path {shlex.quote(directory)}"
    )


def _biases(raw: Mapping[str, Any]) -> Biases:
    """`bias` is the fusion layer's and true unless said (ea_model.py); `qkv_bias` is that of q, k and v (cnets1.py)."""
    return Biases(fc=bool(raw.get("bias", True)), qkv=bool(raw.get("qkv_bias", False)), o=False, mlp=False)


def read(package: Package, target: TargetFacts | None) -> Reading:
    """What `EaModel.from_pretrained` makes of the directory.

    Raises:
        InputError: for sizes in `config.json` that are no sizes.
    """
    reader = Reader(package, target, SYSTEM)
    raw = package.config
    size, biases, rope = sizes(raw, head_dim=False), _biases(raw), safeailab_rope(raw)
    reader.take(size, slots(size, biases), rope)
    _check_config(reader)
    for name in package.tensors:
        _load(reader, name, biases)
    reader.missing("random numbers")
    reader.surroundings(truncates=False)
    longest = positions(target)
    if longest > reader.settings["max_position"]:
        reader.note("max_position_embeddings", f"grows its rotary table on demand, to the target's {longest}")
        reader.settings["max_position"] = longest
    return reader.reading()


def _check_config(reader: Reader) -> None:
    raw = reader.raw
    reader.note("architectures", f"does not read it ({raw.get('architectures')})")
    reader.note(
        "release",
        "is read here as in its repository, which needs transformers 4; the older package eagle-llm 1.2.1 wants"
        " pytorch_model.bin with the embedding in it, knows no qkv_bias and has base 10000 always",
    )
    if "bias" not in raw:
        reader.note("bias", "gives fc a bias: the field is absent and its default is true")
    heads, head_dim = reader.settings["num_heads"], reader.settings["head_dim"]
    if raw.get("head_dim") not in (None, head_dim):
        reader.error("head_dim", f"ignores {raw['head_dim']} and takes hidden_size / {heads} heads = {head_dim}")
    scaling = raw.get("rope_scaling")
    if scaling:
        factor, kind = scaling.get("factor"), scaling.get("type")
        if len(scaling) != 2:
            reader.error(
                "rope_scaling",
                "raises: `rope_scaling` must be a dictionary with with two fields, `name` and `factor`, "
                f"got {dict(scaling)}",
            )
        elif kind not in ("linear", "dynamic"):
            reader.error(
                "rope_scaling", f"raises: `rope_scaling`'s name field must be one of ['linear', 'dynamic'], got {kind}"
            )
        elif not isinstance(factor, float) or factor <= 1:
            reader.error("rope_scaling", f"raises: `rope_scaling`'s factor field must be an float > 1, got {factor}")
    meant, does = transformers_rope(raw), safeailab_rope(raw)
    if (meant.kind, meant.theta) != (does.kind, does.theta):
        reader.error("rope_theta", f"computes with {does}, not with {meant} as config.json says: {_rope_rule(raw)}")
    if raw.get("hidden_act", "silu") != "silu":
        reader.error("hidden_act", f"computes with {raw['hidden_act']}, which this check and our head do not")
    for key in ("attention_bias", "mlp_bias", "hot_vocab_size", "logit_scale"):
        if raw.get(key) not in (None, False, 1, 1.0):
            reader.note(key, f"does not read it ({raw[key]})")


def _rope_rule(raw: Mapping[str, Any]) -> str:
    if raw.get("rope_scaling"):
        return "under rope_scaling its base is always 10000"
    return "it reads rope_theta and rope_scaling only, not rope_parameters"


def _load(reader: Reader, name: str, biases: Biases) -> None:
    """`load_state_dict(..., strict=False)`; names as they are."""
    if name in reader.slots:
        reader.fill(name, name, f"size mismatch for {name}")
    elif name == "embed_tokens.weight":
        _load_embedding(reader, name)
    elif "lm_head" in name:
        reader.dropped_lm_head(name)
    elif name == "fc.bias":
        reader.dropped(name, "because config.json says `bias: false`")
    elif name.removeprefix("model.") in reader.slots:
        reader.dropped(name, "because of the prefix `model.`, which it does not know")
    else:
        reader.dropped(name, "because it has no such parameter")


def _load_embedding(reader: Reader, name: str) -> None:
    """It fills its embedding from the target and loads the file over it."""
    tensor, target = reader.package.tensors[name], reader.target
    rows = reader.raw.get("vocab_size", tensor.shape[0]) if target is None else target.raw.get("vocab_size")
    expected = (tensor.shape[0] if rows is None else rows, reader.slots["fc.weight"].shape[0])
    if tuple(tensor.shape) != expected:
        reader.used.append(name)
        shapes = f"(file {list(tensor.shape)}, model {list(expected)})"
        reader.error(name, f"raises: size mismatch for {name} {shapes}")
    elif reader.embeds_differ(name) is False:
        reader.used.append(name)
        reader.note(name, "loads it over the target's, which is the same")
    else:
        reader.keep_embedding(name)
