"""Run the tutorial and write down what it showed: `python tests/tutorial.py`, after a change of what it does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

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


if __name__ == "__main__":
    main()
