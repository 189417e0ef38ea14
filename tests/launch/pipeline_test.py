"""`draftsmith run`: the shipped pipelines, what is skipped, what is refused, and the time that is left. That the demo
runs and meets its figures is the business of `make demo`, in CI."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from forked import forked

from draftsmith.benchmarks.embedded.tasks import HEADLINE_TASKS
from draftsmith.launch import pipeline
from draftsmith.launch.cli import main
from draftsmith.launch.commands import COMMANDS, command_name, configure
from draftsmith.launch.pipeline import Stage
from draftsmith.modules.types import InputError

OUT = Path("runs/out")
SHIPPED = {
    "demo": [],
    "demo-full": [],
    "laptop": ["target=model.gguf", "source=mine.jsonl"],
    "refresh": ["head=runs/head/best", "target=runs/tuned", "source=chats.jsonl"],
}


@pytest.fixture(autouse=True)
def no_server_and_no_head(monkeypatch):
    monkeypatch.setattr(pipeline, "has_llama_server", lambda: "true")
    monkeypatch.setattr(pipeline, "kind_of_head", lambda directory: "eagle3")
    monkeypatch.setattr(pipeline, "with_mtp", lambda target: "true")


def stages_of(name: str, given: list[str] = []) -> list[Stage]:  # noqa: B006  # never changed
    plan = pipeline.read_pipeline(name)
    return pipeline.make_stages(plan, pipeline.variables(plan, given, OUT))


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.yaml").write_text(text)
    return str(tmp_path / "mine.yaml")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_stage_of_a_shipped_pipeline_is_a_command_that_parses(name):
    for stage in stages_of(name, SHIPPED[name]):
        command = command_name(stage.argv)
        settings = configure(command, stage.argv[len(command.split()) :])[1]
        # What shows that it finished lies in the pipeline's output.
        assert getattr(settings, "output", OUT / "x").is_relative_to(OUT)


def test_help_names_every_shipped_pipeline():
    assert {path.stem for path in pipeline.SHIPPED.glob("*.yaml")} == set(SHIPPED)
    assert [name for name in SHIPPED if name not in COMMANDS["run"].config_class().__doc__] == []


def test_the_demo_measures_headline_tasks_only():
    for stage in stages_of("demo"):
        if stage.argv[:2] == ("eval", "bench"):
            assert set(stage.argv[stage.argv.index("--tasks") + 1].split(",")) <= set(HEADLINE_TASKS)


def test_the_laptop_fetches_its_default_model_and_takes_the_minutes_it_says():
    stages = stages_of("laptop")
    assert "--require-hashes" in stages[0].argv and stages[1].argv[:4] == ("data", "prompts", "--source", "self")
    assert all(stage.minutes > 0 for stage in stages) and stages[-1].argv[0] == "check"
    # 45 minutes, with five for the installation and seven for llama.cpp.
    assert sum(stage.minutes for stage in stages) <= 33
    assert "--source mine.jsonl --limit 1000" in stages_of("laptop", SHIPPED["laptop"])[0].command


def test_the_fastest_setting_of_each_method_is_chosen(tmp_path):
    assert pipeline.fastest_methods(tmp_path) == "ar"  # before it is measured
    speeds = {"ar": 9.0, "spec:k=3": 1.0, "spec:k=5": 2.0, "eagle:k=3": 4.0, "eagle:k=5": 3.0}
    rows = [{"method": name, "tokens_per_s": speed} for name, speed in speeds.items()]
    (tmp_path / "results.json").write_text(json.dumps({"methods": rows}))
    assert pipeline.fastest_methods(tmp_path) == "spec:k=5,eagle:k=3"


# A program that appends a word to a file and ends with an exit code.
APPEND = """{python} -c "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + chr(10)); exit(int(sys.argv[3]))" """
THREE = f"""
variables: {{word: [a, "b c; exit 4"], last: 0}}
stages:
  - title: One
    program: >-
      {APPEND} {{output}}/log {{word}} 0
  - title: Two
    when: "{{last}} == 0"
    otherwise: Two is left out
    program: >-
      {APPEND} {{output}}/two {{word}} 0
  - title: Three
    program: >-
      {APPEND} {{output}}/log three {{last}}
"""


def test_finished_stages_are_skipped_and_a_failed_one_is_run_again(tmp_path, capfd):
    words = ["run", written(tmp_path, THREE), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="3"):
        main([*words, "--set", "last=3"])
    captured = capfd.readouterr()
    assert "Three (2 of 2)" in captured.err and "left out" not in captured.err
    assert main(words) == 0
    assert "One (done before)" in capfd.readouterr().err
    assert (tmp_path / "out" / "log").read_text() == "a,b c; exit 4\nthree\nthree\n"
    # Another command is not the one that finished.
    assert main([*words, "--set", "word=a,c", "--set", "last=0"]) == 0
    assert (tmp_path / "out" / "log").read_text().splitlines()[-1] == "a,c"
    assert (tmp_path / "out" / "two").read_text() == "a,b c; exit 4\na,c\n"


def test_a_command_whose_output_was_deleted_is_run_again_and_launchers_get_a_process(tmp_path, monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(pipeline, "dispatch", lambda argv: ran.append(argv) or Path(argv[-1]).mkdir() or 0)
    monkeypatch.setattr(pipeline.subprocess, "run", lambda argv, **_: ran.append(argv[1:]) or argparse(0))
    one = "{title: One, run: 'eval report r --output {output}/x'}"
    stages = f"[{one}, {{title: Two, run: 'launch torchrun -- data inspect x'}}]"
    words = ["run", written(tmp_path, f"stages: {stages}"), "--output", str(tmp_path / "out")]
    assert main(words) == 0 and main(words) == 0
    first = ["eval", "report", "r", "--output", f"{tmp_path}/out/x"]
    second = ["-m", "draftsmith", "launch", "torchrun", "--", "data", "inspect", "x"]
    assert ran == [first, second]
    (tmp_path / "out" / "x").rmdir()
    assert main(words) == 0 and ran[2:] == [first]


def test_a_pipeline_whose_training_is_interrupted_says_what_continues_all_of_it(tmp_path, monkeypatch, capsys):
    def interrupted(argv: list[str]) -> int:
        raise SystemExit(130)  # a training has said how to continue itself

    monkeypatch.setattr(pipeline, "dispatch", interrupted)
    stages = "[{title: Head, run: 'eval report r --output x'}, {title: Next, run: 'doctor'}]"
    with pytest.raises(SystemExit, match="130"):
        main(["run", written(tmp_path, f"stages: {stages}"), "--output", str(tmp_path / "out")])
    assert capsys.readouterr().err.endswith("Stopped at Head: the same `draftsmith run` continues from there.\n")


SMALL = """
stages:
  - {title: Prompts, run: "data prompts --source embedded:prompts --split train --limit 4 --target embedded:target
      --output {output}/prompts"}
  - {title: Answers, run: "data responses --data {output}/prompts --target embedded:target --temperature 0
      --max-new-tokens 16 --num-threads 1 --output {output}/responses"}
  - {title: Head, run: "train eagle3 --data {output}/responses --target embedded:target --max-steps 1 --val-every 1
      --tau-prompts 0 --num-threads 1 --device cpu --loggers csv --output {output}/head"}
  - {title: Export, run: "export --head {output}/head/best --format vllm --output {output}/x"}
"""


def test_a_pipeline_that_was_killed_before_it_recorded_an_export_continues(tmp_path, monkeypatch):
    out, real = tmp_path / "out", pipeline.execute
    words = ["run", written(tmp_path, SMALL), "--output", str(out)]

    def killed(stage: Stage) -> int:
        code = real(stage)
        if stage.argv[0] == "export":
            os.kill(os.getpid(), signal.SIGKILL)
        return code

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "execute", killed)
        process = forked(main, words)
        process.join()
    exported = {path.name: path.read_bytes() for path in (out / "x").iterdir()}
    assert process.exitcode == -signal.SIGKILL and "model.safetensors" in exported
    ran: list[str] = []
    monkeypatch.setattr(pipeline, "execute", lambda stage: ran.append(stage.title) or real(stage))
    assert main(words) == 0 and main(words) == 0 and ran == ["Export"]
    assert {path.name: path.read_bytes() for path in (out / "x").iterdir()} == exported
    # What another one has put there stays.
    finished = json.loads((out / "stages.json").read_text())
    (out / "stages.json").write_text(json.dumps({key: value for key, value in finished.items() if "export" not in key}))
    assert main(words) == 2
    assert {path.name: path.read_bytes() for path in (out / "x").iterdir()} == exported


def argparse(code: int):
    return type("Finished", (), {"returncode": code})


def test_a_file_may_change_another_one(tmp_path):
    text = "base: demo\nvariables: {repeats: 7}\n"
    plan = pipeline.read_pipeline(written(tmp_path, text))
    assert (plan["variables"]["repeats"], plan["variables"]["dev_prompts"]) == ("7", "9")
    assert plan["stages"] == pipeline.read_pipeline("demo")["stages"] and plan["output"] == "runs/demo/quick"


@pytest.mark.parametrize(
    ("text", "given", "says"),
    [
        ("stages: 3", [], "stages: found '3', expected a list"),
        ("stagse: []", [], "found the key 'stagse'"),
        ("about: x", [], "no stages"),
        ("stages: [{title: A, run: x, program: y}]", [], "stage 1: found the keys title, run, program"),
        ("stages: [{title: A, run: 'decode {who}'}]", [], "found 'decode'|found '{who}'"),
        ("stages: [{title: A, run: 'data x'}]", [], "data x"),
        ("stages: [{title: A, run: 'run demo'}]", [], "run demo"),
        ("stages: [{title: A, run: 'data prompts --limit x'}]", [], "value for --limit"),
        ("stages: [{title: A, program: no-such-program x}]", [], "A: found no program 'no-such-program x'"),
        ("stages: [{title: A, program: x, when: yes}]", [], "when: found 'yes', expected A == B or A != B"),
        ("stages: [{title: A, run: 'decode {output.foo}'}]", [], "found '{output.foo}'"),
        ("stages: [{title: A, run: 'decode {output:>2000000000}'}]", [], "output takes no '>2000000000'"),
        ("stages: [{title: A, run: 'decode {kind:{output!r:>2000000000}}'}]", [], "output takes no"),
        ("stages: [{title: A, run: decode, minutes: [a, b]}]", [], "stage 'A': found could not convert.*numbers"),
        ("stages: [{title: A, run: decode, minutes: [1, 2, 3]}]", [], "stage 'A': found too many values"),
        ("stages: [{title: A, run: 'decode \"Hi'}]", [], "stage 'A': found No closing quotation"),
        ("stages: [{title: A, run: ''}]", [], "found command ''"),
        ("base: mine.yaml", [], "mine.yaml: found a base of itself"),
        ("variables: {word: }\nstages: []", [], "found no word.*--set word=VALUE"),
        ("variables: {word: 1}\nstages: []", ["wrod=2"], "found 'wrod=2'.*Did you mean word"),
        ("stages: []", ["word"], "found 'word', expected KEY=VALUE"),
    ],
)
def test_a_wrong_pipeline_is_refused_before_anything_runs(tmp_path, monkeypatch, text, given, says):
    monkeypatch.chdir(tmp_path)
    config = pipeline.RunConfig(written(tmp_path, text), tuple(given), tmp_path / "out")
    with pytest.raises(InputError, match=says):
        pipeline.run(config)
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_missing_is_named_as_such(tmp_path, monkeypatch):
    def missing(directory: str) -> str:
        raise InputError("head", directory, "a head directory", "Train one.")

    monkeypatch.setattr(pipeline, "kind_of_head", missing)
    with pytest.raises(InputError, match="head: found no-head, expected a head"):
        pipeline.run(pipeline.RunConfig(written(tmp_path, "stages: [{title: A, run: 'train {kind:no-head}'}]")))


def test_the_time_left_follows_the_pace_of_the_machine(tmp_path, monkeypatch, capsys):
    """Four stages of 2, 2, 4 and 6 expected minutes; the first is finished, and each minute takes three."""
    now = 0.0
    minutes = {"a": 2, "b": 2, "c": 4, "d": 6}
    stages = [{"title": name, "program": name, "minutes": [str(each), "0"]} for name, each in minutes.items()]

    def execute(stage: Stage) -> int:
        nonlocal now
        now += 3 * 60 * stage.minutes
        return 0

    monkeypatch.setattr(pipeline, "execute", execute)
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: now)
    (tmp_path / "stages.json").write_text('{"a": 1}')
    pipeline.run_stages({"stages": stages}, {}, tmp_path, pace=0.5)
    said = [line.split("about ")[1] for line in capsys.readouterr().err.splitlines() if "about" in line]
    assert said == [
        "1 min, all that is left 6 min)",
        "12 min, all that is left 30 min)",
        "18 min, all that is left 18 min)",
    ]


@pytest.mark.parametrize(
    ("slower", "fast", "says"), [(1, True, ["10 minutes", "bfloat16"]), (3, False, ["30 min", "float32"])]
)
def test_what_a_pipeline_takes_and_gains_here_is_said_from_a_measurement(monkeypatch, capsys, slower, fast, says):
    from draftsmith.launch import machine

    monkeypatch.setattr(machine, "read_ms", lambda rows: slower * {1: 2.0, 4: 3.0, machine.ROWS: 20.0}[rows])
    monkeypatch.setattr(machine, "bfloat16_is_fast", lambda: fast)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1})
    measured = {"probe_ms": "20", "tau": "2.1", "drafted": "3", "draft_cost": "0.1"}
    assert machine.forecast(measured, 10, 2) == pytest.approx(slower)
    said = capsys.readouterr().err
    # Reading four tokens takes 1.5 times as long as one, and three drafts 0.3: 2.1 / 1.8.
    assert all(part in said for part in [*says, "2.1 tokens per call", "1.50 times", "about 1.17x"])
    assert machine.forecast({}, 10, 2) == 1.0 and capsys.readouterr().err == ""
