"""CSV files that survive being continued, and Weights & Biases without a key."""

from __future__ import annotations

import csv
import struct
import time
from pathlib import Path

import pytest

from draftsmith.train.config import TrainConfig
from draftsmith.train.loggers import CsvLogger, has_wandb_key, make_loggers


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


def test_a_continued_run_keeps_what_came_before_its_checkpoint(tmp_path):
    first = CsvLogger(tmp_path / "m.csv")
    for step in (1, 2, 3, 4):
        first.log_metrics({"a": float(step)}, step)
    with (tmp_path / "m.csv").open("a") as file:
        file.write("5")  # cut short by a kill
    second = CsvLogger(tmp_path / "m.csv", resumed_step=2)
    second.log_metrics({"a": 30.0}, 3)
    assert [(row["step"], row["a"]) for row in rows(tmp_path / "m.csv")] == [("1", "1"), ("2", "2"), ("3", "30")]


def test_a_new_run_starts_a_new_file(tmp_path):
    CsvLogger(tmp_path / "m.csv").log_metrics({"a": 1.0}, 1)
    CsvLogger(tmp_path / "m.csv").log_metrics({"a": 2.0}, 1)
    assert [row["a"] for row in rows(tmp_path / "m.csv")] == ["2"]


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


def wandb_records(path: Path):
    """Records of a .wandb file: a 7-byte header, then LevelDB log blocks of 32 KiB with protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_without_a_key_the_run_is_logged_offline_and_that_is_said_once(no_key, tmp_path):
    config, said = TrainConfig(data=tmp_path, output=tmp_path / "out"), []
    loggers = make_loggers(config, "eagle", 0, said.append)
    for logger in loggers:
        logger.log_metrics({"train/loss": 0.5}, 7)
    for logger in loggers:
        logger.finalize("success")
    assert len(said) == 1 and "offline" in said[0]
    (file,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    while not any(record.HasField("exit") for record in wandb_records(file)):
        time.sleep(0.05)  # another process writes it
    history = [
        {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        for record in wandb_records(file)
        if record.HasField("history")
    ]
    assert [(row["train/loss"], row["trainer/global_step"]) for row in history] == [("0.5", "7")]
    assert rows(tmp_path / "out" / "metrics.csv") == [{"step": "7", "train/loss": "0.5"}]


def test_off_is_off(tmp_path):
    config = TrainConfig(data=tmp_path, output=tmp_path / "out", wandb="off")
    assert [logger.name for logger in make_loggers(config, "eagle", 0, print)] == ["csv"]
