"""Targets, heads that know their target's answers, and exports of them to take apart."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import quick_block_head, quick_eagle3_head, quick_eagle_head, tiny_llama_dir

from draftsmith.eval.check.check import run as check
from draftsmith.eval.check.states import answered_prompts
from draftsmith.eval.settings import CheckConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm


class Exchange:
    """Targets, heads and exports by kind, each made when it is first asked for, once a session.

    Heads are trained on the very answers that they are checked on: what a wrong reading costs has to show, not how good
    a head is.
    """

    def __init__(self, root: Path):
        self.root = root

    @functools.cache  # noqa: B019 (one object a session)
    def target(self, kind: str) -> str:
        if kind == "eagle3":
            return "embedded:target"
        sizes = {"layers": 2 if kind == "eagle" else 8, "hidden": 48}
        return str(tiny_llama_dir(self.root / f"target-{sizes['layers']}", **sizes))

    @functools.cache  # noqa: B019
    def head(self, kind: str) -> Path:
        target = self.target("block" if kind.startswith("d") else kind)
        lm = load_lm(target)
        rows = [text["input_ids"] for text in answered_prompts(lm, lm.info.max_position)]
        head: Any
        if kind == "eagle":
            head = quick_eagle_head(lm, rows, steps=100)
        elif kind == "eagle3":
            head = quick_eagle3_head(lm, rows, steps=60, draft_vocab=1500)
        else:
            head = quick_block_head(lm, rows, 60, kind, layers=(1, 3, 5), block=4, anchors=128)
        manifest = {"target": lm.info.identity, "config": {"target": target}}
        return save_head(self.root / kind, head, manifest, "card")

    @functools.cache  # noqa: B019
    def export(self, format: str, kind: str) -> Path:
        path = self.root / f"{kind}-{format}"
        assert export(ExportConfig(format=format, head=self.head(kind), output=path)) == 0
        return path


@pytest.fixture(scope="session")
def exchange(tmp_path_factory) -> Exchange:
    return Exchange(tmp_path_factory.mktemp("exchange"))


@pytest.fixture
def copy_of(exchange, tmp_path) -> Callable[..., Path]:
    """Return a copy of an export that a test may break."""
    return lambda format, kind="eagle": Path(shutil.copytree(exchange.export(format, kind), tmp_path / format))


@pytest.fixture
def checked(exchange, capsys, monkeypatch) -> Callable[..., tuple[int, str]]:
    """Return the exit code of `draftsmith check` for a directory, and what it prints on one line."""
    monkeypatch.setenv("COLUMNS", "400")  # no folded names

    def run(directory: Path, format: str = "auto", kind: str = "eagle", **more: Any) -> tuple[int, str]:
        target = exchange.target("block" if kind.startswith("d") else kind)
        capsys.readouterr()
        code = check(CheckConfig(directory=directory, format=format, **{"target": target, **more}))
        return code, " ".join(capsys.readouterr().out.split())

    return run
