"""Logs of a training that was interrupted and resumed, read back from the trackers' own files."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from wandb_file import OfflineRun, offline_runs

from draftsmith.data.store.manifest import Manifest, resolved
from draftsmith.modules.pretrained.provenance import git_commit
from draftsmith.train.command import run
from draftsmith.train.config import TrainDrafterConfig, drafter_config
from draftsmith.train.module import LitHead
from draftsmith.train.prepare import with_shape
from draftsmith.train.strategies import resolve_precision

STOPPED_AT, STEPS = 23, 50


@dataclass(frozen=True)
class Tracked:
    """Output directory of a run, its two sessions in Weights & Biases, and its CSV rows."""

    output: Path
    config: TrainDrafterConfig
    sessions: list[OfflineRun]
    table: list[dict[str, float]]


def table(output: Path) -> list[dict[str, float]]:
    with (output / "metrics.csv").open() as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def tracked(artefacts, tmp_path_factory) -> Tracked:
    output = tmp_path_factory.mktemp("tracking") / "run 1"
    shared = {"data": artefacts.features, "target": str(artefacts.target), "output": output, "accelerator": "cpu"}
    shared |= {"max_steps": STEPS, "batch_size": 8, "val_share": 0.25, "val_every": 10, "log_every": 5, "lr": 3e-3}
    shared |= {"tau_prompts": 2, "tau_max_new_tokens": 6, "tau_every": 50, "token_weight": 1.0, "num_threads": 1}
    shared |= {"log": ("wandb-offline", "tensorboard"), "group": "study 1"}
    learn = LitHead.training_step

    def interrupted(module: LitHead, batch, batch_idx):
        if module.trainer.global_step == STOPPED_AT - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(module, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(output.parent / "no netrc"))
        with patch.context() as stopping:
            stopping.setattr(LitHead, "training_step", interrupted)
            with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
                run(drafter_config("eagle")(**shared))
        config = drafter_config("eagle")(**shared)
        run(config)
    return Tracked(output, config, offline_runs(output), table(output))


def test_a_resumed_run_keeps_its_id_and_logs_all_rows_again(tracked):
    first, second = tracked.sessions
    assert first.run_id == second.run_id == (tracked.output / "wandb_id.txt").read_text().strip()
    assert first.record.project == second.record.project == "draftsmith"
    for session, last_step in ((first, STOPPED_AT), (second, STEPS)):
        expected = [{"trainer/global_step": row["step"], **row} for row in tracked.table if row["step"] <= last_step]
        assert len(session.history) == len(expected) > 0
        for row, logged in zip(expected, session.history, strict=True):
            del row["step"]
            assert logged == pytest.approx(row, rel=1e-7)  # the table has 8 digits


def test_all_documented_metrics_are_logged(tracked):
    names = {name for row in tracked.table for name in row} - {"step"}
    training = {f"train/{name}" for name in ("loss", "feature_loss", "token_loss", "top1", "top3")}
    validation = {f"val/{name}" for name in ("loss", "feature_loss", "token_loss", "top1", "top3", "tau")}
    cost = {"steps_per_s", "tokens_per_s", "memory_gb", "data_wait", "real_tokens"}
    assert names >= training | validation | {"lr"} | {f"cost/{name}" for name in cost}
    for row in tracked.table:
        assert all(math.isfinite(value) for value in row.values())
        if "cost/data_wait" in row:
            assert 0 <= row["cost/data_wait"] <= 1 and 0.5 < row["cost/real_tokens"] <= 1


def test_config_and_inputs_are_logged(tracked, artefacts):
    for session in tracked.sessions:
        logged = session.config
        assert resolved(resolve_precision(with_shape(tracked.config))).items() <= logged.items()
        made_from = logged["made_from"]
        assert made_from["inputs"] == {"data": Manifest.read(artefacts.features).digest}
        assert made_from["git_commit"] == git_commit()
        assert made_from["packages"]["torch"] == __import__("torch").__version__
        assert (
            made_from["models"]["target"] == json.loads((tracked.output / "best/manifest.json").read_text())["target"]
        )


def test_the_head_is_an_artifact_of_the_completed_run_with_its_card(tracked):
    made = [[artifact for artifact in session.artifacts if artifact.type == "model"] for session in tracked.sessions]
    (artifact,), best = made[1], tracked.output / "best"
    assert made[0] == [] and not artifact.use_after_commit
    manifest = json.loads((best / "manifest.json").read_text())
    assert (artifact.type, artifact.name) == ("model", "eagle-run-1")
    assert artifact.description == (best / "README.md").read_text()
    assert json.loads(artifact.metadata)["metrics"] == manifest["metrics"]
    assert set(artifact.aliases) >= {"best", f"step-{manifest['step']}"}
    # Referred to, not copied: what is uploaded later lies in best/. But for the card, which may be written anew.
    files = {entry.path: (entry.local_path, entry.size) for entry in artifact.manifest.contents}
    card, size = files.pop("README.md")
    assert Path(card).read_text() == artifact.description and size == Path(card).stat().st_size
    assert Path(card).parent == tracked.sessions[1].directory.resolve()
    assert files == {path.name: (str(path), path.stat().st_size) for path in best.iterdir() if path.name != "README.md"}


def test_the_data_artefact_is_an_input_of_the_run(tracked, artefacts):
    manifest = Manifest.read(artefacts.features)
    for session in tracked.sessions:
        (used,) = [artifact for artifact in session.artifacts if artifact.type == "dataset"]
        assert used.use_after_commit and used.name == f"features-{manifest.digest[:12]}"  # an input, not an output
        assert json.loads(used.metadata)["digest"] == manifest.digest
        assert [Path(entry.local_path) for entry in used.manifest.contents] == [artefacts.features / "manifest.json"]
        assert session.record.run_group == "study 1"


def test_machine_and_process_are_not_logged(tracked):
    for session in tracked.sessions:
        assert not session.kinds & {"environment", "output", "output_raw", "stats"} and session.record.host == ""
        content = next(session.directory.glob("run-*.wandb")).read_bytes()
        assert sys.executable.encode() not in content and platform.platform().encode() not in content
        assert not [path for path in (session.directory / "files").rglob("*") if path.is_file()]


def test_tensorboard_has_the_numbers_of_the_csv_file(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked.output / "tensorboard")).Reload()
    names = {name for row in tracked.table for name in row} - {"step"}
    steps = {name: [] for name in names}
    for row in table(tracked.output):
        for name in names & set(row):
            steps[name].append((row["step"], row[name]))
    for name in names:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in steps[name]], name  # float32
    assert "max_steps: 50" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
