"""The trace of a bench: its lines add up to the counts of the results, and each is a legal round."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from worlds import STEADY_METHODS, draft_options

from draftsmith.eval.bench import command as bench
from draftsmith.eval.bench.command import BenchConfig
from draftsmith.eval.bench.results import read_rows
from draftsmith.modules.drafters import learned
from draftsmith.modules.drafters.method_names import known_methods

METHODS = ",".join([
    *STEADY_METHODS, "specdec++:h=0.4:calibrated=on", "cost:c=0.2", "online:c=0.2:max=5", "online:c=0.1:drafter=eagle",
    "confidence:t=0.5:drafter=eagle", "self-verify:k=4:drafter=eagle",
])  # fmt: skip


def test_every_own_method_is_traced_below():
    assert set(known_methods()) == {label.partition(":")[0] for label in METHODS.split(",")}


@pytest.fixture(scope="module")
def traced(models, tmp_path_factory):
    output = tmp_path_factory.mktemp("trace")
    heads = (str(Path(models["eagle"]).with_name(kind)) for kind in learned() if kind != "draft")
    given = {**draft_options(models), "head": (models["draft"], *heads)}
    config = BenchConfig(
        **given, mid=models["target"], methods=METHODS, split="test", limit=2, max_new_tokens=16, ignore_eos=True,
        repeats=1, temperature="1", output=output, traces=2,
    )  # fmt: skip
    bench.run(config)
    lines = [json.loads(line) for line in (output / "trace.jsonl").read_text().splitlines()]
    rows = json.loads((output / "results.json").read_text())["methods"]
    tokens = read_rows(output)
    return lines, rows, tokens


def test_lines_add_up_to_the_results(traced):
    lines, rows, per_prompt = traced
    by_method = defaultdict(list)
    for line in lines:
        by_method[line["method"]].append(line)
    assert set(by_method) == {row["method"] for row in rows}
    for row in rows:
        own = by_method[row["method"]]
        assert {line["prompt"] for line in own} == {0, 1}
        drafted = sum(line.get("num_drafted", 0) for line in own)
        assert len(own) == row["num_target_calls"]  # the prefill is a line too
        assert drafted == row["num_draft_tokens"]
        emitted = sum(len(line["emitted"]) for line in own)
        assert emitted == row["tokens"]
        assert drafted + len(own) == emitted + row["num_discarded"]
        answers = [line["token_ids"] for line in per_prompt if line["method"] == row["method"]]
        rebuilt = [[t for line in own if line["prompt"] == n for t in line["emitted"]] for n in range(2)]
        assert rebuilt == answers


def test_every_line_is_a_round(traced):
    for line in traced[0]:
        assert line["target_s"] > 0
        if line.get("prefill"):
            assert line["round"] == 0 and len(line["emitted"]) == 1
            continue
        node = -1
        for child in line["accepted"]:
            assert line["parents"][child] == node
            node = child
        assert line["num_accepted"] == len(line["accepted"]) and line["num_emitted"] == len(line["emitted"])
        assert line["num_drafted"] == len(line["drafted"])
        chosen = [line["drafted"][child] for child in line["accepted"]]
        assert line["emitted"] == [*chosen, line["next_token"]][: line["num_emitted"]]
        assert all(0 <= q <= 1 for q in line.get("q", []))
        if line["method"].startswith(("spec", "confidence", "self-verify")) and line["drafted"]:
            assert len(line["q"]) == len(line["drafted"]) and line["draft_s"] > 0
