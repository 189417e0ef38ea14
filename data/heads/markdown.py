"""Pieces of Markdown: what cards and reports are written with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def code(value: Any) -> str:
    """A value as Markdown code, on one line; nothing for nothing."""
    if value is None or value == {}:
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)}`"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def shell(*lines: str, language: str = "sh") -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def markdown_lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
