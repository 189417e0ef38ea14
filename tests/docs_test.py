"""The Python of the documents: all of it is Python, and a page that is to be run runs as it is written."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from draftsmith.modules import drafters

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(autouse=True)
def one_thread():
    """Beside other tests more only stand in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_what_is_called_python_is(page):
    for block in blocks(page):
        ast.parse(block)


def test_the_page_on_python_runs_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.setattr(drafters, "__path__", list(drafters.__path__))
    page, names = ROOT / "docs" / "python.md", {"__name__": "page"}
    assert len(blocks(page)) >= 8
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
