"""HSDDW's study: what is watched against a greedy simulation written from the algorithm, tables against hand-made runs,
and the command on tiny models."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial

import pandas as pd
import pytest
from table_models import PROMPT, TableLM, warped

from draftsmith.eval.report.tables import from_json
from draftsmith.eval.studies.hsddw.found import ablation_table, entropy_tables, tenths
from draftsmith.eval.studies.hsddw.study import drafted_row
from draftsmith.eval.studies.hsddw.watch import Watcher
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.decoding.protocols import EachRow
from draftsmith.modules.decoding.stop import FixedLength, SelfVerify
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, pool
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

TOKENS, CAPACITY = 30, 64
M1, M2, TARGET = TableLM(105), TableLM(3), TableLM(8)


def best(lm: TableLM, prefix: tuple[int, ...]) -> int:
    return int(lm.row(prefix)[0].argmax())


def entropy_after(lm: TableLM, prefix: tuple[int, ...]) -> float:
    """-sum p log p of the softmax, in Python floats."""
    return -sum(p * math.log(p) for p in warped(lm.row(prefix)[0], SamplingParams(1.0)) if p > 0)


def draft(lm: TableLM, prefix: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens after `prefix`, and the entropies of their distributions."""
    tokens: list[int] = []
    entropies = []
    for _ in range(count):
        entropies.append(entropy_after(lm, (*prefix, *tokens)))
        tokens.append(best(lm, (*prefix, *tokens)))
    return tokens, entropies


def agreed(lm: TableLM, prefix: tuple[int, ...], tokens: list[int]) -> int:
    """How many of the tokens are the model's own."""
    return next((i for i, token in enumerate(tokens) if best(lm, (*prefix, *tokens[:i])) != token), len(tokens))


def verdicts(by: str, entropies: list[float], accepted: int, start: int, end: int) -> list[tuple[str, float, bool]]:
    return [(by, value, i < accepted) for i, value in enumerate(entropies[: accepted + 1]) if start + i <= end]


def simulated(k: int, middle: bool, eos: tuple[int, ...]) -> tuple[list, Counter, list[int]]:
    """Greedy rounds of `spec` or `pre-verify`: what is verified, who made the tokens, and the windows."""
    answer = [best(TARGET, PROMPT)]
    verified, origin, windows = [], Counter(), []
    while len(answer) < TOKENS and answer[-1] not in eos:
        text, room = (*PROMPT, *answer), TOKENS - len(answer) - 1
        inner, entropies = draft(M1, text, min(k, room - middle))
        count, mine = len(inner), agreed(M2, text, inner)
        tokens, outer = draft(M2, text, mine + 1 if room else 0) if middle else (inner, entropies)
        end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
        kept = agreed(TARGET, text, tokens)
        verified += verdicts("M2 by target" if middle else "M1 by target", outer, kept, 0, end)
        if middle and room:
            verified += verdicts("M1 by M2", entropies, mine, 0, end)
        emitted = [*tokens[:kept], best(TARGET, (*text, *tokens[:kept]))]
        emitted = emitted[: next((i + 1 for i, token in enumerate(emitted) if token in eos), len(emitted))]
        drafted = min(kept, len(emitted))
        by_m1 = min(drafted, mine if middle else count)
        origin += Counter(M1=by_m1, M2=drafted - by_m1, target=len(emitted) - drafted)
        windows += [len(tokens)] if tokens else []
        answer += emitted
    return verified, origin, windows


@pytest.mark.parametrize("eos", [(), (1,)], ids=["to the limit", "to the end token"])
@pytest.mark.parametrize("middle", [False, True], ids=["spec", "pre-verify"])
def test_what_is_watched_is_what_happens(middle, eos):
    k = 3
    drafter = DraftModelDrafter(M1, [FixedLength(k)], CAPACITY)
    if middle:
        drafter = EachRow([HierarchicalDrafter(M2, drafter, k + 1, dynamic=False, capacity=CAPACITY)])
    watcher = Watcher(drafter, eos)
    greedy, watch = SamplingParams(), DecodeOptions(partial(watcher.on_round, "a"))
    made = generate_one(TARGET, drafter, PROMPT, greedy, TOKENS, TorchSource(0), eos, watch)
    verified, origin, windows = simulated(k, middle, eos)
    seen = watcher
    assert Counter((one["by"], round(one["entropy"], 9), one["accepted"]) for one in seen.verified) == Counter(
        (by, round(value, 9), accepted) for by, value, accepted in verified
    )
    assert {one["accepted"] for one in seen.verified} == {True, False}
    assert (seen.origin, [window["drafted"] for window in seen.windows]) == (origin, windows)
    assert origin.total() == len(made.tokens) - 1  # all but the prefill's
    assert sum(step.num_drafted for step in made.trace.steps) == sum(windows)


def test_windows_carry_the_threshold_that_they_were_drafted_under():
    """The running mean over rejected tokens so far, taken from the verdicts themselves; 0 at first."""
    drafter = DraftModelDrafter(M1, [SelfVerify(4)], CAPACITY)
    watcher = Watcher(drafter, ())
    params = SamplingParams(1.0)
    watch = DecodeOptions(partial(watcher.on_round, "a"))
    made = generate_one(TARGET, drafter, PROMPT, params, TOKENS, TorchSource(1), (), watch)
    rejected: list[float] = []
    verified = iter(watcher.verified)
    for window in watcher.windows:
        assert window["threshold"] == pytest.approx(sum(rejected) / len(rejected) if rejected else 0.0)
        own = [next(verified) for _ in range(min(window["accepted"] + 1, window["drafted"]))]
        rejected += [one["entropy"] for one in own if not one["accepted"]]
    steps = [step for step in made.trace.steps if step.num_drafted]
    assert [window["start"] for window in watcher.windows][:2] == [1, 1 + steps[0].num_emitted]
    assert len(rejected) > 3


def test_redundancy_and_utilisation_by_hand():
    """Two rounds: 5 drafted, 3 kept, 4 emitted; 5 drafted, 1 kept, 2 emitted. With the prefill 3 calls for 7 tokens,
    the paper's eta. M1 drafted 4 for M2, which kept 1."""
    totals = pool([DecodeTrace([DecodeStep(5, 3, 4, 5), DecodeStep(5, 1, 2, 5)], prefill_emitted=1)])
    row = drafted_row(DecodeTrace([DecodeStep(4, 1, 2, 4)]), Counter(M1=1, M2=3, target=2), totals)
    assert (row["drafted"], row["accepted"]) == (10, 4)
    assert (row["redundancy"], row["inner"]) == (pytest.approx(0.6), pytest.approx(0.75))
    assert row["utilisation"] == pytest.approx(3 / 7, abs=1e-5)
    assert [row[model] for model in ("M1", "M2", "target")] == pytest.approx([1 / 6, 3 / 6, 2 / 6], abs=1e-4)


def test_entropies_of_accepted_and_rejected_tokens_by_hand():
    values = [(0.1, True), (0.3, True), (0.3, False), (7.0, False)]
    seen = [
        {"mode": "T=0", "method": method, "prompt": "a", "by": "M1 by target", "entropy": value, "accepted": accepted}
        for method in ("SD", "HSDDW")  # windows that entropy ended say nothing of entropy
        for value, accepted in values
    ]
    table, density = entropy_tables(pd.DataFrame(seen))
    (row,) = table.rows
    assert (row["accepted"], row["rejected"], row["mean_accepted"], row["mean_rejected"]) == (2, 2, 0.2, 3.65)
    assert row["auc"] == 3.5 / 4  # of four pairs three in order, and a tie
    shares = {(r["verdict"], r["entropy"]): r["share"] for r in density.rows if r["share"]}
    assert shares == {("accepted", 0.125): 0.5, ("accepted", 0.375): 0.5, ("rejected", 0.375): 0.5,
                      ("rejected", 5.875): 0.5}  # fmt: skip


def test_ablation_takes_the_common_window_and_the_best():
    def speed(k: int, speedup: float) -> dict:
        named = {"mode": "T=1", "method": "SD", "k": k}
        return {**named, "speedup": speedup, "speedup_ci95": [1.0, 2.0], "tau": k / 2}

    (row,) = ablation_table(4, pd.DataFrame([speed(2, 2.0), speed(4, 1.5), speed(8, 1.0)])).rows
    assert (row["speedup"], row["tau"], row["best_k"], row["best"], row["lost"]) == (1.5, 2.0, 2, 2.0, 0.5)
    assert row["paper"] == 2.40


def test_windows_are_averaged_by_tenths_of_their_own_answer():
    columns = ["prompt", "length", "start", "drafted"]
    windows = pd.DataFrame([("a", 20, 1, 2), ("a", 20, 19, 6), ("b", 100, 1, 4)], columns=columns)
    rows = list(tenths(windows.assign(mode="T=1", method="HSDDW"), "drafted", seed=0))
    assert [(row["position"], row["drafted"], row["rounds"]) for row in rows] == [(0.05, 3.0, 2), (0.95, 6.0, 1)]
    assert rows[0]["low"] >= 2 and rows[0]["high"] <= 4 and rows[1]["low"] is None


def test_the_command_on_tiny_models(models, tmp_path):
    arguments = {
        "target": models["target"], "draft": models["draft"], "mid": models["target"], "prompts": models["prompts"],
        "limit": "2", "max-new-tokens": "12", "repeats": "1", "k": "2", "windows": "2,3", "max": "4",
        "temperatures": "0,1", "output": str(tmp_path),
    }  # fmt: skip
    assert main(["eval", "hsddw", *(word for key, value in arguments.items() for word in (f"--{key}", value))]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    figures = {figure.name: figure for figure in from_json(results)}
    assert results["meta"]["kind"] == "hsddw" and set(results["meta"]["models"]) == {"draft", "mid"}
    assert len(figures["hsddw-ablation"].rows) == 2 * 7
    # M2 is the target itself here: greedily it accepts whatever M2 hands over.
    (row,) = [r for r in figures["hsddw-redundancy"].rows if r["mode"] == "T=0" and r["method"] == "HSDDW"]
    assert row["redundancy"] == 0 and 0 < row["inner"] < 1
    assert results["summary"]["redundancy_hsddw_t0"] == 0


def test_both_small_models_are_asked_for(models, tmp_path, capsys):
    arguments = ["--target", models["target"], "--prompts", models["prompts"], "--draft", models["draft"]]
    assert main(["eval", "hsddw", *arguments, "--output", str(tmp_path)]) == 2
    assert "mid: found nothing" in capsys.readouterr().err
