"""What every test shares: one torch thread, and tests marked `gpu` skip where there is no CUDA device."""

from __future__ import annotations

import os
import tempfile

import papers_drafters  # noqa: F401
import pytest
import torch

# Copies of sources that last as long as the tests; read when `datasets` is imported.
_cache = tempfile.TemporaryDirectory(prefix="draftsmith-tests-")
os.environ["HF_DATASETS_CACHE"] = _cache.name

# The models of the tests are so small that a second thread costs more than it gives, and starves other processes.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    # Files with slow tests come first: else one process would still be at such a file when the others have ended.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def one_thread():
    """Take back the threads that a command has set: sums are in one order."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """Tiny models that agree now and then: target, draft, eagle, acceptance and prompts -> path."""
    from worlds import make_tiny_world

    return make_tiny_world(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def drafters_registry(monkeypatch):
    """Restore the registries of drafters, methods and commands after a test that adds a folder to them."""
    from draftsmith.launch.commands import COMMANDS, SECTIONS
    from draftsmith.modules import drafters
    from draftsmith.modules.drafters.method_names import known_methods

    monkeypatch.setenv("DRAFTSMITH_DRAFTERS", "")
    monkeypatch.setattr(drafters, "__path__", list(drafters.__path__))
    monkeypatch.setattr(drafters, "HEADS", dict(drafters.HEADS))
    registries = known_methods(), COMMANDS, SECTIONS["Train heads"]
    before = [dict(registry) for registry in registries]
    yield
    for registry, own in zip(registries, before, strict=True):
        registry.clear()
        registry.update(own)
