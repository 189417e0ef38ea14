"""Conversations that were asked and answered once, and what is to say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chats import NUM_ROWS, REWRITES, TARGET, conversation, make_prompts, make_responses
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.modules.pretrained.hub import model_directory


@pytest.fixture(scope="session")
def talks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "rows.jsonl"
    rows = [{"id": f"row-{i}", "messages": conversation(i), "task": "edit"} for i in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def asked(talks, tmp_path_factory) -> Path:
    return make_prompts(talks, tmp_path_factory.mktemp("prompts") / "out")


@pytest.fixture(scope="session")
def answered(asked, tmp_path_factory) -> Path:
    return make_responses(asked, tmp_path_factory.mktemp("responses") / "out")


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_directory(TARGET))


@pytest.fixture(scope="session")
def oracle():
    return AutoModelForCausalLM.from_pretrained(model_directory(TARGET), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def rewritten(talks, tmp_path_factory) -> tuple[Path, Path]:
    """A template that rewrites earlier answers, and responses by it."""
    root = tmp_path_factory.mktemp("rewritten")
    (root / "template.jinja").write_text(REWRITES)
    asked = make_prompts(talks, root / "prompts", chat_template=root / "template.jinja")
    return root / "template.jinja", make_responses(asked, root / "responses")
