"""The demo's commands and choices. That it runs and meets its figures is `make demo`'s business, in CI."""

from __future__ import annotations

import pytest

from draftsmith.benchmarks.embedded.tasks import HEADLINE_TASKS
from draftsmith.launch import demo
from draftsmith.launch.commands import command_name, configure
from draftsmith.launch.pipeline import PipelineStep, execute


@pytest.mark.parametrize("full", [False, True])
def test_every_step_is_a_command_that_parses(full):
    config = demo.DemoConfig(full=full)
    for step in demo.demo_steps(config, ["spec:k=4", "eagle:k=5"]):
        name = command_name(step.argv)
        settings = configure(name, step.argv[len(name.split()) :])[1]
        # What it writes last lies in what it was told to write.
        assert step.done == settings.output or step.done.parent == settings.output
        assert step.done.is_relative_to(config.directory)


def test_the_demo_measures_headline_tasks_only():
    for step in demo.demo_steps(demo.DemoConfig()):
        if step.argv[:2] == ("eval", "bench"):
            assert set(step.argv[step.argv.index("--keep-tasks") + 1].split(",")) <= set(HEADLINE_TASKS)


def test_the_fastest_setting_of_each_method_is_chosen():
    speeds = {"ar": 9.0, "spec:k=3": 1.0, "spec:k=5": 2.0, "eagle:k=3": 4.0, "eagle:k=5": 3.0}
    rows = [{"method": name, "tokens_per_s": speed} for name, speed in speeds.items()]
    assert demo.choose_methods({"methods": rows}) == {"spec": "spec:k=5", "eagle": "eagle:k=3"}


def test_a_finished_step_is_shown_and_not_run_again(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text("{}")
    execute(PipelineStep("Nothing", ("no", "such command"), tmp_path / "manifest.json"))
    assert "done before" in capsys.readouterr().err
