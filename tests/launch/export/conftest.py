"""A tiny target, an EAGLE head that knows its answers, and exports of it to take apart."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quick_heads import quick_eagle_head
from tiny_models import tiny_llama_dir

from draftsmith.eval.check.check import CheckConfig
from draftsmith.eval.check.check import run as check
from draftsmith.eval.check.states import answered_prompts
from draftsmith.launch.export.export import ExportConfig
from draftsmith.launch.export.export import run as export
from draftsmith.modules.drafters.eagle import EagleHead
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm


def save_eagle(directory: Path, head: EagleHead, target: Path) -> Path:
    """As training would: its target is in the manifest."""
    lm = load_lm(str(target))
    return save_head(directory, head, {"target": lm.info.identity, "config": {"target": str(target)}}, "card")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("exchange") / "target", layers=2, hidden=48)


@pytest.fixture(scope="session")
def eagle_dir(tiny_target) -> Path:
    """Trained on the very answers that it is checked on: to show what a check sees, not how good a head is."""
    lm = load_lm(str(tiny_target))
    texts = answered_prompts(str(tiny_target), lm, lm.info.max_position)
    head = quick_eagle_head(lm, [text["input_ids"] for text in texts], steps=100)
    return save_eagle(tiny_target.parent / "head", head, tiny_target)


@pytest.fixture(scope="session")
def exported(tmp_path_factory, eagle_dir) -> Callable[[str], Path]:
    """Format -> a directory that export wrote, once a session."""
    root = tmp_path_factory.mktemp("exports")

    def make(format: str) -> Path:
        if not (root / format).exists():
            assert export(ExportConfig(format=format, head=eagle_dir, output=root / format)) == 0
        return root / format

    return make


@pytest.fixture
def copy_of(exported, tmp_path) -> Callable[[str], Path]:
    """Format -> a copy that a test may break."""
    return lambda format: Path(shutil.copytree(exported(format), tmp_path / format))


@pytest.fixture
def checked(tiny_target, capsys, monkeypatch) -> Callable[..., tuple[int, str]]:
    """What `draftsmith check` says of a directory: its exit code, and what it prints."""

    monkeypatch.setenv("COLUMNS", "400")  # no folded names

    def run(directory: Path, format: str, target: Path = tiny_target, **more: Any) -> tuple[int, str]:
        capsys.readouterr()
        code = check(CheckConfig(directory=directory, format=format, target=str(target), **more))
        return code, " ".join(capsys.readouterr().out.split())

    return run
