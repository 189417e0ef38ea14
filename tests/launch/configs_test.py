"""Every shipped YAML of a command is one that the command accepts."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from draftsmith.launch.arguments import parse
from draftsmith.launch.cli import COMMANDS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(file for group in ("data", "train", "eval") for file in (CONFIGS / group).rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(CONFIGS).as_posix())
def test_a_config_is_accepted_by_its_command(file):
    """`configs/GROUP/COMMAND.yaml` and `configs/GROUP/COMMAND-VARIANT.yaml` belong to `draftsmith GROUP COMMAND`."""
    name = f"{file.relative_to(CONFIGS).parts[0]} {file.stem.split('-')[0]}"
    command = COMMANDS[name]
    config_class = getattr(importlib.import_module(f"draftsmith.{command.module}"), command.config)
    config = parse(f"draftsmith {name}", config_class, ["--config", str(file)], command.positional, command.help)
    assert isinstance(config, config_class)
