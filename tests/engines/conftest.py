"""The differences that were measured, below the result; and the settings of vLLM's build for CPUs."""

from __future__ import annotations

import os
import sys

import exported
import pytest

if sys.prefix.endswith("vllm_cpu"):
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else its one thread waits for a core that others use
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in exported.FIGURES:
        terminalreporter.write_line(line)
