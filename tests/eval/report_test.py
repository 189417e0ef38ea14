"""The report page: it says what the runs say, how each token came, and nothing of a model's text can run in it."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import CHAIN, HOSTILE, META, METHODS, ROUNDS, TASKS, TOKENS, TREE, bench_run

from draftsmith.data.store.writer import writing_alone
from draftsmith.eval.report import Run, kinds, read_runs, run, section_of, shown_prompts, verdicts
from draftsmith.eval.settings import ReportConfig
from draftsmith.launch.cli import main

# A loss before the steps, two validations, and a line that is being written.
METRICS = """step,val/loss,val/tau,val/accepted_1,val/top1,val/accepted_2,train/loss,cost/tokens_per_s
10,6.5,1.25,0.2,0.2,0.1,,
10,,,,,,6.75,1200.0
20,5.5,1.5,0.4,0.4,0.3,,
20,,,,,,5.75,
3"""


class Page(HTMLParser):
    """Elements and texts of a page, as a browser reads them."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def page_of(*directories: Path) -> tuple[str, Page]:
    output = directories[0].parent / "page.html"
    run(ReportConfig(runs=directories, output=output))
    return output.read_text(), Page(output.read_text())


@pytest.mark.parametrize("rounds", [CHAIN, TREE], ids=["chain", "tree"])
def test_how_each_token_came_follows_from_the_round(rounds):
    for item in rounds:
        assert kinds(item) == item["kinds"]


def test_the_page_has_every_traced_answer_and_every_number_and_runs_no_text(tmp_path):
    text, page = page_of(bench_run(tmp_path / "run"))
    # What models and prompts wrote stays text, and nothing is loaded.
    assert HOSTILE not in text and html.escape(HOSTILE) in text and len(text) < 5e6
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "a"}
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}) in page.elements  # fmt: skip # noqa: E501
    assert not re.search(r"@import|url\(", text)
    # Every token of every answer, in the order of its rounds, by its kind.
    emitted = [kind for tag, attributes in page.elements if tag == "span" and "title" in attributes
               and (kind := attributes["class"]) != "discarded"]  # fmt: skip
    of_methods = [kind for name in METHODS for item in ROUNDS[name] for kind in item["kinds"]]
    assert emitted == of_methods * 2 * len(TASKS)  # at both temperatures
    shown = html.unescape("".join(page.texts))
    for name, value in (("target calls", "9"), ("drafted", "15"), ("accepted", "11")):
        assert name in shown and value in shown
    assert META["command"] in shown and f"{HOSTILE} 0" in shown


def test_what_is_said_of_a_token_is_what_its_round_holds(tmp_path):
    prompts = section_of(read_runs([bench_run(tmp_path / "run")])[0], 10**6)["prompts"]
    assert [one["title"] for one in prompts] == [f"{task} {task}-{number}" for number, task in enumerate(TASKS)]
    chain = prompts[0]["answers"][f"{METHODS[1]}, greedy"]
    assert chain["rounds"] == len(CHAIN)
    said = [(kind, text, about.partition("\n")[0]) for kind, text, about in chain["tokens"]][1:5]
    assert said == [
        ("accepted", " x", "accepted, q 0.9, head 0.95, P(accept) 1"),
        ("accepted", "\n", "accepted, q 0.8, head 0.4, P(accept) 1"),
        ("discarded", " a", "thrown away, q 0.123, P(accept) 0"),
        ("correction", HOSTILE, "correction"),
    ]
    assert chain["tokens"][1][2].endswith("round 1: 3 drafted, 2 accepted; target 12.3 ms, drafting 4 ms")
    assert {text for _, text, _ in chain["tokens"]} <= set(TOKENS.values())


def test_prompts_are_taken_task_by_task_until_the_bytes_are_used():
    tasks = {(0, 1): "a", (1, 1): "a", (2, 1): "a", (3, 1): "b"}
    sizes = {(0, 1): 10, (1, 1): 50, (2, 1): 5, (3, 1): 10}
    assert shown_prompts(sizes, tasks, 100) == [(0, 1), (3, 1), (1, 1), (2, 1)]
    assert shown_prompts(sizes, tasks, 30) == [(0, 1), (3, 1), (2, 1)]
    assert shown_prompts(sizes, tasks, 4) == []


def test_a_verdict_claims_what_its_interval_holds_and_names_the_best_head(tmp_path):
    path = bench_run(tmp_path / "run")
    results = json.loads((path / "results.json").read_text())
    assert "every answer of every method is the target's own" in verdicts(Run(path, "run", results))[0]
    for row in results["methods"]:
        row["matches_ar"], row["num_differing"] = False, 1
        spans = {"spec:k=3": (1.21, [0.89, 3.2]), "eagle-tree:nodes=4:depth=2:topk=2": (0.95, [0.9, 0.99])}
        row["speedup"], row["speedup_ci95"] = spans.get(row["method"], (1.0, [1.0, 1.0]))
    verdict, _ = verdicts(Run(path, "run", results))
    assert (
        "spec:k=3 is neither faster nor slower for certain than the target alone: 1.21 times (0.89 to 3.20)" in verdict
    )
    assert "of the heads, eagle-tree:nodes=4:depth=2:topk=2 is slower than the target alone: 0.95 times" in verdict
    assert "Answers of ar, spec:k=3, eagle-tree:nodes=4:depth=2:topk=2 differ from the target's" in verdict


def test_a_running_training_shows_its_curves_so_far(tmp_path):
    directory = tmp_path / "my head"
    directory.mkdir()
    (directory / "metrics.csv").write_text(METRICS)
    (directory / "config.yaml").write_text("# draftsmith train eagle --config THIS_FILE\ntarget: embedded:target\n")

    def section():
        return section_of(read_runs([directory])[0], 0)

    assert section()["about"].startswith("Interrupted: step 20 is the last one logged. The same command")
    with writing_alone(directory):
        found = section()
    assert found["about"].startswith("Running: step 20 is the last one logged. Target embedded:target")
    assert found["command"] == f"draftsmith train eagle --config '{directory}/config.yaml'"
    curves = {figure["title"]: figure["paths"] for figure in found["figures"][1:]}
    assert [name for name, _ in curves["Loss by steps"]] == ["val", "train"]
    assert "Tokens a second by steps" not in curves  # one step is a dot
    (_, tau), *others = curves["tau of held-out prompts by steps"]
    assert not others and [float(place.split(",")[1]) for place in tau.split()] == [198.0, 8.0]  # upwards
    last = {row["metric"]: (row["value"], row["step"], row["lowest"]) for row in found["figures"][0].rows}
    assert last["val/loss"] == (5.5, 20, 5.5) and last["cost/tokens_per_s"] == (1200.0, 10, 1200.0)
    (directory / "training.json").write_text("{}")
    assert section()["about"].startswith("Finished after 20 steps.")
    assert "<polyline" in page_of(directory)[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["."], "no results.json in ."), (["{run}", "{run}"], "twice"), (["{other}"], "nothing measured")],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    run_directory = bench_run(tmp_path / "study")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text('{"meta": {}}')
    named = [word.format(run=run_directory, other=tmp_path / "other") for word in words]
    assert main(["eval", "report", *named, "--output", "x.html"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
