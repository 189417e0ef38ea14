"""The tutorial runs as it is written, and shows in git what a run of it shows.

`python tests/tutorial_test.py` runs it and writes down what it showed, after a change of what it does.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

TUTORIAL = Path(__file__).resolve().parents[1] / "docs" / "tutorial.ipynb"
BOUNDS = 300  # seconds of a cell


def executed(folder: Path) -> Any:
    """The notebook as it is after a run in a folder, where it leaves its data. Progress and what a cell writes to its
    standard error stand in no document."""
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(TUTORIAL, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=BOUNDS, kernel_name="python3", record_timing=False, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if is_said(output)]
    return notebook


def is_said(output: Any) -> bool:
    if output.output_type == "stream":
        return output.name == "stdout"
    return bool(output.data["text/plain"].strip())  # a bar that is done is empty


def main() -> None:
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(Path(folder))
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    nbformat.write(notebook, TUTORIAL)


def shapes(notebook: Any) -> list[list[tuple[str, ...]]]:
    """What each cell shows, apart from numbers that another machine may have otherwise: also how often a bar moved."""
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        list(dict.fromkeys((output.output_type, *sorted(output.get("data", {}))) for output in cell.outputs))
        for cell in codes
    ]


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


if __name__ == "__main__":
    main()
