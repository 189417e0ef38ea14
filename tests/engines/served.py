"""Exported heads of the embedded target that know something, and what our own chain drafts with them, for an engine
that serves them to be held against.

    python served.py OUT

writes OUT/served/target (a transformers directory), OUT/served/CASE/FORMAT (exports), and OUT/served/CASE/ours.json:

prompts, tokens
    Token ids of held-out prompts, and of the target's greedy answers by our chain.
rounds.K
    Of chains of K tokens, for every prompt the number of accepted ones of every round, counted as vLLM does: what an
    end token or the limit cuts off is among them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other tests' helpers
from worlds import in_rows, quick_block_head, quick_eagle3_head, quick_eagle_head, run_models

from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.check.states import facts_of
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.eagle3 import layer_like
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.formats import formats
from draftsmith.modules.pretrained.directory import read_package
from draftsmith.modules.pretrained.heads import build_head, save_head
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

TARGET, GREEDY = "embedded:target", SamplingParams()
NUM_PROMPTS, NEW_TOKENS, LENGTHS = 4, 96, (3, 5)
# Of training, and the prompts whose answers a head learns by heart: long drafts there, short ones elsewhere.
STEPS, PASSES, TAUGHT, BLOCK_STEPS = 250, 4, 1, 80


@dataclass(frozen=True)
class Case:
    """shape: fields of `Eagle3Config` that are not the default; None is an EAGLE-1 head. rope_theta: of the head.
    fc_bias: as of `quick_eagle_head`; no export holds such a head: `gate_test.py` writes its directory.
    first: learns the answers to the first so many held-out prompts, which `gate_test.py` asks, in place of TAUGHT.
    block: kind of a block drafter, whose training takes `shape` as options. window: sliding window of the head, several
    times shorter than the prompts. num_layers: of an EAGLE-3 head. weights: of `export`."""

    formats: tuple[str, ...]
    shape: dict[str, Any] | None = field(default_factory=dict)
    draft_vocab: int = 0
    rope_theta: float | None = None
    fc_bias: float = 0.0
    first: int = 0
    block: str = ""
    window: int | None = None
    num_layers: int = 1
    weights: str = "auto"

    @property
    def kind(self) -> str:
        return self.block or ("eagle" if self.shape is None else "eagle3")


OTHER = {"aux_layers": (1, 4, 11), "fc_norm": True, "norm_output": True}
CASES = {
    "eagle": Case(("vllm",), shape=None),
    "biased": Case((), shape=None, fc_bias=1.0, first=4),
    "whole": Case(("vllm", "llamacpp")),
    "reduced": Case(("vllm", "speculators"), draft_vocab=512),
    "other": Case(("vllm",), OTHER, draft_vocab=512, rope_theta=300.0),
    "taught": Case(("vllm",), OTHER, draft_vocab=512, rope_theta=300.0, first=4),
    # As llama.cpp serves them: three layers, version 3.
    "three": Case(("llamacpp",), {"aux_layers": (1, 4, 11), "norm_before_fc": True}, 512, rope_theta=300.0, first=4),
    "residual": Case(("speculators", "llamacpp"), {"norm_before_residual": True, "own_embedding": True}),
    "ends": Case(("vllm",), {"aux_layers": (0, 6, 12)}, draft_vocab=512, first=4),
    "dflash": Case(("llamacpp", "vllm", "speculators"), first=4, block="dflash"),
    "dflash2": Case(("llamacpp",), {"selector_top_k": 7}, first=4, block="dflash2"),
    "dspark": Case(("llamacpp", "vllm"), first=4, block="dspark"),
    "dflash-reduced": Case(("llamacpp", "vllm"), draft_vocab=512, first=4, block="dflash"),
    "dspark-reduced": Case(("llamacpp",), draft_vocab=512, first=4, block="dspark"),
    "filling": Case(("llamacpp",), {"filling": True}, first=4, block="dspark"),
    "window": Case(("vllm", "speculators"), draft_vocab=512, first=4, window=12, num_layers=2),
    "int8": Case(("vllm",), draft_vocab=512, first=4, weights="int8"),
    "dflash-fp8": Case(("vllm",), first=4, block="dflash", weights="fp8"),
    "dflash-window": Case(("llamacpp", "vllm", "speculators"), first=4, block="dflash", window=12),
    "dflash2-window": Case(("llamacpp",), {"selector_top_k": 7}, first=4, block="dflash2", window=12),
    "dspark-window": Case(("llamacpp",), first=4, block="dspark", window=12),
}


def answers(target: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts with the target's own answers behind them."""
    made = in_rows(target, prompts, NEW_TOKENS)
    return [[*prompt, *one.tokens] for prompt, one in zip(prompts, made, strict=True)]


def trained(target: Any, case: Case, rows: Sequence[Sequence[int]]) -> Any:
    if case.block:
        options = {"block": 5, "anchors": 256, "window": case.window, **(case.shape or {})}
        return quick_block_head(target, rows, BLOCK_STEPS, case.block, draft_vocab=case.draft_vocab, **options)
    if case.shape is None:
        return quick_eagle_head(target, rows, STEPS, fc_bias=case.fc_bias)
    layer = layer_like(target.config, case.rope_theta)
    llama = dataclasses.replace(layer, sliding_window=case.window, num_layers=case.num_layers)
    return quick_eagle3_head(target, rows, STEPS, case.draft_vocab, PASSES, llama=llama, **case.shape)


def drafted(target: Any, head: Any, kind: str, length: int, prompt: Sequence[int]) -> tuple[list[int], list[int]]:
    """The answer, and how many tokens of each round were accepted, also beyond the answer's limit: vLLM's last draft is
    as long as the others."""
    drafter = parse_method(f"{kind}:k={length}").build(run_models(target, **{kind: head}, capacity=1024))
    made = generate_one(target, drafter, prompt, GREEDY, NEW_TOKENS + length + 1, TorchSource(0))
    rounds, emitted = [], made.trace.prefill_emitted
    for step in made.trace.steps:
        if emitted < NEW_TOKENS:
            rounds.append(step.num_accepted)
        emitted += step.num_emitted
    return made.tokens[:NEW_TOKENS], rounds


def main(output: Path) -> None:
    output.mkdir(parents=True)
    target = load_lm(TARGET)
    shutil.copytree(resolve_model(TARGET), output / "target")
    held_out = [row.prompt_ids for row in read_prompts("embedded:prompts", TARGET, "test")]
    prompts = [prompt for prompt in held_out if len(prompt) > 64][:: len(held_out) // (2 * NUM_PROMPTS)][:NUM_PROMPTS]
    rows = {0: answers(target, prompts[:TAUGHT])}
    for name, case in CASES.items():
        kind = case.kind
        if case.first not in rows:
            rows[case.first] = answers(target, held_out[: case.first])
        head = trained(target, case, rows[case.first])
        saved = save_head(output / name / "head", head, {"target": target.info.identity}, "")
        for format in case.formats:
            out = output / name / format
            config = ExportConfig(format=format, head=saved, target=TARGET, output=out, weights=case.weights)
            assert export(config) == 0, "export says why"
        if case.weights != "auto":
            read = formats()["vllm", kind].read(read_package(str(output / name / "vllm")), facts_of(target))
            head = build_head(kind, read.config, read.state).to(target.dtype).eval()
        ours: dict[str, Any] = {"prompts": prompts}
        for length in LENGTHS:
            made = [drafted(target, head, kind, length, prompt) for prompt in prompts]
            ours["tokens"] = [tokens for tokens, _ in made]
            ours[f"rounds.{length}"] = [rounds for _, rounds in made]
        (output / name / "ours.json").write_text(json.dumps(ours))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]) / "served")
