"""Heads that others published, with random weights, read by `import` and checked for every server.

published_heads.yaml has their configs with the sources, and what comes out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.eval.check.check import CheckReport, check_head
from draftsmith.eval.check.states import StateSource
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import TargetFacts
from draftsmith.modules.formats.foreign import detect
from draftsmith.modules.pretrained.directory import read_package

ROOT = Path(__file__).resolve().parents[1]
HEADS = ROOT / "tests" / "published_heads.yaml"
SERVERS = ("vllm", "sglang")
TITLES = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}
TITLES |= {"dflash2": "DFlash2"}
RANDOM = torch.Generator().manual_seed(5)
V, DRAFT_V, WIDTH, RANK = 96, 40, 8, 4  # vocabularies, width of an attention head, rank of a Markov head


@dataclass(frozen=True)
class Published:
    """A published head: its config with reduced sizes, the rule that makes its tensors, and what comes of it."""

    name: str
    target: tuple[str, int]
    rule: str
    outcome: str
    config: Mapping[str, Any]

    @property
    def layer(self) -> Mapping[str, Any]:
        """The settings of the layers, which speculators keep inside."""
        return self.config.get("transformer_layer_config", self.config)

    @property
    def block(self) -> Mapping[str, Any]:
        return {**self.config, **self.config.get("dflash_config", {})}

    def facts(self) -> TargetFacts:
        """The target as its head knows it, with random tables."""
        model_type, layers = self.target
        width, vocab = self.layer.get("hidden_size", WIDTH), self.layer.get("vocab_size", V)
        raw = {"model_type": model_type, "num_hidden_layers": layers, "hidden_size": width, "vocab_size": vocab}
        return TargetFacts(raw, rand(vocab, width), rand(vocab, width))


def heads() -> dict[str, Published]:
    """Name -> head, in the order of the file."""
    return {
        row["name"]: Published(
            row["name"], tuple(row["target"]), row["tensors"], row["outcome"], reduced(json.loads(row["config"]))
        )
        for row in yaml.safe_load(HEADS.read_text("utf-8"))
    }


def reduced(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with smaller sizes: the same ratios of attention heads, and a width that is theirs or not as before."""
    if "transformer_layer_config" in config:
        layer = config["transformer_layer_config"]
        outer = vocabularies(config, layer["vocab_size"])
        return {**outer, "transformer_layer_config": reduced(layer)}
    if "hidden_size" not in config:
        return dict(config)
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    heads, kv_heads = heads // math.gcd(heads, kv_heads), kv_heads // math.gcd(heads, kv_heads)
    used = config["num_attention_heads"] * config.get(
        "head_dim", config["hidden_size"] // config["num_attention_heads"]
    )
    width = heads * WIDTH
    smaller = {
        "hidden_size": width
        if used == config["hidden_size"]
        else width + (heads if used < config["hidden_size"] else -heads),
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": heads,
    }
    for name, value in {"num_key_value_heads": kv_heads, "head_dim": WIDTH}.items():
        if name in config:
            smaller[name] = value
    if config.get("target_hidden_size"):
        smaller["target_hidden_size"] = smaller["hidden_size"]
    return vocabularies({**config, **smaller}, config["vocab_size"])


def vocabularies(config: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """A config with smaller vocabularies and ranks; a mask token stays within its vocabulary."""
    smaller: dict[str, Any] = {}
    for name, value in config.items():
        if name == "dflash_config":
            smaller[name] = vocabularies(value, vocab)
        elif name == "mask_token_id":
            smaller[name] = min(value, V - 1)
        elif name == "vocab_size":
            smaller[name] = V
        elif name == "draft_vocab_size" and value:
            smaller[name] = V if value == vocab else DRAFT_V
        elif name == "markov_rank":
            smaller[name] = min(value, RANK)
        elif name == "conv_group_size":  # a divisor of the width
            smaller[name] = 2
    return {**config, **smaller}


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM)


def attention(layer: Mapping[str, Any], inputs: int, norms: bool = False) -> dict[str, Tensor]:
    """Weights of attention over `inputs` columns; norms: of queries and keys, as Qwen3's."""
    heads, width = layer["num_attention_heads"], layer["hidden_size"]
    kv_heads = layer.get("num_key_value_heads", heads)
    dim = layer.get("head_dim", width // heads)
    return {
        "self_attn.q_proj.weight": rand(heads * dim, inputs),
        "self_attn.k_proj.weight": rand(kv_heads * dim, inputs),
        "self_attn.v_proj.weight": rand(kv_heads * dim, inputs),
        "self_attn.o_proj.weight": rand(width, heads * dim),
        **({f"self_attn.{part}_norm.weight": rand(dim) for part in "qk"} if norms else {}),
    }


def mlp(layer: Mapping[str, Any]) -> dict[str, Tensor]:
    width, inner = layer["hidden_size"], layer["intermediate_size"]
    return {
        "mlp.gate_proj.weight": rand(inner, width),
        "mlp.up_proj.weight": rand(inner, width),
        "mlp.down_proj.weight": rand(width, inner),
        "post_attention_layernorm.weight": rand(width),
    }


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def eagle1(head: Published, facts: TargetFacts) -> dict[str, Tensor]:
    """SafeAILab's EAGLE-1 (cnets1.py): fc has a bias unless the config says no, and the embedding is saved too."""
    width = head.config["hidden_size"]
    tensors = {
        "fc.weight": rand(width, 2 * width),
        **under("layers.0", attention(head.config, width) | mlp(head.config)),
    }
    bias = {"fc.bias": rand(width)} if head.config.get("bias", True) else {}
    return {**tensors, **bias, "embed_tokens.weight": facts.embed_tokens}


def eagle3(head: Published, facts: TargetFacts, name: str = "midlayer", norms: bool = False) -> dict[str, Tensor]:
    """EAGLE-3 (cnets.py, llama3_eagle.py): SpecForge saves the tables of the vocabulary even if it is whole."""
    config, width, vocab = head.config, head.config["hidden_size"], head.config["vocab_size"]
    ids = head.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids") or config.get("target_layer_ids")
    count, drafted = len(ids or range(3)), config.get("draft_vocab_size", vocab)
    layer = {"input_layernorm.weight": rand(width), "hidden_norm.weight": rand(width)}
    layer |= attention(config, 2 * width, norms) | mlp(config)
    tensors = {"fc.weight": rand(width, count * width), **under(name, layer), "norm.weight": rand(width)}
    tensors |= {f"fc_norm.{i}.weight": rand(width) for i in range(count if config.get("fc_norm") else 0)}
    return {
        **tensors,
        "lm_head.weight": rand(drafted, width),
        **(tables(drafted, vocab) if "draft_vocab_size" in config else {}),
    }


def tables(drafted: int, vocab: int) -> dict[str, Tensor]:
    """The tables of a draft vocabulary, of every other token where it is reduced."""
    ids = torch.arange(drafted) * (vocab // drafted)
    marks = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(drafted), "t2d": marks}


def dflash(head: Published, facts: TargetFacts) -> dict[str, Tensor]:
    """z-lab's and SpecForge's DFlash (dflash.py): Qwen3's layers over a block."""
    layer, width = head.layer, head.layer["hidden_size"]
    ids = head.block.get("target_layer_ids") or head.block["aux_hidden_state_layer_ids"]
    tensors = {
        "fc.weight": rand(width, len(ids) * width),
        "hidden_norm.weight": rand(width),
        "norm.weight": rand(width),
    }
    for number in range(layer["num_hidden_layers"]):
        own = {"input_layernorm.weight": rand(width), **attention(layer, width, norms=True), **mlp(layer)}
        tensors |= under(f"layers.{number}", own)
    return tensors


def dflash2(head: Published, facts: TargetFacts) -> dict[str, Tensor]:
    """z-lab's DFlash2 (dflash/model.py): DFlash, convolutions and a selector."""
    width, vocab, block, tensors = head.layer["hidden_size"], head.layer["vocab_size"], head.block, dflash(head, facts)
    rank, kernel = block["selector_rank"], block["conv_kernel_size"]
    for number in range(head.layer["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            deltas = rand(2 * kernel * width // block["conv_group_size"], width)
            own = {"base_kernel": rand(2, kernel, width), "kernel_projection.weight": deltas}
            tensors |= under(f"layers.{number}.{conv}", own)
    tables = {f"{name}_codebook": rand(vocab, rank) for name in ("predecessor", "successor")}
    return tensors | under("candidate_selector", {**tables, "hidden_projection.weight": rand(rank, width)})


def dspark(head: Published, facts: TargetFacts) -> dict[str, Tensor]:
    """DSpark (dspark.py): DFlash, a Markov head and a confidence head."""
    width, vocab, rank = head.layer["hidden_size"], head.layer["vocab_size"], head.block["markov_rank"]
    tensors = dflash(head, facts)
    if rank:
        drafted = head.config.get("draft_vocab_size") or vocab
        tensors |= under(
            "markov_head", {"markov_w1.weight": rand(vocab, rank), "markov_w2.weight": rand(drafted, rank)}
        )
    if head.block.get("enable_confidence_head"):
        tensors |= under("confidence_head.proj", {"weight": rand(1, width + rank), "bias": rand(1)})
    return tensors


def deepspec(head: Published, facts: TargetFacts) -> dict[str, Tensor]:
    """DeepSpec's DSpark and DFlash, which save the target's embedding and lm_head."""
    return {**dspark(head, facts), "embed_tokens.weight": facts.embed_tokens, "lm_head.weight": facts.lm_head}


def deepspec_eagle3(head: Published, facts: TargetFacts) -> dict[str, Tensor]:
    """DeepSpec's EAGLE-3 (modeling/eagle3/qwen3/modeling.py): Qwen3's norms, the target's embedding and lm_head."""
    tensors = eagle3(head, facts, "layers.0", norms=True)
    return {**tensors, "embed_tokens.weight": facts.embed_tokens, "lm_head.weight": facts.lm_head}


def torchspec(head: Published, facts: TargetFacts) -> dict[str, Tensor]:
    """TorchSpec's DFlash by its own names (torchspec/models/draft/dflash.py)."""
    names = {
        "fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "norm.weight": "final_norm.weight",
    }
    tensors = {names.get(name, name): tensor for name, tensor in dflash(head, facts).items()}
    return {**tensors, "embed_tokens.weight": facts.embed_tokens}


def speculators_dspark(head: Published, facts: TargetFacts) -> dict[str, Tensor]:
    """speculators' DSpark with a reduced vocabulary."""
    width, drafted = head.layer["hidden_size"], head.config["draft_vocab_size"]
    own = {"embed_tokens.weight": facts.embed_tokens, "lm_head.weight": rand(drafted, width)}
    return {**dspark(head, facts), **own, **tables(drafted, head.layer["vocab_size"])}


def speculators_eagle3(head: Published, facts: TargetFacts) -> dict[str, Tensor]:
    """speculators' EAGLE-3, which saves the target's embedding, and a norm of all states before fc."""
    tensors = eagle3(dataclasses.replace(head, config={**head.layer, **head.config}), facts, "layers.0")
    norm = {"input_norm.weight": rand(tensors["fc.weight"].shape[1])} if head.config["norm_before_fc"] else {}
    return {**tensors, **norm, "embed_tokens.weight": facts.embed_tokens}


RULES: dict[str, Callable[[Published, TargetFacts], dict[str, Tensor]]] = {
    "eagle1": eagle1, "eagle3": eagle3, "dflash": dflash, "dspark": dspark, "dflash2": dflash2,
    "deepspec-dspark": deepspec, "deepspec-dflash": deepspec, "deepspec-eagle3": deepspec_eagle3,
    "torchspec-dflash": torchspec,
    "speculators-dspark": speculators_dspark, "speculators-eagle3": speculators_eagle3,
}  # fmt: skip


def write(head: Published, facts: TargetFacts, directory: Path) -> dict[str, Tensor]:
    """Write a head's directory; return its tensors."""
    tensors = RULES[head.rule](head, facts)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(head.config), "utf-8")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return tensors


def outcome(head: Published, facts: TargetFacts, directory: Path) -> str:
    """Return the kind that a written head is read as, and each server's verdict, apart by `|`."""
    source, package = StateSource(None, facts), read_package(str(directory))
    own = detect(package, facts)
    read = check_head(package, own, source, None, forward=False).read
    others = (formats().get((server, own.kind)) for server in SERVERS)
    verdicts = [
        "does not load it" if other is None else verdict(check_head(package, other, source, None, False, read))
        for other in others
    ]
    return " | ".join([f"{TITLES[own.kind]} of {own.system}", *verdicts])


def verdict(report: CheckReport) -> str:
    return first(report) if report.problems else "computes it"


def first(report: CheckReport) -> str:
    """The first difference, without the system's name and the numbers, which are those of the reduced sizes."""
    problem = report.problems[0]
    text = re.sub(r"^(vLLM|SGLang) |^found | is not .*|\. Such heads.*|\. Heads of.*", "", problem.text)
    return f"`{problem.where.removeprefix('config.json, ')}`: {text}"
