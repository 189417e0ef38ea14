"""tau of drawn chains verified as a block, and token by token, on recorded sampled answers of a target:

    python benchmarks/verification.py --target TARGET --replay RESPONSES --head HEAD --methods eagle3:k=5 --output DIR

Both are exact means over decoding's random numbers (modules/along.py), of the same answers and drafts. Token by token,
a drafted token of the answer is accepted with min(1, q / p), whatever came before it. Intervals are over answers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.benchmarks.measured import describe_run
from draftsmith.data.console import log_note
from draftsmith.data.engines.served_target import load_target
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.replay import Replayed, make_drafters, read_recorded, replay_text
from draftsmith.eval.bench.results import Resamples
from draftsmith.eval.bench.runner import load_models
from draftsmith.eval.settings import BenchConfig
from draftsmith.launch.cli import main_of
from draftsmith.modules.along import AlongDrafter, TargetText
from draftsmith.modules.drafters.method_names import parse_methods
from draftsmith.modules.pretrained.files import make_directory, write_json


def one_by_one(along: AlongDrafter) -> AlongDrafter:
    """Return the drafter whose tokens are verified one by one: no token makes up for another."""

    def odds(seen: TargetText, starts: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
        odds, drafted = along.odds(seen, starts, limits)
        return odds.clamp_max(1), drafted

    return replace(along, odds=odds)


@sole_writer()
def run(config: BenchConfig) -> Path:
    """Measure, print and write results.json; return the directory."""
    config, checkpoint = config.open(config.target)
    torch.set_num_threads(config.num_threads)
    (texts, params), named = read_recorded(config, checkpoint), parse_methods(config.methods)
    target = load_target(checkpoint, **config.loading)
    models = load_models(named, config.paths, max(len(text.ids) for text in texts), params, target, **config.loading)
    block = make_drafters(named, models)
    rules = {"standard": [(one_by_one(along), lengths) for along, lengths in block], "block": block}

    calls = {(rule, item.label): list[Tensor]() for rule in rules for item in named}
    tokens, owners = list[int](), list[int]()
    for number, text in enumerate(texts):
        for rule, drafters in rules.items():
            walks = {item.label: list[Replayed]() for item in named}
            replay_text(target, number, text, params, drafters, walks)
            for label, own in walks.items():
                calls[rule, label] += [one.walk.calls for one in own]
        tokens += [answer.end - answer.begin for answer in text.answers]
        owners += [number] * len(text.answers)

    rows, resamples = list[dict[str, Any]](), Resamples(owners, config.seed)
    for label in (item.label for item in named):
        standard, whole = (torch.stack(calls[rule, label]).T.numpy() for rule in rules)  # [K, answers]
        for length, (one, two) in enumerate(zip(standard, whole, strict=True), 1):
            taus = [sum(tokens) / own.sum() for own in (one, two)]
            sums = resamples.sums(one), resamples.sums(two)
            ci95 = resamples.interval(sums[0] / sums[1])
            rows.append({"method": label, "length": length, "standard": taus[0], "block": taus[1], "ci95": ci95})
            rows[-1] |= {"answers_with_more_calls": int(np.sum(two > one + 1e-9)), "answers": len(tokens)}
            gain = f"{taus[1] / taus[0]:.4f}x ({ci95[0]:.4f}-{ci95[1]:.4f})" if ci95 else ""
            log_note(f"{label}, {length} drafted: standard {taus[0]:.3f}, block {taus[1]:.3f}, {gain}")
    write_json(make_directory(config.output) / "results.json", {"meta": describe_run(config), "rows": rows})
    return config.output


if __name__ == "__main__":
    sys.exit(main_of(BenchConfig, run))
