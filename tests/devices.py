"""The devices that a test is for: the same body runs on a CPU wherever tests run, and on a GPU where there is one
(`make test-gpu`)."""

from __future__ import annotations

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
