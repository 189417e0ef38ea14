"""A drafter that nobody outside its own file knows: its card, and what export says while no format holds it."""

from __future__ import annotations

import json
import sys

import pytest

from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.drafters.plug_ins import add_folder
from draftsmith.modules.pretrained.card import model_card
from draftsmith.modules.types import InputError

SOURCE = '''"""Echo: drafts the last token again."""

from dataclasses import dataclass, field
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.settings import HeadSettings


@dataclass(frozen=True)
class EchoConfig:
    hidden_size: int


@dataclass(frozen=True, kw_only=True)
class EchoSettings(HeadSettings):
    delay: int = 2
    log: str = field(default="", metadata={"volatile": True})


class EchoHead(DraftHead):
    """Drafts the last token
    again.

    Not a word of this is on its card.
    """

    kind = "echo"
    Config, Settings = EchoConfig, EchoSettings


HEADS = (EchoHead,)
'''


@pytest.fixture
def echo(tmp_path, drafters_registry):
    """Register a new drafter and return the directory of a head of its kind."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "echo.py").write_text(SOURCE)
    add_folder(str(tmp_path / "files"))
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"kind": "echo", "head": {"hidden_size": 8}}))
    (head / "manifest.json").write_text(json.dumps({"sha256": {}}))
    yield head
    sys.modules.pop("draftsmith.modules.drafters.echo", None)


def test_a_new_drafters_card_says_what_its_own_file_does(echo):
    options = {"delay": 3, "lr": 0.1}
    manifest = {"config": {"target": "owner/model"}, "options": options, "step": 12, "head": {"hidden_size": 8}}
    card = model_card("echo", manifest)
    assert "# echo head\n\nDrafts the last token again.\n\n- hidden_size: `8`\n" in card and "- echo\n" in card
    assert "12 steps of `draftsmith train echo`" in card and "delay: 3" in card
    assert "decode PROMPT --target owner/model --head DIR --method echo" in card
    assert "draftsmith export" not in card


def test_export_says_that_no_format_holds_a_new_drafter_yet(echo, tmp_path):
    said = r"an eagle.* head, which vllm holds\. No format holds an echo head\."
    with pytest.raises(InputError, match=rf"head: found .*, an echo head, expected {said}"):
        export(ExportConfig(format="vllm", head=echo, output=tmp_path / "out"))
