"""Shell scripts of commands: every command is one that would start, with its output below the script's own.

That the demo runs and meets its figures is the business of `make demo`, in CI; that a repeated script continues, of
finished_test.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.benchmarks.embedded.tasks import HEADLINE_TASKS
from draftsmith.data.store.datasets import VAL_SHARE
from draftsmith.launch.commands import command_name, configure

ROOT = Path(__file__).resolve().parents[2]
REFRESH = {"HEAD": "data/embedded/smollm2/eagle3", "TARGET": "tuned", "SLICE": "chats.jsonl"}
# Script -> variables that it asks for, and how many commands it has.
SCRIPTS = {
    "examples/demo.sh": ({}, 11),
    "examples/laptop.sh": ({}, 9),
    "examples/refresh.sh": (REFRESH, 14),
    "benchmarks/embedded/families.sh": ({}, 6),
    "benchmarks/embedded/mtp.sh": ({}, 11),
}
DRAFTSMITH = f"""#!{sys.executable}
import json, os, pathlib, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["eval", "bench"]:
    output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
    output.mkdir(parents=True, exist_ok=True)
    rows = [("ar", 9), ("spec:k=4", 1), ("spec:k=6", 2), ("eagle:k=4", 4), ("eagle:k=5", 3)]
    rows = [{{"method": name, "tokens_per_s": speed}} for name, speed in rows]
    (output / "results.json").write_text(json.dumps({{"methods": rows}}))
if sys.argv[1] == "import":
    output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(json.dumps({{"kind": "eagle3", "head": {{}}}}, indent=2))
sys.exit("fail" in os.environ and {{*os.environ["fail"].split()}} <= {{*sys.argv}})
"""
# Scripts of benchmarks/ are not run.
PYTHON = f'#!/bin/sh\n[ "$1" = - ] || exit 0\nexec {sys.executable} "$@"\n'


def commands(tmp_path: Path, script: str, given: dict[str, str]) -> tuple[int, list[list[str]]]:
    """Return the exit code of a script, and the words of its commands, which do nothing."""
    stubs, calls = tmp_path / "bin", tmp_path / "calls"
    stubs.mkdir()
    for name, text in {"draftsmith": DRAFTSMITH, "python3": PYTHON, "llama-server": "#!/bin/sh\n"}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    environment = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "OUTPUT": str(tmp_path / "out"),
        **given,
    }
    code = subprocess.run(["sh", script], cwd=ROOT, env=environment, check=False, capture_output=True).returncode
    return code, [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_of_a_script_would_start(tmp_path, script):
    given, count = SCRIPTS[script]
    code, words = commands(tmp_path, script, given)
    assert code == 0 and len(words) == count
    for one in words:
        name = command_name(one)
        assert name is not None
        config = configure(name, one[len(name.split()) :])[1]
        if "--output" in one:
            assert config.output.is_relative_to(tmp_path / "out")


def test_the_demo_measures_the_fastest_setting_of_each_method_on_headline_tasks_only(tmp_path):
    benches = [words for words in commands(tmp_path, "examples/demo.sh", {})[1] if words[:2] == ["eval", "bench"]]
    assert [words[words.index("--split") + 1] for words in benches] == ["dev", "test"]
    assert benches[1][benches[1].index("--methods") + 1] == "eagle:k=4,spec:k=6"
    for words in benches:
        assert set(words[words.index("--tasks") + 1].split(",")) <= set(HEADLINE_TASKS)


def test_a_script_ends_with_the_command_that_fails_and_takes_variables(tmp_path):
    code, words = commands(tmp_path, "examples/laptop.sh", {"fail": "train", "SOURCE": "mine.jsonl", "PROMPTS": "7"})
    assert code == 1 and words[-1][:2] == ["train", "eagle3"]
    assert words[0][:6] == ["data", "prompts", "--source", "mine.jsonl", "--limit", "7"]


def test_a_target_without_an_mtp_module_is_refreshed_without_one(tmp_path):
    code, words = commands(tmp_path, "examples/refresh.sh", {**REFRESH, "fail": "import mtp"})
    outputs = [[Path(each).name for each in one[2:]] for one in words if one[:2] == ["eval", "compare"]]
    assert code == 0 and outputs == [["before-slice", "after-slice"], ["before", "after"]]
    assert [one[1] for one in words if one[0] == "train"] == ["eagle3"]


def test_a_slice_that_a_server_answers_is_joined_with_the_old_data(tmp_path):
    given = {"OLD_DATA": "runs/a runs/b*0.1", "WEIGHT": "5", "WHERE": "a=x b=z"}
    given |= {"SERVER": "http://x:8000", "ENGINE": "vllm", "SPLIT": "dev"}
    code, words = commands(tmp_path, "examples/refresh.sh", {**REFRESH, **given})
    by_name = {command_name(one): one for one in words}
    assert code == 0 and {"--engine", "openai", "--server", "http://x:8000"} <= {*by_name["data responses"]}
    assert list(configure("data prompts", by_name["data prompts"][2:])[1].where) == ["a=x", "b=z"]
    trained = configure("train eagle3", by_name["train eagle3"][2:])[1]
    assert [str(part) for part in trained.data] == [f"{tmp_path}/out/responses*5", "runs/a", "runs/b*0.1"]
    # What is measured of the slice is what the training holds out.
    splits = [one[one.index("--split") + 1] for one in words if one[:2] == ["eval", "bench"]]
    assert splits == ["dev", "dev", "val", "val", "dev"] and trained.val_share == VAL_SHARE
    assert configure("check", by_name["check"][1:])[1].engine == "vllm"


def test_a_head_that_cannot_be_bound_ends_the_script_at_once(tmp_path):
    code, words = commands(tmp_path, "examples/refresh.sh", {**REFRESH, "fail": "import"})
    assert code == 1 and [one[0] for one in words] == ["import"]


def test_what_a_script_cannot_know_is_asked_for(tmp_path):
    assert commands(tmp_path, "examples/refresh.sh", {"HEAD": "x", "TARGET": "y"}) == (2, [])
