"""What a training logs, and where to, in real Weights & Biases and TensorBoard files; and the cost of its steps."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Clock, config

from draftsmith.data.settings import with_dtype
from draftsmith.data.store.manifest import Manifest, resolved
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.provenance import git_commit
from draftsmith.modules.types import FeatureBatch, InputError
from draftsmith.train import tracking
from draftsmith.train.command import run
from draftsmith.train.config import TrainConfig, TrainDrafterConfig, drafter_config, has_wandb_key
from draftsmith.train.data import MicroBatch, SampleKey
from draftsmith.train.module import LitHead
from draftsmith.train.prepare import with_shape
from draftsmith.train.strategies import resolve_precision
from draftsmith.train.tracking import CsvLogger, Telemetry, make_loggers, peak_memory_gb


@dataclass
class FakeRun:
    """A run of Weights & Biases that keeps what it is told. options: of `wandb.init`."""

    options: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, str] = field(default_factory=dict)
    artifacts: list[tuple[Any, list[str]]] = field(default_factory=list)
    offline: bool = True
    resumed: bool = False
    exit_code: int | None = None

    def __post_init__(self) -> None:
        Path(self.dir).mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        return self.options["name"]

    @property
    def dir(self) -> str:
        return f"{self.options['dir']}/wandb/run-{self.options['id']}/files"

    def log(self, metrics: dict[str, Any], **_: Any) -> None:
        self.history.append(metrics)

    def define_metric(self, name: str, summary: str = "", **_: Any) -> None:
        self.best[name] = summary

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append((artifact, aliases))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def offline_runs(output: Path) -> list[Path]:
    """Return the directories of real offline runs, oldest first."""
    return sorted((output / "wandb").glob("offline-run-*"))


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
def test_without_a_key_weights_and_biases_is_off_until_it_is_asked_for(
    no_key, tmp_path, monkeypatch, capsys, mode, tracked
):
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    loggers = make_loggers(TrainConfig(data=tmp_path, output=tmp_path / "out"), "eagle", 0)
    said = capsys.readouterr().err
    assert [type(logger).__name__ for logger in loggers] == ["CsvLogger"] + ["TrackedRun"] * tracked
    for logger in loggers:
        logger.finalize("success")
    assert len(offline_runs(tmp_path / "out")) == tracked
    assert ("no key was found (`wandb login`" in said) == (mode is None) and (said == "") == (mode is not None)


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_PROJECT", "a:b"), ("WANDB_MODE", "sometimes"), ("WANDB_API_KEY", " secret ")]
)
def test_a_name_that_the_client_refuses_is_a_line_before_anything_is_loaded(
    no_key, artifacts, tmp_path, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("draftsmith.train.command.prepare", None)
    with pytest.raises(InputError, match=f"{name}: found .* that Weights & Biases takes") as caught:
        run(config(artifacts, tmp_path / "run", loggers=("wandb-offline",)))
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_an_offline_run_prints_the_upload_command(no_key, tmp_path, capsys):
    settings = TrainConfig(data=tmp_path, output=tmp_path / "out", loggers=("wandb-offline",))
    loggers = make_loggers(settings, "eagle", 0)
    for logger in loggers:
        logger.log_metrics({"train/loss": 0.5}, 7)
    for logger in loggers:
        logger.finalize("success")
        logger.finalize("success")  # once is enough
    (directory,) = offline_runs(tmp_path / "out")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].endswith(f": wandb sync {directory}")
    assert rows(tmp_path / "out" / "metrics.csv") == [{"step": "7", "train/loss": "0.5"}]
    # Neither machine nor process is logged.
    (file,), began = directory.glob("run-*.wandb"), time.monotonic()
    # The client's own process may still write after `finish`.
    while b"train/loss" not in (content := file.read_bytes()):
        assert time.monotonic() < began + 30
        time.sleep(0.1)
    assert not [own for own in (sys.executable, platform.platform(), platform.node()) if own.encode() in content]
    assert not [path for path in (directory / "files").rglob("*") if path.is_file()]


CPU = torch.device("cpu")


class Run:
    """Training on one rank: steps of 2 x 10 slots with 7 + 8 tokens and 600 FLOPs."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.telemetry = Telemetry(self.clock, count_flops=True)
        self.rows = 5  # of a product, 600 FLOPs
        self.telemetry.start(CPU)

    def step(self, waits: float, works: float) -> None:
        ids = torch.zeros(2, 10, dtype=torch.int64)
        batch = FeatureBatch(ids, torch.zeros(2, 10, 4), ids.bool(), ids)
        part = MicroBatch(batch, (SampleKey(0, 0), SampleKey(0, 1)), (7, 8), 5)
        self.clock.now += waits
        with self.telemetry.step([part]):
            torch.ones(self.rows, 6) @ torch.ones(6, 10)
            self.clock.now += works

    def take(self) -> dict[str, float]:
        metrics = self.telemetry.take(CPU)
        assert metrics.pop("memory_gb", 1.0) > 0
        return metrics


def test_a_window_counts_tokens_flops_and_waiting():
    run = Run()
    run.step(waits=0.5, works=1.5)
    run.step(waits=0.3, works=1.7)
    assert run.take() == pytest.approx(
        {
            "steps_per_s": 2 / 4,
            "tokens_per_s": 30 / 4,
            "data_wait": 0.8 / 4,
            "real_tokens": 15 / 20,
            "tflops": 1200e-12 / 4,
        }
    )
    run.rows = 10  # as counted before
    run.step(waits=0.0, works=1.0)  # a window of its own
    assert run.take() == pytest.approx(
        {"steps_per_s": 1, "tokens_per_s": 15, "data_wait": 0, "real_tokens": 0.75, "tflops": 600e-12}
    )
    run.telemetry.count_again()
    run.step(waits=0.0, works=1.0)
    assert run.take()["tflops"] == pytest.approx(1200e-12)


def test_time_between_steps_does_not_count():
    run = Run()
    run.step(waits=0.5, works=1.5)
    run.clock.now += 50  # a validation
    run.telemetry.resume()
    run.step(waits=0.5, works=1.5)
    metrics = run.take()
    assert metrics["steps_per_s"] == pytest.approx(0.5) and metrics["data_wait"] == pytest.approx(0.25)


def test_ranks_add_up_and_the_fullest_memory_counts(monkeypatch):
    """Two ranks: 2 steps in 4 s each; the second has half the tokens, waited 2 s, and holds more."""

    def two(rows: torch.Tensor) -> torch.Tensor:
        own = rows[0]
        other = torch.tensor([own[0], own[1] / 2, own[2], own[3], 2.0, own[5], own[6] + 5])
        return torch.stack([own, other.double()])

    run = Run()
    run.step(0.0, 2.0)
    run.step(0.0, 2.0)
    monkeypatch.setattr(tracking, "gather_rows", two)
    metrics = run.telemetry.take(CPU)
    assert metrics.pop("memory_gb") == pytest.approx(peak_memory_gb(CPU) + 5, rel=0.01)
    assert metrics == pytest.approx(
        {"steps_per_s": 0.5, "tokens_per_s": 45 / 4, "data_wait": 2 / 8, "real_tokens": 45 / 80, "tflops": 2400e-12 / 8}
    )


STOPPED_AT, STEPS = 23, 50


@dataclass(frozen=True)
class Tracked:
    """Output directory of a run, its two sessions in Weights & Biases, and its CSV rows."""

    output: Path
    config: TrainDrafterConfig
    sessions: list[FakeRun]
    table: list[dict[str, float]]


def table(output: Path) -> list[dict[str, float]]:
    return [{name: float(text) for name, text in row.items() if text} for row in rows(output / "metrics.csv")]


@pytest.fixture(scope="module")
def tracked(artifacts, tmp_path_factory) -> Tracked:
    output = tmp_path_factory.mktemp("tracking") / "run 1"
    shared = {"data": artifacts.features, "target": str(artifacts.target), "output": output, "device": "cpu"}
    shared |= {"max_steps": STEPS, "batch_size": 8, "val_share": 0.25, "val_every": 10, "log_every": 5, "lr": 3e-3}
    shared |= {"tau_prompts": 2, "token_weight": 1.0, "num_threads": 1}
    shared |= {"loggers": ("wandb-offline",)}
    learn = LitHead.training_step

    def interrupted(module: LitHead, batch, batch_idx):
        if module.trainer.global_step == STOPPED_AT - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(module, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(output.parent / "no netrc"))
        sessions: list[FakeRun] = []
        patch.setattr("wandb.init", lambda **options: sessions.append(FakeRun(options)) or sessions[-1])
        with patch.context() as stopping:
            stopping.setattr(LitHead, "training_step", interrupted)
            with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
                run(drafter_config("eagle")(**shared))
        config = drafter_config("eagle")(**shared)
        run(config)
    return Tracked(output, config, sessions, table(output))


def test_a_resumed_run_keeps_its_id_and_logs_all_rows_again(tracked):
    first, second = tracked.sessions
    assert first.options["id"] == second.options["id"] == (tracked.output / "wandb_id.txt").read_text().strip()
    assert first.options["project"] == second.options["project"] == "draftsmith"
    assert second.exit_code == 0 and second.best["val/tau"] == "max" and second.best["val/loss"] == "min"
    for session, last_step in ((first, STOPPED_AT), (second, STEPS)):
        expected = [{"trainer/global_step": row["step"], **row} for row in tracked.table if row["step"] <= last_step]
        assert len(session.history) == len(expected) > 0
        for row, logged in zip(expected, session.history, strict=True):
            del row["step"]
            assert logged == pytest.approx(row, rel=1e-7)  # the table has 8 digits


def test_all_documented_metrics_are_logged(tracked):
    names = {name for row in tracked.table for name in row} - {"step"}
    training = {f"train/{name}" for name in ("loss", "feature_loss", "token_loss", "top1")}
    validation = {f"val/{name}" for name in ("loss", "feature_loss", "token_loss", "top1", "tau", "accepted_1")}
    cost = {"steps_per_s", "tokens_per_s", "memory_gb", "data_wait", "real_tokens"}
    assert names >= training | validation | {"lr"} | {f"cost/{name}" for name in cost}
    for row in tracked.table:
        assert all(math.isfinite(value) for value in row.values())
        if "cost/data_wait" in row:
            assert 0 <= row["cost/data_wait"] <= 1 and 0.5 < row["cost/real_tokens"] <= 1


def test_config_and_inputs_are_logged(tracked, artifacts):
    for session in tracked.sessions:
        logged = session.options["config"]
        target = Checkpoint(tracked.config.target)
        asked = with_dtype(resolve_precision(with_shape(tracked.config, target.shape)), target, "cpu")
        assert resolved(asked).items() <= logged.items() and logged["dtype"] == "float32"
        made_from = logged["made_from"]
        assert made_from["inputs"] == {"data": Manifest.read(artifacts.features).digest}
        assert made_from["git_commit"] == git_commit()
        assert made_from["packages"]["torch"] == __import__("torch").__version__
        assert (
            made_from["models"]["target"] == json.loads((tracked.output / "best/manifest.json").read_text())["target"]
        )


def test_the_head_is_an_artifact_of_the_completed_run_with_its_card(tracked):
    (artifact, aliases), best = tracked.sessions[1].artifacts[0], tracked.output / "best"
    assert not tracked.sessions[0].artifacts and len(tracked.sessions[1].artifacts) == 1
    manifest = json.loads((best / "manifest.json").read_text())
    model = Path(tracked.config.target).name
    assert (artifact.type, artifact.name) == ("model", f"eagle-{model}-run-1")
    assert [session.options["tags"] for session in tracked.sessions] == [["eagle", model]] * 2
    assert artifact.description == (best / "README.md").read_text()
    assert artifact.metadata["metrics"] == manifest["metrics"]
    assert aliases == ["best", f"step-{manifest['step']}"]
    # Referred to, not copied: what is uploaded later lies in best/. But for the card, which may be written anew.
    files = {entry.path: (entry.local_path, entry.size) for entry in artifact.manifest.entries.values()}
    card, size = files.pop("README.md")
    assert Path(card).read_text() == artifact.description and size == Path(card).stat().st_size
    assert Path(card).parent == Path(tracked.sessions[1].dir).resolve().parent
    assert files == {path.name: (str(path), path.stat().st_size) for path in best.iterdir() if path.name != "README.md"}
