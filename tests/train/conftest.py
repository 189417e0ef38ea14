"""Small real artifacts, made by the data stages with tiny random models, once for all tests of training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from trainings import config
from worlds import tiny_llama_dir

from draftsmith.data import acceptance, features, prompts, responses
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.train.command import run

NUM_PROMPTS = 48


@dataclass(frozen=True)
class Artifacts:
    """Directories: two models of one tokenizer, and what the data stages made with them."""

    target: Path
    draft: Path
    prompts: Path
    responses: Path
    acceptance: Path
    features: Path


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in one order, whatever the machine: runs are compared bit by bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    root = tmp_path_factory.mktemp("artifacts")
    target = tiny_llama_dir(root / "target", seed=0, layers=2)
    draft = tiny_llama_dir(root / "draft", seed=1, layers=1)
    source = root / "prompts.jsonl"
    source.write_text(
        "".join(json.dumps({"prompt": f"def add{i}(a, b): " + "a + " * (i % 7)}) + "\n" for i in range(NUM_PROMPTS))
    )
    made = Artifacts(target, draft, root / "prompts", root / "responses", root / "acceptance", root / "features")
    prompts.run(prompts.PromptsConfig(source=str(source), target=str(target), output=root / "prompts"))
    responses.run(
        responses.ResponsesConfig(
            data=root / "prompts", target=str(target), output=made.responses, max_new_tokens=24, num_threads=1
        )
    )
    acceptance.run(
        acceptance.AcceptanceConfig(
            data=made.responses, target=str(target), head=str(draft), output=made.acceptance, num_threads=1
        )
    )
    features.run(features.FeaturesConfig(data=made.responses, target=str(target), output=made.features, num_threads=1))
    return made


@pytest.fixture(scope="session")
def eagle(artifacts, tmp_path_factory) -> Path:
    """A random EAGLE head."""
    torch.manual_seed(0)
    target = load_lm(str(artifacts.target))
    head = EagleHead(EagleConfig.for_target(target.config))
    return save_head(tmp_path_factory.mktemp("eagle") / "head", head, {"target": target.info.identity}, "card")


@pytest.fixture(scope="session")
def rollouts(artifacts, eagle, tmp_path_factory) -> Path:
    """Labels of the EAGLE head's rounds."""
    settings = acceptance.AcceptanceConfig(
        data=artifacts.responses,
        target=str(artifacts.target),
        head=str(eagle),
        output=tmp_path_factory.mktemp("rollouts") / "labels",
        depth=4,
        num_threads=1,
    )
    return acceptance.run(settings)


@pytest.fixture(scope="session")
def eagle_run(artifacts, tmp_path_factory) -> Path:
    """Output of a short training of an EAGLE head."""
    output = tmp_path_factory.mktemp("eagle") / "run"
    run(config(artifacts, output))
    return output
