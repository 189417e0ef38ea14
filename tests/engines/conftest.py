"""The differences that were measured, below the result."""

from __future__ import annotations

import exported
import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in exported.FIGURES:
        terminalreporter.write_line(line)
