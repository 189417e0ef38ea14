"""`--head`: language models and heads are told apart by their directories."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from oracles.tables import random_eagle_head
from worlds import varied_acceptance_head

from draftsmith.eval.settings import DraftSettings
from draftsmith.launch.arguments import parse
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.types import InputError


@dataclass(frozen=True, kw_only=True)
class Command(DraftSettings):
    """A command.

    target: the target.
    mid: a model.
    """

    target: str = "t"
    mid: str | None = None


@pytest.fixture
def eagle(tmp_path) -> str:
    return str(save_head(tmp_path / "eagle", random_eagle_head(1), {}, "card"))


def test_a_head_is_known_by_its_directory_and_all_else_is_a_model(eagle):
    both = Command(head=("embedded:draft", eagle))
    assert both.drafters == {"draft": "embedded:draft", "eagle": eagle}
    assert both.paths == {"target": "t", **both.drafters}
    assert replace(both, head="owner/name", mid="m").paths == {"target": "t", "mid": "m", "draft": "owner/name"}
    assert Command(head=None).drafters == Command().drafters == {}


@pytest.mark.parametrize(
    ("words", "heads"),
    [
        (["--head", "a", "--head", "b"], ("a", "b")),
        (["--config", "one.yaml"], ("embedded:draft",)),
        (["--config", "two.yaml"], ("a", "b")),
        (["--config", "two.yaml", "--head", "c"], ("c",)),
    ],
)
def test_words_and_files_name_one_or_several(tmp_path, words, heads):
    for name, text in (("one", "embedded:draft"), ("two", "[a, b]"), ("none", "null")):
        (tmp_path / f"{name}.yaml").write_text(f"head: {text}\n")
    words = [str(tmp_path / word) if word.endswith(".yaml") else word for word in words]
    assert parse("draftsmith x", Command, words).head == heads


def test_two_of_a_kind_and_heads_that_do_not_draft_are_told(eagle, tmp_path):
    head = save_head(tmp_path / "head", varied_acceptance_head(8), {}, "card")
    for wrong, expected in (
        ({"head": ("a", "b")}, "head: found a and b, two draft models, expected one of a kind. Pass one of them"),
        ({"head": (eagle, eagle)}, "two eagle heads"),
        ({"head": (str(head),)}, "expected a model or head that drafts. Pass it with --acceptance"),
    ):
        with pytest.raises(InputError, match=expected):
            _ = Command(**wrong).drafters
