"""The report page: it says what the runs say, how each token came, and nothing of a model's text can run in it."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import CHAIN, HOSTILE, META, METHODS, ROUNDS, TASKS, TOKENS, TREE, bench_run

from draftsmith.eval.report import kinds, read_runs, run, section_of, shown_prompts
from draftsmith.eval.settings import ReportConfig
from draftsmith.launch.cli import main


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
    for speedup in ("1.50x", "2.00x", "1.25x", "1.75x"):
        assert speedup in shown
    assert META["command"] in shown and f"{HOSTILE} 0" in shown


def test_what_is_said_of_a_token_is_what_its_round_holds(tmp_path):
    prompts = section_of(read_runs([bench_run(tmp_path / "run")])[0], 10**6)["prompts"]
    assert [one["title"] for one in prompts] == [f"{task} {task}-{number}" for number, task in enumerate(TASKS)]
    chain = prompts[0]["answers"][f"{METHODS[1]}, greedy"]
    assert chain["rounds"] == len(CHAIN)
    said = [(kind, text, about.partition("\n")[0]) for kind, text, about in chain["tokens"]][1:5]
    assert said == [
        ("accepted", " x", "accepted, q 0.9"),
        ("accepted", "\n", "accepted, q 0.8"),
        ("discarded", " a", "thrown away, q 0.123"),
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
