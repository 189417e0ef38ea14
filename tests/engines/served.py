"""Exported heads of the embedded target that know something: `draftsmith check` starts whole engines on them.

    python served.py OUT

writes OUT/served/CASE/head and OUT/served/CASE/FORMAT (exports).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other tests' helpers
from worlds import in_rows, quick_block_head, quick_eagle3_head, quick_eagle_head

from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.drafters.eagle3 import layer_like
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm

TARGET = "embedded:target"
NEW_TOKENS = 96
# Of training, and the held-out prompts whose answers a head learns by heart: those that the engines are asked.
STEPS, PASSES, TAUGHT, BLOCK_STEPS = 250, 4, 4, 80


@dataclass(frozen=True)
class Case:
    """shape: fields of `Eagle3Config` that are not the default; None is an EAGLE-1 head. rope_theta: of the head.
    fc_bias: as of `quick_eagle_head`; no export holds such a head: `gate_test.py` writes its directory.
    block: kind of a block drafter, whose training takes `shape` as options. window: sliding window of the head, several
    times shorter than the prompts. num_layers: of an EAGLE-3 head."""

    formats: tuple[str, ...]
    shape: dict[str, Any] | None = field(default_factory=dict)
    draft_vocab: int = 0
    rope_theta: float | None = None
    fc_bias: float = 0.0
    block: str = ""
    window: int | None = None
    num_layers: int = 1

    @property
    def kind(self) -> str:
        return self.block or ("eagle" if self.shape is None else "eagle3")


OTHER = {"aux_layers": (1, 4, 11), "fc_norm": True, "norm_output": True}
CASES = {
    "eagle": Case(("vllm",), shape=None),
    "biased": Case((), shape=None, fc_bias=1.0),
    "whole": Case(("llamacpp",)),
    "reduced": Case(("vllm", "speculators"), draft_vocab=512),
    "taught": Case(("vllm",), OTHER, draft_vocab=512, rope_theta=300.0),
    # As llama.cpp serves them: three layers, version 3.
    "three": Case(("llamacpp",), {"aux_layers": (1, 4, 11), "norm_before_fc": True}, 512, rope_theta=300.0),
    "residual": Case(("speculators", "llamacpp"), {"norm_before_residual": True, "own_embedding": True}),
    "ends": Case(("vllm",), {"aux_layers": (0, 6, 12)}, draft_vocab=512),
    "dflash": Case(("llamacpp", "vllm", "speculators"), block="dflash"),
    "dflash2": Case(("llamacpp",), {"selector_top_k": 7}, block="dflash2"),
    "dspark": Case(("llamacpp", "vllm"), block="dspark"),
    "dflash-reduced": Case(("llamacpp", "vllm"), draft_vocab=512, block="dflash"),
    "dspark-reduced": Case(("llamacpp",), draft_vocab=512, block="dspark"),
    "filling": Case(("llamacpp",), {"filling": True}, block="dspark"),
    "window": Case(("vllm", "speculators"), draft_vocab=512, window=12, num_layers=2),
    "dflash-window": Case(("llamacpp", "vllm", "speculators"), block="dflash", window=12),
    "dflash2-window": Case(("llamacpp",), {"selector_top_k": 7}, block="dflash2", window=12),
    "dspark-window": Case(("llamacpp",), block="dspark", window=12),
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


def main(output: Path) -> None:
    target = load_lm(TARGET)
    held_out = [row.prompt_ids for row in read_prompts("embedded:prompts", TARGET, "test")]
    rows = answers(target, held_out[:TAUGHT])
    for name, case in CASES.items():
        manifest = {"target": target.info.identity}
        saved = save_head(output / name / "head", trained(target, case, rows), manifest, "")
        for format in case.formats:
            config = ExportConfig(format=format, head=saved, target=TARGET, output=output / name / format)
            assert export(config) == 0, "export says why"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]) / "served")
