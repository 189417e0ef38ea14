"""How often `eval lossless` finds biases planted in the real loops, on the embedded pair: docs/evaluation.md's table.

    python tests/eval/lossless_rates.py --runs 20

Every run has a seed of its own and the command's defaults, as one of the six tests of three methods. It ends where the
bias is found. A line a run goes to stderr, the table to stdout. `nothing` plants nothing: runs that fail are false
alarms.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_biases import PLANTED, Planted

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.lossless.answers import PlacedRunner
from draftsmith.eval.lossless.power import Power
from draftsmith.eval.lossless.sampling import SamplingTest
from draftsmith.eval.lossless.settings import LosslessConfig
from draftsmith.modules.drafters.methods import Models, parse_methods

CAPACITY = 512
TESTS = 6
ROWS = {"nothing": Planted(None), "nothing, batched": Planted(None, loop="batched"), **PLANTED}


class Known(SamplingTest):
    """With the power of the first run of its method and loop, whose prompts, p and q are the same."""

    powers: dict[tuple[str, str], Power] = {}

    def _power(self) -> Power:
        key = (self.label, self.runner.loop)
        if key not in self.powers:
            self.powers[key] = super()._power()
        self._kept = []
        return self.powers[key]


def found_in(planted: Planted, seed: int, config: LosslessConfig, models: Models, prompts) -> tuple[bool, int]:
    """Whether one run finds it, and the tokens that it took."""
    method = parse_methods(planted.method)[0].method
    with pytest.MonkeyPatch.context() as patch:
        if planted.plant is not None:
            planted.plant(patch)
        runner = PlacedRunner.of(method, models, 1 if planted.loop == "single" else config.batch_size)
        config = dataclasses.replace(config, seed=seed)
        row = Known(planted.method, runner, prompts, config, config.alpha / TESTS, lambda text: None).run()
    return not row["passed"], row["tokens"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = LosslessConfig("embedded:target", "embedded:prompts", Path("."))
    target = load_lm(config.target)
    models = Models(target, load_lm("embedded:draft"), capacity=CAPACITY, ends=tuple(target.info.eos_ids))
    prompts = read_prompts(config.prompts, config.target, "test", None, config.sampled_prompts)
    results: dict[str, list[tuple[bool, int]]] = {name: [] for name in given.only}
    for seed in range(given.first_seed, given.first_seed + given.runs):
        for name in given.only:
            began = time.process_time()
            results[name].append(found_in(ROWS[name], seed, config, models, prompts))
            print(name, seed, *results[name][-1], f"{time.process_time() - began:.1f}", file=sys.stderr, flush=True)
    print("| planted | method | loop | runs | found | median tokens of a run |\n|---|---|---|---|---|---|")
    for name, runs in results.items():
        planted, found = ROWS[name], sum(each[0] for each in runs)
        median = sorted(each[1] for each in runs)[len(runs) // 2]
        print(f"| {name} | `{planted.method}` | {planted.loop} | {len(runs)} | {found} | {median:,} |")


if __name__ == "__main__":
    main()
