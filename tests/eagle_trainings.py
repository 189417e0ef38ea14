"""Short trainings of EAGLE heads on features, and their modules before the first step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trained_runs import fake_trainer, micro_batch

from draftsmith.data.features import text_dataset
from draftsmith.data.store.datasets import ArtifactDataset, collate_features, open_dataset
from draftsmith.modules.drafters.eagle import EagleHead
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.train.config import TrainDrafterConfig, drafter_config
from draftsmith.train.data import MicroBatch
from draftsmith.train.module import LitDrafter
from draftsmith.train.prepare import make_head

QUICK = {"lr": 3e-3, "max_steps": 12, "batch_size": 8, "val_share": 0.25, "val_every": 6, "log_every": 3}
QUICK |= {"loggers": ("csv",)}
QUICK |= {"token_weight": 1.0, "tau_prompts": 3, "tau_max_new_tokens": 8}


def config(artifacts, output: Path, **changes) -> TrainDrafterConfig:
    settings = {"data": artifacts.features, "target": str(artifacts.target), "output": output, **QUICK, **changes}
    return drafter_config("eagle")(**settings)


def a_module(artifacts, tmp_path, **changes) -> LitDrafter:
    settings, target = config(artifacts, tmp_path, **changes), load_lm(str(artifacts.target))
    module = LitDrafter(make_head(settings, target), target, settings)
    module.total_steps, module.feature_std = 12, 2.0
    module.trainer = fake_trainer(open_dataset(artifacts.features))
    return module


def texts(artifacts) -> ArtifactDataset:
    """Responses, whose features the target computes."""
    return text_dataset(artifacts.responses, str(artifacts.target), load_lm(str(artifacts.target)).info.identity)


def change(module: LitDrafter, **settings) -> None:
    """Continue with other settings."""
    module.settings = dataclasses.replace(module.settings, **settings)


def a_part(artifacts, indices, collate=collate_features, epoch: int = 0) -> MicroBatch:
    data = open_dataset(artifacts.features)
    batch = collate([data[i] for i in indices])
    return micro_batch(batch, EagleHead.loss_count(batch, None), indices, epoch)
