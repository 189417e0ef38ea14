"""A tiny pair of models and one unbroken run of every stage, shared by the tests of the data stages."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import tiny_llama_dir

from draftsmith.data import acceptance, features, prompts, responses

NUM_ROWS = 11
WORDS = [
    "Rename a to b:",
    "What does this function do?",
    "def add(first, second):",
    "return first + second",
    "Explain.",
]


@dataclass(frozen=True)
class Chain:
    """Directories of the models, the source and the four artifacts, and the configurations that made them."""

    target: Path
    draft: Path
    source: Path
    configs: dict[str, Any]

    def directory(self, stage: str) -> Path:
        return self.configs[stage].output


STAGES = {"prompts": prompts, "responses": responses, "acceptance": acceptance, "features": features}


def run_stage(stage: str, config: Any) -> Path:
    return STAGES[stage].run(config)


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return tiny_llama_dir(root / "target"), tiny_llama_dir(root / "draft", seed=1, layers=1)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """Prompts of different lengths with answers, tasks and splits."""
    path = tmp_path_factory.mktemp("source") / "rows.jsonl"
    rows = [
        {
            "id": f"row-{i}",
            "prompt": " ".join(WORDS[(i + j) % len(WORDS)] for j in range(1 + i % 4)),
            "answer": WORDS[i % len(WORDS)],
            "task": ["edit", "explain"][i % 2],
            "split": ["train", "dev", "test"][i % 3],
        }
        for i in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def chain(pair, source, tmp_path_factory) -> Chain:
    """All four stages, unbroken, three rows a shard."""
    target, draft = pair
    out = tmp_path_factory.mktemp("chain")
    common: dict[str, Any] = {"rows_per_shard": 3}
    read = {**common, "num_threads": 1, "device": "cpu"}
    own = {**read, "batch_size": 2}
    configs: dict[str, Any] = {
        "prompts": prompts.PromptsConfig(str(source), str(target), out / "prompts", **common),
        "responses": responses.ResponsesConfig(
            out / "prompts", str(target), out / "responses", top_k=40, top_p=0.95, max_new_tokens=9, **own
        ),
        "acceptance": acceptance.AcceptanceConfig(
            out / "responses", str(target), out / "acceptance", str(draft), **own
        ),
        "features": features.FeaturesConfig(
            out / "responses", str(target), out / "features", tokens_per_batch=64, **read
        ),
    }
    for stage, config in configs.items():
        run_stage(stage, config)
    return Chain(target, draft, source, configs)


@pytest.fixture
def remake(chain, tmp_path):
    """Run a stage of the chain again into a fresh directory, with changed settings; returns the directory."""

    def make(stage: str, **changes: Any) -> Path:
        changes = {"output": tmp_path / stage, **changes}
        return run_stage(stage, dataclasses.replace(chain.configs[stage], **changes))

    return make


@pytest.fixture(scope="session")
def make_stage():
    return run_stage
