"""EAGLE-2's study: verdicts of nodes, positions, bins and the cost fit against numbers made by hand, and the command on
tiny models."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
import torch
from tiny_world import draft_words

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.report.tables import from_json
from draftsmith.eval.studies.eagle2.found import TreeSize, fit_tree_cost, size_tables
from draftsmith.eval.studies.eagle2.nodes import COLUMNS, node_names, node_tables, nodes_of
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.protocols import DraftTree, Verdict
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.types import SamplingParams

PROMPT = BenchPrompt("a", [1], "rename")
# Root's children 0 and 1; of node 0: 2 and 3; of node 1: 4; of node 3: 5. Tokens 0 .. 5 in that order.
PARENTS = (-1, -1, 0, 0, 1, 3)
# The head gave the root's children 0.6 and 0.3, and each child 0.5 or 0.4 after its parent.
VALUES = tuple(math.log(p) for p in (0.6, 0.3, 0.6 * 0.5, 0.6 * 0.4, 0.3 * 0.5, 0.6 * 0.4 * 0.5))
DISTRIBUTIONS = {-1: [0.7, 0.1, 0, 0, 0, 0.2], 0: [0, 0, 0.25, 0.75, 0, 0], 3: [0.9, 0, 0, 0, 0, 0.1]}


def round_of(path: tuple[int, ...], values: tuple[float, ...] | None = VALUES) -> Round:
    """A round that accepted `path`; rows of nodes that no verdict may look at are NaN."""
    logits = torch.full((len(PARENTS) + 1, 6), torch.nan, dtype=torch.float64)
    for node, distribution in DISTRIBUTIONS.items():
        logits[node + 1] = torch.tensor(distribution, dtype=torch.float64).log()
    tree = DraftTree(tuple(range(6)), PARENTS, values=values)
    return Round([*path, 0], len(path), tree, Verdict(path, 0), None, logits)


def test_nodes_below_the_root_and_the_accepted_path_have_a_verdict():
    greedy = list(nodes_of(PROMPT, round_of((0, 3)), SamplingParams(), ()))
    assert [(node["node"], node["accepted"]) for node in greedy] == [(0, 1), (1, 0), (2, 0), (3, 1), (5, 0)]
    sampling = list(nodes_of(PROMPT, round_of((0, 3)), SamplingParams(1.0), ()))
    expected = [(0, 0.7), (1, 0.1), (2, 0.25), (3, 0.75), (5, 0.1)]
    assert [(node["node"], pytest.approx(node["accepted"])) for node in sampling] == expected
    assert [node["confidence"] for node in sampling] == pytest.approx([0.6, 0.3, 0.5, 0.4, 0.5])
    assert {(node["prompt"], node["task"]) for node in sampling} == {("a", "rename")}


def test_nothing_below_an_accepted_end_token_counts():
    assert [node["node"] for node in nodes_of(PROMPT, round_of((0, 3)), SamplingParams(), (3,))] == [0, 1, 2, 3]


def test_the_prefill_has_no_nodes_and_a_static_tree_no_confidence():
    assert list(nodes_of(PROMPT, Round([0], 0), SamplingParams(), ())) == []
    assert {node["confidence"] for node in nodes_of(PROMPT, round_of((0,), None), SamplingParams(), ())} == {None}


SHAPE = StaticTree.from_paths([[0], [1], [0, 0], [0, 2], [0, 2, 0]])


def frame(*nodes: tuple) -> pd.DataFrame:
    """Nodes of greedy decoding: prompt, number, confidence, acceptance."""
    return pd.DataFrame([("T=0", prompt, "", *rest) for prompt, *rest in nodes], columns=COLUMNS)


def named(tables: list) -> dict:
    return {table.name: list(table.rows) for table in tables}


def test_acceptance_by_position_by_hand():
    """Prompt a reaches the root's best child three times and accepts it twice, prompt b once and never."""
    assert node_names(SHAPE) == ["0", "1", "0.0", "0.2", "0.2.0"]
    seen = [("a", 0, None, 1.0), ("a", 0, None, 1.0), ("a", 0, None, 0.0), ("b", 0, None, 0.0), ("a", 3, None, 0.25)]
    found = named(node_tables(frame(*seen), frame(), SHAPE, seed=0))["eagle2-acceptance-by-position"]
    assert [(row["position"], row["depth"], row["accepted"], row["reached"]) for row in found] == [
        ("0", 1, 0.5, 4), ("0.2", 2, 0.25, 1)
    ]  # fmt: skip
    # Prompts' own rates 2/3 and 0: their quartiles are a quarter of the way in.
    assert (found[0]["low"], found[0]["high"]) == pytest.approx((2 / 3 / 4, 2 / 3 * 3 / 4), abs=1e-5)


def test_cells_of_a_task_need_some_nodes():
    seen = frame(*[("a", 0, None, 1.0)] * 5, *[("a", 1, None, 1.0)] * 4)
    (cell,) = named(node_tables(seen, frame(), SHAPE, seed=0))["eagle2-acceptance-by-task"]
    assert (cell["position"], cell["task"], cell["reached"]) == ("0", "all", 5)


def test_bins_of_confidence_and_the_correlation_by_hand():
    nodes = frame(*[("a", 0, sure, accepted) for sure, accepted in [(0.05, 0), (0.15, 0.5), (0.95, 1), (1.0, 0.6)]])
    found = named(node_tables(frame(), nodes, SHAPE, seed=0))
    bins = found["eagle2-acceptance-by-confidence"]
    assert [(row["confidence"], row["accepted"], row["nodes"]) for row in bins] == [
        (0.05, 0.0, 1), (0.15, 0.5, 1), (0.975, 0.8, 2)
    ]  # fmt: skip
    assert {row["low"] for row in bins} == {None}  # one prompt says nothing of others
    # Deviations from the means 0.5375 and 0.525: -0.4875, -0.3875, 0.4125, 0.4625 and -0.525, -0.025, 0.475, 0.075.
    product = 0.4875 * 0.525 + 0.3875 * 0.025 + 0.4125 * 0.475 + 0.4625 * 0.075
    squares = (0.4875**2 + 0.3875**2 + 0.4125**2 + 0.4625**2) * (0.525**2 + 0.025**2 + 0.475**2 + 0.075**2)
    assert found["eagle2-confidence"][0]["correlation"] == pytest.approx(product / math.sqrt(squares), abs=1e-5)
    (alone,) = named(node_tables(frame(), nodes[:1], SHAPE, seed=0))["eagle2-confidence"]
    assert alone["correlation"] is None


def row(calls: int, drafted: int, forwards: int, tokens: int = 100) -> dict[str, float]:
    """A bench's row whose seconds are 1 + 0.5 a call + 0.01 a drafted token + 0.1 a forward."""
    seconds = 1 + 0.5 * calls + 0.01 * drafted + 0.1 * forwards
    counts = {"num_target_calls": calls, "num_draft_tokens": drafted, "draft_calls": forwards}
    speed = {"tokens_per_s": tokens / seconds, "speedup": 51 / seconds, "speedup_ci95": None, "tau": 2.0}
    return {"mode": "T=0", "tokens": tokens, **speed, **counts}


MEASURED = {TreeSize(8, 2, 10): row(40, 300, 80), TreeSize(16, 4, 10): row(30, 600, 150),
            TreeSize(60, 1, 10): row(45, 2000, 90), TreeSize(60, 6, 10): row(25, 1500, 200)}  # fmt: skip


def tables_of_sizes(timed: list[TreeSize]) -> dict:
    """Of these measured sizes, and of one that was replayed alone: 10 rounds of 8 drafted and 5 emitted, 3 forwards
    each, after the prefill."""
    alone = pd.Series({"num_target_calls": 11, "num_draft_tokens": 80, "draft_calls": 30, "tokens": 51, "tau": 51 / 11})
    counts = {TreeSize(8, 3, 10): alone, **MEASURED}
    replayed = [
        {**own, "mode": "T=0", "size": str(size), "nodes": size.nodes, "depth": size.depth}
        for size, own in counts.items()
    ]
    rows = [{"method": "ar", **row(100, 0, 0)}, *({"method": size.label, **MEASURED[size]} for size in timed)]
    return named(size_tables(timed, pd.DataFrame(replayed), pd.DataFrame(rows)))


def test_the_cost_fit_finds_what_the_seconds_are_made_of():
    cost = fit_tree_cost(pd.DataFrame([row(100, 0, 0), *MEASURED.values()]))
    assert (cost.fixed, *cost.weights) == pytest.approx((1, 0.5, 0.01, 0.1), rel=1e-6)


def test_replayed_counts_are_priced_by_the_measured_ones():
    found = tables_of_sizes(list(MEASURED))
    seconds = 1 + 0.5 * 11 + 0.01 * 80 + 0.1 * 30
    expected = (51 / seconds) / (100 / 51)  # ar: 100 tokens in 1 + 0.5 * 100 seconds
    assert [row["speedup"] for row in found["eagle2-predicted-speed"] if row["depth"] == 3] == [
        pytest.approx(expected, rel=1e-4)
    ]
    # Each measured size by the cost of the others, which is the same one.
    assert [row["error"] for row in found["eagle2-prediction"]] == pytest.approx([0] * 4, abs=1e-4)


def test_too_few_measured_sizes_predict_nothing():
    found = tables_of_sizes(list(MEASURED)[:3])
    assert found["eagle2-predicted-speed"] == []
    assert {row["predicted"] for row in found["eagle2-prediction"]} == {None}


def test_ablations_name_every_combination_once():
    labels = TreeSize(16, 4, 4).ablations
    assert labels == {
        "neither": "eagle2:nodes=16:depth=4:topk=4:value=off:rerank=off",
        "no value": "eagle2:nodes=16:depth=4:topk=4:value=off",
        "no reranking": "eagle2:nodes=16:depth=4:topk=4:rerank=off",
        "full": "eagle2:nodes=16:depth=4:topk=4",
    }


def test_the_command_on_tiny_models(models, tmp_path):
    arguments = {
        "target": models["target"], "eagle": models["eagle"], "prompts": models["prompts"], "limit": "2",
        "max-new-tokens": "12", "repeats": "1", "ablations": "6:2:3", "topk": "3", "nodes": "2,6", "depths": "1,2",
        "measured-nodes": "2,6", "measured-depths": "1,2", "temperatures": "0,1", "output": str(tmp_path),
    }  # fmt: skip
    assert main(["eval", "eagle2", *draft_words(arguments)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    figures = {figure.name: figure for figure in from_json(results)}
    assert results["meta"]["kind"] == "eagle2" and "correlation_t0" in results["summary"]
    rows = figures["eagle2-prediction"].rows
    assert len(rows) == 2 * 4
    assert all(row["tau"] == row["replayed"] for row in rows)  # sampling, too: the same seed draws the same answers
    assert len(figures["eagle2-tau-by-size"].rows) == len(figures["eagle2-predicted-speed"].rows) == 2 * 4
    assert len(figures["eagle2-ablation"].rows) == 2 * (4 + 2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"eagle": None}, "draft: found nothing"),
        ({"ablations": "60:6"}, "ablations: found '60:6'"),
        ({"temperatures": "0,warm"}, "temperatures: found '0,warm'"),
        ({"measured-nodes": "7"}, "measured_nodes: found eagle2:nodes=7"),
        ({"nodes": "8,8"}, "nodes: found '8,8'"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_loaded(models, tmp_path, capsys, change, expected):
    arguments = {"target": models["target"], "eagle": models["eagle"], "prompts": models["prompts"], **change}
    assert main(["eval", "eagle2", *draft_words(arguments), "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert expected in err and err.count("\n") == 1
