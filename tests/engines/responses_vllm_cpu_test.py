"""`data responses` from a vLLM server on a CPU. Run by `make test-engines`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from states_vllm_cpu_test import serving

from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.prompts import run as make_prompts
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.responses import run as make_responses
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.modules.pretrained.hub import resolve_model

torch.set_num_threads(1)
TARGET = "embedded:target"
SAID = ("user", "Rename x to y in: x = 1"), ("assistant", "y = 1"), ("user", "Now wrap it in try")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve held-out prompts, and a conversation of two turns."""
    directory = tmp_path_factory.mktemp("prompts")
    rows = [json.loads(line) for line in Path(resolve_model("embedded:prompts")).read_text().splitlines()]
    talks: list[dict[str, Any]] = [{"prompt": row["prompt"]} for row in rows if row["split"] == "test"][:12]
    talks.append({"messages": [{"role": role, "content": content} for role, content in SAID]})
    source = directory / "talks.jsonl"
    source.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))
    return make_prompts(PromptsConfig(str(source), TARGET, directory / "made"))


def responses(prompts: Path, output: Path, **settings: Any) -> list[dict[str, Any]]:
    more: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 48, "num_threads": 1, **settings}
    config = ResponsesConfig(prompts, TARGET, output, **more)
    return Rows(Manifest.read(make_responses(config))).read(0, 99)


def test_they_are_those_of_our_own_decoder(prompts: Path, tmp_path: Path):
    with serving(tmp_path / "states", ["--target", TARGET, "--dtype", "float32"]) as server:
        theirs = responses(prompts, tmp_path / "theirs", engine="openai", server=server.url)
    assert theirs == responses(prompts, tmp_path / "ours")
    mask = theirs[-1]["loss_mask"]
    assert mask.count(False) > mask.index(True), "the second turn was not asked"
