"""What the site of the documents cannot find out by itself: `make site` checks the links and that its pages build."""

from __future__ import annotations

import re
from pathlib import Path

import draftsmith

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_every_public_name_is_in_the_reference_once():
    named = re.findall(r"^\.\. auto\w+:: draftsmith\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(draftsmith.PUBLIC)
