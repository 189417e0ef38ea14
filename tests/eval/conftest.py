"""Tiny models that agree now and then, for every test of this folder."""

from __future__ import annotations

import pytest
import torch
from worlds import make_tiny_world


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """target, draft, eagle, acceptance and prompts: flag -> path."""
    torch.set_num_threads(1)
    return make_tiny_world(tmp_path_factory.mktemp("tiny"))
