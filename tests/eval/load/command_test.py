"""`eval load` end to end on tiny models: equal answers, what it writes, and an interrupted run that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest
from streaming_server import StreamingServer

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.load import command
from draftsmith.eval.load.command import Methods
from draftsmith.launch.cli import main
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

METHODS = "ar,spec:k=3,eagle2:nodes=6:depth=3:topk=2,online:c=0.1"


def words(models: dict[str, str], output: object, *more: str) -> list[str]:
    given = ["--target", models["target"], "--draft", models["draft"], "--draft", models["eagle"]]
    asked = ["--prompts", models["prompts"], "--split", "test", "--max-new-tokens", "12", "--requests", "7"]
    return ["eval", "load", *given, *asked, "--warmup", "2", "--output", str(output), *more]


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    output = tmp_path_factory.mktemp("load") / "run"
    more = ("--methods", METHODS, "--concurrency", "3,2", "--rates", "40", "--clock", "cpu", "--repeats", "2")
    assert main(words(models, output, *more, "--goal-ttft-ms", "1e6", "--ignore-eos")) == 0
    return output, json.loads((output / "results.json").read_text())


def test_answers_under_load_are_those_of_the_target_alone(models, finished):
    output, results = finished
    rows = pq.read_table(output / "requests.parquet").to_pylist()
    lm = load_lm(models["target"])
    prompts = {prompt.id: prompt.prompt_ids for prompt in read_prompts(models["prompts"], models["target"], "test")}
    alone = {
        name: generate_one(lm, None, ids, SamplingParams(), 12, TorchSource(0), ()).tokens
        for name, ids in prompts.items()
    }
    # 4 methods under 3 loads in 2 blocks each, and ar alone before them.
    assert len(rows) == (4 * 3 * 2 + 1) * 7
    for row in rows:
        assert row["token_ids"] == alone[row["id"]] and sum(row["counts"]) == 12
    assert len({row["prompt"] for row in rows}) == len(prompts) == 5
    assert all(point["matches_ar"] and point["num_differing"] == 0 for point in results["points"])


def test_points_hold_what_requests_say(finished):
    output, results = finished
    rows = pq.read_table(output / "requests.parquet").to_pylist()
    loads = [(point["load"], point["value"]) for point in results["points"]]
    assert list(dict.fromkeys(loads)) == [("closed", 2.0), ("closed", 3.0), ("open", 40.0)]
    for point in results["points"]:
        key = point["method"], point["load"], point["value"]
        own = [row for row in rows if (row["method"], row["load"], row["value"]) == key]
        assert point["requests"] == len(own) == 14
        assert point["tau"] == pytest.approx(sum(map(len, (r["token_ids"] for r in own)))
                                             / sum(r["target_calls"] for r in own), rel=1e-4)  # fmt: skip
        waits = sorted(row["times"][0] - row["intended"] for row in own)
        assert waits[6] * 0.999 <= point["ttft_p50"] <= waits[7] * 1.001 and waits[0] > 0
        assert point["goodput"] == pytest.approx(point["requests_per_s"])
        assert (point["tau"] > 1.0) == (point["method"] != "ar")
    ar = [point for point in results["points"] if point["method"] == "ar"]
    assert all(point["speedup"] == 1.0 for point in ar)
    assert results["meta"]["kind"] == "load" and results["meta"]["clock"] == "cpu"


def test_a_changed_answer_under_load_is_told(models, tmp_path, monkeypatch):
    true = Methods.block

    def spoiled(self, label, load, repeat):
        block = true(self, label, load, repeat)
        if (label, load.value) == ("spec:k=3", 2):
            block.requests[3].token_ids[-1] += 1
        return block

    monkeypatch.setattr(Methods, "block", spoiled)
    assert main(words(models, tmp_path / "out", "--methods", "spec:k=3", "--concurrency", "1,2")) == 0
    points = json.loads((tmp_path / "out" / "results.json").read_text())["points"]
    assert [point["num_differing"] for point in points] == [0, 0, 0, 1]


def test_an_interrupted_run_goes_on(models, tmp_path, monkeypatch, capsys):
    true, made = Methods.block, []

    def counted(self, label, load, repeat):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append((label, load.value))
        return true(self, label, load, repeat)

    more = words(models, tmp_path / "out", "--methods", "spec:k=3", "--concurrency", "1,2", "--repeats", "2")
    monkeypatch.setattr(Methods, "block", counted)
    assert main(more) != 0
    assert not (tmp_path / "out" / "results.json").exists()
    monkeypatch.setattr(Methods, "block", true)
    capsys.readouterr()
    assert main(more) == 0
    assert "3 of 8 blocks" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "requests.parquet"}
    rows = pq.read_table(tmp_path / "out" / "requests.parquet").to_pylist()
    assert len({(row["method"], row["value"], row["repeat"]) for row in rows}) == 8


def test_methods_take_turns(models, tmp_path):
    config = command.LoadConfig(
        **models, methods="ar,spec:k=3", concurrency="1,2", repeats=2, output=tmp_path, split="test"
    )
    keys = [(label, load.value, repeat) for label, load, repeat in command.block_keys(config, ["ar", "spec:k=3"])]
    first = [label for label, _, _ in keys[::2]]
    assert first == ["ar", "spec:k=3", "spec:k=3", "ar"]
    assert len(set(keys)) == 8


@pytest.fixture
def server() -> Iterator[StreamingServer]:
    found = StreamingServer(gap=0.002)
    yield found
    found.shutdown()
    found.server_close()


def test_two_servers_side_by_side(models, tmp_path, server, capsys):
    other = StreamingServer(gap=0.012)
    given = ["--target", models["target"], "--prompts", models["prompts"], "--split", "test", "--requests", "6"]
    given += ["--concurrency", "1,2", "--warmup", "1", "--max-new-tokens", "6", "--output", str(tmp_path / "out")]
    try:
        assert main(["eval", "load", "--server", f"ar={other.url},head={server.url}/v1", *given]) == 0
    finally:
        other.shutdown()
        other.server_close()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    by_name = {(point["method"], point["value"]): point for point in results["points"]}
    assert by_name["head", 1.0]["speedup"] > 1.5 and by_name["head", 2.0]["matches_ar"]
    assert results["meta"]["servers"]["head"] == {"model": "served", "version": "0.0.1"}
    assert "pays up to 2" in capsys.readouterr().out


def test_a_server_that_answers_nothing_is_named(models, tmp_path, server, capsys):
    server.spoil = dict.fromkeys(range(1000), "refuse")
    given = ["--target", models["target"], "--prompts", models["prompts"], "--split", "test", "--requests", "3"]
    assert main(["eval", "load", "--server", server.url, *given, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "server: found" in said and "status 429, too much" in said


def test_the_report_draws_it(finished, tmp_path):
    output, _ = finished
    page = tmp_path / "report.html"
    assert main(["eval", "report", str(output), "--output", str(page)]) == 0
    text = page.read_text()
    for part in ("Throughput against what a user sees", "Speed over ar by users", "spec:k=3", "Where speculation"):
        assert part in text
