"""The commands of `draftsmith laptop`, its time left, and what a second run may not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.launch import laptop, pipeline
from draftsmith.launch.commands import command_name, configure
from draftsmith.launch.laptop import LaptopConfig
from draftsmith.launch.pipeline import PipelineStep
from draftsmith.modules.types import InputError


@pytest.mark.parametrize("source", ["self", "mine.jsonl"])
def test_every_step_is_a_command_that_parses(source, monkeypatch):
    monkeypatch.setattr("draftsmith.data.engines.llamacpp.server_binary", lambda: Path("llama-server"))
    config = LaptopConfig(source=source)
    steps = laptop.laptop_steps(config, "model.gguf")
    assert steps[-1].done.name == "check.done"
    for step in steps:
        name = command_name(step.argv)
        settings = configure(name, step.argv[len(name.split()) :])[1]
        assert settings.target == "model.gguf" and step.minutes > 0
        # A step is done when its own output holds `done`; a check has no output, so the pipeline writes the file.
        assert name == "check" or step.done.parent == settings.output
    # 45 minutes, with five for the installation and seven for llama.cpp.
    assert sum(step.minutes for step in steps) <= 33


def test_the_time_left_follows_the_pace_of_the_machine(tmp_path, monkeypatch):
    """Four steps of 2, 2, 4 and 6 expected minutes; the first is finished, and each minute takes three."""
    steps = [
        PipelineStep(name, (name,), tmp_path / name / "done", minutes)
        for name, minutes in [("a", 2), ("b", 2), ("c", 4), ("d", 6)]
    ]
    steps[0].done.parent.mkdir()
    steps[0].done.touch()
    said: list[str] = []
    now = 0.0

    def execute(step, remaining):
        nonlocal now
        said.append(remaining)
        if not step.done.exists():
            step.done.parent.mkdir()
            step.done.touch()
            now += 3 * 60 * step.minutes

    monkeypatch.setattr(pipeline, "execute", execute)
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: now)
    pipeline.run_steps(steps)
    assert [text.split("about ")[1] for text in said[1:]] == [
        "2 min, all that is left 12 min)",
        "12 min, all that is left 30 min)",
        "18 min, all that is left 18 min)",
    ]


def test_other_options_need_another_output(tmp_path):
    laptop.begin(LaptopConfig(output=tmp_path))
    laptop.begin(LaptopConfig(output=tmp_path, num_threads=1))
    with pytest.raises(InputError, match=r"begun with prompts 1000, expected prompts 40\."):
        laptop.begin(LaptopConfig(output=tmp_path, prompts=40))


def test_without_an_index_the_error_names_the_option(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InputError, match="Pass --target with a GGUF file"):
        laptop.fetch_smollm2(tmp_path)
    assert not list(tmp_path.iterdir())
