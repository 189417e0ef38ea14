"""Exported heads and what our own head computes with them, for the engines' own code to be compared with.

    python directories.py OUT

writes for every case OUT/KIND/CASE/target (a transformers directory), OUT/KIND/CASE/FORMAT (exports), and
OUT/KIND/CASE/ours.safetensors:

ids [T + 1]; features [T, H] of EAGLE-1, states [T, n H] of EAGLE-3
    Row t has ids[t + 1] and the target's states of ids[t], sits at position t and scores ids[t + 2]; float32.
logits.J [T, V], of EAGLE-3 and block drafters [T, draft vocabulary]
    Of the J-th token of a draft from every row; beyond the text it is fed token 0. EAGLE-1 has J = 0 alone. Of a block
    drafter, J = 0 and 1: of the blocks at positions 1, 2, .. of a text whose last token has states too; -inf for what a
    selector does not choose among.
final [T, H], loss of DFlash2
    The target's states that give its logits, and the loss of the blocks at positions 1 to T - 5, by `LOSS`.
embed_tokens, lm_head [V, H], state.NAME; d2t of EAGLE-3, and of block drafters with a reduced vocabulary
    Of the target, and the head's parameters.

For every defect of `defects.py` and every format of its case it writes OUT/broken/KIND/DEFECT/FORMAT, the export with
that defect, and FORMAT.json beside it: what `draftsmith check` says of it, nothing if it is the head that was exported.

It runs with this project's Python. The engines live in environments of their own and read only what is written here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other tests' helpers
from defects import DEFECTS, Defect
from worlds import tiny_llama_dir

from draftsmith.eval.check.record import differences, hashes_of
from draftsmith.eval.check.states import facts_of
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.export import write_package
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.block.net import DocumentBlocks, layers_like
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head, layer_like
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package
from draftsmith.modules.formats.quantized import FORMATS
from draftsmith.modules.llama_config import LlamaConfig, RopeScaling
from draftsmith.modules.pretrained.directory import read_package
from draftsmith.modules.pretrained.heads import build_head, load_head, save_head, stored_tensors
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import FeatureBatch, InputError

LENGTH, PASSES = 48, 3
WINDOW = 12
LOSS = {"selector_weight": 0.7, "decay": 4.0}  # beside half of l1 and no cross-entropy
SPREAD = 0.1  # of random weights: far from any initial value


@dataclass(frozen=True)
class Case:
    """A head and the formats that hold it.

    target: arguments of `tiny_llama_dir`. num_layers: of an EAGLE head. shape: fields of `Eagle3Config`, of a target
    of eight layers, whose default is 2, 4 and 5, or of `BlockConfig`. rope_theta: of an EAGLE-3 head; the target has
    10000. rope: the head's scaling; the target has none. window: the head's sliding window. weights: of `export`.
    """

    formats: tuple[str, ...]
    target: Mapping[str, Any] = field(default_factory=dict)
    num_layers: int = 1
    shape: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float | None = None
    rope: RopeScaling | None = None
    window: int | None = None
    weights: str = "auto"

    def layers(self, like: LlamaConfig) -> LlamaConfig:
        return dataclasses.replace(like, rope_scaling=self.rope or like.rope_scaling, sliding_window=self.window)


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
# As gpt-oss: the ramp ends between pairs. As DeepSeek: another scale. As Qwen3.5: a part of each head.
GPT_OSS = RopeScaling("yarn", 8.0, original_max_position=32, beta_fast=4.0, beta_slow=0.5, truncate=False)
DEEPSEEK = dataclasses.replace(GPT_OSS, truncate=True, mscale=1.0, mscale_all_dim=0.5)
PART = RopeScaling(partial_rotary_factor=0.5)
SELECTOR = {"conv_group": 8, "selector_rank": 6, "selector_top_k": 5}
# Sizes of which every layer, or all but o_proj, fit the kernels of 8 bits.
WIDE, NARROW = {"hidden": 128, "initializer_range": 0.1}, {"hidden": 64, "initializer_range": 0.2}
THREE, ALL = ("eagle", "vllm", "sglang"), ("eagle", "vllm", "sglang", "speculators")
CASES = {
    "eagle": {
        "llama": Case(THREE),
        "two-layers": Case(THREE, num_layers=2),
        "llama3-rope": Case(THREE[1:], {"rope_parameters": LLAMA3_ROPE}),
        "yarn": Case(THREE[1:], {"rope_parameters": YARN_ROPE}),
        "head-dim": Case(THREE[1:], {"head_dim": 16}),
        "qwen2": Case(THREE, {"family": "qwen2"}),
        "int8": Case(THREE[1:], NARROW, weights="int8"),
        "fp8": Case(THREE[1:], NARROW, weights="fp8"),
    },
    "eagle3": {
        "whole": Case(ALL),
        "reduced": Case(ALL, shape={"draft_vocab_size": 100}),
        "layers": Case(ALL[1:], shape={"draft_vocab_size": 100, "aux_layers": (1, 3, 6)}),
        "ends": Case(("vllm", "speculators"), shape={"draft_vocab_size": 100, "aux_layers": (0, 3, 8)}),
        "two": Case(ALL[1:], shape={"draft_vocab_size": 100, "aux_layers": (3, 6), "fc_norm": True}),
        "late": Case(ALL[1:], shape={"draft_vocab_size": 100, "fc_norm": True, "norm_output": True}),
        "residual": Case(("vllm", "speculators"), shape={"norm_before_residual": True}),
        "theta": Case(ALL, rope_theta=100.0),
        "gpt-oss": Case(ALL[1:], rope=GPT_OSS),
        "deepseek": Case(ALL[1:], rope=DEEPSEEK),
        "part": Case(("vllm",), rope=PART),
        "window": Case(ALL[1:], shape={"draft_vocab_size": 100}, window=WINDOW),
        "deep": Case(ALL[1:], num_layers=3, shape={"draft_vocab_size": 100, "norm_before_fc": True}, window=WINDOW),
        "embedding": Case(("vllm", "speculators"), shape={"draft_vocab_size": 100, "own_embedding": True}),
        "int8": Case(THREE[1:], NARROW, num_layers=2, shape={"draft_vocab_size": 100}, weights="int8"),
        "fp8": Case(THREE[1:], WIDE, shape={"draft_vocab_size": 100}, weights="fp8"),
    },
    "dflash": {
        "block": Case(ALL[1:], shape={"layout": "fill-in"}),
        "window": Case(ALL[1:], shape={"layout": "fill-in"}, window=WINDOW),
        "reduced": Case(("vllm", "speculators"), shape={"layout": "fill-in", "draft_vocab_size": 100}),
        "int8": Case(THREE[1:], WIDE, shape={"layout": "fill-in"}, weights="int8"),
    },
    "dflash2": {
        "block": Case(ALL[1:], shape={"layout": "fill-in", **SELECTOR}),
        "window": Case(ALL[1:], shape={"layout": "fill-in", **SELECTOR, "conv_kernel": 3}, window=WINDOW),
        "fp8": Case(THREE[1:], WIDE, shape={"layout": "fill-in", **SELECTOR}, weights="fp8"),
    },
    "dspark": {
        "vanilla": Case(ALL[1:], shape={"markov_rank": 6, "confidence": True}),
        "filling": Case(ALL[1:], shape={"markov_rank": 6, "confidence": True, "layout": "fill-in"}),
        "gpt-oss": Case(ALL[1:], shape={"markov_rank": 6}, rope=GPT_OSS),
        "part": Case(("vllm", "sglang"), shape={"markov_rank": 6}, rope=PART),
        "window": Case(ALL[1:], shape={"markov_rank": 6}, window=WINDOW),
        "reduced": Case(("vllm", "speculators"), shape={"markov_rank": 6, "confidence": True, "draft_vocab_size": 100}),
        "int8": Case(THREE[1:], WIDE, shape={"markov_rank": 6, "confidence": True}, weights="int8"),
        "gated": Case(ALL[2:], shape={"markov_rank": 6, "markov_type": "gated"}),
        "rnn": Case(ALL[2:], shape={"markov_rank": 6, "markov_type": "rnn", "confidence": True}),
    },
}


def random_head(kind: str, case: Case, lm: Any) -> Any:
    """Return a head of random weights, whose attention scores are large: every position shows in the result."""
    torch.manual_seed(1)
    if kind == "eagle":
        head: Any = EagleHead(EagleConfig.for_target(lm.config, case.num_layers)).requires_grad_(False)
        for name, parameter in head.named_parameters():
            spread = 4 * SPREAD if "q_proj" in name or "k_proj" in name else SPREAD
            parameter.normal_(1.0 if "layernorm" in name else 0.0, spread)
        return head
    if kind != "eagle3":
        layers = case.layers(layers_like(lm.config, 2))
        made = head_class(kind)
        shape = made.Config(layers, (1, 3, 5), 4, lm.info.vocab_size - 1, **case.shape)
        head = made(shape).requires_grad_(False)
        return scattered(head)
    layers = dataclasses.replace(case.layers(layer_like(lm.config, case.rope_theta)), num_layers=case.num_layers)
    plain = Eagle3Config(layers, (2, 4, 5), lm.info.vocab_size)
    return scattered(Eagle3Head(dataclasses.replace(plain, **case.shape)).requires_grad_(False))


def scattered(head: Any) -> Any:
    """Spread a head's weights, and draw the tokens that it can draft."""
    for weight in head.parameters():
        weight.add_(2 * SPREAD * torch.randn_like(weight))
    if head.tokens is not None:
        head.use_draft_vocabulary(torch.randperm(head.config.vocab_size)[: len(head.tokens)].sort().values)
    return head


def block_logits(head: Any, lm: Any, ids: Tensor, states: Tensor) -> Tensor:
    """Logits [T - 1, 2, draft vocabulary] of the first two tokens of the blocks at every position of a text but the
    first."""
    config, anchors = head.config, torch.arange(1, len(ids))
    slots = torch.full((len(anchors), config.block_size), config.mask_token)
    slots[:, 0] = ids[anchors]
    blocks = DocumentBlocks.of(0, anchors, config.block_size, config.llama.sliding_window)
    hidden = head(lm.embed(slots), states, [blocks])[:, config.first_slot :][:, :2]
    logits = lm.lm_head(hidden) if head.tokens is None else head.lm_head(hidden)
    if head.sequential is None:
        return logits
    previous = ids[(anchors[:, None] + torch.arange(2)).clamp_max(len(ids) - 1)]
    return head.sequential.add(logits, head.sequential(hidden, previous))


def block_loss(head: Any, lm: Any, ids: Tensor, features: Tensor) -> Tensor:
    length, block = ids.shape[1], head.config.block_size
    answer = torch.arange(length)[None] > 0
    batch = FeatureBatch(ids, features, answer, torch.arange(length)[None], lengths=(length,))
    step = TrainStep(0, 1, (length,), (1,), loss_count=length - block - 1, span=(1, length - block))
    weighted = type("Weighted", (head.Settings,), {"ce_weight": 0.0, "l1_weight": 0.5})
    return head.loss(batch, lm, weighted(**LOSS), step).loss


@torch.inference_mode()
def write(kind: str, case: Case, directory: Path) -> None:
    """Write target, exports and our own results of a case."""
    directory.mkdir(parents=True)
    target = tiny_llama_dir(directory / "target", layers=3 if kind == "eagle" else 8, **case.target)
    lm = load_lm(str(target), loader="lean")
    head = random_head(kind, case, lm)
    saved = save_head(directory / "head", head, {"target": lm.info.identity}, "")
    for format in case.formats:
        out = directory / format
        config = ExportConfig(format=format, head=saved, target=str(target), output=out, weights=case.weights)
        assert export(config) == 0, "export says why"
    if case.weights in FORMATS:
        # As our reader has the rounded weights.
        read = formats()[format, kind].read(read_package(str(directory / format)), facts_of(lm))
        head = build_head(kind, read.config, read.state).float().requires_grad_(False)
    ids = torch.randint(lm.info.vocab_size, (1, LENGTH + 1))
    ours = {"ids": ids[0]}
    if kind == "eagle":
        features = lm.features(ids)[:, :-1]
        hidden = head.unroll(lm.embed(ids[:, 1:]), features, 1)[0][0]
        ours |= {"features": features[0].contiguous(), "hidden": hidden, "logits.0": lm.lm_head(hidden)}
    elif kind != "eagle3":
        states = lm.features(ids, aux_layers=head.config.aux_layers)[0]
        logits = block_logits(head, lm, ids[0], states)
        ours |= {"states": states.contiguous(), "logits.0": logits[:, 0].clone(), "logits.1": logits[:, 1].clone()}
        ours |= {} if head.tokens is None else {"d2t": head.d2t.clone()}
        if kind == "dflash2":
            ours |= {"final": lm.features(ids)[0].contiguous()}
            ours |= {"loss": block_loss(head, lm, ids, torch.cat([states, ours["final"]], -1)[None])}
    else:
        states = lm.features(ids, aux_layers=head.config.aux_layers)[:, :-1].contiguous()
        ttt_steps = head.unroll(head.embedding(lm)(F.pad(ids[:, 1:], (0, PASSES - 1))), states, PASSES)
        logits = [head.lm_head(head.logits_input(hidden))[0].clone() for hidden in ttt_steps]
        ours |= {"states": states[0], "d2t": head.d2t.clone()} | {f"logits.{j}": part for j, part in enumerate(logits)}
    tables = {"embed_tokens": lm.model.embed_tokens.weight, "lm_head": lm.model.lm_head.weight}
    ours |= {name: weight.detach().clone() for name, weight in tables.items()}
    ours |= {f"state.{name}": weight.detach().contiguous() for name, weight in head.named_parameters()}
    save_file(ours, directory / "ours.safetensors")


def damage(kind: str, defect: Defect, case_directory: Path, directory: Path) -> None:
    """Write the case's exports with the defect, and what our reader of each format says of them."""
    directory.mkdir(parents=True)
    target = str(case_directory / "target")
    facts, ours = facts_of(load_lm(target, loader="lean")), load_file(case_directory / "ours.safetensors")
    head = load_head(case_directory / "head")
    config, hashes = dataclasses.asdict(head.config), hashes_of(stored_tensors(head))
    for name in CASES[kind][defect.case].formats:
        exported = read_package(str(case_directory / name))
        package = Package(*defect.apply(exported.config, exported.tensors, ours))
        (directory / name).mkdir()
        write_package(directory / name, package)
        try:
            imported = formats()[name, kind].read(package, facts)
            problems = [*imported.problems, *differences(config, hashes, imported)]
            lines = [f"{problem.where}: {problem.text}" for problem in problems]
        except InputError as error:
            lines = [str(error)]
        (directory / f"{name}.json").write_text(json.dumps(lines))


def main(output: Path) -> None:
    for kind, cases in CASES.items():
        for name, case in cases.items():
            write(kind, case, output / kind / name)
        for name, defect in DEFECTS[kind].items():
            damage(kind, defect, output / kind / defect.case, output / "broken" / kind / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
