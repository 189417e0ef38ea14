"""`eval schedule` end to end on tiny models: what it reads, prints and writes, and times measured by a run."""

from __future__ import annotations

import json

import pytest

from draftsmith.eval.bench.compare import open_bench
from draftsmith.eval.schedule import servers
from draftsmith.eval.schedule.choice import choose
from draftsmith.eval.schedule.costs import read_times
from draftsmith.eval.schedule.rounds import count_rounds
from draftsmith.launch.cli import main

SECONDS = {"1": {"0": 0.010, "3": 0.011}, "4": {"0": 0.012, "3": 0.020}, "16": {"0": 0.016, "3": 0.056}}


@pytest.fixture(scope="module")
def bench(models, tmp_path_factory):
    output = tmp_path_factory.mktemp("schedule") / "bench"
    words = ["eval", "bench", "--target", models["target"], "--draft", models["draft"], "--prompts", models["prompts"]]
    words += ["--methods", "spec:k=3,spec:k=2,online:c=0.1", "--split", "test", "--ignore-eos"]
    words += ["--temperatures", "0,1", "--batch-size", "2", "--max-new-tokens", "24", "--repeats", "1"]
    assert main([*words, "--output", str(output)]) == 0
    return output


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"seconds": SECONDS, "machine": "a table by hand"}))
    return path


def test_files_are_those_of_the_printed_schedule(bench, costs, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "vllm-T0.7.json").write_text("of a run before")
    words = ["eval", "schedule", str(bench), "--method", "spec:k=3", "--costs", str(costs), "--output", str(out)]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    results = json.loads((out / "results.json").read_text())
    assert [table["name"] for table in results["tables"]] == ["schedule-T0", "schedule-T1"]
    assert results["meta"]["kind"] == "schedule" and results["meta"]["costs"] == "a table by hand"
    assert not (out / "vllm-T0.7.json").exists()
    times, methods = read_times(costs), open_bench(str(bench)).methods
    for number, temperature in enumerate((0.0, 1.0)):
        own = choose(temperature, count_rounds(methods[temperature]["spec:k=3"], 3), times, 0)
        assert results["schedules"][number]["ranges"] == [list(part) for part in own.ranges]
        assert own.advice in said and results["schedules"][number]["advice"] == own.advice
        assert own.last, "nothing to be seen in the files"
        form = f"T{temperature:g}"
        assert json.loads((out / f"vllm-{form}.json").read_text()) == servers.for_vllm(own.drafting_ranges)
        assert json.loads((out / f"sglang-{form}.json").read_text()) == servers.for_sglang(own.ranges)
        prompts = {row["prompt"] for row in methods[temperature]["spec:k=3"]}
        assert len(prompts) > 1 and own.rows[0]["over_none_ci95"] is not None


def test_no_zero_is_written_without_a_word_on_what_it_did_to_vllm(bench, costs, tmp_path, capsys):
    words = ["eval", "schedule", str(bench), "--method", "spec:k=3", "--output", str(tmp_path / "out"), "--costs"]
    for more, least in (((), 1), (("--allow-zero",), 0)):
        assert main([*words, str(costs), *more]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "fell from 232 to 24-157 tokens/s" in said and "(vllm#49548)" in said
        assert ("--allow-zero writes the 0" in said) == (not more)
        for number, temperature in enumerate("01"):
            written = json.loads((tmp_path / "out" / f"vllm-T{temperature}.json").read_text())
            schedule = json.loads((tmp_path / "out" / "results.json").read_text())["schedules"][number]
            assert min(schedule["lengths"]) == 0
            assert min(k for *_, k in written["num_speculative_tokens_per_batch_size"]) == least
            assert (written["num_speculative_tokens_per_batch_size"] == schedule["ranges"]) == (least == 0)
    free = tmp_path / "free.json"
    free.write_text(json.dumps({"seconds": {"1": {"0": 0.01, "3": 0.0100001}}}))
    assert main([*words, str(free)]) == 0 and "49548" not in capsys.readouterr().out


def test_nothing_is_written_for_servers_where_nothing_pays(bench, tmp_path, capsys):
    path = tmp_path / "dear.json"
    path.write_text(json.dumps({"seconds": {"1": {"0": 0.01, "3": 0.1}}}))
    words = ["eval", "schedule", str(bench), "--method", "spec:k=3", "--costs", str(path)]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    assert "Do not speculate: it pays at no number" in capsys.readouterr().out.replace("\n", " ")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]


def test_several_chains_are_told_apart(bench, costs, tmp_path, capsys):
    assert main(["eval", "schedule", str(bench), "--costs", str(costs), "--output", str(tmp_path / "out")]) == 2
    assert "expected one of spec:k=2, spec:k=3. Name it with --method." in capsys.readouterr().err


def test_times_between_the_measured_ones_lie_on_lines(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"seconds": {"4": {"4": 0.5, "0": 0.3}, "1": {"0": 0.1, "2": 0.2}}}))
    times = read_times(path)
    assert times.most_requests == 4 and times.most_drafted == 2
    assert times.of(1, 1) == pytest.approx(0.15) and times.of(4, 1) == pytest.approx(0.35)
    assert times.of(2, 1) == pytest.approx(0.15 + 0.2 / 3)
