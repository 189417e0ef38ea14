"""Every shipped YAML of a command is one that the command accepts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from draftsmith.launch.commands import COMMANDS, configure

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(file for group in ("data", "train", "eval") for file in (CONFIGS / group).rglob("*.yaml"))


def test_no_command_defaults_to_a_shared_output():
    named = set()
    for name, command in COMMANDS.items():
        config_class = command.config_class()
        named |= {name for field in dataclasses.fields(config_class) if field.name == "output" and field.default not in
                  (dataclasses.MISSING, None)}  # fmt: skip
    assert named == set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(CONFIGS).as_posix())
def test_a_config_is_accepted_by_its_command(file):
    """`configs/GROUP/COMMAND.yaml` and `configs/GROUP/COMMAND-VARIANT.yaml` belong to `draftsmith GROUP COMMAND`."""
    name = f"{file.relative_to(CONFIGS).parts[0]} {file.stem.split('-')[0]}"
    words = ["--config", str(file), "--output", "mine"]  # no two runs share an output that a file names
    assert "output" not in yaml.safe_load(file.read_text("utf-8"))
    _, config = configure(name, words)
    assert isinstance(config, COMMANDS[name].config_class())
