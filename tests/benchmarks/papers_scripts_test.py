"""The papers' scripts run on few prompts of the embedded models, and their formulas agree with oracles."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.formulas import warped
from oracles.tables import PROMPT, TableLM
from worlds import quick_eagle_head

from draftsmith.benchmarks.papers import eagle2, hsddw, specdecpp
from draftsmith.benchmarks.papers.eagle2 import nodes_of
from draftsmith.benchmarks.papers.hsddw import Watcher
from draftsmith.benchmarks.papers.specdecpp import ForwardTimes, pareto_front
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.launch.cli import main_of
from draftsmith.modules.decoding.loop import DecodeOptions, Round, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.decoding.verify import Verdict
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

SMALL = ["--limit", "2", "--max-new-tokens", "20", "--repeats", "1"]


def results_of(directory: Path) -> dict[str, list]:
    """Rows by the name of their table; the report is there too."""
    return {
        table["name"]: table.get("rows", []) for table in json.loads((directory / "results.json").read_text())["tables"]
    }


def test_hsddw_runs(tmp_path):
    words = [*SMALL, "--temperatures", "1", "--k", "3", "--windows", "3", "--max", "6", "--output", str(tmp_path)]
    assert main_of(hsddw.HsddwConfig, hsddw.run, words) == 0
    tables = results_of(tmp_path)
    assert [row["method"] for row in tables["hsddw-ablation"]] == [*hsddw.METHODS, *hsddw.M2_METHODS]
    assert tables["hsddw-redundancy"] and tables["hsddw-entropy"]


def test_eagle2_runs(tmp_path):
    target = load_lm("embedded:target")
    prompts = read_prompts("embedded:prompts", "embedded:target", "dev", "rename", 2)
    how = (SamplingParams(), 40, TorchSource(0))
    rows = [[*p.prompt_ids, *generate_one(target, None, p.prompt_ids, *how).tokens][-80:] for p in prompts]
    head = quick_eagle_head(target, rows, steps=10, batch_size=2)
    save_head(tmp_path / "head", head, {"target": target.info.identity}, "card")
    words = [*SMALL, "--head", str(tmp_path / "head"), "--temperatures", "0", "--topk", "3"]
    words += ["--nodes", "2,4,8", "--depths", "1,2"]
    assert main_of(eagle2.Eagle2Config, eagle2.run, [*words, "--output", str(tmp_path / "out")]) == 0
    tables = results_of(tmp_path / "out")
    assert all(row["tau"] >= 1 for row in tables["eagle2-sizes"]) and len(tables["eagle2-sizes"]) == 7
    assert tables["eagle2-acceptance-by-position"] and tables["eagle2-confidence"]


def test_specdecpp_runs(tmp_path):
    """specdecpp.sh is a script of commands that a user has on the path."""
    (tmp_path / "draftsmith").write_text(f'#!/bin/sh\nexec {sys.executable} -m draftsmith "$@"\n')
    (tmp_path / "draftsmith").chmod(0o755)
    small = {
        "TRAIN_PROMPTS": "4",
        "LABEL_PROMPTS": "2",
        "NEW_TOKENS": "20",
        "WEIGHTS": "6",
        "DEPTHS": "0",
        "EPOCHS": "1",
    }
    out = tmp_path / "run"
    env = {**os.environ, **small, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(out)}
    subprocess.run(["sh", Path(specdecpp.__file__).with_suffix(".sh")], env=env, check=True, capture_output=True)
    words = [*SMALL, "--heads", str(out / "heads"), "--labels", str(out / "data"), "--dev-prompts", "2"]
    words += ["--ks", "2", "--ks", "4", "--thresholds", "0.5", "--max-drafted", "4", "--output", str(out / "results")]
    assert main_of(specdecpp.SpecDecPPConfig, specdecpp.run, words) == 0
    tables = results_of(out / "results")
    assert [row["role"] for row in tables["specdecpp-throughput"]][:2] == [specdecpp.BEST_K, specdecpp.BEST_T]
    assert tables["specdecpp-rates"] and tables["specdecpp-kl"] and tables["specdecpp-forward-times"]


# -- SpecDec++: theorem 3.1 against optimal stopping by dynamic programming

WANTED = 9


class Process:
    """A response of WANTED tokens behind the first, decoded in rounds that take t_draft n + t_target.

    chances: probability by place that a drafted token is accepted if all before it in the draft were. length: of every
    draft, or None for optimal drafts.
    """

    def __init__(self, chances: Sequence[float], t_draft: float, length: int | None = None):
        self.chances, self.t_draft, self.length = chances, t_draft, length
        self.value = cache(self._value)

    def cost(self, start: int, count: int) -> float:
        """Return the expected cost of the rest with `count` tokens drafted behind `start` others."""
        cost, alive = self.t_draft * count + 1.0, 1.0
        for place, chance in enumerate(self.chances[start : start + count], start=start):
            cost += alive * (1 - chance) * self.value(place + 1)
            alive *= chance
        return cost + alive * self.value(start + count + 1)

    def _value(self, start: int) -> float:
        most = WANTED - start - 1
        if most < 0:
            return 0.0
        return min(self.cost(start, n) for n in ([min(self.length, most)] if self.length else range(most + 1)))

    def rejected(self, start: int, count: int) -> float:
        return 1 - math.prod(self.chances[start : start + count])

    def continues(self, start: int, count: int) -> bool:
        """Return whether a longer draft is better; costs that differ in the last bits are equal."""
        costs = [self.cost(start, n) for n in range(count + 1, WANTED - start)]
        return min(costs, default=math.inf) < self.cost(start, count) - 1e-12


@pytest.mark.parametrize("t_draft", [0.05, 0.2, 0.6])
def test_the_optimal_policy_never_drafts_beyond_the_bound(t_draft):
    bound, compared = ForwardTimes(t_draft, 1.0, 1.0, 4).bound, 0
    assert bound == pytest.approx(1 - t_draft)
    for seed in range(20):
        process = Process(np.random.default_rng(seed).beta(2, 0.7, WANTED).tolist(), t_draft)
        states = [(start, n) for start in range(WANTED) for n in range(1, WANTED - start - 1)]
        beyond = [state for state in states if process.rejected(*state) >= bound]
        assert not any(process.continues(*state) for state in beyond)
        compared += len(beyond)
    assert compared > 10


@pytest.mark.parametrize("t_draft", [0.1, 0.4])
def test_the_bound_is_tight_where_one_more_token_saves_a_call(t_draft):
    start, bound = WANTED - 3, ForwardTimes(t_draft, 1.0, 1.0, 4).bound

    def continues(chance: float) -> bool:
        return Process([0.5] * start + [chance, 1.0, 1.0], t_draft).continues(start, 1)

    assert continues(1 - bound + 1e-6) and not continues(1 - bound - 1e-6)


def test_forward_times_are_recovered_from_exact_rows():
    counts = [(3, 2), (10, 4), (7, 9), (0, 5)]
    rows = [{"num_draft_tokens": d, "num_target_calls": t, "cpu_s": 0.2 * d + 1.5 * t} for d, t in counts]
    times = ForwardTimes.fit(rows, "cpu")
    assert (times.t_draft, times.t_target, times.r2) == pytest.approx((0.2, 1.5, 1.0))
    assert times.bound == pytest.approx(1 - 0.2 / 1.5, abs=5e-4)
    assert ForwardTimes(2.0, 1.0, 1.0, 4).bound is None


def test_the_pareto_front_keeps_undominated_points():
    assert pareto_front([(3, 1), (1, 3), (2, 2), (2, 2), (3, 3), (1, 4)]) == [1, 2, 0]


# -- EAGLE-2: verdicts of single nodes by hand


def test_nodes_below_the_root_and_the_accepted_path_have_a_verdict():
    # Root's children 0 and 1; of node 0: 2 and 3; of node 1: 4; of node 3: 5. Rows that nothing may read are NaN.
    parents = (-1, -1, 0, 0, 1, 3)
    values = tuple(math.log(p) for p in (0.6, 0.3, 0.6 * 0.5, 0.6 * 0.4, 0.3 * 0.5, 0.6 * 0.4 * 0.5))
    logits = torch.full((7, 6), torch.nan, dtype=torch.float64)
    for node, probs in {-1: [0.7, 0.1, 0, 0, 0, 0.2], 0: [0, 0, 0.25, 0.75, 0, 0], 3: [0.9, 0, 0, 0, 0, 0.1]}.items():
        logits[node + 1] = torch.tensor(probs, dtype=torch.float64).log()
    done = Round([0, 3, 0], 2, DraftTree(tuple(range(6)), parents, values=values), Verdict((0, 3), 0), None, logits)
    nodes = list(nodes_of(BenchPrompt("a", [1], "rename"), done, SamplingParams(1.0), ()))
    expected = [(0, 0.7), (1, 0.1), (2, 0.25), (3, 0.75), (5, 0.1)]
    assert [(node["node"], pytest.approx(node["accepted"])) for node in nodes] == expected
    assert [node["confidence"] for node in nodes] == pytest.approx([0.6, 0.3, 0.5, 0.4, 0.5])
    ended = nodes_of(BenchPrompt("a", [1]), done, SamplingParams(), (3,))
    assert [node["node"] for node in ended] == [0, 1, 2, 3]  # nothing below an accepted end token


# -- HSDDW: the watcher against a greedy simulation written from the algorithm

TOKENS, CAPACITY = 30, 64
M1, M2, TARGET = TableLM(105), TableLM(3), TableLM(8)


def best(lm: TableLM, prefix: tuple[int, ...]) -> int:
    return int(lm.row(prefix)[0].argmax())


def draft(lm: TableLM, prefix: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Return greedy tokens after `prefix`, and the entropies of their distributions in Python floats."""
    tokens, entropies = list[int](), []
    for _ in range(count):
        probs = warped(lm.row((*prefix, *tokens))[0], SamplingParams(1.0))
        entropies.append(-sum(p * math.log(p) for p in probs if p > 0))
        tokens.append(best(lm, (*prefix, *tokens)))
    return tokens, entropies


def agreed(lm: TableLM, prefix: tuple[int, ...], tokens: list[int]) -> int:
    return next((i for i, token in enumerate(tokens) if best(lm, (*prefix, *tokens[:i])) != token), len(tokens))


def simulate(k: int, middle: bool, eos: tuple[int, ...]) -> tuple[Counter, Counter]:
    """Return verified tokens and origins of greedy rounds of `spec` or `pre-verify`."""
    answer = [best(TARGET, PROMPT)]
    verified, origin = Counter(), Counter()

    def add(by: str, entropies: list[float], accepted: int, end: int) -> None:
        for i, value in enumerate(entropies[: accepted + 1]):
            verified[by, round(value, 9), i < accepted] += i <= end

    while len(answer) < TOKENS and answer[-1] not in eos:
        text, room = (*PROMPT, *answer), TOKENS - len(answer) - 1
        inner, entropies = draft(M1, text, min(k, room - middle))
        mine = agreed(M2, text, inner)
        tokens, outer = draft(M2, text, mine + 1 if room else 0) if middle else (inner, entropies)
        end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
        kept = agreed(TARGET, text, tokens)
        add("M2 by target" if middle else "M1 by target", outer, kept, end)
        if middle and room:
            add("M1 by M2", entropies, mine, end)
        emitted = [*tokens[:kept], best(TARGET, (*text, *tokens[:kept]))]
        emitted = emitted[: next((i + 1 for i, token in enumerate(emitted) if token in eos), len(emitted))]
        drafted = min(kept, len(emitted))
        by_m1 = min(drafted, mine if middle else len(inner))
        origin += Counter(M1=by_m1, M2=drafted - by_m1, target=len(emitted) - drafted)
        answer += emitted
    return +verified, origin


@pytest.mark.parametrize(("middle", "eos"), [(False, ()), (True, ()), (True, (1,))])
def test_the_watcher_sees_what_happens(middle, eos):
    k = 3
    drafter = ChainDrafter(DraftModelNet(M1), FixedLengthStop(k), CAPACITY)
    if middle:
        drafter = HierarchicalDrafter(M2, drafter, k + 1, dynamic=False, capacity=CAPACITY)
    watcher = Watcher(drafter, eos)
    setup = DecodeOptions(partial(watcher.on_round, "a"))
    generation = generate_one(TARGET, drafter, PROMPT, SamplingParams(), TOKENS, TorchSource(0), eos, setup)
    verified, origin = simulate(k, middle, eos)
    seen = Counter((one["by"], round(one["entropy"], 9), one["accepted"]) for one in watcher.verified)
    assert (seen, watcher.origin) == (verified, origin)
    assert origin.total() == len(generation.tokens) - 1  # all but the prefill's
