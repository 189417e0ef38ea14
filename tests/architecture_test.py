"""Walls that import-linter (pyproject.toml, `make lint`) has no contract for."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "lightning", "datasets", "deepspeed", "wandb", "pyarrow", "numpy", "safetensors")


def test_no_modules_import_each_other():
    """Not in functions and not for types either."""
    graph = grimp.build_graph("draftsmith")
    edges = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(edges) > 200
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("module", ["draftsmith", "draftsmith.launch.cli"])
def test_importing_the_command_line_loads_nothing_heavy(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").rglob("*.y*ml")), ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_a_config_is_a_yaml_mapping_and_a_tree_a_list(path):
    assert path.suffix == ".yaml", "package data holds *.yaml only"
    assert isinstance(yaml.safe_load(path.read_text("utf-8")), list if path.parent.name == "trees" else dict)
