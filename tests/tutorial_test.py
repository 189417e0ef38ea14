"""The tutorial runs as it is written, and shows in git what a run of it shows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tutorial import TUTORIAL, executed


def shapes(notebook: Any) -> list[list[tuple[str, ...]]]:
    """What each cell shows, apart from numbers that another machine may have otherwise."""
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[(output.output_type, *sorted(output.get("data", {}))) for output in cell.outputs] for cell in codes]


@pytest.mark.slow
def test_the_tutorial_runs_as_it_is_written(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # its history and its connection go where the test goes
        monkeypatch.setenv(name, str(tmp_path / name))
    kept: Any = nbformat.read(TUTORIAL, as_version=4)
    made = executed(tmp_path)
    assert shapes(made) == shapes(kept)
    printed = [output.text for cell in made.cells for output in cell.get("outputs", []) if "text" in output]
    assert "the same tokens as the target alone: True" in "".join(printed)
    assert (tmp_path / "runs" / "tutorial" / "head" / "best" / "manifest.json").is_file()


def test_what_git_holds_is_a_run_in_order_without_a_machines_paths():
    text = TUTORIAL.read_text()
    counts = [int(number) for number in re.findall(r'"execution_count": (\d+),\n   "id"', text)]
    assert counts == list(range(1, len(counts) + 1)) and len(counts) >= 8
    assert not re.search(r"site-packages|/home/|/root/|/tmp/|/work/", text)
