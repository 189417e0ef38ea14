"""What the site makes of the documents. That its pages build and that no link is broken, `make site` checks."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import draftsmith

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    pytest.importorskip("sphinx")  # of the extra `docs`
    spec = importlib.util.spec_from_file_location("site_conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference_once():
    named = re.findall(r"^\.\. auto\w+:: draftsmith\.(\w+)$", (DOCS / "python.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(draftsmith.PUBLIC)


def test_what_is_no_page_is_linked_in_the_repository(conf, monkeypatch):
    text = "[page](training.md#x) [code](../modules/types.py#L3) [folder](../configs) [none](../no.py) ![i](a.svg)"
    monkeypatch.setattr(conf, "REPOSITORY", "https://forge/repo")
    monkeypatch.setattr(conf, "BRANCH", "main")
    found = "[code](https://forge/repo/blob/main/modules/types.py#L3) [folder](https://forge/repo/tree/main/configs)"
    rest = "[none](../no.py) ![i](a.svg)"  # Sphinx warns of what is missing
    assert conf.sources(DOCS, text, {"docs/training"}) == f"[page](training.md#x) {found} {rest}"
    monkeypatch.setattr(conf, "REPOSITORY", "")
    assert conf.sources(DOCS, "[code](../LICENSE) [folder](../configs)", set()) == "[code](path:../LICENSE) folder"


def test_parameters_in_prose_become_a_list(conf):
    def thing(one: int, two: int, other: int): ...

    lines = ["What it is: a thing.", "", "one, two: numbers; none", "    is 0. other: text.", "", "Raises:", "    E"]
    conf.parameters(None, "function", "thing", thing, None, lines)
    listed = [":param one: numbers; none is 0.", ":param two: numbers; none is 0.", ":param other: text."]
    assert lines == ["What it is: a thing.", "", *listed, "", "Raises:", "    E"]


def test_every_page_has_one_place_in_the_navigation(conf):
    pages = {"README", "CHANGELOG", "docs/zebra", "docs/python", "docs/formats", "docs/guides/b", "docs/guides/a"}
    trees = conf.navigation(pages)
    order = re.findall(r"^(?::caption: )?([\w/]+)$", trees, re.MULTILINE)
    start = ["Start", "docs/python", "Guides", "docs/guides/a", "docs/guides/b", "Topics", "docs/zebra"]
    assert order == [*start, "Reference", "docs/formats", "Project", "CHANGELOG"]


def test_a_notebook_is_text_code_results_and_what_was_printed(conf):
    result = {"output_type": "execute_result", "data": {"text/html": ["<b>", "2</b>"], "text/plain": ["2"]}}
    shown = {"output_type": "display_data", "data": {"text/html": ["<pre>"], "text/plain": ["said\n"]}}
    stream = {"output_type": "stream", "name": "stdout", "text": ["more\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["1 + 1"], "outputs": [result, shown, stream]},
    ]
    text = conf.notebook(json.dumps({"cells": cells}))
    assert text.startswith("# Title\ntext\n\n```python\n1 + 1\n```\n\n```{raw} html\n")
    assert "<b>2</b>" in text and "<pre>" not in text and text.endswith("said\nmore\n\n```")
