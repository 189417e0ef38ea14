"""Every recipe is one that its command accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from draftsmith.launch.commands import COMMANDS, configure

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted((CONFIGS / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_accepted_by_its_command(file):
    """`configs/recipes/MODEL-HEAD.yaml`, or HEAD-TRAINER.yaml, belongs to `draftsmith train HEAD`."""
    (name,) = (name for part in file.stem.split("-") if (name := f"train {part}") in COMMANDS)
    words = ["--config", str(file), "--output", "mine"]  # no two runs share an output that a file names
    assert "output" not in yaml.safe_load(file.read_text("utf-8"))
    _, config = configure(name, words)
    assert isinstance(config, COMMANDS[name].config_class())
