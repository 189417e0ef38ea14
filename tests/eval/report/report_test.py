"""The report's parts: which rows stand together, how a token came, charts and tables that say what the runs say."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
import vl_convert
from report_runs import (
    CHAIN,
    HOSTILE,
    METHODS,
    ROUNDS,
    TASKS,
    TOKENS,
    TREE,
    bench_run,
    rows_to_draw,
    study_run,
)

from draftsmith.data.console import merged
from draftsmith.eval.report import tables
from draftsmith.eval.report.benchmark import DRAWINGS as OF_A_BENCH
from draftsmith.eval.report.benchmark import points_by_context, verdicts
from draftsmith.eval.report.command import ReportConfig, run
from draftsmith.eval.report.drawing import chart
from draftsmith.eval.report.page import VEGA_LITE, json_text
from draftsmith.eval.report.runs import read_runs
from draftsmith.eval.report.sections import TABLE_RUNS, make_sections
from draftsmith.eval.report.viewer import kinds, shown_prompts, viewer_data
from draftsmith.launch.cli import main
from draftsmith.modules.types import InputError


@pytest.mark.parametrize("rounds", [CHAIN, TREE], ids=["chain", "tree"])
def test_how_each_token_came_follows_from_the_round(rounds):
    for item in rounds:
        assert kinds(item) == item["kinds"]


def test_the_viewer_has_every_answer_of_the_trace_with_its_text(tmp_path):
    data = viewer_data(bench_run(tmp_path / "run"), 10**6)
    assert data["methods"] == list(METHODS) and data["total"] == 2
    assert [prompt["task"] for prompt in data["prompts"]] == list(TASKS)
    assert len(data["answers"]) == len(METHODS) * 2 * 2  # prompts, temperatures
    for answer in data["answers"]:
        rounds = ROUNDS[data["methods"][answer["method"]]]
        assert [item["emitted"] for item in answer["rounds"]] == [item["emitted"] for item in rounds]
    chain = next(answer for answer in data["answers"] if answer["method"] == 1)["rounds"][1]
    assert chain["q"] == [0.9, 0.8, 0.123] and chain["target_ms"] == 12.3 and "parents" not in chain
    assert all(TOKENS[token] == text for token, text in data["tokens"].items())


def test_prompts_are_taken_task_by_task_until_the_bytes_are_used():
    tasks = {(0, 1): "a", (1, 1): "a", (2, 1): "a", (3, 1): "b"}
    sizes = {(0, 1): 10, (1, 1): 50, (2, 1): 5, (3, 1): 10}
    assert shown_prompts(sizes, tasks, 100) == [(0, 1), (3, 1), (1, 1), (2, 1)]
    assert shown_prompts(sizes, tasks, 30) == [(0, 1), (3, 1), (2, 1)]
    assert shown_prompts(sizes, tasks, 4) == []


def test_every_run_has_a_section_of_its_own(tmp_path):
    paths = [bench_run(tmp_path / "one" / "run"), bench_run(tmp_path / "two" / "run"), study_run(tmp_path / "three")]
    sections = make_sections(read_runs(paths), 10**6)
    assert [section.title.partition(" · ")[2] for section in sections] == ["one/run", "two/run", "three"]
    assert len({section.name for section in sections}) == 3


def test_tables_and_verdicts_say_what_the_results_say(tmp_path):
    path = bench_run(tmp_path / "run")
    rows = json.loads((path / "results.json").read_text())["methods"]
    (section,) = make_sections(read_runs([path]), 0)
    for temperature, verdict in zip((0, 1), section.verdicts, strict=True):
        own = [row for row in rows if row["temperature"] == temperature]
        methods, by_task = (
            tables.text_cells(next(figure for figure in section.figures if figure.name == f"{name}-t{temperature}"))
            for name in ("methods", "tasks")
        )
        for cells, row in zip(methods, own, strict=True):
            low, high = row["speedup_ci95"]
            speeds = [f"{row['tokens_per_s']:,.1f}", f"{row['speedup']:.2f}x", f"{low:.2f}-{high:.2f}"]
            assert cells[:5] == [row["method"], *speeds, f"{row['tau']:.2f}"]
            assert cells[-1] == ("-" if temperature else "yes")
        for cells, task in zip(by_task, TASKS, strict=False):  # behind them both ways over all tasks
            parts = [row["by_task"][task] for row in own if row["method"] != "ar"]
            assert cells[1:] == [form.format(part) for part in parts for form in ("{0[speedup]:.2f}x", "{0[tau]:.2f}")]
        assert [cells[0] for cells in by_task[-2:]] == ["all, pooled", "mean of tasks"]
        best = max(own, key=lambda row: row["speedup"])
        claim = f"{best['method']} is faster than the target alone: {best['speedup']:.2f} times"
        assert claim in verdict and f"acceptance length {best['tau']:.2f}" in verdict
        assert ("the target's own" in verdict) == (temperature == 0)


def test_tau_by_context_is_drawn_for_classes_with_enough_rounds(tmp_path):
    path = bench_run(tmp_path / "run")
    rows = json.loads((path / "results.json").read_text())["methods"]
    found = {
        (point["method"], point["temperature"], point["context"]): point["tau"] for point in points_by_context(rows)
    }
    modes = "greedy", "temperature 1"
    # From 0 has no place on a logarithmic axis: it is drawn at half of 256.
    assert found == {(name, at, x): tau for name in METHODS[1:] for at in modes for x, tau in ((128, 2.5), (256, 2.0))}
    for row in rows:
        row["by_context"] = row.get("by_context", [])[:1]
    assert points_by_context(rows) == []


def test_a_verdict_claims_what_its_interval_holds_and_names_the_best_head(tmp_path):
    path = bench_run(tmp_path / "run")
    results = json.loads((path / "results.json").read_text())
    for row in results["methods"]:
        row["matches_ar"], row["num_differing"] = False, 1
        spans = {"spec:k=3": (1.21, [0.89, 3.2]), "eagle-tree:nodes=4:depth=2:topk=2": (0.95, [0.9, 0.99])}
        row["speedup"], row["speedup_ci95"] = spans.get(row["method"], (1.0, [1.0, 1.0]))
    (path / "results.json").write_text(json.dumps(results))
    (found,) = read_runs([path])
    verdict, _ = verdicts(found)
    assert (
        "spec:k=3 is neither faster nor slower for certain than the target alone: 1.21 times (0.89 to 3.20)" in verdict
    )
    assert "of the heads, eagle-tree:nodes=4:depth=2:topk=2 is slower than the target alone: 0.95 times" in verdict
    assert "Answers of ar, spec:k=3, eagle-tree:nodes=4:depth=2:topk=2 differ from the target's" in verdict


def test_the_trace_opens_on_a_trained_head(tmp_path):
    assert viewer_data(bench_run(tmp_path / "run"), 10**6)["first"] == 2


def test_results_of_another_form_are_refused(tmp_path):
    path = bench_run(tmp_path / "run")
    results = json.loads((path / "results.json").read_text())
    results["meta"]["schema_version"] = 2
    (path / "results.json").write_text(json.dumps(results))
    with pytest.raises(InputError, match="version 2 of its form"):
        read_runs([path])


def test_intervals_share_the_cells_of_their_numbers(tmp_path):
    (section,) = make_sections(read_runs([bench_run(tmp_path / "run")]), 0)
    shown = merged(section.figures[0])
    assert [column.title for column in shown.columns][:3] == ["method", "tokens/s", "speed-up, 95 % CI"]
    assert [str(cell) for cell in shown.rows[1].values()][:3] == ["spec:k=3", "150.0", "1.50x 1.40-1.60"]


DRAWN = [(name, drawing) for drawings in (OF_A_BENCH, *(own for _, own in TABLE_RUNS.values()))
         for name, drawing in drawings.items()]  # fmt: skip


@pytest.mark.parametrize(("name", "drawing"), DRAWN, ids=[name for name, _ in DRAWN])
def test_vega_draws_a_mark_for_every_row(name, drawing):
    drawn = chart(name, drawing, rows_to_draw())
    svg = vl_convert.vegalite_to_svg(drawn.specification, vl_version=VEGA_LITE, show_warnings=True)
    described = [element.get("aria-roledescription") for element in ET.fromstring(svg).iter()]
    found = {kind: described.count(kind) for kind in ("point", "bar")}
    assert [count for count in found.values() if count] == [len(rows_to_draw())]
    assert "undefined" not in svg and "{" not in drawn.title


def test_json_in_the_page_cannot_end_its_element():
    text = json_text({"a": "</script><!-- & \u2028\u2029", "b": HOSTILE})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"a": "</script><!-- & \u2028\u2029", "b": HOSTILE}


def test_the_page_names_nothing_that_it_would_load(tmp_path):
    output = tmp_path / "r.html"
    run(ReportConfig(runs=(bench_run(tmp_path / "b"), study_run(tmp_path / "s")), output=output))
    page = output.read_text()
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(?:src|href)=(?!["']?#)""", outside) and "@import" not in outside and "url(" not in outside
    assert HOSTILE not in page
    assert 'content="default-src &#39;none&#39;; script-src &#39;unsafe-eval&#39; &#39;sha256-' in page
    assert output.stat().st_size < 5e6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["."], "no results.json in ."),
        (["{run}", "{run}"], "twice"),
        (["{other}"], "nothing measured"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    run_directory = study_run(tmp_path / "study")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text('{"meta": {}}')
    named = [word.format(run=run_directory, other=tmp_path / "other") for word in words]
    assert main(["eval", "report", *named, "--output", "x.html"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
