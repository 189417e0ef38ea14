"""Trainings in the report, finished or not."""

from pathlib import Path

import pytest

from draftsmith.data.store.writer import writing_alone
from draftsmith.eval.report.runs import read_runs
from draftsmith.eval.report.sections import make_sections

# A loss before the steps, two validations, and a line that is being written.
METRICS = """step,val/loss,val/tau,val/agreement_1,val/top1,val/agreement_2,train/loss,cost/tokens_per_s
10,6.5,1.25,0.2,0.2,0.1,,
10,,,,,,6.75,1200.0
20,5.5,1.5,0.4,0.4,0.3,,
20,,,,,,5.75,
3"""
CONFIG = "# draftsmith train eagle --config THIS_FILE\ntarget: embedded:target\nmax_steps: 40\n"


@pytest.fixture
def training(tmp_path) -> Path:
    directory = tmp_path / "my head"
    directory.mkdir()
    (directory / "metrics.csv").write_text(METRICS)
    (directory / "config.yaml").write_text(CONFIG)
    return directory


def figures(directory: Path):
    (section,) = make_sections(read_runs([directory]), 0)
    return section, {figure.name: figure for figure in section.figures}


def test_a_running_training_shows_its_curves_so_far(training):
    assert figures(training)[0].about.startswith("Interrupted: step 20 is the last one logged. The same command")
    with writing_alone(training):
        section, found = figures(training)
    assert section.about.startswith("Running: step 20 is the last one logged. Target embedded:target")
    assert section.command == f"draftsmith train eagle --config '{training}/config.yaml'"

    def points(name):
        values = found[name].specification["data"]["values"]
        return [(row["series"], row["at_step"], row["value"]) for row in values]

    assert points("training-loss") == [
        ("validation", 10, 6.5), ("training", 10, 6.75), ("validation", 20, 5.5), ("training", 20, 5.75)
    ]  # fmt: skip
    assert points("training-tau") == [("tau", 10, 1.25), ("tau", 20, 1.5)]
    assert points("training-depth") == [
        ("token 1", 10, 0.2), ("token 2", 10, 0.1), ("token 1", 20, 0.4), ("token 2", 20, 0.3)
    ]  # fmt: skip
    assert "training-speed" not in found  # one step is a dot
    last = {row["metric"]: (row["value"], row["step"], row["lowest"]) for row in found["training-latest"].rows}
    assert last["val/loss"] == (5.5, 20, 5.5) and last["cost/tokens_per_s"] == (1200.0, 10, 1200.0)
    (training / "training.json").write_text("{}")
    assert figures(training)[0].about.startswith("Finished after 20 steps.")
