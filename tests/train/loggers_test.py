"""CSV files of resumed runs, and Weights & Biases without a key."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from eagle_trainings import config
from wandb_file import offline_runs

from draftsmith.data.tracking import has_wandb_key
from draftsmith.modules.types import InputError
from draftsmith.train.command import run
from draftsmith.train.config import TrainConfig
from draftsmith.train.tracking import CsvLogger, make_loggers


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_new_metric_adds_a_column(tmp_path):
    logger = CsvLogger(tmp_path / "m.csv")
    logger.log_metrics({"a": 1.0}, 1)
    logger.log_metrics({"b": 2.5}, 2)
    logger.log_metrics({"a": 3.0}, 3)
    assert rows(tmp_path / "m.csv") == [
        {"step": "1", "a": "1", "b": ""},
        {"step": "2", "a": "", "b": "2.5"},
        {"step": "3", "a": "3", "b": ""},
    ]


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path):
    first = CsvLogger(tmp_path / "m.csv")
    for step in (1, 2, 3, 4):
        first.log_metrics({"a": float(step)}, step)
    with (tmp_path / "m.csv").open("a") as file:
        file.write("5")  # cut short by a kill
    second = CsvLogger(tmp_path / "m.csv", resumed_step=2)
    second.log_metrics({"a": 30.0}, 3)
    assert [(row["step"], row["a"]) for row in rows(tmp_path / "m.csv")] == [("1", "1"), ("2", "2"), ("3", "30")]


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_a_key_is_found_where_wandb_looks_for_it(no_key, monkeypatch, tmp_path):
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine example.org login user password x\n")
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert has_wandb_key()
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_wandb_key()


@pytest.mark.parametrize(("mode", "tracked"), [(None, False), ("offline", True), ("dryrun", True), ("disabled", False)])
def test_without_a_key_weights_and_biases_is_off_until_it_is_asked_for(no_key, tmp_path, monkeypatch, mode, tracked):
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    said: list[str] = []
    loggers = make_loggers(TrainConfig(data=tmp_path, output=tmp_path / "out"), "eagle", 0, said.append)
    assert [type(logger).__name__ for logger in loggers] == ["CsvLogger"] + ["TrackedRun"] * tracked
    for logger in loggers:
        logger.finalize("success")
    assert len(offline_runs(tmp_path / "out")) == tracked
    assert [text for text in said if "no key was found" in text and "wandb login" in text] == said[: mode is None]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("project", "a/b"),
        ("project", "x" * 200),
        ("WANDB_PROJECT", "a:b"),
        ("WANDB_RUN_ID", "a/b"),
        ("WANDB_BASE_URL", "nonsense"),
        ("WANDB_MODE", "sometimes"),
        ("WANDB_API_KEY", " secret "),
    ],
)
def test_a_name_that_the_client_refuses_is_a_line_before_anything_is_loaded(
    no_key, artefacts, tmp_path, monkeypatch, name, value
):
    options = {name: value} if name == "project" else {}
    if not options:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("draftsmith.train.command.prepare", None)
    with pytest.raises(InputError, match=f"{name}: found .* that Weights & Biases takes") as caught:
        run(config(artefacts, tmp_path / "run", log=("wandb-offline",), **options))
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_an_offline_run_prints_the_upload_command(no_key, tmp_path):
    settings, said = TrainConfig(data=tmp_path, output=tmp_path / "out", log=("wandb-offline",)), []
    loggers = make_loggers(settings, "eagle", 0, said.append)
    for logger in loggers:
        logger.log_metrics({"train/loss": 0.5}, 7)
    for logger in loggers:
        logger.finalize("success")
        logger.finalize("success")  # once is enough
    (run,) = offline_runs(tmp_path / "out")
    assert len(said) == 1 and said[0].endswith(f": wandb sync {run.directory}")
    assert run.history == [{"train/loss": 0.5, "trainer/global_step": 7}]
    assert rows(tmp_path / "out" / "metrics.csv") == [{"step": "7", "train/loss": "0.5"}]


def test_log_chooses_the_loggers(no_key, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")

    def names(*track: str) -> list[str]:
        config = TrainConfig(data=tmp_path, output=tmp_path / "-".join(track or ("none",)), log=track)
        loggers = make_loggers(config, "eagle", 0, lambda text: None)
        for logger in loggers:
            logger.finalize("success")
        return [type(logger).__name__ for logger in loggers]

    assert names() == names("csv") == ["CsvLogger"]
    assert names("tensorboard") == ["CsvLogger", "TensorBoardLogger"]
    assert names("csv", "wandb") == ["CsvLogger", "TrackedRun"]


def test_tensorboard_hides_events_after_the_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TrainConfig(data=tmp_path, output=tmp_path, log=("tensorboard",))
    for resumed, values in ((0, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}), (2, {3: 30.0})):
        _, board = make_loggers(config, "eagle", resumed, print)
        for step, value in values.items():
            board.log_metrics({"a": value}, step)
        board.finalize("success")
        # Files are read in the order of their names, which begin with whole seconds.
        for file in (tmp_path / "tensorboard").glob("events.out.tfevents.1*"):
            file.rename(file.with_name(f"events.out.tfevents.{resumed:010}"))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
