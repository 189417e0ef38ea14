"""Where loops that a GPU runs wait for it: every place is listed here with its reason, and there are no others."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READS = {"item", "tolist", "cpu", "nonzero", "unique", "bincount", "masked_select", "isin", "argwhere"}
FILES = [
    *(f"modules/engine/{name}.py" for name in ("lean", "rows", "cache", "graphs")),
    *(f"modules/{name}.py" for name in ("sampling", "losses", "attention", "transfer")),
    *(f"modules/decoding/{name}.py" for name in ("loop", "plain", "verify", "chain", "growth")),
    *(
        f"modules/drafters/{name}.py"
        for name in ("net", "draft_model", "feature_heads", "eagle", "eagle3", "unrolled", "mtp")
    ),
    *(f"train/{name}.py" for name in ("module", "features", "metrics", "tracking")),
]
HOST, ROUND, CPU = "tensors of the host", "one transfer a round", "the CPU's way, or a row's alone"
ALLOWED = {
    "modules/engine/lean.py:__call__": (1, CPU),
    "modules/engine/rows.py:extend": (1, HOST),
    "modules/sampling.py:choose_each": (1, "tokens of all rows, one transfer a round"),
    "modules/sampling.py:_pick_rows": (3, CPU),
    "modules/sampling.py:best_token": (1, CPU),
    "modules/sampling.py:_last": (1, CPU),
    "modules/sampling.py:_fill": (1, HOST),
    "modules/sampling.py:draw_each": (1, "tokens of all rows, one transfer a round"),
    "modules/transfer.py:true_places": (1, "only where the count is not known; trainings count on the host"),
    "modules/decoding/plain.py:extend_answers": (1, "one transfer for several rounds"),
    "modules/decoding/verify.py:odds": (2, "the CPU's way, or of a drawn tree: each child that is verified"),
    "modules/decoding/verify.py:__init__": (1, ROUND),
    "modules/decoding/verify.py:_chain_odds": (1, ROUND),
    "modules/decoding/verify.py:_draws": (1, ROUND),
    "modules/decoding/chain.py:draft_ahead": (1, "one transfer a draft"),
    "modules/decoding/growth.py:grow_static": (1, "one transfer a draft"),
    "modules/decoding/growth.py:_tree": (1, "one transfer a draft"),
    "modules/decoding/growth.py:_draw_level": (1, "of a drawn tree: each level, and each draw"),
    "modules/drafters/unrolled.py:loss_count": (1, HOST),
    "train/metrics.py:agree": (1, "one transfer a step, behind its gradients: whether to leave it out"),
    "train/module.py:agree": (1, "between ranks only, at the step's begin: what they count together"),
    "train/module.py:agree_on_signal": (1, "between ranks only, before a batch of a validation and behind a step"),
    "train/features.py:feature_std": (1, "before the first step"),
    "train/features.py:item": (1, "of a feature server only, on the host"),
    "train/features.py:ahead": (1, HOST),
    "train/features.py:costs": (1, "where losses are logged"),
    "train/metrics.py:gather_rows": (1, "where losses are logged"),
    "train/metrics.py:state": (1, "where losses are logged"),
    "train/tracking.py:take": (1, "where losses are logged"),
}


def reads(path: str) -> Counter[str]:
    found: Counter[str] = Counter()

    def look(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            found[f"{path}:{function}"] += 1
        for child in ast.iter_child_nodes(node):
            look(child, function)

    look(ast.parse((ROOT / path).read_text()), "")
    return found


def test_nothing_else_waits_for_a_device():
    found = sum((reads(path) for path in FILES), Counter[str]())
    assert dict(found) == {place: count for place, (count, _) in ALLOWED.items()}
