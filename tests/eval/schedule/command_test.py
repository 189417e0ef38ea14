"""`eval schedule` end to end on tiny models: what it reads, prints and writes, and times measured by a run."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest
import torch
import yaml

from draftsmith.data.exchange.vllm_plugin import read_start
from draftsmith.eval.bench.compare import open_bench
from draftsmith.eval.cost.batches import as_json
from draftsmith.eval.schedule import servers
from draftsmith.eval.schedule.choice import choose
from draftsmith.eval.schedule.costs import read_times
from draftsmith.eval.schedule.rounds import count_rounds
from draftsmith.launch.cli import main
from draftsmith.modules.acceptance.budget import BatchTimes
from draftsmith.modules.acceptance.served import fit_priors

SECONDS = {"1": {"0": 0.010, "3": 0.011}, "4": {"0": 0.012, "3": 0.020}, "16": {"0": 0.016, "3": 0.056}}


@pytest.fixture(scope="module")
def bench(models, tmp_path_factory):
    output = tmp_path_factory.mktemp("schedule") / "bench"
    words = ["eval", "bench", "--target", models["target"], "--draft", models["draft"], "--prompts", models["prompts"]]
    words += ["--methods", "spec:k=3,spec:k=2,shared:max=4,online:c=0.1", "--split", "test", "--ignore-eos"]
    words += ["--temperatures", "0,1", "--batch-size", "2", "--max-new-tokens", "24", "--repeats", "1"]
    assert main([*words, "--traces", "2", "--output", str(output)]) == 0
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
    times, methods = read_times(costs, "draft"), open_bench(str(bench)).methods
    for number, temperature in enumerate((0.0, 1.0)):
        own = choose(temperature, count_rounds(methods[temperature]["spec:k=3"], 3), times, 0)
        assert results["schedules"][number]["ranges"] == [list(part) for part in own.ranges]
        assert own.advice in said and results["schedules"][number]["advice"] == own.advice
        assert own.last, "nothing to be seen in the files"
        form = f"T{temperature:g}"
        assert json.loads((out / f"vllm-{form}.json").read_text()) == servers.for_vllm(own.drafting_ranges)
        assert json.loads((out / f"sglang-{form}.json").read_text()) == servers.for_sglang(own.ranges)
        read = yaml.safe_load((out / f"tensorrt-llm-{form}.yaml").read_text())
        assert read == servers.for_tensorrt_llm(own.falling_ranges)
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
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"results.json", "priors-T0.json", "priors-T1.json"}


def test_several_chains_are_told_apart(bench, costs, tmp_path, capsys):
    assert main(["eval", "schedule", str(bench), "--costs", str(costs), "--output", str(tmp_path / "out")]) == 2
    assert "expected one of spec:k=2, spec:k=3. Name it with --method." in capsys.readouterr().err


def test_times_of_a_run_are_the_parts_of_its_rounds(bench, tmp_path, capsys):
    """The run's own, measured for `shared`; then some whose sums are known."""
    words = ["eval", "schedule", str(bench), "--method", "spec:k=3", "--output", str(tmp_path / "out")]
    assert main(words) == 0 and "draft, up to 2 rows" in " ".join(capsys.readouterr().out.split())
    of_rows = {1: {1: 2.0}, 4: {1: 2.0, 4: 3.0}}
    known = BatchTimes({1: 10.0, 4: 12.0}, {1: {1: 1.0, 12: 12.0}, 4: {1: 4.0, 12: 48.0}}, of_rows, of_rows)
    meta = {"meta": {"batch_times": {"draft, up to 2 rows": {}, "draft, up to 4 rows": as_json(known)}}}
    meta["meta"]["batch_times"]["draft, up to 2 rows"] = as_json(BatchTimes({1: 1.0, 2: 1.0}, {}, {}, {}))
    (tmp_path / "results.json").write_text(json.dumps(meta))
    times = read_times(tmp_path, "draft")
    assert times.most_requests == 4 and times.most_drafted == 12
    for k in range(1, 13):
        assert times.of(1, k) == pytest.approx(10 + 2 * k + k)
        assert times.of(4, k) == pytest.approx(12 + 3 * k + 4 * k)
    assert (times.of(1, 0), times.of(4, 0), times.of(2, 0)) == (10, 12, pytest.approx(10 + 2 / 3))


def test_priors_are_the_fit_of_the_traced_verdicts(bench, costs, tmp_path):
    out = tmp_path / "out"
    words = ["eval", "schedule", str(bench), "--method", "spec:k=3", "--costs", str(costs), "--output", str(out)]
    assert main(words) == 0
    for temperature in (0, 1):
        lines = [json.loads(line) for line in (bench / "trace.jsonl").read_text().splitlines()]
        own = [line for line in lines if (line["method"], line["temperature"]) == ("spec:k=3", temperature)]
        rounds = [line for line in own if line.get("undrawn")]
        assert len(rounds) > 5
        features = torch.zeros(len(rounds), 3, 2)
        for row, line in enumerate(rounds):
            for place, values in enumerate(line["undrawn"]):
                features[row, place] = torch.tensor(values)
        counts = [torch.tensor([line[name] for line in rounds]) for name in ("num_accepted", "num_drafted")]
        expected = fit_priors(features, *counts)
        found = read_start(str(out / f"priors-T{temperature}.json"))
        assert astuple(found)[:2] == tuple(map(list, astuple(expected)[:2]))


@pytest.mark.parametrize("schedule", [[(1, 3, 4), (4, 4, 2), (5, 16, 0)], [(1, 8, 1)]])
def test_either_reading_of_tensorrt_llms_keys_is_the_schedule(schedule):
    """Earlier versions: the length of the largest key that is not above the batch; later ones: of the smallest that is
    not below it."""
    own = servers.for_tensorrt_llm(schedule)["speculative_config"]
    keys = own["draft_len_schedule"]
    assert keys[min(keys)] == own["max_draft_len"] == max(keys.values()) and min(keys) == 1
    for start, end, k in schedule:
        for size in range(start, end + 1):
            assert keys[max(key for key in keys if key <= size)] == k
            assert keys[min(key for key in keys if key >= size)] == k
