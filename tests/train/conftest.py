"""Small real artifacts, made by the data stages with tiny random models, once for all tests of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from trainings import answered_prompts, config

from draftsmith.data import acceptance, features
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.pretrained.heads import save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.train.command import run


@dataclass(frozen=True)
class Artifacts:
    """Directories: two models of one tokenizer, and what the data stages made with them."""

    target: Path
    draft: Path
    prompts: Path
    responses: Path
    acceptance: Path
    features: Path


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    root = tmp_path_factory.mktemp("artifacts")
    made = Artifacts(**answered_prompts(root), acceptance=root / "acceptance", features=root / "features")
    shared = {"data": made.responses, "target": str(made.target), "num_threads": 1}
    acceptance.run(acceptance.AcceptanceConfig(head=str(made.draft), output=made.acceptance, **shared))
    features.run(features.FeaturesConfig(output=made.features, **shared))
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
    options = {"data": artifacts.responses, "target": str(artifacts.target), "depth": 4, "num_threads": 1}
    output = tmp_path_factory.mktemp("rollouts") / "labels"
    return acceptance.run(acceptance.AcceptanceConfig(head=str(eagle), output=output, **options))


@pytest.fixture(scope="session")
def eagle_run(artifacts, tmp_path_factory) -> Path:
    """Output of a short training of an EAGLE head."""
    output = tmp_path_factory.mktemp("eagle") / "run"
    run(config(artifacts, output))
    return output
