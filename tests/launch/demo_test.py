"""The demo's commands and choices. That it runs and meets its figures is `make demo`'s business, in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.benchmarks.embedded.tasks import HEADLINE_TASKS
from draftsmith.launch import demo
from draftsmith.launch.commands import configure
from draftsmith.launch.steps import PipelineStep, execute


def every_step(full: bool) -> list[PipelineStep]:
    config, profile, sized = demo.DemoConfig(full=full), demo.load_profile(full), Path("runs/demo/sized")
    bench = demo.bench_step(config, profile, sized, "dev", demo.dev_methods(), profile.dev_prompts, 2)
    stages = [*demo.data_steps(config, profile, sized), *demo.training_steps(config, profile, sized)]
    return [*stages, bench, demo.page_step(sized)]


@pytest.mark.parametrize("full", [False, True])
def test_every_step_is_a_command_that_parses(full):
    for step in every_step(full):
        assert configure(" ".join(step.argv[:2]), step.argv[2:])[1] is not None


def test_steps_are_done_by_what_their_command_writes_last():
    names = [step.done.name for step in every_step(False)]
    assert names == ["manifest.json"] * 4 + ["training.json"] * 2 + ["results.json", "report.html"]


def test_the_demo_measures_headline_tasks_only():
    assert set(demo.load_profile(False).tasks.split(",")) <= set(HEADLINE_TASKS)


def test_full_differs_only_where_it_says():
    quick, full = demo.load_profile(False), demo.load_profile(True)
    assert full.eagle_steps > quick.eagle_steps and full.tasks == quick.tasks


def test_the_fastest_setting_of_each_method_is_chosen():
    speeds = {"ar": 9.0, "spec:k=3": 1.0, "spec:k=5": 2.0, "eagle:k=3": 4.0, "eagle:k=5": 3.0}
    rows = [{"method": name, "tokens_per_s": speed} for name, speed in speeds.items()]
    assert demo.choose_methods({"methods": rows}) == {"spec": "spec:k=5", "eagle": "eagle:k=3"}


def test_a_finished_step_is_shown_and_not_run_again(tmp_path, capsys):
    from rich.console import Console

    (tmp_path / "manifest.json").write_text("{}")
    execute(PipelineStep("Nothing", ("no", "such command"), tmp_path / "manifest.json"), Console())
    assert "done before" in capsys.readouterr().out
